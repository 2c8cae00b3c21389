"""merge_report.json: the inputs of a merge and its rounding error."""

import math
import shlex
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from lora_grpo import console
from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.files import disk
from lora_grpo.merging.base_weights import MergeTarget
from lora_grpo.models import ADAPTER_CONFIG, BEST, adapter_sha256

REPORT = "merge_report.json"
Dtype = Literal["bf16", "fp16", "fp32"]

MADE_FROM = {"merged": "adapter", "gguf": "adapter", f"{BEST}-merged": BEST, f"{BEST}-gguf": BEST}
"""The folders of models that a run has by default, and the adapters that they are made from."""


class Base(BaseModel, frozen=True):
    """The model that the adapter was merged into."""

    name: str
    """A Hub id, or the name of a folder."""
    revision: str | None
    fingerprint: str
    """SHA-256 of its weight files."""
    checked: bool
    """Whether this was verified to be the base that the adapter was trained on."""


class Retained(BaseModel, frozen=True):
    """How much of the adapter's update one dtype keeps; see fidelity.py."""

    overall: float
    """Fraction of the update of all layers; 1 keeps everything."""
    error: float
    """Rounding error relative to the update."""
    worst: float
    """Fraction of the update of the layer that keeps the least."""
    worst_layer: str


class Divergences(BaseModel, frozen=True):
    """Mean KL divergences in nats per token; `adapter_merged` is KL(adapter || merged)."""

    tokens: int = 0
    """Number of tokens that the means are over."""
    adapter_merged: float | None = None
    adapter_base: float | None = None
    trained_merged: float | None = None
    """KL divergence from the adapter on its 4-bit base; None unless a 4-bit run was merged into 16-bit weights."""
    not_measured: str | None = None
    """The reason, if the divergences were not measured."""


class MergeReport(BaseModel, frozen=True):
    """The contents of merge_report.json."""

    identity: dict[str, str]
    """Digests and settings. Two merges with the same identity and dtype produce the same bytes."""
    dtype: Dtype
    reason: str
    """Why this dtype was chosen."""
    onto: MergeTarget
    base: Base
    retained: Retained | None
    """None if the adapter changes nothing."""
    kl: Divergences
    untied: bool
    """Whether the merged model unties the base's head and embedding."""
    chat_template: Literal["adapter", "base"] | None = None
    """Where the merged model's chat template is from; None if it has none."""
    system_prompt: str | None = None
    """The system prompt of the run that trained the adapter, for a merged model outside of the run."""


def read_report(folder: Path) -> MergeReport | None:
    """Return the report of a merged model, or None if the folder has no readable report."""
    try:
        return MergeReport.model_validate_json((folder / REPORT).read_bytes())
    except (OSError, ValidationError):
        return None


def source_adapter(folder: Path) -> Path | None:
    """Return the adapter in a folder of a run, or the one of the run from which the models in the folder were made.

    `merged` and `gguf` are made from `adapter`, the last one, and `best-merged` and `best-gguf` from `best`; these
    adapters may have changed since. For a folder with another name, the digest in its report tells.

    Returns:
        None for a folder outside a run, without a report, or with the digest of an adapter that the run does not have.
    """
    run = folder.parent
    if not (run / "run.json").is_file():
        return None
    if (folder / ADAPTER_CONFIG).is_file():
        return folder
    if folder.name in MADE_FROM:
        return run / MADE_FROM[folder.name]
    report = read_report(folder)
    if report is None:
        return None
    configs = [*run.glob(f"*/{ADAPTER_CONFIG}"), *run.glob(f"*/*/{ADAPTER_CONFIG}")]  # of checkpoints
    others = sorted(path.parent for path in configs)
    for adapter in (run / "adapter", run / BEST, *others):
        if adapter_sha256(adapter) == report.identity.get("adapter_sha256"):
            return adapter
    return None


def check_current(folder: Path) -> None:
    """Raise a UserError if the models in a folder of a run were merged from an adapter that the run no longer has."""
    run = folder.parent
    if read_report(folder) is None or not (run / "run.json").is_file():
        return
    adapter = source_adapter(folder)
    if adapter is None:
        raise UserError(
            f"{folder} was merged from an adapter that {run} does not have; delete it and merge again, or move it out "
            "of the run"
        )
    if adapter.is_dir():
        check_merged_from(folder, adapter, adapter)


def check_merged_from(folder: Path, adapter: Path, origin: Path) -> None:
    """Raise a UserError unless the model in a folder was merged from an adapter as it is now.

    Args:
        adapter: a folder in PEFT's format, which may be a converted copy.
        origin: the folder that it is from.
    """
    report = read_report(folder)
    if report is None or report.identity.get("adapter_sha256") != adapter_sha256(adapter):
        raise UserError(
            f"{folder} was not merged from {origin} as it is now; delete it and run {command('merge', origin)} again"
        )


def show(output: Path, report: MergeReport) -> None:
    """Print the report of the merged model in `output`."""
    num_bytes = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    console.result(
        f"merged    {output}: {report.dtype}, {disk.size(num_bytes)}, into {report.base.name} ({report.onto})"
    )
    console.result(f"dtype     {report.reason}")
    retained = report.retained
    if retained:
        worst = f"{percent(retained.worst)} in {retained.worst_layer}"
        overall = percent(retained.overall)
        console.result(f"update    {overall} kept (lowest: {worst}); relative rounding error {retained.error:.2g}")
    kl = report.kl
    if kl.not_measured:
        console.result(f"KL        not measured: {kl.not_measured}")
    else:
        pair = f"KL(adapter || merged) {kl.adapter_merged:.2g}, KL(adapter || base) {kl.adapter_base:.2g}"
        console.result(f"KL        {pair} nats per token, over {kl.tokens} tokens")
    if kl.trained_merged is not None:
        trained = f"KL(adapter on its 4-bit base || merged) {kl.trained_merged:.2g}"
        keep_base = f"--onto dequantized --output-dir {shlex.quote(str(output))}-dequantized"
        console.result(f"{'':<10}{trained}; {keep_base} keeps that base")
    if report.chat_template == "base":
        console.result("template  the base's, because the adapter has none")
    elif report.chat_template is None:
        console.result("template  none: neither the adapter's tokenizer nor the base has one; prompts are plain text")
    if not report.base.checked:
        console.result("base      not checked: the adapter does not record which weights it was trained on")
    if report.untied:
        console.result("head      no longer tied to the embedding: the adapter changed only one of the two")


def percent(value: float) -> str:
    """Return a fraction as a percentage, rounded down. 99.96% is not 100%, but 99.9999% (float32 noise) is."""
    return f"{math.floor(value * 1000 + 0.01) / 10:.1f}%"
