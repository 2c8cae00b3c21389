import json

import pytest

from lora_grpo.config import replace
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.data import load_data
from lora_grpo.evaluation import units
from lora_grpo.evaluation.results import append_batches
from lora_grpo.evaluation.run import evaluate
from lora_grpo.grading.verdict import RESULT_ENTRIES
from lora_grpo.models.policy import load_policy
from lora_grpo.progress import Progress
from lora_grpo.runs import claim_run, open_run
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
    claim_run(config, Invocation())
    run = open_run(config, Invocation(), "test", data.record)
    policy = load_policy(config)
    run.begin(policy.record)
    return run, build_sampler(policy, config), data.eval


class Counting:
    """A real sampler that counts the requested completions. If it streams, it yields them one by one."""

    def __init__(self, sampler, streams=False):
        self.sampler = sampler
        self.tokenizer = sampler.tokenizer
        self.streams = streams
        self.batch_size = None
        self.calls = 0
        self.completions = 0

    def __getattr__(self, name):
        return getattr(self.sampler, name)

    def stream(self, prompts, params, seeds):
        self.calls += 1
        group_size = params.num_samples
        indices = list(range(len(prompts)))
        if self.streams:
            indices.reverse()
        for index in indices:
            seeds_of_prompt = seeds[index * group_size : (index + 1) * group_size]
            ((_, samples),) = self.sampler.stream([prompts[index]], params, seeds_of_prompt)
            self.completions += group_size
            yield index, samples


def samples_file(run, name):
    return run.evaluation / f"{name}.samples.jsonl"


def read_lines(run, name):
    return samples_file(run, name).read_text().splitlines(keepends=True)


def test_every_row_is_sampled_and_decoded_greedily(parts):
    run, sampler, rows = parts
    samples = evaluate(run, sampler, rows, "all")
    assert len(samples) == 10 * 4
    for row in rows:
        indices = [sample["sample_index"] for sample in samples if sample["task_id"] == row["id"]]
        assert sorted(indices, key=str) == [0, 1, 2, "greedy"]
    assert [json.loads(line) for line in read_lines(run, "all")] == samples
    assert all({"strict", "flexible", "robust"} <= sample.keys() for sample in samples)


def test_the_progress_keeps_the_pass_rates_of_greedy_and_sampled_answers_apart(tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr(Progress, "show", lambda _, done, note: notes.append((done, note)))
    greedy = [{"sample_index": "greedy", "passed": True}, {"sample_index": "greedy", "passed": False}]
    sampled = [{"sample_index": index, "passed": False} for index in range(3)]
    append_batches(tmp_path / "samples.jsonl", [], [greedy, sampled], 5, "evaluating")
    assert notes == [(2, "50.0% of greedy ones pass"), (5, "0.0% pass")]


@pytest.fixture
def small_units(monkeypatch):
    """Use units of 6 completions: 6 greedy ones, or 2 rows x 3 samples."""
    monkeypatch.setattr(units, "UNIT_SIZE", 6)


KILLS = {
    # Lines that were written, and a torn one.
    "in the first line": (0, "{"),
    "between two units": (6, ""),
    "in the second unit": (7, '{"task_id": "starter/ev'),
    "among the sampled completions": (20, "{"),
    "before the last line": (39, ""),
}


@pytest.mark.parametrize(("num_lines", "torn_line"), KILLS.values(), ids=KILLS)
def test_a_killed_evaluation_goes_on_after_its_last_whole_unit(parts, small_units, num_lines, torn_line):
    run, sampler, rows = parts
    samples = evaluate(run, sampler, rows, "units")
    lines = read_lines(run, "units")
    name = f"killed-{num_lines}"
    samples_file(run, name).write_text("".join(lines[:num_lines]) + torn_line)
    counting = Counting(sampler)
    assert evaluate(run, counting, rows, name) == samples
    assert read_lines(run, name) == lines
    num_missing = 40 - num_lines
    assert num_missing <= counting.completions < num_missing + 6  # at most one unit is sampled twice


def test_the_files_of_several_processes_that_were_killed_are_gathered(parts, small_units):
    run, sampler, rows = parts
    samples = evaluate(run, sampler, rows, "units")
    lines = read_lines(run, "units")
    path = samples_file(run, "gathered")
    path.write_text("".join(lines[:6]))
    path.with_name(f"{path.name}.rank0").write_text("".join(lines[10:16]))
    path.with_name(f"{path.name}.rank2").write_text("".join(lines[6:10] + lines[16:19]) + '{"task_id": "sta')
    counting = Counting(sampler)
    assert evaluate(run, counting, rows, "gathered") == samples
    assert counting.completions == 40 - 16  # the last three are from an incomplete unit
    assert read_lines(run, "gathered") == lines
    assert list(run.evaluation.glob(f"{path.name}.*")) == []


def test_episodes_whose_agent_failed_are_played_again(parts, small_units):
    run, sampler, rows = parts
    samples = evaluate(run, sampler, rows, "units")
    lines = read_lines(run, "units")
    result = {**json.loads(lines[20]), "failure": "KeyError: 'x'"}
    samples_file(run, "failed").write_text("".join([*lines[:20], json.dumps(result) + "\n", *lines[21:]]))
    counting = Counting(sampler)
    assert evaluate(run, counting, rows, "failed") == samples
    assert counting.completions == 6  # its unit
    assert read_lines(run, "failed") == lines


KILLS_OF_A_STREAM = {
    # Lines that were written, and how many of them are of an incomplete row, which is sampled again.
    "among the greedy completions": (5, 0),
    "in a row": (26, 1),
}


@pytest.mark.parametrize(("num_lines", "num_lost"), KILLS_OF_A_STREAM.values(), ids=KILLS_OF_A_STREAM)
def test_a_streaming_sampler_is_asked_for_what_is_missing_at_once(parts, small_units, num_lines, num_lost):
    run, sampler, rows = parts
    samples = evaluate(run, sampler, rows, "units")
    # Decoding one by one may change rounding, but not the sampled tokens of these rows.
    assert evaluate(run, Counting(sampler, streams=True), rows, "streamed") == samples

    # The stream yields the last rows first, and was killed.
    lines = read_lines(run, "streamed")
    greedy_lines = lines[:10]
    lines_of_rows = [lines[start : start + 3] for start in range(10, 40, 3)]
    in_order_of_stream = greedy_lines[::-1]
    for lines_of_row in reversed(lines_of_rows):
        in_order_of_stream += lines_of_row
    name = f"streamed-{num_lines}"
    samples_file(run, name).write_text("".join(in_order_of_stream[:num_lines]))

    counting = Counting(sampler, streams=True)
    assert evaluate(run, counting, rows, name) == samples
    assert counting.calls <= 2
    assert counting.completions == 40 - num_lines + num_lost
    assert read_lines(run, name) == read_lines(run, "units")


def test_a_completions_random_numbers_are_its_own(parts):
    run, sampler, rows = parts
    samples = evaluate(run, sampler, rows, "all")
    fewer_rows = rows[3:6]
    ids = [row["id"] for row in fewer_rows]
    assert evaluate(run, sampler, fewer_rows, "fewer") == [sample for sample in samples if sample["task_id"] in ids]
    seeds = {completion_seed(0, row["id"], index) for row in rows for index in range(3)}
    assert len(seeds) == 30
    assert completion_seed(1, rows[0]["id"], 0) not in seeds


def test_no_rule_can_have_the_name_of_another_entry(parts, tmp_path):
    """A rule named `passed` would replace the grade; see `as_verdict`."""
    run, sampler, rows = parts
    samples = evaluate(run, sampler, rows, "all")
    names = set().union(*samples)
    assert names - {"strict", "flexible", "robust"} <= RESULT_ENTRIES
