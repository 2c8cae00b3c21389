"""`--data.filter-by-difficulty`: which rows are sampled, and that neither a kill nor a longer run changes them."""

import itertools
import json
import shlex
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
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
WANTED = 10


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


@pytest.fixture(scope="module")
def ask(parts):
    """Return a function that filters rows and returns the kept rows, the number of completions and the record."""
    config, data, _, sampler = parts

    def filtered(folder, **changes):
        folder.mkdir(exist_ok=True)
        run = Run(replace(config, {"output_dir": str(folder), **changes}), {})
        counting = Counting(sampler)
        asked = [row["id"] for row in filter_by_difficulty(run, counting, data.train)]
        return asked, counting.completions, run.record.get("filter")

    with pytest.MonkeyPatch.context() as patch:  # chunks of 8 rows, written 4 rows at a time
        patch.setattr(difficulty, "_CHUNK", 8)
        patch.setattr(units, "UNIT_SIZE", 16)
        yield filtered


@pytest.fixture(scope="module")
def whole(ask, tmp_path_factory):
    """An uninterrupted filter pass, with its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *ask(folder)


def solved(folder):
    """Return how often each row was solved, read from the samples files."""
    times_solved = defaultdict(int)
    for path in sorted((folder / "filter").iterdir()):
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            times_solved[sample["task_id"]] += sample["passed"]
    return times_solved


def test_the_rows_that_are_asked_are_those_solved_sometimes_in_the_order_of_training(whole, parts):
    folder, asked, drawn, record = whole
    times_solved = solved(folder)
    rows = parts[1].train
    sampled_ids = [rows[index]["id"] for index in prompt_order(40, 40, 0)][: len(times_solved)]
    assert set(sampled_ids) == set(times_solved)
    sometimes = [row_id for row_id in sampled_ids if 0 < times_solved[row_id] < 4]
    assert asked == sometimes[:WANTED]
    assert drawn == 4 * len(sampled_ids) < 4 * 40  # no more chunks than needed
    before_last_chunk = [row_id for row_id in sampled_ids[:-8] if 0 < times_solved[row_id] < 4]
    assert len(before_last_chunk) < WANTED
    assert record == {
        "rows": len(sampled_ids),
        "kept": len(sometimes),
        "always": sum(count == 4 for count in times_solved.values()),
        "never": sum(count == 0 for count in times_solved.values()),
        "samples_per_row": 4,
    }


def test_difficulty_is_that_of_the_runs_own_sampling(ask, tmp_path):
    cut_off = {"sampling": {"max_completion_tokens": 4}}
    with pytest.raises(
        RunError, match=r"of 40 rows the base solves 0 sometimes, 0 always and 40 never: too few .*easier"
    ):
        ask(tmp_path / "a", **cut_off)


@pytest.mark.parametrize(("files", "kept", "torn"), [(1, 0, "{"), (1, 20, '{"task_id": "sta'), (2, 32, "")])
def test_a_pass_that_was_killed_goes_on_and_asks_the_same_rows(ask, whole, tmp_path, files, kept, torn):
    folder, asked, drawn, record = whole
    names = sorted(path.name for path in (folder / "filter").iterdir())
    assert len(names) >= 2
    (tmp_path / "filter").mkdir()
    for name in names[:files]:
        shutil.copy(folder / "filter" / name, tmp_path / "filter" / name)
    last = tmp_path / "filter" / names[files - 1]
    last.write_text("".join(last.read_text().splitlines(keepends=True)[:kept]) + torn)
    assert ask(tmp_path) == (asked, drawn - 32 * (files - 1) - kept // 16 * 16, record)
    for name in names:
        assert (tmp_path / "filter" / name).read_bytes() == (folder / "filter" / name).read_bytes()
    assert ask(tmp_path) == (asked, 0, record)


def test_a_longer_run_begins_with_the_rows_of_a_shorter_one(ask, whole, tmp_path):
    shutil.copytree(whole[0] / "filter", tmp_path / "filter")
    lengths = {steps: ask(tmp_path, train={"max_steps": steps}) for steps in (2, 5, 20, 40)}
    orders = [asked for asked, _, _ in lengths.values()]
    assert [len(asked) for asked in orders] == [4, 10, 40, 80]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in itertools.pairwise(orders))
    assert orders[1] == whole[1] and lengths[2][1] == 0
    assert lengths[20][1] > 0 and lengths[20][2]["rows"] == 40
    assert lengths[40][1] == 0 and lengths[40][2] == lengths[20][2]
    num_kept = lengths[40][2]["kept"]
    first_pass = orders[-1][:num_kept]
    assert len(set(first_pass)) == num_kept == len(set(orders[-1]))  # each row once, then again in another order
    assert first_pass != orders[-1][num_kept : 2 * num_kept]


# The recipe

TINY = shlex.split(
    "--model.engine peft --lora.rank 4 --data.filter-by-difficulty --data.eval-limit 2 --eval.num-samples 0 "
    "--sampling.num-generations 4 --sampling.max-completion-tokens 40 --train.prompts-per-step 2 "
    "--train.micro-batch-size 4 --train.completions-steps 1 --train.checkpoint-steps 1"
)


def asked_in_training(folder):
    """Return the rows that the logged completions answer, by step."""
    files = sorted((folder / "completions").glob("step-*.jsonl"))
    return [list(dict.fromkeys(json.loads(line)["id"] for line in path.read_text().splitlines())) for path in files]


def test_a_filtered_run_trains_on_the_rows_it_kept_and_may_be_extended(warm, tmp_path):
    start = (RECIPE, *TINY, "--data.train-limit", "24", "--train.max-steps", "1", "--output-dir", tmp_path / "run")
    finish(warm.start(*start, cwd=tmp_path))
    samples = (tmp_path / "run" / "filter" / "00000.samples.jsonl").read_bytes()
    first = asked_in_training(tmp_path / "run")
    longer = warm.start(RECIPE, "--resume", "--train.max-steps", "3", "--output-dir", tmp_path / "run", cwd=tmp_path)
    assert "evaluating difficulty" not in finish(longer).stderr
    steps = asked_in_training(tmp_path / "run")
    times_solved = solved(tmp_path / "run")
    assert steps[:1] == first and [len(rows) for rows in steps] == [2, 2, 2]
    assert len({row_id for row_ids in steps for row_id in row_ids}) == 6
    assert all(0 < times_solved[row_id] < 4 for row_ids in steps for row_id in row_ids)
    assert (tmp_path / "run" / "filter" / "00000.samples.jsonl").read_bytes() == samples
    assert json.loads((tmp_path / "run" / "run.json").read_text())["filter"]["rows"] == 24
