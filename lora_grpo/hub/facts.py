"""Collect facts about a pushed model: its base, license, run, merge, and evaluations."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_grpo import starter
from lora_grpo.commands import command
from lora_grpo.config import STARTER
from lora_grpo.errors import UserError
from lora_grpo.evaluation import Report, read_reports
from lora_grpo.files import json_files
from lora_grpo.gguf import MeasuredFile, measured_files
from lora_grpo.hub import base_license
from lora_grpo.hub.example import Example, find
from lora_grpo.merging import REPORT, MergeReport
from lora_grpo.merging import read_report as read_merge_report
from lora_grpo.models import BEST, adapter_sha256, model_files, source_adapter
from lora_grpo.runs import read_record
from lora_grpo.sampling import served_rank
from lora_grpo.tasks import is_task_file


@dataclass(frozen=True)
class Base:
    """The base model, as far as it is known."""

    name: str | None
    """A Hub id, `starter`, or the last part of a folder's path."""
    hub_id: str | None = None
    revision: str | None = None
    """The Hub commit."""
    fingerprint: str | None = None
    """SHA-256 of its weight files, if it was loaded from a folder."""
    license: Mapping[str, Any] = field(default_factory=dict)
    """`license`, `license_name` and `license_link` of its model card, if known."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of the uploaded weights or, if not `of_upload`, of the adapter that they were made from."""

    report: Report
    of_upload: bool
    folder: Path


@dataclass(frozen=True)
class Best:
    """The validation pass that chose a run's `best` adapter."""

    step: int
    reward: float
    accuracy: float | None
    """Fraction of the rows; None if the task is not graded."""
    rows: int
    """Number of validation rows, with one sample each."""
    passes: int
    """Number of validation passes, of which this one had the highest reward."""
    base_reward: float | None
    """Before training; None if it was not measured."""
    base_accuracy: float | None


@dataclass(frozen=True)
class Facts:
    """All facts that a card may include; `kind` is one of `files.KINDS`."""

    kind: str
    base: Base
    record: Mapping[str, Any]
    """run.json, or nothing for a model that is not part of a run."""
    adapter: Mapping[str, Any]
    """adapter_config.json, if there is one."""
    vllm_rank: int | None
    """The LoRA rank to pass to vLLM; None if vLLM cannot serve the adapter."""
    merge: MergeReport | None
    evaluations: tuple[Evaluation, ...]
    best: Best | None = None
    """If the model is made from the run's `best` adapter."""
    example: Example | None = None
    """A problem that the first evaluation shows as fixed."""
    plot: Path | None = None
    """The image of the training reward, or of the loss of SFT, in the run's report."""
    other_merge: MergeReport | None = None
    """The run's merge of the same adapter into the other kind of base: full precision or dequantized."""
    measured_files: tuple[MeasuredFile, ...] = ()
    """The GGUF files, if anything was measured of them."""


def gather(folder: Path, kind: str) -> Facts:
    """Read the facts about the model in a folder and the run that produced it."""
    folder = folder.resolve()
    # An adapter in another folder of the run was not produced by this run.
    is_own = kind != "adapter" or folder.name in ("adapter", BEST)
    run = folder.parent if is_own and (folder.parent / "run.json").is_file() else None
    record = read_record(run) if run else {}
    merge, source = read_merge_report(folder), source_adapter(folder) if run else folder
    path = source / "adapter_config.json"
    adapter = json_files.read_object(path) if path.is_file() else {}
    is_best = source.name == BEST and run is not None
    reports = read_reports(run) if run else {}
    files = measured_files([*folder.glob("*.gguf")], reports) if kind == "gguf" else ()
    if files or kind != "gguf":  # GGUF files have a table of their own, and other cards none of them
        reports = {path: each for path, each in reports.items() if "gguf_sha256" not in each.evaluated.source}
    evaluations = sorted(_evaluations(reports, folder, kind, merge), key=lambda each: not each.of_upload)
    if run and not evaluations:
        measure = _measuring_command(record, str(run), is_best=is_best)
        print(f"the card has no evaluation of {source}; to measure it: {measure}", file=sys.stderr)
    return Facts(
        kind=kind,
        base=_base(record.get("policy", {}), adapter, merge),
        record=record,
        adapter=adapter,
        vllm_rank=_vllm_rank(folder) if kind == "adapter" else None,
        merge=merge,
        evaluations=tuple(evaluations),
        best=_best(run, record) if run and is_best else None,
        example=find(run, evaluations[0].folder, evaluations[0].report) if run and evaluations else None,
        plot=_plot(run, record) if run else None,
        other_merge=_other_merge(run, folder, adapter_sha256(source), merge) if run and kind != "gguf" else None,
        measured_files=files,
    )


def _best(run: Path, record: Mapping[str, Any]) -> Best | None:
    best = record.get("best")
    if not best:
        return None

    def mean(step: int, name: str) -> float | None:
        values = [line.get(name) for line in _validation(run, step)]
        numbers = [float(value) for value in values if isinstance(value, bool | int | float)]
        return sum(numbers) / len(numbers) if numbers else None

    return Best(
        step=best["step"],
        reward=best["reward"],
        accuracy=best.get("accuracy"),
        rows=len(_validation(run, best["step"])),
        passes=len([*(run / "validation").glob("step-*.jsonl")]),
        base_reward=mean(0, "reward"),
        base_accuracy=mean(0, "passed"),
    )


def _validation(run: Path, step: int) -> list[dict[str, Any]]:
    lines = json_files.read_finished_lines(run / "validation" / f"step-{step:05d}.jsonl")
    return [line for line in lines if isinstance(line, dict)]


def _plot(run: Path, record: Mapping[str, Any]) -> Path | None:
    name = "sft-loss.png" if record.get("config", {}).get("method") == "sft" else "reward.png"
    path = run / "report" / name
    return path if path.is_file() and path.resolve().is_relative_to(run) else None


def _other_merge(run: Path, folder: Path, adapter: str, merge: MergeReport | None) -> MergeReport | None:
    """Return a merge of the same adapter in the run that is onto the other kind of base.

    For an adapter, it is the merge into the base in full precision.
    """
    wanted = "full" if merge is None or merge.onto == "dequantized" else "dequantized"
    others = (read_merge_report(path.parent) for path in sorted(run.glob(f"*/{REPORT}")) if path.parent != folder)
    same = (other for other in others if other and other.identity.get("adapter_sha256") == adapter)
    return next((other for other in same if other.onto == wanted), None)


def _measuring_command(record: Mapping[str, Any], run: str, *, is_best: bool) -> str:
    """Return the command that evaluates the last or the best adapter of a run, and its base."""
    config = record.get("config", {})
    data = config.get("data", {})
    task = data.get("eval_task") or data.get("task", "")
    arguments = [run, *(["--what", BEST] if is_best else []), "--compare", "base"]
    arguments += ["--task", task] if is_task_file(task) else []
    arguments += ["--trust-remote-code"] if config.get("model", {}).get("trust_remote_code") else []
    return command("evaluate", *arguments)


def _base(policy: Mapping[str, Any], adapter: Mapping[str, Any], merge: MergeReport | None) -> Base:
    name = policy.get("base_model") or adapter.get("base_model_name_or_path")
    source = policy or adapter
    if merge:
        name, source = merge.base.name, merge.base.model_dump()
    revision, fingerprint = source.get("revision"), source.get("fingerprint")
    trusted = bool(policy.get("trust_remote_code"))
    if not isinstance(revision, str) or not re.fullmatch("[0-9a-f]{40}", revision):  # a branch or a tag
        revision = None
    if not isinstance(name, str) or not name:
        return Base(None)
    if name == STARTER or Path(name).resolve() == starter.model_path().resolve():
        return Base(STARTER, fingerprint=fingerprint, license=base_license.of_folder(starter.model_path()))
    # `models/base` may be a folder or a Hub id. A base from a folder has a fingerprint and no commit.
    if model_files.is_folder_name(name) or (fingerprint and not revision) or not _is_hub_id(name):
        path = Path(name).expanduser()
        shown = Path(name.replace("\\", "/")).name  # the name may be a Windows path
        return Base(shown, fingerprint=fingerprint, license=base_license.of_folder(path), trust_remote_code=trusted)
    return Base(name, name, revision, license=base_license.of_hub_model(name, revision), trust_remote_code=trusted)


def _is_hub_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.isascii() and name.isprintable()


def _vllm_rank(adapter: Path) -> int | None:
    try:
        return served_rank(adapter)
    except UserError as error:
        print(f"the card does not mention vLLM: {error}", file=sys.stderr)
        return None


def _evaluations(
    reports: Mapping[Path, Report], folder: Path, kind: str, merge: MergeReport | None
) -> Iterator[Evaluation]:
    """Yield the evaluations of the pushed weights, or of the adapter that they were made from."""
    adapter = adapter_sha256(source_adapter(folder)) if reports else None
    is_from_adapter = merge is not None and merge.identity.get("adapter_sha256") == adapter
    for path, report in reports.items():
        measured = report.evaluated.source
        of_adapter = measured.get("adapter_sha256") == adapter
        of_upload = of_adapter
        if kind != "adapter":
            is_model = kind == "merged" and not measured.get("adapter_sha256")
            of_upload = is_model and measured.get("weights_sha256") == model_files.weights_fingerprint(folder)
        if of_upload or (of_adapter and is_from_adapter):
            yield Evaluation(report, of_upload, path)
        else:
            print(f"{path}/report.json measured other weights; it is left out", file=sys.stderr)
