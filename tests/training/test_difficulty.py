"""`--data.filter-by-difficulty`: which rows are sampled, and that neither a kill nor a longer run changes them."""

import dataclasses
import itertools
import json
import shlex
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.tiny_runs import begin_tiny
from helpers.warm_process import finish

from lora_grpo.config import replace
from lora_grpo.config.schema import RunConfig
from lora_grpo.data import load_data, prompt_order
from lora_grpo.errors import RunError
from lora_grpo.evaluation import units
from lora_grpo.models.policy import load_policy
from lora_grpo.runs import Run
from lora_grpo.sampling.build import build_sampler
from lora_grpo.training import difficulty
from lora_grpo.training.difficulty import filter_by_difficulty

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gsm8k_lora.py"
SETTINGS = {
    "model": {"engine": "peft"},
    "lora": {"rank": 4, "alpha": 8},
    "data": {"train_limit": 40, "eval_limit": 2, "filter_by_difficulty": True},
    "sampling": {"num_generations": 4, "max_completion_tokens": 40},
    "train": {"max_steps": 5, "prompts_per_step": 2, "micro_batch_size": 4},
}
GROUP = 4  # completions of a row
PROMPTS = 10  # of the training
ROWS_PER_FILE = 8
UNIT = 16  # completions that are written together


class Counting:
    """A real sampler that counts the requested completions."""

    def __init__(self, sampler):
        self.sampler = sampler
        self.completions = 0
        self.batch_size = None

    def __getattr__(self, name):
        return getattr(self.sampler, name)

    def stream(self, prompts, params, seeds):
        self.completions += len(seeds)
        return self.sampler.stream(prompts, params, seeds)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    config = replace(RunConfig(output_dir=str(tmp_path_factory.mktemp("difficulty") / "out")), SETTINGS)
    data = load_data(config)
    policy = load_policy(config)
    return config, data, policy, build_sampler(policy, config)


@dataclass(frozen=True)
class FilterPass:
    """What a pass over the rows of `parts` returned, sampled and recorded."""

    folder: Path

    row_ids: list[str]
    """The prompts of the training, in order."""

    completions: int
    """How many completions were sampled for it."""

    record: dict
    """`filter` in run.json."""


@pytest.fixture(scope="module")
def filter_rows(parts):
    """Return a function that filters the rows of a run in a folder."""
    config, data, _, sampler = parts

    def filter_rows(folder, **changes):
        folder.mkdir(exist_ok=True)
        run = Run(replace(config, {"output_dir": str(folder), **changes}), {})
        counting = Counting(sampler)
        row_ids = [row["id"] for row in filter_by_difficulty(run, counting, data.train)]
        return FilterPass(folder, row_ids, counting.completions, run.record.get("filter"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(difficulty, "_CHUNK", ROWS_PER_FILE)
        patch.setattr(units, "UNIT_SIZE", UNIT)
        yield filter_rows


@pytest.fixture(scope="module")
def unbroken(filter_rows, tmp_path_factory):
    """A pass that nothing interrupted."""
    return filter_rows(tmp_path_factory.mktemp("unbroken"))


def solved_counts(folder):
    """Return how many of its completions solved each row, read from the samples files."""
    counts = defaultdict(int)
    for path in sorted((folder / "filter").iterdir()):
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            counts[sample["task_id"]] += sample["passed"]
    return counts


def solved_sometimes(row_ids, counts):
    return [row_id for row_id in row_ids if 0 < counts[row_id] < GROUP]


def test_the_rows_that_are_asked_are_those_solved_sometimes_in_the_order_of_training(unbroken, parts):
    _, data, _, _ = parts
    counts = solved_counts(unbroken.folder)
    sampled_ids = [data.train[index]["id"] for index in prompt_order(40, 40, 0)][: len(counts)]
    assert set(sampled_ids) == set(counts)
    assert unbroken.row_ids == solved_sometimes(sampled_ids, counts)[:PROMPTS]

    # No more files than needed.
    assert unbroken.completions == GROUP * len(sampled_ids) < GROUP * 40
    assert len(solved_sometimes(sampled_ids[:-ROWS_PER_FILE], counts)) < PROMPTS

    assert unbroken.record == {
        "rows": len(sampled_ids),
        "kept": len(solved_sometimes(sampled_ids, counts)),
        "always": list(counts.values()).count(GROUP),
        "never": list(counts.values()).count(0),
        "samples_per_row": GROUP,
    }


def test_difficulty_is_that_of_the_runs_own_sampling(filter_rows, tmp_path):
    cut_off = {"sampling": {"max_completion_tokens": 4}}
    with pytest.raises(
        RunError, match=r"of 40 rows the base solves 0 sometimes, 0 always and 40 never: too few .*easier"
    ):
        filter_rows(tmp_path / "a", **cut_off)


KILLS = {
    # Files that were begun, lines and a torn line in the last one, and how many completions need not be sampled again.
    "in the first unit": (1, 0, "{", 0),
    "in the second unit": (1, 20, '{"task_id": "sta', UNIT),
    "between two files": (2, 32, "", 32 + 32),
}


@pytest.mark.parametrize(("num_files", "num_lines", "torn_line", "saved"), KILLS.values(), ids=KILLS)
def test_a_pass_that_was_killed_goes_on_and_asks_the_same_rows(
    filter_rows, unbroken, tmp_path, num_files, num_lines, torn_line, saved
):
    names = sorted(path.name for path in (unbroken.folder / "filter").iterdir())
    assert len(names) >= 2
    (tmp_path / "filter").mkdir()
    for name in names[:num_files]:
        shutil.copy(unbroken.folder / "filter" / name, tmp_path / "filter" / name)
    last_file = tmp_path / "filter" / names[num_files - 1]
    lines = last_file.read_text().splitlines(keepends=True)
    last_file.write_text("".join(lines[:num_lines]) + torn_line)

    resumed = filter_rows(tmp_path)
    assert resumed.row_ids == unbroken.row_ids
    assert resumed.completions == unbroken.completions - saved
    assert resumed.record == unbroken.record
    for name in names:
        assert (tmp_path / "filter" / name).read_bytes() == (unbroken.folder / "filter" / name).read_bytes()
    assert filter_rows(tmp_path) == dataclasses.replace(resumed, completions=0)


def test_steps_that_use_the_same_rollouts_need_their_rows_once(filter_rows, unbroken, tmp_path):
    shutil.copytree(unbroken.folder / "filter", tmp_path / "filter")
    reused = filter_rows(tmp_path, train={"max_steps": 4}, grpo=("num_iterations=2",))
    assert reused.row_ids == unbroken.row_ids[:4]
    assert reused.completions == 0


def test_a_longer_run_begins_with_the_rows_of_a_shorter_one(filter_rows, unbroken, tmp_path):
    shutil.copytree(unbroken.folder / "filter", tmp_path / "filter")
    passes = [filter_rows(tmp_path, train={"max_steps": steps}) for steps in (2, 5, 20, 40)]
    of_2_steps, of_5_steps, of_20_steps, of_40_steps = passes
    assert [len(filtered.row_ids) for filtered in passes] == [4, 10, 40, 80]
    for shorter, longer in itertools.pairwise(passes):
        assert longer.row_ids[: len(shorter.row_ids)] == shorter.row_ids

    # Only what is not known yet is sampled.
    assert of_2_steps.completions == 0
    assert of_5_steps.row_ids == unbroken.row_ids
    assert of_20_steps.completions > 0
    assert of_20_steps.record["rows"] == 40
    assert of_40_steps.completions == 0
    assert of_40_steps.record == of_20_steps.record

    # A run that needs more has each row once, then again in another order.
    num_kept = of_40_steps.record["kept"]
    first_epoch = of_40_steps.row_ids[:num_kept]
    second_epoch = of_40_steps.row_ids[num_kept : 2 * num_kept]
    assert len(set(first_epoch)) == num_kept
    assert set(of_40_steps.row_ids) == set(first_epoch)
    assert first_epoch != second_epoch


# The recipe

TINY = shlex.split(
    "--model.engine peft --lora.rank 4 --data.filter-by-difficulty --data.eval-limit 2 --eval.num-samples 0 "
    "--sampling.num-generations 4 --sampling.max-completion-tokens 40 --train.prompts-per-step 2 "
    "--train.micro-batch-size 4 --train.completions-steps 1 --train.checkpoint-steps 1"
)


def asked_in_training(folder):
    """Return the ids of the rows that the logged completions answer, by step."""
    ids_of_steps = []
    for path in sorted((folder / "completions").glob("step-*.jsonl")):
        ids_of_completions = [json.loads(line)["id"] for line in path.read_text().splitlines()]
        ids_of_steps.append(set(ids_of_completions))
    return ids_of_steps


def test_a_filtered_run_trains_on_the_rows_it_kept_and_may_be_extended(warm, tmp_path):
    start = (RECIPE, *TINY, "--data.train-limit", "24", "--train.max-steps", "1", "--output-dir", tmp_path / "run")
    finish(warm.start(*start, cwd=tmp_path))
    samples = (tmp_path / "run" / "filter" / "00000.samples.jsonl").read_bytes()
    [first_step] = asked_in_training(tmp_path / "run")
    longer = warm.start(RECIPE, "--resume", "--train.max-steps", "3", "--output-dir", tmp_path / "run", cwd=tmp_path)
    assert "evaluating difficulty" not in finish(longer).stderr
    steps = asked_in_training(tmp_path / "run")
    assert steps[0] == first_step
    assert [len(row_ids) for row_ids in steps] == [2, 2, 2]
    trained_ids = set().union(*steps)
    assert len(trained_ids) == 6
    assert len(solved_sometimes(trained_ids, solved_counts(tmp_path / "run"))) == 6
    assert (tmp_path / "run" / "filter" / "00000.samples.jsonl").read_bytes() == samples
    assert json.loads((tmp_path / "run" / "run.json").read_text())["filter"]["rows"] == 24


@pytest.mark.parametrize("is_filtered", [True, False])
def test_a_reward_on_the_rows_that_are_kept_is_not_compared_with_that_on_all_rows(is_filtered, tmp_path):
    training = begin_tiny(tmp_path / "run", data={"filter_by_difficulty": is_filtered})
    assert training.monitor.alarms.validates_as_it_trains is not is_filtered
