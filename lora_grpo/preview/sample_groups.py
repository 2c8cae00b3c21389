"""`--preview`: samples a few groups from the base model, with the prompts of the first training steps."""

import shutil
from collections import Counter
from dataclasses import dataclass

from lora_grpo import console
from lora_grpo.config import RunConfig
from lora_grpo.data import Data, prompt_order, split_validation
from lora_grpo.errors import UserError
from lora_grpo.files import printable
from lora_grpo.grading import CheckError, Row
from lora_grpo.models import load_policy
from lora_grpo.preview.diagnosis import Answer, Diagnosis, Group, Summary, judge, measure
from lora_grpo.rewards import RewardError, Scorer, parse_reward_specs, resolve
from lora_grpo.rollouts import has_agent, play_all
from lora_grpo.sampling import Sampler, SamplingParams, build_sampler, completion_seed

PROMPTS = 8
"""Number of sampled groups."""
_SHOWN_GROUPS = 3
_SHOWN_LINES = 40
"""Number of lines shown of a conversation."""
_SHOWN_ANSWERS = 8
"""Number of distinct completions shown per group."""


@dataclass(frozen=True)
class Preview:
    """What the model answers before training, and whether GRPO can learn from it."""

    groups: tuple[Group, ...]
    summary: Summary
    diagnosis: Diagnosis


def preview(config: RunConfig, data: Data) -> Preview:
    """Sample completions of the first training prompts from the base model, tell and return the result.

    Writes no files.

    Raises:
        UserError: a check or a reward raised an exception, or the agent failed in every episode.
    """
    policy = load_policy(config)
    rows, _ = split_validation(data.train, config)
    sampler = build_sampler(policy, config)
    try:
        groups = sample_groups(config, sampler, rows)
    except (CheckError, RewardError) as error:  # there is no run that failed
        raise UserError(str(error)) from None
    finally:
        sampler.close()
    if not any(group.played for group in groups):
        failure = groups[0].answers[0].failure
        raise UserError(f"the agent failed in every episode: {failure}; mend it, and run the command again")
    result = Preview(tuple(groups), measure(groups), judge(groups, config))
    show(config, result)
    return result


def sample_groups(config: RunConfig, sampler: Sampler, rows: list[Row]) -> list[Group]:
    """Sample and score at most PROMPTS groups from the base model, each from a different row.

    They use the prompts and seeds of the first training steps. Groups of the first step equal those in training.
    """
    order = prompt_order(len(rows), min(PROMPTS, len(rows)), config.seed)
    prompted_rows = [rows[index] for index in order]
    scorer = Scorer(resolve(parse_reward_specs(config.rewards)), sampler.tokenizer, rows)
    group_size = config.sampling.num_generations
    console.note(f"sampling {len(prompted_rows)} prompts x {group_size} completions from {config.model.name}")

    # The seed of a completion names its step and its index in the step, as in training.
    per_step = config.train.prompts_per_step * group_size
    seeds = []
    for number in range(len(prompted_rows) * group_size):
        step, index = divmod(number, per_step)
        seeds.append(completion_seed(config.seed, f"step {step}", index))
    params = SamplingParams.of(config.sampling, group_size)
    played = play_all(sampler, prompted_rows, params, seeds, adapter=config.lora.from_ is not None)
    episodes = [episode for group in played for episode in group]

    batch = scorer.score_episodes(episodes)
    weights = {reward.name: reward.weight for reward in scorer.rewards}
    answers = []
    for episode, values, verdict in zip(episodes, batch.values, batch.verdicts, strict=True):
        weighted: dict[str, float | None] = {}
        for name, value in values.items():
            weighted[name] = None if value is None else weights[name] * value
        num_tokens = sum(episode.loss_mask)
        answers.append(Answer(episode.text, num_tokens, episode.truncated, weighted, verdict, episode.failure))
    groups = []
    for number, row in enumerate(prompted_rows):
        first = number * group_size
        groups.append(Group(row, tuple(answers[first : first + group_size])))
    return groups


def show(config: RunConfig, preview: Preview) -> None:
    """Tell the first groups, the summary of all groups, and the verdict, with control characters escaped."""
    number_of_groups = len(preview.groups)
    lines = []
    for number, group in enumerate(preview.groups[:_SHOWN_GROUPS], start=1):
        lines.append(f"--- group {number} of {number_of_groups}: {group.row['id']}")
        lines += _group_lines(group)
    lines.append(f"--- all {number_of_groups} groups")
    lines += _summary_lines(preview.summary)

    diagnosis = preview.diagnosis
    lines += ["--- can GRPO learn from this?", f"verdict   {diagnosis.verdict}: {diagnosis.reason}"]
    for finding in diagnosis.findings:
        lines += [f"found     {finding.problem}", f"try       {finding.advice}"]
    if config.teacher.name:
        lines.append("teacher   scores the tokens of all completions, so the model also learns where rewards are equal")
    source = "starting adapter" if config.lora.from_ else "base model"
    lines.append(
        f"sample    {number_of_groups} prompts x {preview.summary.size} completions of the {source}, 95% intervals in "
        "brackets; nothing was trained or written"
    )
    console.result("\n".join(map(printable, lines)))


def _group_lines(group: Group) -> list[str]:
    """Return the question of a group, and each distinct completion below its rewards, the highest reward first."""
    width = max(40, shutil.get_terminal_size((100, 24)).columns - 1)
    lines = _cut(group.row["question"], width)
    counts = Counter(answer.text for answer in group.answers)
    distinct = {answer.text: answer for answer in group.answers}.values()
    ranked = sorted(distinct, key=lambda answer: (-(answer.total or 0.0), -counts[answer.text]))
    for answer in ranked[:_SHOWN_ANSWERS]:
        rewards = ", ".join(f"{name} {_number(value)}" for name, value in answer.rewards.items())
        line = f"{counts[answer.text]} x reward {_number(answer.total)} ({rewards}), {answer.num_tokens} tokens"
        line += f", {answer.verdict.reason.replace('_', ' ')}"
        if answer.truncated:
            line += ", truncated"
        lines += _cut(line, width)

        texts = [answer.text]
        if "reset_text" in group.row or has_agent(group.row):  # a conversation, turn by turn
            texts = answer.text.splitlines()[:_SHOWN_LINES]
        for text in texts:
            lines += [f"    {part}" for part in _cut(text, width - 4)]
    if len(ranked) > _SHOWN_ANSWERS:
        lines.append(f"and {len(ranked) - _SHOWN_ANSWERS} more")
    return [*lines, ""]


def _summary_lines(summary: Summary) -> list[str]:
    """Return a table of the summary."""
    table = {}
    for name, moments in summary.rewards.items():
        table[name] = "graded no completion"
        if moments:
            table[name] = f"mean {moments.mean:.2f}, std {moments.std:.2f}"
    difficulty = summary.difficulty
    table["solved"] = f"{summary.solved} of completions"
    table["problems solved"] = (
        f"{difficulty.always_solved} by all completions, {difficulty.sometimes_solved} by some, "
        f"{difficulty.never_solved} by none"
    )
    table["truncated"] = f"{summary.truncated} of completions"
    table["zero-variance"] = f"{summary.zero_variance} of groups (all completions have the same reward)"
    table["distinct"] = f"{summary.distinct:.1f} of {summary.size} completions in a group"
    table["tokens"] = f"{summary.num_tokens:.1f} per completion"
    if summary.failed:
        table["left out"] = f"{summary.failed} of {summary.failed + summary.completions} episodes, whose agent failed"
    if summary.unparsed.value:  # a task file may not parse answers at all
        table["unparsed"] = f"{summary.unparsed} of completions end without an answer that can be parsed"
    width = max(map(len, table))
    return [f"{name:{width}}  {text}" for name, text in table.items()]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _cut(text: str, width: int) -> list[str]:
    """Return at most two lines of a text: its beginning, and its end, which usually has the answer."""
    text = printable(text)
    if len(text) <= width:
        return [text]
    if len(text) <= 2 * width:
        return [text[:width], text[width:]]
    return [f"{text[: width - 1]}…", f"…{text[1 - width :]}"]
