"""`--preview`: what it measures against what training then logs, and what it says of groups made to fail each way."""

import json
import os
import random
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.flags import flag_names
from helpers.warm_process import finish

from lora_grpo.config import replace
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.data import load_data, sft_command
from lora_grpo.errors import UserError
from lora_grpo.grading.verdict import Verdict
from lora_grpo.models.policy import load_policy, load_tokenizer
from lora_grpo.preview import dry_run, preview
from lora_grpo.preview.diagnosis import Answer, Difficulty, Group, judge, measure
from lora_grpo.preview.sample_groups import Preview, sample_groups, show
from lora_grpo.prompts.styles import write_completion
from lora_grpo.rewards.specs import parse_reward_specs, resolve
from lora_grpo.runs import claim_run, open_run
from lora_grpo.sampling.build import build_sampler
from lora_grpo.training import prepare_training, train

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TINY = {
    "model": {"engine": "peft"},
    "lora": {"rank": 4, "alpha": 8},
    "data": {"train_limit": 16, "eval_limit": 2},
    "sampling": {"num_generations": 4, "max_completion_tokens": 40},
    "rewards": ("correct_answer=2.0", "xml_tag_count=0.5", "near_length:60tokens"),
    "train": {"max_steps": 1, "prompts_per_step": 8, "micro_batch_size": 16, "warmup_steps": 0},
}


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    """A configuration with its rows, policy and sampler."""
    config = replace(RunConfig(output_dir=str(tmp_path_factory.mktemp("preview") / "out")), TINY)
    data = load_data(config)
    policy = load_policy(config)
    return config, data, policy, build_sampler(policy, config)


# Against training itself


def test_the_groups_are_those_of_the_first_step_and_so_are_their_figures(starter):
    config, data, policy, sampler = starter
    groups = sample_groups(config, sampler, data.train)
    weights = {reward.name: reward.weight for reward in resolve(parse_reward_specs(config.rewards))}
    claim_run(config, Invocation())
    run = open_run(config, Invocation(), "test", data.record)
    training = prepare_training(run, policy, data.train, sampler)
    run.begin(policy.record)
    train(training)

    # The completions of the preview are the first ones of the step.
    answers = [(group, answer) for group in groups for answer in group.answers]
    logged_completions = read_lines(run.completions / "step-00001.jsonl")
    assert len(groups) == 8 and len(logged_completions) >= 16
    for line, (group, answer) in zip(logged_completions, answers, strict=False):
        assert (line["id"], line["completion"]) == (group.row["id"], answer.text)
        assert {name: weights[name] * value for name, value in line["rewards"].items()} == answer.rewards
        assert line["reward"] == pytest.approx(answer.total)

    # Its figures are the metrics of the step.
    [step] = read_lines(run.metrics)
    measured = measure(groups)
    assert step["reward"] == pytest.approx(measured.rewards["sum"].mean, abs=1e-4)
    assert 2 * step["rewards/correct_answer/mean"] == pytest.approx(measured.rewards["correct_answer"].mean, abs=1e-4)
    assert step["frac_reward_zero_std"] == pytest.approx(measured.zero_variance.value)
    assert step["completions/clipped_ratio"] == pytest.approx(measured.truncated.value)
    assert step["completions/mean_length"] == pytest.approx(measured.num_tokens, abs=1e-3)


OWN_FILE = """
def load(split): return [{"question": f"{split} {number}"} for number in range(9)]
def check(completion, row): return 1 / 0
def mine(completions, **columns): return 1 / 0
"""


@pytest.mark.parametrize("raises", ["check", "reward"])
def test_a_check_or_a_reward_that_raises_is_an_error_of_the_user(raises, starter, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN_FILE)
    changes = {"check": {"data": {"task": str(path)}}, "reward": {"rewards": (f"{path}:mine",)}}
    config = replace(starter[0], changes[raises])
    with pytest.raises(UserError, match=r"own\.py:\d: .* raised ZeroDivisionError"):
        preview(config, load_data(config))


# Groups that fail in one way each

RIGHT = Verdict(True, "correct")
WRONG = Verdict(False, "wrong_answer")
UNREAD = Verdict(False, "no_answer")


def group(rewards, verdicts=(WRONG,) * 4, *, texts="abcd", truncated=False, failures=("",) * 8):
    """Return a group of four answers of ten tokens.

    Args:
        rewards: by name, the values of the four.
        failures: why the agent of each failed.
    """
    answers = []
    for index, verdict in enumerate(verdicts):
        rewards_of_answer = {name: values[index] for name, values in rewards.items()}
        answers.append(Answer(texts[index], 10, truncated, rewards_of_answer, verdict, failures[index]))
    return Group({"id": "row", "question": "What?"}, tuple(answers))


def graded(*verdicts, **options):
    """Return a group that is paid for right answers alone."""
    return group({"correct_answer": [float(verdict.passed) for verdict in verdicts]}, verdicts, **options)


NEVER_RIGHT = graded(WRONG, WRONG, WRONG, WRONG)
ALWAYS_RIGHT = graded(RIGHT, RIGHT, RIGHT, RIGHT)
HALF_RIGHT = graded(RIGHT, WRONG, WRONG, RIGHT)
MOSTLY_RIGHT = graded(RIGHT, WRONG, RIGHT, RIGHT)
RARELY_RIGHT_AND_TRUNCATED = graded(RIGHT, WRONG, WRONG, WRONG, truncated=True)
NEVER_RIGHT_AND_TRUNCATED = graded(WRONG, WRONG, WRONG, WRONG, truncated=True)
HALF_UNREADABLE = graded(RIGHT, WRONG, UNREAD, UNREAD)
UNREADABLE = graded(UNREAD, UNREAD, UNREAD, UNREAD)
ALIKE = graded(WRONG, WRONG, WRONG, WRONG, texts="aaaa")
PAID_FOR_FORMAT_ALONE = group({"correct_answer": [0, 0, 0, 0], "soft_xml_format": [0, 1, 0, 1]})
NOT_GRADED = group({"mine": [None] * 4})
ONE_OF_TWO_REWARDS_VARIES = group({"mine": [0, 1, 0, 1], "other": [1, 1, 1, 1]})
REWARDS_THAT_CANCEL_OUT = group({"mine": [0, 1, 0, 1], "other": [1, 0, 1, 0]})
THREE_OF_EIGHT_EACH_WAY = [*[ALWAYS_RIGHT] * 3, *[NEVER_RIGHT] * 3, *[HALF_RIGHT] * 2]

FILTER = {"data": {"filter_by_difficulty": True}}
SFT_BEFORE_CODE = {"data": {"task": "mbpp"}, "lora": {"from": "outputs/sft_lora"}}
LARGER_GROUPS = "--sampling.num-generations 8"
LONGER = "--sampling.max-completion-tokens 512 --model.max-sequence-tokens 1280,"

CAN = "can learn"
BARELY = "can barely learn"
CANNOT = "cannot learn"


class Case(NamedTuple):
    groups: list[Group]
    verdict: str
    problem: str | None
    """A part of a finding, or None if nothing is found."""
    advice: str | None = None
    """A part of the advice of the same finding."""
    settings: dict[str, Any] = {}  # noqa: RUF012


FAILURES = [
    Case([HALF_RIGHT] * 8, CAN, None),
    # Problems that are too hard or too easy
    Case([NEVER_RIGHT] * 8, CANNOT, "none of 32 completions is correct (95% upper bound: 32%)", "--data.train"),
    Case([NEVER_RIGHT] * 8, CANNOT, "none of 32", "soft_xml_format=0.5"),
    Case([NEVER_RIGHT] * 8, CANNOT, "none of 32", "share_of_tests_passed", {"data": {"task": "mbpp"}}),
    Case([NEVER_RIGHT] * 8, BARELY, "none of 32", "easier problems", FILTER),
    Case([PAID_FOR_FORMAT_ALONE] * 8, BARELY, "none of 32", LARGER_GROUPS),
    Case([ALWAYS_RIGHT] * 8, CANNOT, "all of 32 completions are correct", "harder problems"),
    Case(THREE_OF_EIGHT_EACH_WAY, CAN, "3 of 8 problems are always solved and 3 never", "filter"),
    Case(THREE_OF_EIGHT_EACH_WAY, CAN, None, settings=FILTER),
    Case([*[NEVER_RIGHT] * 7, MOSTLY_RIGHT], BARELY, "0 of 8 problems are always solved and 7 never", "filter"),
    Case([*[NEVER_RIGHT] * 7, HALF_RIGHT], BARELY, "0 of 8 problems are always solved and 7 never", LARGER_GROUPS),
    # Texts
    Case([UNREADABLE] * 8, CANNOT, "100% [68, 100] of completions end without", "train sft"),
    Case([UNREADABLE] * 8, CANNOT, "of completions end without", "a larger model", SFT_BEFORE_CODE),
    Case([HALF_UNREADABLE] * 8, CAN, "50% [", "no change needed: training can fix this"),
    Case([RARELY_RIGHT_AND_TRUNCATED] * 8, BARELY, "100% [68, 100] of completions are truncated at 256 tokens", LONGER),
    Case([NEVER_RIGHT_AND_TRUNCATED] * 8, CANNOT, "are truncated at", "first, on reference answers, which"),
    Case([ALIKE] * 8, CANNOT, "has 1.0 distinct", "--sampling.temperature 1.2"),
    # Rewards
    Case([group({"mine": [n / 8] * 4}) for n in range(8)], CANNOT, "within each group: mine", "a finer reward"),
    Case([NOT_GRADED] * 8, CANNOT, "within each group: mine", "a finer reward"),
    Case([ONE_OF_TWO_REWARDS_VARIES] * 8, CAN, "within each group: other", "none is needed if mine is the goal"),
    Case([REWARDS_THAT_CANCEL_OUT] * 8, CANNOT, "their rewards do not", "reward"),
]


@pytest.mark.parametrize("case", FAILURES)
def test_each_way_to_fail_is_named_with_what_to_change(case):
    diagnosis = judge(case.groups, replace(RunConfig(), case.settings))
    assert diagnosis.verdict == case.verdict
    if case.problem is None:
        assert diagnosis.findings == ()
    else:
        assert any(case.problem in finding.problem and case.advice in finding.advice for finding in diagnosis.findings)

    # Flags and rewards that the advice names exist.
    advice = " ".join(finding.advice for finding in diagnosis.findings)
    assert set(re.findall(r"--[a-z.-]+", advice)) <= {*flag_names(), "--task"}
    format_rewards = re.findall(r"\b\w+_format=[\d.]+", advice)
    if format_rewards:
        parse_reward_specs(format_rewards)


@pytest.mark.parametrize("style", ["xml", "hashes", "boxed", "think"])
def test_the_format_that_is_advised_is_the_one_that_the_prompt_asks_for(style):
    diagnosis = judge([NEVER_RIGHT] * 8, replace(RunConfig(), {"data": {"prompt_style": style}}))
    advice = " ".join(finding.advice for finding in diagnosis.findings)
    [spec] = shlex.split(re.search(r"finer reward, e\.g\. (.*?); ", advice)[1])
    [reward] = resolve(parse_reward_specs([spec]))
    texts = [write_completion("Four and three make seven.", "7", style), "It is 7."]
    assert reward.function(completions=[[{"role": "assistant", "content": text}] for text in texts]) == [1.0, 0.0]


def test_sft_is_advised_for_this_preset_and_only_before_it_has_run():
    laptop = replace(RunConfig(), {"preset": "laptop", "data": {"task": "starter"}})
    assert sft_command(laptop) == "lora-grpo train sft --preset laptop --task starter"
    assert sft_command(replace(laptop, {"lora": {"from": "outputs/sft_lora"}})) is None


def test_sft_of_a_task_file_has_a_folder_of_its_own(tmp_path):
    task_file = tmp_path / "mine.py"
    task_file.write_text(WITH_REFERENCE)
    config = replace(RunConfig(), {"data": {"task": str(task_file)}})
    assert sft_command(config) == f"lora-grpo train sft --task {task_file} --output-dir outputs/mine_sft"


WITHOUT_REFERENCE = """
def load(split): return [{"question": f"{split} {number}"} for number in range(9)]
def check(completion, row): return completion == "a"
"""
WITH_REFERENCE = f"""
{WITHOUT_REFERENCE}
def gold(row): return "a"
"""


@pytest.fixture
def dry_run_of(tmp_path, capsys):
    """Return a function that returns what a dry run of a task file prints."""

    def printed(text):
        path = tmp_path / "own.py"
        path.write_text(text)
        config = replace(RunConfig(), {"data": {"task": str(path)}})
        dry_run(config, load_data(config), load_tokenizer(config, dry_run=True))
        return capsys.readouterr().out

    return printed


def test_a_dry_run_shows_a_prompt_and_the_reward_of_its_reference_answer(dry_run_of):
    printed = dry_run_of(WITH_REFERENCE)
    assert printed.count("--- prompt of own/train/0") == 1 and printed.endswith("nothing was trained\n")
    assert "\n--- reference answer\na\n--- its rewards\ncorrect_answer           1 of 1, weight 2" in printed


def test_a_dry_run_without_a_reference_answer_says_so(dry_run_of):
    printed = dry_run_of(WITHOUT_REFERENCE)
    assert printed.count("--- prompt of own/train/0") == 1 and printed.endswith("nothing was trained\n")
    assert "\n--- no reference answer: own.py has no gold(row)\n" in printed
    assert "reward" not in printed.split("---")[2]


NUM_PREVIEWS = 200


@pytest.mark.parametrize(
    ("rates", "is_useful"), [((0.05,), False), ((0.95,), False), ((0.0, 1.0, 1.0, 0.0, 0.5), True)]
)
def test_the_filter_is_advised_only_where_it_raises_the_share_of_mixed_groups(rates, is_useful):
    """Problems of one difficulty are kept by chance, so the filter gains nothing.

    Args:
        rates: the difficulties of the problems, as shares of right answers.
    """
    generator = random.Random(0)
    num_advised = 0
    for _ in range(NUM_PREVIEWS):
        groups = [random_group(generator, generator.choice(rates)) for _ in range(8)]
        advice = " ".join(finding.advice for finding in judge(groups, RunConfig()).findings)
        num_advised += "--data.filter-by-difficulty" in advice
    if is_useful:
        assert num_advised >= NUM_PREVIEWS / 2
    else:
        assert num_advised <= NUM_PREVIEWS / 10


def random_group(generator, rate):
    """Return a group of eight different answers, each of which is right with a probability."""
    verdicts = [RIGHT if generator.random() < rate else WRONG for _ in range(8)]
    return graded(*verdicts, texts="abcdefgh")


def test_a_share_of_eight_groups_is_told_with_its_interval():
    measured = measure([HALF_RIGHT] * 6 + [NEVER_RIGHT] * 2)
    assert str(measured.zero_variance) == "25% [7, 59]"
    assert measured.difficulty == Difficulty(always_solved=0, sometimes_solved=6, never_solved=2)
    assert measured.solved.value == pytest.approx(12 / 32)
    assert measured.solved.low < 12 / 32 < measured.solved.high


def test_an_episode_whose_agent_failed_counts_nowhere():
    failed = Verdict(False, "agent_failed")
    one_failed = graded(RIGHT, RIGHT, failed, RIGHT, failures=("", "", "KeyError: 'x'", ""))
    all_failed = graded(*[failed] * 4, failures=("KeyError: 'x'",) * 4)
    groups = [*[one_failed] * 6, HALF_RIGHT, all_failed]
    without_them = [*[graded(RIGHT, RIGHT, RIGHT, texts="abd")] * 6, HALF_RIGHT]

    measured = measure(groups)
    assert (measured.groups, measured.completions, measured.failed) == (7, 22, 10)
    assert measured.difficulty == Difficulty(always_solved=6, sometimes_solved=1, never_solved=0)
    assert (measured.solved.value, measured.zero_variance.value) == (pytest.approx((6 + 0.5) / 7), 6 / 7)
    assert measured.solved == measure(without_them).solved
    assert judge(groups, RunConfig()).verdict == judge(without_them, RunConfig()).verdict
    assert judge([one_failed] * 8, RunConfig()).findings[0].problem.startswith("all of 24 completions are correct")


def test_a_preview_says_how_many_episodes_are_left_out(capsys):
    failed = graded(RIGHT, WRONG, WRONG, WRONG, failures=("", "", "", "KeyError: 'x'"))
    for groups, line in (([failed] * 4, "4 of 16 episodes, whose agent failed"), ([HALF_RIGHT] * 4, None)):
        show(RunConfig(), Preview(tuple(groups), measure(groups), judge(groups, RunConfig())))
        printed = capsys.readouterr().out
        assert ("left out" in printed) == (line is not None)
        assert line is None or line in printed


# What a person sees


def test_what_a_model_wrote_cannot_move_the_cursor(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    hostile = "\x1b[2J[bold]\r\x07\u202e\ud800</answer>\n" + "x" * 500 + "\x9bend"
    answers = group({"mine": [0, 1, 1, 1]}, texts=(hostile, "", "\0", hostile), truncated=True).answers
    groups = (Group({"id": "\x1b[31m", "question": hostile}, answers),) * 4
    show(RunConfig(), Preview(groups, measure(groups), judge(groups, RunConfig())))
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.splitlines())
    assert "\\x1b[2J[bold]\\r\\x07" in printed and "\\x9bend" in printed
    assert printed.count("--- group") == 3
    table, _, _ = printed.partition("--- all 4 groups")
    assert max(map(len, table.splitlines())) <= 80
    assert printed.count("2 x reward ") == 3  # the two that are alike, once in each group
    printed.encode()


def test_a_preview_says_what_a_teacher_does_where_rewards_are_equal(capsys):
    groups = (group({"mine": [0, 0, 0, 0]}),) * 4
    for config in (RunConfig(), replace(RunConfig(), {"teacher": {"name": "other"}})):
        show(config, Preview(groups, measure(groups), judge(groups, config)))
        assert ("\nteacher   " in capsys.readouterr().out) == (config.teacher.name is not None)


def test_a_preview_beside_a_run_leaves_everything_as_it_is(warm, tmp_path):
    folder = tmp_path / "outputs" / "code_lora"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    flags = [
        *("--preview", "--sampling.num-generations", "4", "--train.micro-batch-size", "4", "--model.engine", "peft"),
        *("--data.train-limit", "8", "--data.eval-limit", "4"),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = finish(warm.start(RECIPES / "code_lora.py", *flags, cwd=tmp_path, env=environment))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [folder / "run.json"]
    assert (folder / "run.json").read_text() == "{}"
    for text in ("\nverdict   can", "\nsample    8 prompts x 4 completions", "\nproblems solved"):
        assert text in ended.stdout
    assert "\x1b" not in ended.stdout
