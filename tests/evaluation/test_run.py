import json

import pytest

from lora_grpo.config import replace
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.data import load_data
from lora_grpo.evaluation import units
from lora_grpo.evaluation.run import evaluate
from lora_grpo.grading.verdict import RESULT_ENTRIES
from lora_grpo.models.policy import load_policy
from lora_grpo.runs import open_run
from lora_grpo.sampling.build import build_sampler
from lora_grpo.sampling.sampler import completion_seed

SETTINGS = {
    "data": {"task": "starter", "eval_limit": 10},
    "sampling": {"max_completion_tokens": 16},
    "eval": {"num_samples": 3, "k": (1, 3)},
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    config = replace(RunConfig(output_dir=str(tmp_path_factory.mktemp("evaluate") / "out")), SETTINGS)
    data = load_data(config)
    run = open_run(config, Invocation(), "test", data.record)
    policy = load_policy(config)
    run.begin(policy.record)
    return run, build_sampler(policy, config), data.eval


class Counting:
    """A real sampler that counts the requested completions. If it streams, it yields them one by one."""

    def __init__(self, sampler, streams=False):
        self.sampler, self.tokenizer, self.completions, self.calls = sampler, sampler.tokenizer, 0, 0
        self.streams, self.batch_size = streams, None

    def __getattr__(self, name):
        return getattr(self.sampler, name)

    def stream(self, prompts, params, seeds):
        self.calls += 1
        group, indices = params.num_samples, range(len(prompts))
        for index in reversed(indices) if self.streams else indices:
            own = seeds[index * group : (index + 1) * group]
            ((_, samples),) = self.sampler.stream([prompts[index]], params, own)
            self.completions += group
            yield index, samples


def test_every_row_is_sampled_and_decoded_greedily(parts):
    run, sampler, rows = parts
    samples = evaluate(run, sampler, rows, "whole")
    assert len(samples) == 10 * 4
    for row in rows:
        indices = [sample["sample_index"] for sample in samples if sample["task_id"] == row["id"]]
        assert sorted(indices, key=str) == [0, 1, 2, "greedy"]
    written = [json.loads(line) for line in (run.evaluation / "whole.samples.jsonl").read_text().splitlines()]
    assert written == samples
    assert all({"strict", "flexible", "robust"} <= sample.keys() for sample in samples)


@pytest.fixture
def small_units(monkeypatch):
    """Use units of 6 completions: 6 greedy ones, or 2 rows x 3 samples."""
    monkeypatch.setattr(units, "UNIT_SIZE", 6)


@pytest.mark.parametrize(("kept", "torn"), [(0, "{"), (6, ""), (7, '{"task_id": "starter/ev'), (20, "{"), (39, "")])
def test_a_killed_evaluation_goes_on_after_its_last_whole_unit(parts, small_units, kept, torn):
    run, sampler, rows = parts
    whole = evaluate(run, sampler, rows, "units")
    path = run.evaluation / f"killed-{kept}-{len(torn)}.samples.jsonl"
    head = (run.evaluation / "units.samples.jsonl").read_text().splitlines(keepends=True)[:kept]
    path.write_text("".join(head) + torn)
    counting = Counting(sampler)
    assert evaluate(run, counting, rows, path.name.removesuffix(".samples.jsonl")) == whole
    assert path.read_text() == (run.evaluation / "units.samples.jsonl").read_text()
    assert 40 - kept <= counting.completions < 40 - kept + 6  # at most one unit is sampled twice


def test_the_shares_of_several_processes_that_were_killed_are_gathered(parts, small_units):
    run, sampler, rows = parts
    whole = evaluate(run, sampler, rows, "units")
    lines = (run.evaluation / "units.samples.jsonl").read_text().splitlines(keepends=True)
    path = run.evaluation / "shared.samples.jsonl"
    path.write_text("".join(lines[:6]))
    path.with_name(f"{path.name}.rank0").write_text("".join(lines[10:16]))
    path.with_name(f"{path.name}.rank2").write_text("".join(lines[6:10] + lines[16:19]) + '{"task_id": "sta')
    counting = Counting(sampler)
    assert evaluate(run, counting, rows, "shared") == whole
    assert counting.completions == 40 - 16  # the last three are from an incomplete unit
    assert path.read_text() == "".join(lines)
    assert list(run.evaluation.glob("shared.samples.jsonl.*")) == []


@pytest.mark.parametrize("kept", [5, 26])
def test_a_streaming_sampler_is_asked_for_what_is_missing_at_once_and_loses_nothing(parts, small_units, kept):
    run, sampler, rows = parts
    whole = evaluate(run, sampler, rows, "units")
    streamed = evaluate(run, Counting(sampler, streams=True), rows, "streamed")
    # Decoding one by one may change rounding, but not the sampled tokens of these rows.
    assert streamed == whole
    path = run.evaluation / f"streamed-{kept}.samples.jsonl"
    lines = (run.evaluation / "streamed.samples.jsonl").read_text().splitlines(keepends=True)
    greedy, others = lines[:10], lines[10:]
    # The results after a kill of a stream that yields the last rows first.
    rows_left = [line for start in range(len(others) - 3, -1, -3) for line in others[start : start + 3]]
    path.write_text("".join((greedy[::-1] + rows_left)[:kept]))
    counting = Counting(sampler, streams=True)
    assert evaluate(run, counting, rows, path.name.removesuffix(".samples.jsonl")) == whole
    assert counting.calls <= 2
    lost = kept - 10 if kept > 10 else 0  # samples of incomplete rows are sampled again
    assert counting.completions == 40 - kept + lost % 3
    assert path.read_text() == (run.evaluation / "units.samples.jsonl").read_text()


def test_a_completions_random_numbers_are_its_own(parts):
    run, sampler, rows = parts
    whole = evaluate(run, sampler, rows, "whole")
    fewer = evaluate(run, sampler, rows[3:6], "fewer")
    assert [sample for sample in whole if sample["task_id"] in {row["id"] for row in rows[3:6]}] == fewer
    numbered = {completion_seed(0, row["id"], index) for row in rows for index in range(3)}
    assert len(numbered) == 30 and completion_seed(1, rows[0]["id"], 0) not in numbered


def test_no_rule_can_have_the_name_of_another_entry(parts, tmp_path):
    """A rule named `passed` would replace the grade; see `as_verdict`."""
    run, sampler, rows = parts
    results = evaluate(run, sampler, rows, "named")
    rules = {"strict", "flexible", "robust"}
    assert {name for result in results for name in result} - rules <= RESULT_ENTRIES
