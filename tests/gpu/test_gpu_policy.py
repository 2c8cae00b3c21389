"""What must hold of a policy while it is trained on a GPU, which no file of a run tells."""

import json
import statistics
from pathlib import Path

import pytest
from gpu_runs import COMBINATIONS, run_script, skip_without

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("one_run.py")


@pytest.fixture(scope="module", params=COMBINATIONS, ids="-".join)
def facts(request, tmp_path_factory, short):
    """What `one_run.py` tells of two steps of the random model, with an engine and a backend."""
    engine, backend = request.param
    skip_without(engine, backend)
    folder = tmp_path_factory.mktemp("one_run") / "run"
    done = run_script(SCRIPT, *short, "--output-dir", folder, "--model.engine", engine, "--sampling.backend", backend)
    assert done.returncode == 0, done.stderr[-3000:]
    return {"engine": engine, "backend": backend, **json.loads(done.stdout.splitlines()[-1])}


def test_the_frozen_base_is_the_same_to_the_bit(facts):
    assert facts["frozen_before"] == facts["frozen_after"]


def test_the_sampler_drew_from_the_policy_that_was_trained(facts):
    if facts["backend"] != "vllm":
        pytest.skip("this sampler is the trained model's own")
    logprob_check = facts["record"]["logprob_check"]
    differences = [value for name, value in logprob_check.items() if "difference" in name]
    assert len(differences) == (2 if facts["engine"] == "unsloth" else 1)  # its trainer makes the rollouts
    assert max(differences) <= logprob_check["tolerance"] < logprob_check["moved"]


def test_a_sleeping_engine_gives_its_memory_back(facts):
    if facts["backend"] != "vllm":
        pytest.skip("no engine")
    cache = facts["record"]["memory"]["planned_gib"]["kv_cache"]
    assert facts["free_asleep_gib"] - facts["free_awake_gib"] >= 0.8 * cache


def test_log_probabilities_that_are_trained_on_are_those_of_the_whole_vocabulary(facts):
    differences = []
    for trained, full in zip(facts["trained_log_probs"], facts["full_log_probs"], strict=True):
        for trained_logprob, full_logprob in zip(trained, full, strict=True):
            differences.append(abs(trained_logprob - full_logprob))
    assert len(differences) >= 256
    # bfloat16 has eight bits.
    assert statistics.fmean(differences) < 0.02
    assert max(differences) < 0.2
