"""`--preview`: what it measures against what training then logs, and what it says of groups made to fail each way."""

import json
import os
import random
import re
from pathlib import Path

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
from lora_grpo.rewards.specs import parse_reward_specs, resolve
from lora_grpo.runs import open_run
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


def lines(path):
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
    run = open_run(config, Invocation(), "test", data.record)
    training = prepare_training(run, policy, data.train, sampler)
    run.begin(policy.record)
    train(training)

    answers = [(group, place) for group in groups for place in range(4)]
    logged = lines(run.completions / "step-00001.jsonl")
    assert len(groups) == 8 and len(logged) >= 16
    for line, (group, place) in zip(logged, answers, strict=False):
        assert (line["id"], line["completion"]) == (group.row["id"], group.answers[place].text)
        assert {name: weights[name] * value for name, value in line["rewards"].items()} == group.answers[place].rewards
        assert line["reward"] == pytest.approx(group.answers[place].total)
    (step,), found = lines(run.metrics), measure(groups)
    assert step["reward"] == pytest.approx(found.rewards["sum"].mean, abs=1e-4)
    assert 2 * step["rewards/correct_answer/mean"] == pytest.approx(found.rewards["correct_answer"].mean, abs=1e-4)
    assert step["frac_reward_zero_std"] == pytest.approx(found.zero_variance.value)
    assert step["completions/clipped_ratio"] == pytest.approx(found.truncated.value)
    assert step["completions/mean_length"] == pytest.approx(found.num_tokens, abs=1e-3)


@pytest.mark.parametrize("what", ["check", "reward"])
def test_a_check_or_a_reward_that_raises_is_an_error_of_the_user(what, starter, tmp_path):
    (tmp_path / "own.py").write_text(
        "def load(split): return [{'question': f'{split} {n}'} for n in range(9)]\n"
        "def check(completion, row): return 1 / 0\n"
        "def mine(completions, **columns): return 1 / 0\n"
    )
    own = str(tmp_path / "own.py")
    changes = {"data": {"task": own}} if what == "check" else {"rewards": (f"{own}:mine",)}
    config = replace(starter[0], changes)
    with pytest.raises(UserError, match=r"own\.py:\d: .* raised ZeroDivisionError"):
        preview(config, load_data(config))


# Groups that fail in one way each

RIGHT, WRONG, UNREAD = Verdict(True, "correct"), Verdict(False, "wrong_answer"), Verdict(False, "no_answer")


def group(rewards, verdicts=(WRONG,) * 4, *, texts="abcd", truncated=False):
    """A group of 4; rewards as name to 4 values."""
    answers = (
        Answer(texts[i], 10, truncated, {name: values[i] for name, values in rewards.items()}, verdicts[i])
        for i in range(4)
    )
    return Group({"id": "row", "question": "What?"}, tuple(answers))


def graded(*verdicts, **more):
    """A group that is paid for right answers alone."""
    return group({"correct_answer": [float(verdict.passed) for verdict in verdicts]}, verdicts, **more)


NEVER, ALWAYS = graded(WRONG, WRONG, WRONG, WRONG), graded(RIGHT, RIGHT, RIGHT, RIGHT)
MIXED, MOSTLY = graded(RIGHT, WRONG, WRONG, RIGHT), graded(RIGHT, WRONG, RIGHT, RIGHT)
FORMAT_ALONE = group({"correct_answer": [0, 0, 0, 0], "soft_xml_format": [0, 1, 0, 1]}, (WRONG,) * 4)
FILTER = {"data": {"filter_by_difficulty": True}}
LARGER = "--sampling.num-generations 8"


UNREADABLE, ALIKE = graded(*[UNREAD] * 4), graded(*[WRONG] * 4, texts="aaaa")
CAN, BARELY, CANNOT = "can learn", "can barely learn", "cannot learn"
FAILURES = [
    ([MIXED] * 8, {}, CAN, None, None),
    ([NEVER] * 8, {}, CANNOT, "none of 32 completions is correct (95% upper bound: 32%)", "--data.train"),
    ([NEVER] * 8, {}, CANNOT, "none of 32", "soft_xml_format=0.5"),
    ([NEVER] * 8, {"data": {"task": "mbpp"}}, CANNOT, "none of 32", "share_of_tests_passed"),
    ([ALWAYS] * 8, {}, CANNOT, "all of 32 completions are correct", "harder problems"),
    ([ALWAYS, NEVER] * 3 + [MIXED] * 2, {}, CAN, "3 of 8 problems are always solved and 3 never", "filter"),
    ([ALWAYS, NEVER] * 3 + [MIXED] * 2, FILTER, CAN, None, None),
    ([NEVER] * 7 + [MOSTLY], {}, BARELY, "0 of 8 problems are always solved and 7 never", "filter"),
    ([NEVER] * 7 + [MIXED], {}, BARELY, "0 of 8 problems are always solved and 7 never", LARGER),
    ([NEVER] * 8, FILTER, BARELY, "none of 32", "easier problems"),
    ([UNREADABLE] * 8, {}, CANNOT, "100% [68, 100] of completions end without", "train sft"),
    ([graded(RIGHT, WRONG, UNREAD, UNREAD)] * 8, {}, CAN, "50% [", "no change needed: training can fix this"),
    ([graded(RIGHT, WRONG, WRONG, WRONG, truncated=True)] * 8, {}, BARELY,
     "100% [68, 100] of completions are truncated at 256 tokens",
     "--sampling.max-completion-tokens 512 --model.max-sequence-tokens 1280,"),
    ([ALIKE] * 8, {}, CANNOT, "has 1.0 distinct", "--sampling.temperature 1.2"),
    ([FORMAT_ALONE] * 8, {}, BARELY, "none of 32", "--sampling.num-generations 8"),
    ([group({"mine": [n / 8] * 4}) for n in range(8)], {}, CANNOT, "within each group: mine", "a finer reward"),
    ([group({"mine": [None] * 4})] * 8, {}, CANNOT, "within each group: mine", "a finer reward"),
    ([group({"mine": [0, 1, 0, 1], "other": [1, 1, 1, 1]})] * 8, {}, CAN, "within each group: other",
     "none is needed if mine is the goal"),
    # Each varies, and their sum does not.
    ([group({"mine": [0, 1, 0, 1], "other": [1, 0, 1, 0]})] * 8, {}, CANNOT, "their rewards do not", "reward"),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "changes", "word", "seen", "advice"), FAILURES)
def test_each_way_to_fail_is_named_with_what_to_change(groups, changes, word, seen, advice):
    diagnosis = judge(groups, replace(RunConfig(), changes))
    assert diagnosis.verdict == word
    if seen is None:
        assert diagnosis.findings == ()
    else:
        assert any(seen in finding.problem and advice in finding.advice for finding in diagnosis.findings)
    offered = " ".join(finding.advice for finding in diagnosis.findings)
    assert set(re.findall(r"--[a-z.-]+", offered)) <= {*flag_names(), "--task"}
    assert [*parse_reward_specs(re.findall(r"\b\w+_format=[\d.]+", offered) or ("correct_answer",))]


def test_sft_is_advised_for_this_preset_and_only_before_it_has_run():
    laptop = replace(RunConfig(), {"preset": "laptop", "data": {"task": "starter"}})
    assert sft_command(laptop) == "lora-grpo train sft --preset laptop --task starter"
    assert sft_command(replace(laptop, {"lora": {"from": "outputs/sft_lora"}})) is None


@pytest.mark.parametrize("gold", ["", "def gold(row): return 'a'\n"])
def test_a_dry_run_shows_the_reward_of_the_reference_answer_if_there_is_one(tmp_path, gold, capsys):
    path = tmp_path / "own.py"
    load = "def load(split): return [{'question': f'{split} {n}'} for n in range(9)]\n"
    path.write_text(load + gold + "def check(completion, row): return completion == 'a'\n")
    config = replace(RunConfig(), {"data": {"task": str(path)}})
    dry_run(config, load_data(config), load_tokenizer(config, dry_run=True))
    said = capsys.readouterr().out
    if gold:
        assert "\n--- reference answer\na\n--- its rewards\ncorrect_answer           1 of 1, weight 2" in said
    else:
        assert "\n--- no reference answer: own.py has no gold(row)\n" in said and "reward" not in said.split("---")[2]
    assert said.count("--- prompt of own/train/0") == 1 and said.endswith("nothing was trained\n")


@pytest.mark.parametrize("rates", [(0.05,), (0.95,), (0.0, 1.0, 1.0, 0.0, 0.5)])
def test_the_filter_is_advised_only_where_it_raises_the_share_of_mixed_groups(rates):
    """200 previews of 8 groups of 8. Problems of one difficulty are kept by chance, so the filter gains nothing."""
    draw, advised = random.Random(0), 0
    for _ in range(200):
        groups = []
        for _ in range(8):
            rate = draw.choice(rates)
            verdicts = [RIGHT if draw.random() < rate else WRONG for _ in range(8)]
            answers = (Answer(str(n), 9, False, {"correct_answer": float(v.passed)}, v) for n, v in enumerate(verdicts))
            groups.append(Group({"id": "row", "question": "What?"}, tuple(answers)))
        offered = " ".join(finding.advice for finding in judge(groups, RunConfig()).findings)
        advised += "--data.filter-by-difficulty" in offered
    assert advised <= 20 if len(rates) == 1 else advised >= 100, advised / 200


def test_a_share_of_eight_groups_is_told_with_its_interval():
    found = measure([MIXED] * 6 + [NEVER] * 2)
    assert str(found.zero_variance) == "25% [7, 59]"
    assert found.difficulty == Difficulty(always_solved=0, sometimes_solved=6, never_solved=2)
    assert found.solved.value == pytest.approx(12 / 32)
    assert found.solved.low < 12 / 32 < found.solved.high


# What a person sees


def test_what_a_model_wrote_cannot_move_the_cursor(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    nasty = "\x1b[2J[bold]\r\x07\u202e\ud800</answer>\n" + "x" * 500 + "\x9bend"
    one = group({"mine": [0, 1, 1, 1]}, texts=(nasty, "", "\0", nasty), truncated=True)
    groups = (Group({"id": "\x1b[31m", "question": nasty}, one.answers),) * 4
    show(RunConfig(), Preview(groups, measure(groups), judge(groups, RunConfig())))
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    assert "\\x1b[2J[bold]\\r\\x07" in out and "\\x9bend" in out
    assert out.count("--- group") == 3
    table = out[: out.index("--- all 4 groups")]
    assert max(map(len, table.splitlines())) <= 80
    assert out.count("2 x reward ") == 3  # the two that are alike, once in each group
    out.encode()


def test_a_preview_beside_a_run_leaves_everything_as_it_is(warm, tmp_path):
    recipe = "code_lora"
    folder = tmp_path / "outputs" / recipe
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    flags = ["--preview", "--sampling.num-generations", "4", "--train.micro-batch-size", "4", "--model.engine", "peft"]
    flags += ["--data.train-limit", "8", "--data.eval-limit", "4"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = finish(warm.start(RECIPES / f"{recipe}.py", *flags, cwd=tmp_path, env=environment))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [folder / "run.json"]
    assert (folder / "run.json").read_text() == "{}"
    assert "\nverdict   can" in done.stdout and "\nsample    8 prompts x 4 completions" in done.stdout
    assert "\nproblems solved" in done.stdout
    assert "\x1b" not in done.stdout
