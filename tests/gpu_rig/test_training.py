"""Three steps of the recipe under Unsloth's branches for CUDA, compared with the PEFT engine on the same batches.

The first run trains with PEFT on the CPU and records its rollouts. The others train on them with Unsloth on a pretended
GPU; card.py says what that cannot show. Each run is a process in `.venv-gpu`, which `make gpu-rig` builds.

- float32: a Tesla T4 without mixed precision, so that rounding hides nothing. Unsloth skips its fused LoRA layers.
- bfloat16: an RTX 4090 and a base in NF4, as by default, and a KL penalty. The fused LoRA layers run.

Where Unsloth's trainer bypasses an override of this package, the test says what takes its place.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = Path(os.environ.get("LORA_GRPO_RIG_PYTHON", ROOT / ".venv-gpu" / "bin" / "python"))
T4, RTX_4090 = "Tesla T4,16,7.5", "NVIDIA GeForce RTX 4090,24,8.9"
STEPS = 3
ARGUMENTS = f"""--preset starter --sampling.backend transformers --sampling.num-generations 2
    --sampling.max-completion-tokens 16 --train.max-steps {STEPS} --train.checkpoint-steps 2 --train.prompts-per-step 2
    --train.micro-batch-size 2 --train.warmup-steps 0 --data.eval-limit 4 --monitor.rows 0
    --rewards {HERE / "recipe.py"}:code_points"""

pytestmark = [
    pytest.mark.gpu_rig,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} does not exist: make gpu-rig"),
]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Return a function that runs the recipe and returns what it wrote and printed."""
    rollouts = tmp_path_factory.mktemp("rollouts") / "rollouts.json"
    work, home = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("home")

    def run(engine, dtype, folder, *more, card=None, packing="exact", code=0, **variables):
        command = [PYTHON, *([HERE / "card.py", card] if card else []), HERE / "recipe.py", rollouts, dtype, packing]
        command += [*ARGUMENTS.split(), "--model.engine", engine, "--output-dir", folder, *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(home), **variables}
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
        assert "not written" not in done.stdout  # the report
        assert [*work.iterdir()] == []  # caches are in the home folder
        return SimpleNamespace(**read(folder), printed=done.stdout + done.stderr)

    return run


def read(folder):
    adapter = folder / "adapter" / "adapter_model.safetensors"
    return {
        "folder": folder,
        "record": json.loads((folder / "run.json").read_text()),
        "steps": [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        "gradients": [torch.load(path) for path in sorted((folder / "gradients").iterdir())],
        "overrides": json.loads((folder / "overrides.json").read_text()),
        "adapter": load_file(adapter) if adapter.exists() else None,
    }


@pytest.fixture(scope="module")
def peft(train, tmp_path_factory):
    return train("peft", "float32", tmp_path_factory.mktemp("peft") / "run", "--model.bits", "16")


@pytest.fixture(scope="module")
def unsloth(peft, train, tmp_path_factory):
    return train("unsloth", "float32", tmp_path_factory.mktemp("unsloth") / "run", "--model.bits", "16", card=T4)


@pytest.fixture(scope="module")
def default(peft, train, tmp_path_factory):
    arguments = ("--model.bits", "4", "--train.beta", "0.04")
    return train("unsloth", "bfloat16", tmp_path_factory.mktemp("default") / "run", *arguments, card=RTX_4090)


def flat(gradients):
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def test_unsloth_trains_on_the_pretended_gpu(unsloth, default):
    for run in (unsloth, default):
        assert run.record["policy"]["engine"] == "unsloth"
        assert run.record["status"] == "complete"
        assert not run.record.get("alarms")
        assert max(step["clip_ratio/region_mean"] for step in run.steps) == 0
        assert run.overrides["trainer"] == "UnslothGRPOTrainer"
        assert "first step compiles" in run.printed
        assert [step["step"] for step in run.steps] == [1, 2, 3]


def test_losses_and_gradients_are_those_of_peft(peft, unsloth):
    """Same rollouts and seeds, float32: only the order of sums differs."""
    for step_of_unsloth, step_of_peft in zip(unsloth.steps, peft.steps, strict=True):
        assert step_of_peft["grad_norm"] > 0.01
        assert step_of_unsloth["reward"] == step_of_peft["reward"]
        assert step_of_unsloth["num_tokens"] == step_of_peft["num_tokens"]
        assert step_of_unsloth["loss"] == pytest.approx(step_of_peft["loss"], abs=1e-5)
        assert step_of_unsloth["grad_norm"] == pytest.approx(step_of_peft["grad_norm"], rel=1e-3)
    for gradients, expected_gradients in zip(unsloth.gradients, peft.gradients, strict=True):
        assert gradients.keys() == expected_gradients.keys()
        gradient = flat(gradients)
        expected = flat(expected_gradients)
        assert (gradient - expected).norm() < 1e-3 * expected.norm()


def test_gradients_of_the_default_precision_point_the_same_way(peft, default):
    """Up to the quantization of the base. The policies are the same only before the first update."""
    cosine = torch.nn.functional.cosine_similarity(flat(default.gradients[0]), flat(peft.gradients[0]), dim=0)
    assert cosine > 0.95
    assert all(step["grad_norm"] > 0 for step in default.steps)
    assert [step["kl"] > 1e-9 for step in default.steps] == [False, True, True]  # rounding: about 5e-12


def test_overrides_fit_the_generated_trainer_and_are_called(unsloth, peft):
    """Except that of the loss, because Unsloth's `compute_loss` replaces TRL's `_compute_loss`.

    It logs the logprob mismatch itself. It does not compute the entropy, which is estimated from the sampled tokens.
    """
    assert not any(unsloth.overrides["rejected"].values())
    only_peft = peft.overrides["called"].keys() - unsloth.overrides["called"].keys()
    assert only_peft == {"FastGRPOTrainer._compute_loss"}
    assert peft.steps[0].keys() <= unsloth.steps[0].keys()
    for ours, theirs in zip(unsloth.steps, peft.steps, strict=True):
        assert ours["entropy"] == pytest.approx(theirs["entropy"], abs=0.3)  # about 50 sampled tokens


def test_both_passes_take_the_fused_logprobs(unsloth, default):
    """The other way compiles one graph with all chunks of a batch, for minutes, and keeps the logits of all of them."""
    for run in (unsloth, default):
        assert run.overrides["logprobs"] == [["fused", False], ["fused", True]]


def test_completions_are_scored_before_the_loss_only_for_the_kl_penalty(unsloth, default):
    """The loss computes the importance weights from its own logprobs. The default precision has a KL penalty here."""
    tensors = {name for name in unsloth.overrides["inputs of the loss"] if name.endswith("logps")}
    assert tensors == {"sampling_per_token_logps"}
    tensors = {name for name in default.overrides["inputs of the loss"] if name.endswith("logps")}
    assert tensors == {"sampling_per_token_logps", "ref_per_token_logps"}


@pytest.mark.exhaustive
def test_packed_rows_that_attend_to_each_other_are_noticed(train, peft, tmp_path):
    """By Unsloth's check, which compares the first packed rows with single rows, and by the alarm.

    The check accepts 0.7 nats. The first two rows here differ by 0.24, so it notices in the second micro-batch. With
    `num_iterations`, old logprobs come from another pass, which the alarm compares with the sampler. A second alarm
    compares the two passes.
    """
    flags = ("--model.bits", "16", "--train.max-steps", "2", "--grpo", "num_iterations=2")
    flags += ("--monitor.stop-on", "policy_ratio")
    caught = train(
        "unsloth", "float32", tmp_path / "caught", *flags, card=T4, packing="leaking", UNSLOTH_ENABLE_LOGGING="1"
    )
    for phase in ("grad", "no-grad"):
        assert f"GRPO seq-packing ({phase}) verify: T=" in caught.printed
        assert f"GRPO seq-packing ({phase}) fell back at T=" in caught.printed
    missed = train("unsloth", "float32", tmp_path / "reused", *flags, card=T4, packing="trusted", code=1)
    assert [(alarm["name"], alarm["step"]) for alarm in missed.record["alarms"]] == [("policy_ratio", 1)]

    flags = ("--model.bits", "16", "--train.max-steps", "1")
    missed = train("unsloth", "float32", tmp_path / "missed", *flags, card=T4, packing="trusted", code=1)
    assert [(alarm["name"], alarm["step"]) for alarm in missed.record["alarms"]] == [("logprob_mismatch", 1)]
    assert abs(missed.steps[0]["loss"] - peft.steps[0]["loss"]) > 1e-3


def test_phases_and_the_logprob_mismatch_are_logged(unsloth, default):
    """With the default precision, the rollouts are those of a base that is not quantized."""
    for run, mismatch, off in ((unsloth, 1e-4, 1e-3), (default, 0.05, 0.2)):
        for step in run.steps:
            assert step["time/rollouts"] > 0 and step["time/rewards"] > 0 and step["time/training"] > 0
            assert 0 <= step["sampling/sampling_logp_difference/mean"] < mismatch
            assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=off)


def test_the_peak_of_each_phase_is_logged(unsloth, default, peft):
    """The pretended counters never change, so only that each phase is entered and ended is shown."""
    phases = ("sampling", "scoring", "loss", "backward")
    names = {f"memory/{phase}{kind}" for phase in phases for kind in ("", "_reserved")}
    for run in (unsloth, default):
        assert all({name for name in step if name.startswith("memory/")} == names for step in run.steps)
        assert run.record["peak_start_gib"] == run.record["peak_gpu_memory_gib"] == 0.5  # in use on the pretended GPU
    assert not any(name.startswith("memory/") for name in peft.steps[0])
    assert peft.record["peak_gpu_memory_gib"] is None and peft.record["peak_memory_gib"] > 0


def test_the_adapter_is_trained_and_saved_in_float32(unsloth, default, peft):
    """recipe.py asserts the dtype of the trained parameters before every optimizer step."""
    for run in (unsloth, default):
        assert run.adapter.keys() == peft.adapter.keys()
        assert {tensor.dtype for tensor in run.adapter.values()} == {torch.float32}
    assert all((unsloth.adapter[name] - peft.adapter[name]).abs().max() < 1e-4 for name in peft.adapter)


def test_a_resumed_run_ends_in_the_same_bits(unsloth, train, tmp_path):
    """From the checkpoint of step 2, as if the run had been killed in step 3."""
    folder = tmp_path / "run"
    shutil.copytree(unsloth.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "checkpoint-3")
    record = {name: value for name, value in unsloth.record.items() if name != "trained_steps"}
    (folder / "run.json").write_text(json.dumps({**record, "status": "running"}))
    resumed = train("unsloth", "float32", folder, "--model.bits", "16", "--resume", card=T4)
    assert len(resumed.steps) == STEPS
    assert all(torch.equal(resumed.adapter[name], unsloth.adapter[name]) for name in unsloth.adapter)
    last_step = resumed.steps[-1]
    expected_step = unsloth.steps[-1]
    assert last_step.keys() == expected_step.keys()
    for name, value in expected_step.items():
        if "time" not in name and "second" not in name:
            assert last_step[name] == value, name
