"""What must hold of a policy while it is trained on a GPU, which no file of a run tells."""

import json
import statistics
from pathlib import Path

import pytest
from gpu_runs import COMBINATIONS, run_script, skip_without

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("one_run.py")


@pytest.fixture(scope="module", params=COMBINATIONS, ids="-".join)
def found(request, tmp_path_factory, short):
    """What `one_run.py` tells of two steps of the random model, with an engine and a backend."""
    engine, backend = request.param
    skip_without(engine, backend)
    folder = tmp_path_factory.mktemp("one_run") / "run"
    done = run_script(SCRIPT, *short, "--output-dir", folder, "--model.engine", engine, "--sampling.backend", backend)
    assert done.returncode == 0, done.stderr[-3000:]
    return {"engine": engine, "backend": backend, **json.loads(done.stdout.splitlines()[-1])}


def test_the_frozen_base_is_the_same_to_the_bit(found):
    assert found["frozen_before"] == found["frozen_after"]


def test_the_sampler_drew_from_the_policy_that_was_trained(found):
    if found["backend"] != "vllm":
        pytest.skip("this sampler is the trained model's own")
    logprob_check = found["record"]["logprob_check"]
    differences = [value for name, value in logprob_check.items() if "difference" in name]
    assert len(differences) == (2 if found["engine"] == "unsloth" else 1)  # its trainer makes the rollouts
    assert max(differences) <= logprob_check["tolerance"] < logprob_check["moved"]


def test_a_sleeping_engine_gives_its_memory_back(found):
    if found["backend"] != "vllm":
        pytest.skip("no engine")
    cache = found["record"]["memory"]["planned_gib"]["kv_cache"]
    assert found["free_asleep_gib"] - found["free_awake_gib"] >= 0.8 * cache


def test_log_probabilities_that_are_trained_on_are_those_of_the_whole_vocabulary(found):
    pairs = [
        (one, other)
        for ours, full in zip(found["trained_log_probs"], found["full_log_probs"], strict=True)
        for one, other in zip(ours, full, strict=True)
    ]
    differences = [abs(one - other) for one, other in pairs]
    assert len(pairs) >= 256
    assert statistics.fmean(differences) < 0.02 and max(differences) < 0.2  # bfloat16 has eight bits
