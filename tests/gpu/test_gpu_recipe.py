"""The recipe on a GPU, with every engine and backend that is installed."""

import math

import pytest
from gpu_runs import COIN, COMBINATIONS, RECIPE, run_recipe, run_script, skip_without

from lora_grpo.gpu_check.measure import QWEN, EngineCase, Options, run_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("engine", "backend"), COMBINATIONS)
def test_the_embedded_model_trains(tmp_path, engine, backend):
    skip_without(engine, backend)
    record, steps = run_recipe(
        tmp_path / "run",
        *("--preset", "starter", "--model.engine", engine, "--sampling.backend", backend),
        *("--train.max-steps", "5", "--data.eval-limit", "16", "--eval.num-samples", "0"),
    )
    assert record["status"] == "complete" and record["policy"]["device"] != "cpu"
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert all(math.isfinite(step["grad_norm"]) for step in steps) and any(step["grad_norm"] > 0 for step in steps)
    # It solves a third of its problems as it is: completions of another model, or of none, would earn next to nothing.
    assert all(step["reward"] > 0.8 for step in steps)
    if backend == "vllm":
        assert record["logprob_check"]["difference"] <= record["logprob_check"]["tolerance"]


@pytest.mark.parametrize(("engine", "backend"), COMBINATIONS)
def test_a_model_of_half_a_billion_parameters_trains_within_the_planned_memory(tmp_path, engine, backend):
    skip_without(engine, backend)
    shorter = ("--sampling.max-completion-tokens", "64", "--model.max-sequence-tokens", "576", "--rewards", COIN)
    machine = {"gpu": "GPU", "versions": {}, "started": ""}
    [result] = run_cases([EngineCase(engine, backend)], QWEN, Options(15, tmp_path / "out"), RECIPE, machine, shorter)
    assert result["status"] == "ran", result["reason"]
    assert result["completion_tokens"] == 64
    assert result["gpu_peak_gib"] <= 1.1 * result["planned_gib"]


def test_a_micro_batch_that_does_not_fit_is_one_line_with_a_smaller_one(tmp_path, short):
    skip_without()
    import torch

    free, _ = torch.cuda.mem_get_info()
    rest = torch.empty(max(0, free - 3 * 2**30), dtype=torch.uint8, device="cuda")
    command = [*short, "--model.engine", "peft", "--sampling.backend", "transformers", "--output-dir", tmp_path / "run"]
    done = run_script(RECIPE, *command, "--preset", "8gb", "--train.micro-batch-size", "64")
    del rest
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert "memory" in done.stderr and "--train.micro-batch-size" in done.stderr, last
