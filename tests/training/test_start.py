"""`--lora.from`: a second run goes on from the adapter of a first one."""

import copy
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from helpers.tiny_runs import TINY as TINY_RUN
from helpers.tiny_runs import starter_data
from helpers.warm_process import finish, wait_for
from safetensors.torch import load_file

from lora_grpo.config import Invocation, RunConfig, replace
from lora_grpo.models import load_policy
from lora_grpo.runs import open_run
from lora_grpo.sampling.build import build_sampler
from lora_grpo.tasks import sources
from lora_grpo.tasks.registry import get_task
from lora_grpo.training import prepare_training

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
        self.files = []
        for split, size in (("train", 8), ("eval", 4)):
            rows = sources.sample(get_task("starter").load(split), size, 0)
            text = "".join(json.dumps({name: row[name] for name in ("question", "answer")}) + "\n" for row in rows)
            (folder / f"{split}.jsonl").write_text(text)
            self.files += [f"--data.{split}", f"{split}.jsonl"]

    def start(self, name, *flags):
        return self.warm.start(RECIPE, *TINY, *self.files, "--output-dir", name, *flags, cwd=self.folder)

    def command(self, script, *arguments):
        return finish(self.warm.start(ROOT / "scripts" / script, *arguments, cwd=self.folder))


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


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_second_run_starts_exactly_where_the_first_ended(runs):
    first = runs.folder / "first"
    second = runs.folder / "second"
    assert samples(second, "base") == samples(first, "trained") != samples(first, "base")
    assert samples(second, "trained") != samples(second, "base")
    weights = "adapter_model.safetensors"
    assert (second / "start" / weights).read_bytes() == (first / "adapter" / weights).read_bytes()
    before, after = (json.loads((folder / "evaluation/report.json").read_text()) for folder in (first, second))
    assert after["baseline"]["scores"] == before["evaluated"]["scores"]
    assert (before["baseline"]["label"], after["baseline"]["label"]) == ("base", "start")
    assert after["baseline"]["source"]["adapter_sha256"] == before["evaluated"]["source"]["adapter_sha256"]


def test_the_kl_penalty_is_against_the_starting_adapter(runs):
    first, *rest = [line["kl"] for line in metrics(runs.folder / "second")]
    assert first < 1e-6
    assert max(rest) > 1e-4


def test_the_trained_adapter_and_the_reference_have_the_exact_weights(runs, tmp_path):
    """TRL casts the adapter of a 4-bit base to bfloat16, which would round it."""
    saved = load_file(runs.folder / "first/adapter/adapter_model.safetensors")
    assert any(not torch.equal(weight.bfloat16().float(), weight) for weight in saved.values())
    lora = {"from": str(runs.folder / "first"), "rank": 4, "alpha": 8}
    config = replace(
        replace(RunConfig(output_dir=str(tmp_path / "run")), TINY_RUN), {"lora": lora, "train": {"beta": 0.1}}
    )
    data = copy.deepcopy(starter_data())
    policy = load_policy(config)
    run = open_run(config, Invocation(), "test", data.record)
    prepare_training(run, policy, data.train, build_sampler(policy, config))
    weights = dict(policy.model.named_parameters())
    for name, weight in saved.items():
        for copied in ("default", "ref"):
            assert torch.equal(weights[name.replace(".weight", f".{copied}.weight")], weight), (name, copied)
    assert not any(parameter.requires_grad for name, parameter in weights.items() if ".ref." in name)


def test_the_chat_template_of_the_first_run_is_used(runs):
    for folder in ("start", "adapter"):
        assert "of the first run" in (runs.folder / "second" / folder / "chat_template.jinja").read_text(), folder


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
        printed = finish(runs.warm.start(RECIPE, "--resume", "--output-dir", "killed", cwd=runs.folder)).stderr
    finally:
        shutil.move(moved, runs.folder / "first")
    assert "resuming from" in printed
    for name in ("adapter/adapter_model.safetensors", "evaluation/report.json", "evaluation/trained.samples.jsonl"):
        assert (runs.folder / "killed" / name).read_bytes() == (runs.folder / "second" / name).read_bytes(), name
    resumed, unbroken = (metrics(runs.folder / name) for name in ("killed", "second"))
    assert [line["kl"] for line in resumed] == [line["kl"] for line in unbroken]
