"""Collect facts about a pushed model: its base, license, run, merge, and evaluations."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_grpo import starter
from lora_grpo.config import STARTER
from lora_grpo.errors import UserError
from lora_grpo.evaluation import Report, read_report
from lora_grpo.files import json_files
from lora_grpo.hub.files import without_paths
from lora_grpo.merging import MergeReport
from lora_grpo.merging import read_report as read_merge_report
from lora_grpo.models import BEST, adapter_sha256, base_model, source_adapter
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
    """`license`, `license_name` and `license_link` of its model card, if found on this machine."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of the uploaded weights or, if not `of_upload`, of the adapter that they were made from."""

    report: Report
    of_upload: bool


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
    best: Mapping[str, Any] | None = None
    """The step, reward and accuracy of the run's `best` adapter, if the model is made from it."""
    measured_by: str = ""
    """The command that evaluates the adapter, for a model of a run without evaluations."""


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
    evaluations = tuple(_evaluations(run, folder, kind, merge)) if run else ()
    if run and not evaluations:
        command = _measuring_command(record, str(run), is_best=is_best)
        print(f"the card has no evaluation of {source}; to measure it: {command}", file=sys.stderr)
    return Facts(
        kind=kind,
        base=_base(record.get("policy", {}), adapter, merge),
        record=record,
        adapter=adapter,
        vllm_rank=_vllm_rank(folder) if kind == "adapter" else None,
        merge=merge,
        evaluations=evaluations,
        best=record.get("best") if is_best else None,
        measured_by=_measuring_command(without_paths(record), run.name, is_best=is_best) if run else "",
    )


def _measuring_command(record: Mapping[str, Any], run: str, *, is_best: bool) -> str:
    """Return the command that evaluates the last or the best adapter of a run, and its base."""
    config = record.get("config", {})
    data = config.get("data", {})
    task = data.get("eval_task") or data.get("task", "")
    arguments = [run, *(["--what", BEST] if is_best else []), "--compare", "base"]
    arguments += ["--task", task] if is_task_file(task) else []
    arguments += ["--trust-remote-code"] if config.get("model", {}).get("trust_remote_code") else []
    return shlex.join(["python", "scripts/evaluate.py", *arguments])


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
        return Base(STARTER, fingerprint=fingerprint, license=_license(starter.model_path()))
    # `models/base` may be a folder or a Hub id. A base from a folder has a fingerprint and no commit.
    if base_model.is_folder_name(name) or (fingerprint and not revision) or not _is_hub_id(name):
        path = Path(name).expanduser()
        shown = Path(name.replace("\\", "/")).name  # the name may be a Windows path
        return Base(shown, fingerprint=fingerprint, license=_license(path), trust_remote_code=trusted)
    return Base(name, name, revision, license=_cached_license(name, revision), trust_remote_code=trusted)


def _is_hub_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.isascii() and name.isprintable()


def _cached_license(hub_id: str, revision: str | None) -> dict[str, Any]:
    """Return the license of a model from its card in the local Hub cache. Does not download anything."""
    from huggingface_hub import try_to_load_from_cache

    card = try_to_load_from_cache(hub_id, "README.md", revision=revision)
    found = _license(Path(card).parent) if isinstance(card, str) else {}
    link = found.get("license_link", "")
    if link and "://" not in link:  # a file in the base's repository
        found["license_link"] = f"https://huggingface.co/{hub_id}/blob/main/{link}"
    return found


def _license(folder: Path) -> dict[str, Any]:
    from huggingface_hub import ModelCard

    try:
        data = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data
    except (OSError, ValueError):
        return {}
    keys = ("license", "license_name", "license_link")
    found = {key: value for key in keys if isinstance(value := data.get(key), str)}
    # The Hub rejects other license ids, such as "Apache 2.0".
    return found if re.fullmatch(r"[a-z0-9.+-]+", found.get("license", "")) else {}


def _vllm_rank(adapter: Path) -> int | None:
    try:
        return served_rank(adapter)
    except UserError as error:
        print(f"the card does not mention vLLM: {error}", file=sys.stderr)
        return None


def _evaluations(run: Path, folder: Path, kind: str, merge: MergeReport | None) -> Iterator[Evaluation]:
    """Yield the run's evaluations of the pushed weights, or of the adapter that they were made from.

    The run's own is first. Evaluations of fewer rows by `--limit` are left out.
    """
    adapter = adapter_sha256(source_adapter(folder))
    is_from_adapter = merge is not None and merge.identity.get("adapter_sha256") == adapter
    for path in (run / "evaluation", *sorted((run / "evaluation").glob("*/"))):
        try:
            report = read_report(path)
        except UserError as error:
            print(f"{error}; the card leaves it out", file=sys.stderr)
            continue
        if report is None or report.protocol.sampling is None:
            continue
        if report.protocol.limit:
            print(
                f"{path}/report.json is of `evaluate.py --limit {report.protocol.limit}`; the card leaves it out",
                file=sys.stderr,
            )
            continue
        measured = report.evaluated.source
        of_adapter = measured.get("adapter_sha256") == adapter
        of_upload = of_adapter
        if kind != "adapter":
            is_model = kind == "merged" and not measured.get("adapter_sha256")
            of_upload = is_model and measured.get("weights_sha256") == base_model.weights_fingerprint(folder)
        if of_upload or (of_adapter and is_from_adapter):
            yield Evaluation(report, of_upload)
        else:
            print(f"{path}/report.json measured other weights; the card leaves it out", file=sys.stderr)
