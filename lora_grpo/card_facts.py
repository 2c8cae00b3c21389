"""What is known of a model that is pushed: its base, its licence, its run, and what was measured of it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_grpo import atomic, base_model, starter
from lora_grpo.config import STARTER, ModelConfig
from lora_grpo.errors import UserError
from lora_grpo.evaluation_report import Page
from lora_grpo.run_record import read_record
from lora_grpo.subjects import Subject
from lora_grpo.tasks import TASK_NAMES, get_task
from lora_grpo.tasks.sources import is_on_hub
from lora_grpo.upload_files import UploadFile, is_path, without_paths

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]*[\w])?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{1,40}")


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
    licence: str | None = None
    """Its licence as the Hub spells it, where it was found on this machine."""
    trust_remote_code: bool = False
    """Whether code that came with it was run."""


@dataclass(frozen=True)
class Evaluation:
    """What was measured, of what."""

    page: Page
    of_upload: bool
    """Whether it is what is pushed that was measured; else the adapter that it was made of."""
    after: str
    """The name of the side, in `page.sides`, that the figures are of."""
    isolation: str | None = None
    """How programs were kept apart while they were graded."""
    source: str | None = None
    """The Hub data set of the rows; None where they were files or generated."""


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


def run_of(folder: Path) -> Path | None:
    """Return the run that a folder was made in."""
    above = folder.resolve().parent
    return above if (above / "run.json").is_file() else None


def base_of(folder: Path, kind: str) -> Base:
    """Return what is known of the base model of what is in a folder."""
    run, merge = run_of(folder), read_json(folder / "merge_report.json").get("base") or {}
    record = read_record(run) if run else None
    name, revision, fingerprint, trusted = _named(folder, kind, record, merge)
    if name is None:
        return Base(trust_remote_code=trusted)
    if name == STARTER:
        licence = _licence(starter.model_path())
        return Base(name=STARTER, fingerprint=fingerprint, licence=licence)
    # A folder has a fingerprint and no commit.
    if (fingerprint and not revision) or is_path(name) or not _HUB_ID.fullmatch(name):
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
    from lora_grpo.vllm_sampler import served_rank

    run = run_of(folder)
    record = read_record(run) if run else None
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
        adapter=without_paths(read_json(adapter / "adapter_config.json")) if adapter else None,
        served_rank=rank,
        merge=without_paths(read_json(folder / "merge_report.json")) or None,
        evaluations=tuple(_evaluations(run, record, folder, kind)) if run and record else (),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one where there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {base_model.first_line(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value


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
    config = read_json(folder / "adapter_config.json")
    if config.get("base_model_name_or_path"):
        name = str(config["base_model_name_or_path"])
        embedded = Path(name).resolve() == starter.model_path().resolve()
        return STARTER if embedded else name, config.get("revision"), None, trusted
    return None, None, None, trusted


def _cached_licence(hub_id: str, revision: str | None) -> str | None:
    """Return the licence of a model whose card is in the Hub's cache on this machine; nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache

    for name in ("README.md", "LICENSE"):
        found = try_to_load_from_cache(hub_id, name, revision=revision)
        if isinstance(found, str) and (licence := _licence(Path(found).parent)):
            return licence
    return None


def _licence(folder: Path) -> str | None:
    """Return the licence that a model's card names, or that its LICENSE plainly is."""
    from huggingface_hub import ModelCard

    try:
        named = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.get("license")
        if isinstance(named, str) and _LICENCE.fullmatch(named):
            return named
    except (OSError, ValueError):
        pass
    try:
        text = (folder / "LICENSE").read_text(encoding="utf-8", errors="replace")[:400]
    except OSError:
        return None
    if "Apache License" in text and "Version 2.0" in text:
        return "apache-2.0"
    return "mit" if text.lstrip().startswith("MIT License") else None


# What was measured


def _evaluations(run: Path, record: Mapping[str, Any], folder: Path, kind: str) -> Iterator[Evaluation]:
    """Yield the run's own evaluation, then those of scripts/evaluate.py in its folder."""
    made_of = (read_json(folder / "merge_report.json").get("adapter") or {}).get("sha256")
    if made_of and not _is({"adapter_sha256": made_of}, run / "adapter", "adapter"):
        print(f"{folder} was made of another adapter than the run has now; its figures are left out", file=sys.stderr)
        return
    for path in (run / "evaluation" / "report.json", *sorted(run.glob("evaluation/*/report.json"))):
        own = path.parent.name == "evaluation"
        try:
            how = _own_evaluation if own else _asked_evaluation
            found = how(path, run, record, folder, kind)
            if found is not None:
                found.page.markdown()  # what a card shows of it; a report of another version lacks some of that
                yield found
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            print(f"{path} is no report of this version ({error!r}), and the card leaves it out", file=sys.stderr)


def _own_evaluation(path: Path, run: Path, record: Mapping[str, Any], folder: Path, kind: str) -> Evaluation | None:
    """Return what the run measured at its end of base and adapter."""
    if not path.is_file():
        return None
    report = without_paths(read_json(path))
    # A run that goes on keeps its last report until it has a new one, and files can be changed by hand.
    current = record.get("status") == "complete" and record["results"]["table"] == report["table"]
    wrong = atomic.damage(run / "adapter") if current else "the run has gone on since"
    if wrong:
        print(f"{path} is not of the adapter as it is now ({wrong}), and the card leaves it out", file=sys.stderr)
        return None
    told = report["protocol"]
    title = f"{told['task']}: {told['rows']} held-out rows, one greedy sample each"
    if told["num_samples"]:
        how = f"temperature {told['temperature']:g}, top-p {told['top_p']:g}"
        title += f" and {told['num_samples']} at {how}"
    if told.get("left_out_as_trained_on"):
        title += f"; {told['left_out_as_trained_on']} rows were trained on and left out: not comparable"
    sides = {"base": report["base"], "trained": report["trained"]}
    moved = {word: report.get(word, []) for word in ("fixed", "regressed")}
    page = Page(title, sides, told, report["table"], moved)
    source = _data_set(told["task"], record["data"]["eval"].get("source"))
    return Evaluation(page, kind == "adapter", "trained", told.get("sandbox"), source)


def _asked_evaluation(path: Path, run: Path, record: Mapping[str, Any], folder: Path, kind: str) -> Evaluation | None:
    """Return an evaluation that was asked for, if it is of what is pushed or of the adapter that it was made of."""
    raw = read_json(path)
    report, models = without_paths(raw), (raw.get("protocol") or {}).get("models") or {}
    model = models.get(raw.get("label")) or {}
    of_upload = kind != "gguf" and _is(model, folder, kind)
    of_adapter = (run / "adapter").is_dir() and _is(model, run / "adapter", "adapter")
    if not of_upload and not (kind != "adapter" and of_adapter):
        print(f"{path} is of other weights, and the card leaves it out", file=sys.stderr)
        return None
    told, other = report["protocol"], report.get("compared_with")
    how = f"temperature {told['temperature']:g}, top-p {told['top_p']:g}" if told["temperature"] else "greedy"
    title = f"{report['task']}: {told['rows']} rows, {report['samples']} samples, {how}"
    if told.get("left_out_as_trained_on"):
        title += f"; {told['left_out_as_trained_on']} rows were trained on and left out: not comparable"
    if told.get("contaminated"):
        title += "; CONTAMINATED: trained on this benchmark, the score says nothing"
    sides = {other["label"]: other} if other else {}
    sides[report["label"]] = report
    moved = {word: report.get(word, []) for word in ("fixed", "regressed")} if other else None
    page = Page(title, sides, told, report.get("table", ()), moved)
    asked = read_json(path.with_name("evaluation.json")).get("asked")
    source = asked["options"].get("data") if asked else None
    if asked and source is None and report["task"] == record["data"].get("eval_task"):
        source = record["data"]["eval"].get("source")
    return Evaluation(
        page, of_upload, report["label"], report.get("isolation"), _data_set(report["task"], source) if asked else None
    )


def _is(model: Mapping[str, Any], folder: Path, kind: str) -> bool:
    """Tell whether an evaluation's model is what is in a folder."""
    if kind == "adapter":
        asked = Subject("", ModelConfig(name=str(folder), revision="-"), "", folder, folder).identity
        return bool(model.get("adapter_sha256") == asked["adapter_sha256"])
    asked = Subject("", ModelConfig(name=str(folder)), "", None, folder).identity
    return model.get("adapter_sha256") is None and bool(model.get("weights_sha256") == asked["weights_sha256"])


def _data_set(task: str, source: str | None) -> str | None:
    """Return the Hub data set that rows came from: the one that is named, or the task's own."""
    if source is not None:
        return source if is_on_hub(source) and _HUB_ID.fullmatch(source) else None
    return getattr(get_task(task), "HUB_DATASET", None) if task in TASK_NAMES else None


def data_sets(record: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the Hub data sets of a run's rows, by split."""
    data = record["data"]
    tasks = {"train": data.get("task"), "eval": data.get("eval_task")}
    return {split: _data_set(str(task), (data.get(split) or {}).get("source")) for split, task in tasks.items()}
