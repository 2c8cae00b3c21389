import json

import pytest

from lora_grpo.command_line import replace
from lora_grpo.config import Invocation, RunConfig
from lora_grpo.data import load_data
from lora_grpo.errors import RunError
from lora_grpo.evaluate import evaluate
from lora_grpo.policy import load_policy
from lora_grpo.run_record import open_run

SETTINGS = {
    "data": {"task": "starter", "eval_limit": 10},
    "sampling": {"max_completion_tokens": 40},
    "eval": {"num_samples": 3, "k": (1, 3), "batch_size": 6},
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    config = replace(RunConfig(output_dir=str(tmp_path_factory.mktemp("evaluate") / "out")), SETTINGS)
    data = load_data(config)
    run = open_run(config, Invocation(), "test", data.record)
    policy = load_policy(config)
    run.begin(policy.record)
    return run, policy.sampler(), data.eval


class Counting:
    """A real sampler that counts the completions it was asked for."""

    def __init__(self, sampler):
        self.sampler, self.tokenizer, self.completions = sampler, sampler.tokenizer, 0

    def refresh(self, *, adapter):
        self.sampler.refresh(adapter=adapter)

    def rollouts(self, prompts, num_samples, **options):
        self.completions += len(prompts) * num_samples
        return self.sampler.rollouts(prompts, num_samples, **options)


def test_every_row_is_sampled_and_decoded_greedily(parts):
    run, sampler, rows = parts
    samples = evaluate(run, sampler, rows, "whole")
    assert len(samples) == 10 * 4
    for row in rows:
        draws = [sample["draw"] for sample in samples if sample["id"] == row["id"]]
        assert sorted(draws, key=str) == [0, 1, 2, "greedy"]
    written = [json.loads(line) for line in (run.evaluation / "whole.samples.jsonl").read_text().splitlines()]
    assert written == samples
    assert all(set(sample["rules"]) == {"strict", "flexible", "robust"} for sample in samples)


def test_two_models_are_asked_with_the_same_random_numbers(parts):
    run, sampler, rows = parts
    assert evaluate(run, sampler, rows, "base") == evaluate(run, sampler, rows, "again")  # the adapter is still zero


@pytest.mark.parametrize("kept", [0, 1, 6, 7, 20, 39])
@pytest.mark.parametrize("torn", ["", '{"id": "starter/ev'])
def test_a_killed_evaluation_goes_on_after_its_last_whole_batch(parts, kept, torn):
    run, sampler, rows = parts
    whole = evaluate(run, sampler, rows, "whole")
    path = run.evaluation / f"killed-{kept}-{len(torn)}.samples.jsonl"
    head = (run.evaluation / "whole.samples.jsonl").read_text().splitlines(keepends=True)[:kept]
    path.write_text("".join(head) + torn)
    counting = Counting(sampler)
    assert evaluate(run, counting, rows, path.name.removesuffix(".samples.jsonl")) == whole
    assert path.read_text() == (run.evaluation / "whole.samples.jsonl").read_text()
    # Batches hold 6 greedy completions or 2 rows x 3 samples: at most one batch is drawn twice.
    assert 40 - kept <= counting.completions < 40 - kept + 6


def test_a_finished_evaluation_draws_nothing(parts):
    run, sampler, rows = parts
    evaluate(run, sampler, rows, "whole")
    counting = Counting(sampler)
    evaluate(run, counting, rows, "whole")
    assert counting.completions == 0


def test_samples_of_other_rows_are_refused(parts):
    run, sampler, rows = parts
    evaluate(run, sampler, rows, "whole")
    with pytest.raises(RunError, match="samples of other rows"):
        evaluate(run, sampler, rows[1:], "whole")
