"""The table of models in docs/models.md, row by row against the plan."""

import re
import runpy

import pytest
from helpers.fresh_imports import RECIPES, ROOT

from lora_grpo.cli.arguments import parse
from lora_grpo.models import KNOWN_MODELS
from lora_grpo.planning import make_plan

TABLE = re.findall(
    r"^\| `(\d+gb)` \| `(\S+)`(?: \(default\))? \| ([\d.]+) GB \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d,]+) \|$",
    (ROOT / "docs" / "models.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
PRESETS = {path.stem: runpy.run_path(str(path))["PRESETS"] for path in RECIPES}
ENGINES = ("--model.engine", "unsloth", "--sampling.backend", "vllm")


def planned(recipe, *flags):
    return make_plan(*parse(["--plan", *ENGINES, *flags], recipe=recipe, description="", presets=PRESETS[recipe]))[1]


def test_the_table_has_every_model_of_the_math_recipe():
    presets = {(name, preset["model"]["name"]) for name, preset in PRESETS["gsm8k_lora"].items() if "model" in preset}
    assert presets < {row[:2] for row in TABLE}
    assert {name for _, name, *_ in TABLE} == {name for name in KNOWN_MODELS if "Coder" not in name}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: " ".join(row[:2]))
def test_a_listed_model_fits_its_gpu_with_the_listed_limits(machine, row):
    preset, name, gigabytes, micro, parallel, share, longest = row
    plan = planned("gsm8k_lora", "--preset", preset, "--model.name", name)
    assert f"{KNOWN_MODELS[name].download_bytes / 1e9:.2f}" == gigabytes
    assert plan.fit.fits and plan.fit.sampler == "shared"
    assert (plan.fit.micro_batch_size, plan.fit.max_num_seqs) == (int(micro), int(parallel))
    assert plan.fit.gpu_memory_share == pytest.approx(float(share), abs=0.05)
    assert plan.longest_context == pytest.approx(int(longest.replace(",", "")), rel=0.05)


LONG = ("--sampling.max-completion-tokens", "1024", "--model.max-sequence-tokens", "1536")


@pytest.mark.parametrize("command", [("code_lora",), ("gsm8k_lora", *LONG)], ids=" ".join)
@pytest.mark.parametrize(("preset", "name"), [row[:2] for row in TABLE])
def test_a_listed_model_fits_a_gpu_that_reports_less_and_drives_a_desktop(machine, command, preset, name):
    machine(int(0.93 * 1024 * int(preset.removesuffix("gb"))))
    assert planned(*command, "--preset", preset, "--model.name", name).fit.fits
