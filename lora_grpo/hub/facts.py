"""What is known of a model that is pushed: its base, its licence, its run, and what was measured."""

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
from lora_grpo.hub.card_figures import HUB_ID, Evaluation, evaluations_of
from lora_grpo.hub.card_schema import read_adapter, read_merge, read_run
from lora_grpo.hub.files import UploadFile, is_rooted, without_paths

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{1,40}")
_LICENCE_FILE = re.compile(r"(LICEN[SC]E|COPYING)[\w.-]*", re.ASCII)
_LINK = re.compile(r"https://[\w.-]+/[\w./%+~-]*", re.ASCII)
_TEXTS = {
    "apache-2.0": re.compile(r"\s*Apache License\s+Version 2\.0, January 2004\s"),
    "mit": re.compile(r"\s*(The )?MIT License( \(MIT\))?\s*\n\s*Copyright"),
}
"""How the licences begin that are known by their text."""


@dataclass(frozen=True)
class Licence:
    """A licence, as a model's front matter tells it."""

    id: str
    """As the Hub spells it."""
    name: str | None = None
    """What it is called, of one that the Hub has no spelling for."""
    link: str | None = None
    """Where that one stands."""


@dataclass(frozen=True)
class Base:
    """The model below the adapter, as far as it is known."""

    hub_id: str | None = None
    """Its repository on the Hub."""
    revision: str | None = None
    """The commit of it that was trained on."""
    name: str | None = None
    """What it is called where it is no repository: `starter`, or the last part of a folder's path."""
    fingerprint: str | None = None
    """SHA-256 over its weights, where it was read from a folder."""
    licence: Licence | None = None
    """Its licence, where it was found on this machine."""
    trust_remote_code: bool = False
    """Whether code that came with it was run."""


@dataclass(frozen=True)
class Facts:
    """Everything that a card may say."""

    kind: str
    files: tuple[UploadFile, ...]
    base: Base
    record: Mapping[str, Any] | None = None
    """run.json, with every path cut down to its last part."""
    adapter: Mapping[str, Any] | None = None
    """adapter_config.json."""
    served_rank: int | None = None
    """The rank that vLLM makes room for; None where it does not serve the adapter."""
    merge: Mapping[str, Any] | None = None
    """merge_report.json."""
    evaluations: tuple[Evaluation, ...] = field(default_factory=tuple)

    def has(self, *names: str) -> bool:
        """Tell whether one of these files is pushed."""
        return any(file.name in names for file in self.files)

    def text(self, name: str) -> str:
        """Return the text of a file that is pushed, or nothing where it is not."""
        found = next((file.content for file in self.files if file.name == name), b"")
        return (found if isinstance(found, bytes) else found.read_bytes()).decode(errors="replace")


def run_of(folder: Path, kind: str) -> Path | None:
    """Return the run that a folder was made in; another adapter that lies beside the run's own is not of it."""
    folder = folder.resolve()
    is_its_own = kind != "adapter" or folder.name == "adapter"
    return folder.parent if is_its_own and (folder.parent / "run.json").is_file() else None


def base_of(folder: Path, kind: str) -> Base:
    """Return what is known of the base model of what is in a folder."""
    run, merge = run_of(folder, kind), read_merge(folder).get("base") or {}
    record = read_run(run) if run else None
    name, revision, fingerprint, trusted = _named(folder, kind, record, merge)
    if name is None:
        return Base(trust_remote_code=trusted)
    if name == STARTER:
        licence = _licence(starter.model_path())
        return Base(name=STARTER, fingerprint=fingerprint, licence=licence)
    # A folder has a fingerprint and no commit; a name without an owner may be one too.
    known = revision is not None or (not fingerprint and "/" in name)
    if not known or _is_path(name) or not HUB_ID.fullmatch(name):
        licence = _licence(Path(name).expanduser())
        plain = Path(name).name
        return Base(name=plain, fingerprint=fingerprint, licence=licence, trust_remote_code=trusted)
    revision = revision if revision and _COMMIT.fullmatch(revision) else None
    return Base(name, revision, None, None, _cached_licence(name, revision), trusted)


def gather(folder: Path, kind: str, files: tuple[UploadFile, ...], base: Base) -> Facts:
    """Read what is known of what is in a folder, and of the run that it was made in.

    Figures of other weights are left out, and that is said.

    Raises:
        UserError: a record cannot be read.
    """
    from lora_grpo.sampling import served_rank

    run = run_of(folder, kind)
    record = read_run(run) if run else None
    adapter = folder if kind == "adapter" else run / "adapter" if run else None
    rank = None
    if kind == "adapter":
        try:
            rank = served_rank(folder)
        except UserError as error:
            print(f"the card names no vLLM: {error}", file=sys.stderr)
    return Facts(
        kind=kind,
        files=files,
        base=base,
        record=without_paths(record) if record else None,
        adapter=without_paths(read_adapter(adapter)) if adapter else None,
        served_rank=rank,
        merge=without_paths(read_merge(folder)) or None,
        evaluations=tuple(evaluations_of(run, record, folder, kind)) if run and record else (),
    )


def _is_path(text: str) -> bool:
    return is_rooted(text) or text.count("/") > 1 or ("/" in text and Path(text).exists())


# The base


def _named(
    folder: Path, kind: str, record: Mapping[str, Any] | None, merge: Mapping[str, Any]
) -> tuple[str | None, str | None, str | None, bool]:
    """Return what the base is called, its commit, its fingerprint, and whether its code was trusted.

    A 4-bit copy is named as the base that it is, unless the merge says which 16-bit weights it was merged into.
    """
    policy = record["policy"] if record else {}
    trusted = bool(policy.get("trust_remote_code"))
    merged_onto = merge.get("name") if kind != "adapter" else None
    if merged_onto and not str(merged_onto).endswith("-bnb-4bit"):
        return str(merged_onto), merge.get("revision"), merge.get("fingerprint"), trusted
    if policy.get("base_model"):
        return str(policy["base_model"]), policy.get("revision"), policy.get("fingerprint"), trusted
    config = read_adapter(folder)
    if config.get("base_model_name_or_path"):
        name = str(config["base_model_name_or_path"])
        embedded = Path(name).resolve() == starter.model_path().resolve()
        return STARTER if embedded else name, config.get("revision"), None, trusted
    return None, None, None, trusted


def _cached_licence(hub_id: str, revision: str | None) -> Licence | None:
    """Return the licence of a model whose card is in the Hub's cache on this machine; nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache

    for name in ("README.md", "LICENSE"):
        found = try_to_load_from_cache(hub_id, name, revision=revision)
        if isinstance(found, str) and (licence := _licence(Path(found).parent, hub_id)):
            return licence
    return None


def _licence(folder: Path, hub_id: str | None = None) -> Licence | None:
    """Return the licence that a model's card names, or that its LICENSE plainly is."""
    from huggingface_hub import ModelCard

    try:
        data = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data
    except (OSError, ValueError):
        data = None
    if data and (named := data.get("license")):
        return _named_licence(named, data.get("license_name"), data.get("license_link"), hub_id)
    try:
        text = (folder / "LICENSE").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return next((Licence(name) for name, begins in _TEXTS.items() if begins.match(text)), None)


def _named_licence(named: object, name: object, link: object, hub_id: str | None) -> Licence | None:
    """Return what a card's front matter says; `other` says nothing without a name and a place to read it."""
    if not isinstance(named, str) or not _LICENCE.fullmatch(named):
        return None
    if named != "other":
        return Licence(named)
    if isinstance(link, str) and hub_id and _LICENCE_FILE.fullmatch(link):
        link = f"https://huggingface.co/{hub_id}/blob/main/{link}"
    told = isinstance(name, str) and _LICENCE.fullmatch(name) and isinstance(link, str) and _LINK.fullmatch(link)
    return Licence(named, str(name), str(link)) if told else None
