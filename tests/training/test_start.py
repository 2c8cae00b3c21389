"""`--lora.from`: a second run goes on from the adapter of a first one."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from helpers.tiny_runs import begin_tiny, write_starter_files
from helpers.warm_process import finish, wait_for
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "gsm8k_lora.py"
TINY = shlex.split(
    "--preset starter --model.engine peft --sampling.num-generations 4 --sampling.max-completion-tokens 16 "
    "--train.prompts-per-step 2 --train.micro-batch-size 8 --train.checkpoint-steps 2 --train.learning-rate 0.01 "
    "--train.warmup-steps 0 --rewards near_length:10 --eval.num-samples 2 --eval.k 1 2"
)
NEW = shlex.split("--lora.rank 4 --lora.alpha 8 --train.max-steps 2")
SECOND = shlex.split("--lora.from first --train.max-steps 4 --train.beta 0.1")


class Runs:
    """A folder with a first run, and more that start from it."""

    def __init__(self, folder, warm):
        self.folder = folder
        self.warm = warm
        self.data_flags = write_starter_files(folder)

    def start(self, name, *flags):
        return self.warm.start(RECIPE, *TINY, *self.data_flags, "--output-dir", name, *flags, cwd=self.folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, warm):
    runs = Runs(tmp_path_factory.mktemp("runs"), warm)
    finish(runs.start("first", *NEW))
    with (runs.folder / "first/adapter/chat_template.jinja").open("a") as template:
        template.write("{# of the first run #}")
    finish(runs.start("second", *SECOND))
    return runs


def samples(folder, name):
    return (folder / "evaluation" / f"{name}.samples.jsonl").read_text()


def report(folder):
    return json.loads((folder / "evaluation" / "report.json").read_text())


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_second_run_starts_exactly_where_the_first_ended(runs):
    first = runs.folder / "first"
    second = runs.folder / "second"
    assert samples(second, "base") == samples(first, "trained")
    assert samples(first, "trained") != samples(first, "base")
    assert samples(second, "trained") != samples(second, "base")
    starting_weights = (second / "start" / "adapter_model.safetensors").read_bytes()
    assert starting_weights == (first / "adapter" / "adapter_model.safetensors").read_bytes()

    baseline_of_first = report(first)["baseline"]
    baseline_of_second = report(second)["baseline"]
    evaluated_of_first = report(first)["evaluated"]
    assert baseline_of_first["label"] == "base"
    assert baseline_of_second["label"] == "start"
    assert baseline_of_second["scores"] == evaluated_of_first["scores"]
    assert baseline_of_second["source"]["adapter_sha256"] == evaluated_of_first["source"]["adapter_sha256"]


def test_the_kl_penalty_is_against_the_starting_adapter(runs):
    kl_of_steps = [step["kl"] for step in metrics(runs.folder / "second")]
    assert kl_of_steps[0] < 1e-6
    assert max(kl_of_steps[1:]) > 1e-4


def test_the_trained_adapter_and_the_reference_have_the_exact_weights(runs, tmp_path):
    """TRL casts the adapter of a 4-bit base to bfloat16, which would round it."""
    saved = load_file(runs.folder / "first/adapter/adapter_model.safetensors")
    assert any(not torch.equal(weight.bfloat16().float(), weight) for weight in saved.values())
    lora = {"from": str(runs.folder / "first"), "rank": 4, "alpha": 8}
    training = begin_tiny(tmp_path / "run", lora=lora, train={"beta": 0.1})
    weights = dict(training.policy.model.named_parameters())
    for name, weight in saved.items():
        module = name.removesuffix(".weight")
        assert torch.equal(weights[f"{module}.default.weight"], weight), name
        assert torch.equal(weights[f"{module}.ref.weight"], weight), name
        assert not weights[f"{module}.ref.weight"].requires_grad


@pytest.mark.parametrize("adapter", ["start", "adapter"])
def test_the_chat_template_of_the_first_run_is_used(runs, adapter):
    assert "of the first run" in (runs.folder / "second" / adapter / "chat_template.jinja").read_text()


def test_the_report_names_the_run_that_it_started_from(runs):
    second = (runs.folder / "second" / "report" / "report.html").read_text()
    assert "<dt>Started from</dt><dd>first</dd>" in second


@pytest.mark.slow
def test_a_killed_second_run_ends_in_the_same_bits_without_the_first(runs, tmp_path):
    """The first run is deleted before the second resumes; the KL reference is then the kept copy."""
    process = runs.start("killed", *SECOND)
    wait_for(process, lambda: (runs.folder / "killed/checkpoints/checkpoint-2").exists())
    process.kill()
    moved = shutil.move(runs.folder / "first", tmp_path)
    try:
        done = finish(runs.warm.start(RECIPE, "--resume", "--output-dir", "killed", cwd=runs.folder))
    finally:
        shutil.move(moved, runs.folder / "first")
    assert "resuming from" in done.stderr
    killed = runs.folder / "killed"
    unbroken = runs.folder / "second"
    for file in ("adapter/adapter_model.safetensors", "evaluation/report.json", "evaluation/trained.samples.jsonl"):
        assert (killed / file).read_bytes() == (unbroken / file).read_bytes(), file
    assert [step["kl"] for step in metrics(killed)] == [step["kl"] for step in metrics(unbroken)]
