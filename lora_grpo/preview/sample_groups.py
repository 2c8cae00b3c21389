"""`--preview`: samples a few groups from the base model, with the prompts of the first training steps."""

import shutil
from collections import Counter
from collections.abc import Sequence

from lora_grpo import console
from lora_grpo.config import RunConfig
from lora_grpo.data import Data, prompt_order, split_validation
from lora_grpo.errors import UserError
from lora_grpo.files import printable
from lora_grpo.grading import CheckError, Row
from lora_grpo.models import load_policy
from lora_grpo.preview.diagnosis import Answer, Group, judge, measure
from lora_grpo.rewards import RewardError, Scorer, parse_reward_specs, resolve
from lora_grpo.rollouts import play_all
from lora_grpo.sampling import Sampler, SamplingParams, build_sampler, completion_seed

PROMPTS = 8
"""Number of sampled groups."""
_SHOWN_GROUPS = 3
_SHOWN_LINES = 40
"""Number of lines shown of a conversation."""
_SHOWN_ANSWERS = 8
"""Number of distinct completions shown per group."""


def preview(config: RunConfig, data: Data) -> None:
    """Sample completions of the first training prompts from the base model and print the result. Writes no files."""
    policy = load_policy(config)
    rows, _ = split_validation(data.train, config)
    sampler = build_sampler(policy, config)
    try:
        groups = sample_groups(config, sampler, rows)
    except (CheckError, RewardError) as error:  # there is no run that failed
        raise UserError(str(error)) from None
    finally:
        sampler.close()
    show(config, groups)


def sample_groups(config: RunConfig, sampler: Sampler, rows: list[Row]) -> list[Group]:
    """Sample and score at most PROMPTS groups from the base model, each from a different row.

    They use the prompts and seeds of the first training steps. Groups of the first step equal those in training.
    """
    order = prompt_order(len(rows), min(PROMPTS, len(rows)), config.seed)
    scorer = Scorer(resolve(parse_reward_specs(config.rewards)), sampler.tokenizer, rows)
    settings, size = config.sampling, config.sampling.num_generations
    asked = [rows[index] for index in order]
    console.note(f"sampling {len(asked)} prompts x {size} completions from {config.model.name}")
    params = SamplingParams.of(settings, size)
    per_step = config.train.prompts_per_step * size
    steps = [divmod(index, per_step) for index in range(len(asked) * size)]
    seeds = [completion_seed(config.seed, f"step {step}", index) for step, index in steps]
    groups = play_all(sampler, asked, params, seeds, adapter=config.lora.from_ is not None)
    episodes = [each for group in groups for each in group]
    batch = scorer.score_episodes(episodes)
    weights = {reward.name: reward.weight for reward in scorer.rewards}
    answers = []
    for episode, value, verdict in zip(episodes, batch.values, batch.verdicts, strict=True):
        weighted = {name: None if each is None else weights[name] * each for name, each in value.items()}
        answers.append(Answer(episode.text, sum(episode.from_model), episode.truncated, weighted, verdict))
    return [Group(row, tuple(answers[n * size : (n + 1) * size])) for n, row in enumerate(asked)]


def show(config: RunConfig, groups: Sequence[Group]) -> None:
    """Print the first groups, the summary of all groups, and the verdict, with control characters escaped."""
    width = max(40, shutil.get_terminal_size((100, 24)).columns - 1)
    lines = []
    for number, group in enumerate(groups[:_SHOWN_GROUPS], start=1):
        lines += [f"--- group {number} of {len(groups)}: {group.row['id']}", *_cut(group.row["question"], width)]
        # Each distinct completion below its rewards, the highest reward first.
        often = Counter(answer.text for answer in group.answers)
        distinct = {answer.text: answer for answer in group.answers}.values()
        ranked = sorted(distinct, key=lambda answer: (-(answer.total or 0.0), -often[answer.text]))
        for answer in ranked[:_SHOWN_ANSWERS]:
            rewards = ", ".join(f"{name} {_number(value)}" for name, value in answer.rewards.items())
            line = f"{often[answer.text]} x reward {_number(answer.total)} ({rewards}), {answer.num_tokens} tokens"
            line += f", {answer.verdict.reason.replace('_', ' ')}{', truncated' if answer.truncated else ''}"
            shown = _cut(answer.text, width - 4)
            if "reset_text" in group.row:  # a conversation, turn by turn
                shown = [part for text in answer.text.splitlines()[:_SHOWN_LINES] for part in _cut(text, width - 4)]
            lines += [*_cut(line, width), *(f"    {text}" for text in shown)]
        lines += [f"and {len(ranked) - _SHOWN_ANSWERS} more", ""] if len(ranked) > _SHOWN_ANSWERS else [""]

    found = measure(groups)
    always, mixed, never = found.difficulty
    table = {
        name: "mean {:.2f}, std {:.2f}".format(*moments) if moments else "graded no completion"
        for name, moments in found.rewards.items()
    }
    table |= {
        "solved": f"{found.solved} of completions",
        "problems solved": f"{always} by all completions, {mixed} by some, {never} by none",
        "unparsed": f"{found.unparsed} of completions end without an answer that can be parsed",
        "truncated": f"{found.truncated} of completions",
        "zero-variance": f"{found.flat} of groups (all completions have the same reward)",
        "distinct": f"{found.distinct:.1f} of {found.size} completions in a group",
        "tokens": f"{found.num_tokens:.1f} per completion",
    }
    longest = max(map(len, table))
    lines += [f"--- all {len(groups)} groups", *(f"{name:{longest}}  {text}" for name, text in table.items())]
    word, reason, findings = judge(groups, config)
    lines += ["--- can GRPO learn from this?", f"verdict   {word}: {reason}"]
    for problem, advice in findings:
        lines += [f"found     {problem}", f"try       {advice}"]
    source = "starting adapter" if config.lora.from_ else "base model"
    lines.append(
        f"sample    {len(groups)} prompts x {found.size} completions of the {source}, 95% intervals in brackets; "
        "nothing was trained or written"
    )
    console.result("\n".join(map(printable, lines)))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _cut(text: str, width: int) -> list[str]:
    """Return at most two lines of a text: its beginning, and its end, which usually has the answer."""
    text = printable(text)
    if len(text) <= 2 * width:
        return [text[:width], *([text[width:]] if text[width:] else [])]
    return [f"{text[: width - 1]}…", f"…{text[1 - width :]}"]
