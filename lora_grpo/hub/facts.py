"""Collect facts about a pushed model: its base, license, run, and evaluations."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_grpo import starter
from lora_grpo.config import STARTER
from lora_grpo.errors import UserError
from lora_grpo.files import json_files
from lora_grpo.hub.evaluations import Evaluation, evaluations_of
from lora_grpo.hub.files import is_rooted, without_paths
from lora_grpo.merging import read_report as read_merge_report
from lora_grpo.runs import read_record

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*\w", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.-]{1,40}")


@dataclass(frozen=True)
class Base:
    """The adapter's base model, as far as it is known."""

    hub_id: str | None = None
    """The base model's repository on the Hub."""
    revision: str | None = None
    """The commit used in training."""
    name: str | None = None
    """The display name: the Hub id, `starter`, or the last part of a folder's path."""
    fingerprint: str | None = None
    """SHA-256 of its weights, if it was loaded from a folder."""
    license: Mapping[str, Any] = field(default_factory=dict)
    """`license`, `license_name` and `license_link` of its model card, if found on this machine."""
    trust_remote_code: bool = False
    """Whether it was loaded with custom code from its repository."""


@dataclass(frozen=True)
class Facts:
    """All facts that a card may include."""

    kind: str
    """One of `files.KINDS`."""
    base: Base
    record: Mapping[str, Any] | None
    """The contents of run.json, with each path reduced to its last part."""
    adapter: Mapping[str, Any] | None
    """adapter_config.json."""
    vllm_rank: int | None
    """The LoRA rank to pass to vLLM; None if vLLM cannot serve the adapter."""
    merge: Mapping[str, Any] | None
    """merge_report.json."""
    evaluations: tuple[Evaluation, ...]


def gather(folder: Path, kind: str) -> Facts:
    """Read the facts about the model in a folder and the run that produced it.

    Args:
        folder: the model's folder.
        kind: one of `files.KINDS`.

    Raises:
        UserError: run.json or adapter_config.json cannot be read.
    """
    # An adapter in another folder of the run was not produced by this run.
    above = folder.resolve().parent
    run = (
        above if (kind != "adapter" or folder.resolve().name == "adapter") and (above / "run.json").is_file() else None
    )
    record = read_record(run) if run else None
    merge_report = read_merge_report(folder)
    merge = merge_report.model_dump() if merge_report else None
    adapter_folder = folder if kind == "adapter" else run / "adapter" if run else folder
    path = adapter_folder / "adapter_config.json"
    adapter = json_files.read_object(path) if path.is_file() else None
    return Facts(
        kind=kind,
        base=_base(kind, record["policy"] if record else {}, adapter or {}, merge),
        record=without_paths(record) if record else None,
        adapter=without_paths(adapter),
        vllm_rank=_vllm_rank(folder) if kind == "adapter" else None,
        merge=without_paths(merge),
        evaluations=tuple(evaluations_of(run, folder, kind, merge)) if run else (),
    )


def _base(kind: str, policy: Mapping[str, Any], adapter: Mapping[str, Any], merge: Mapping[str, Any] | None) -> Base:
    trusted = bool(policy.get("trust_remote_code"))
    merged_into = merge["base"] if merge and kind != "adapter" else {}
    if merged_into.get("name") and not str(merged_into["name"]).endswith("-bnb-4bit"):
        name, source = merged_into["name"], merged_into
    elif policy.get("base_model"):
        name, source = policy["base_model"], policy
    else:
        name, source = adapter.get("base_model_name_or_path"), adapter
    if not name:
        return Base(trust_remote_code=trusted)
    name, revision, fingerprint = str(name), source.get("revision"), source.get("fingerprint")
    if name == STARTER or Path(name).resolve() == starter.model_path().resolve():
        return Base(name=STARTER, fingerprint=fingerprint, license=_license(starter.model_path()))
    # `models/base` may be a folder or a Hub id. A base from a folder has a fingerprint and no commit.
    is_folder = is_rooted(name) or Path(name).exists() or (fingerprint and not revision)
    if is_folder or not _HUB_ID.fullmatch(name):
        folder = Path(name).expanduser()
        return Base(None, None, folder.name, fingerprint, _license(folder), trusted)
    revision = revision if revision and _COMMIT.fullmatch(str(revision)) else None
    return Base(name, revision, name, None, _cached_license(name, revision), trusted)


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
    """Return the license fields of a model card's front matter."""
    from huggingface_hub import ModelCard

    try:
        data = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data
    except (OSError, ValueError):
        return {}
    keys = ("license", "license_name", "license_link")
    found = {key: value for key in keys if isinstance(value := data.get(key), str)}
    return found if _LICENSE_ID.fullmatch(found.get("license", "")) else {}


def _vllm_rank(adapter: Path) -> int | None:
    from lora_grpo.sampling import served_rank

    try:
        return served_rank(adapter)
    except UserError as error:
        print(f"the card does not mention vLLM: {error}", file=sys.stderr)
        return None
