"""Collect facts about a pushed model: its base, license, run, merge, and evaluations."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_grpo import console, starter
from lora_grpo.commands import command
from lora_grpo.config import STARTER
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.evaluation import Joint, Report, read_also, read_reports
from lora_grpo.files import json_files
from lora_grpo.gguf import GgufSection, gguf_section
from lora_grpo.hub import token
from lora_grpo.merging import MergeReport
from lora_grpo.merging import read_report as read_merge_report
from lora_grpo.models import (
    ADAPTER_CONFIG,
    BEST,
    ModelFlags,
    adapter_sha256,
    base_model,
    completion_ends,
    model_files,
    resolve,
    source_adapter,
    tokenizer_of,
)
from lora_grpo.runs import read_record
from lora_grpo.sampling import served_rank
from lora_grpo.tasks import TASK_NAMES, get_task

_EXAMPLE = (("question", "rows", None), ("before", "base.samples", False), ("after", "trained.samples", True))
_SECONDS = 10
"""Time limit of the request for a license."""


@dataclass(frozen=True)
class Base:
    """The known facts about the base model."""

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


@dataclass(frozen=True)
class Facts:
    """All facts that a card may include; `kind` is one of `files.KINDS`."""

    kind: str
    base: Base
    record: Mapping[str, Any]
    """run.json, or nothing for a model that is not part of a run."""
    best: Mapping[str, Any]
    """The run's `best` entry, with step and validation reward, if the model is made from that adapter."""
    adapter: Mapping[str, Any]
    """adapter_config.json, if there is one."""
    vllm_rank: int | None
    """The LoRA rank to pass to vLLM; None if vLLM cannot serve the adapter."""
    merge: MergeReport | None
    evaluations: tuple[Evaluation, ...]
    plot: Path | None = None
    """The image of the training reward, or of the loss of SFT, in the run's report."""
    example: Mapping[str, str] | None = None
    """`question`, `before` and `after` of the first problem that the run's own evaluation lists as fixed.

    All texts are of a data set or a model, and must not be rendered.
    """
    also: Joint | None = None
    """What else changed, if the evaluations have that of the run itself."""
    ggufs: GgufSection | None = None
    """The GGUF files, if any of them was measured."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `generate` with which the model ends and samples as here, where its own settings differ."""


def gather(folder: Path, kind: str) -> Facts:
    """Read the facts about the model in a folder and the run that produced it."""
    folder = folder.resolve()
    # An adapter in another folder of the run was not produced by this run.
    is_own = kind != "adapter" or folder.name in ("adapter", BEST)
    run = folder.parent if is_own and (folder.parent / "run.json").is_file() else None
    record = read_record(run) if run else {}
    merge, source = read_merge_report(folder), source_adapter(folder) if run else folder
    adapter = json_files.read_object(source / ADAPTER_CONFIG) if (source / ADAPTER_CONFIG).is_file() else {}
    reports = read_reports(run) if run else {}
    ggufs = gguf_section([*folder.glob("*.gguf")], reports) if kind == "gguf" else None
    if ggufs or kind != "gguf":  # GGUF files have a table of their own, and other cards none of them
        reports = {path: each for path, each in reports.items() if "gguf_sha256" not in each.evaluated.source}
    evaluations = sorted(_evaluations(reports, folder, kind, merge), key=lambda each: not each.of_upload)
    is_best, own = run is not None and source.name == BEST, reports.get(run / "evaluation") if run else None
    if run and not evaluations:
        measure = command("evaluate", run, *(["--what", BEST] if is_best else []), "--compare", "base")
        console.note(f"the card has no evaluation of {source}; to measure it: {measure}")
    return Facts(
        kind=kind,
        base=_base(record.get("policy", {}), adapter, merge),
        record=record,
        best=(record.get("best") or {}) if is_best else {},
        adapter=adapter,
        vllm_rank=_vllm_rank(folder) if kind == "adapter" else None,
        merge=merge,
        evaluations=tuple(evaluations),
        plot=_plot(run, record) if run else None,
        example=next((_example(run, each.report) for each in evaluations if run and each.report is own), None),
        also=read_also(run / "evaluation") if run and own in [each.report for each in evaluations] else None,
        ggufs=ggufs,
        generation={} if kind == "gguf" else _generation(folder, _base_folder(record.get("policy", {}), adapter)),
    )


def _base_folder(policy: Mapping[str, Any], adapter: Mapping[str, Any]) -> Path | None:
    """Return the folder of an adapter's base, if it is on this machine. Asks no server."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    name = policy.get("base_model") or adapter.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return None
    folder = Path(model_files.source(name))
    if not model_files.is_folder_name(str(folder)):
        revision = policy.get("revision") or adapter.get("revision")
        with contextlib.suppress(HFValidationError):
            cached = try_to_load_from_cache(name, "config.json", revision=revision)
            folder = Path(cached).parent if isinstance(cached, str) else folder
    return folder if (folder / "config.json").is_file() else None


def _generation(folder: Path, base: Path | None) -> dict[str, Any]:
    """Return the arguments of `generate` that the example needs, by reading the settings of the model that it loads.

    The tokens that end a completion, if the model declares other ones, and no repetition penalty, with which nothing
    here samples. Nothing for files that cannot be read: the card is still right about everything else.

    Raises:
        WrongTokenId: the model's configuration declares an end that is none of its tokens.
    """
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if is_adapter and base is None:
        return {}
    arguments: dict[str, Any] = {}
    try:
        spec = resolve(str(folder), ModelFlags(base=str(base) if is_adapter else None))
        settings = base_model.generation_config(spec.base, spec.base_name)
        ends = completion_ends(spec, tokenizer_of(spec))
        if not {*ends} <= {*base_model.as_ids(settings.eos_token_id)}:
            arguments["eos_token_id"] = ends
        if settings.repetition_penalty not in (None, 1.0):
            arguments["repetition_penalty"] = 1.0
    except base_model.WrongTokenId:  # nothing could generate with it
        raise
    except (UserError, RunError):
        return {}
    return arguments


def _plot(run: Path, record: Mapping[str, Any]) -> Path | None:
    name = "sft-loss.png" if record.get("config", {}).get("method") == "sft" else "reward.png"
    path = run / "report" / name
    return path if path.is_file() and path.resolve().is_relative_to(run) else None


def _example(run: Path, report: Report) -> dict[str, str] | None:
    """Return a fixed problem of the run's own evaluation, with its first failed and its first passed answer."""
    is_public = own_dataset(report.protocol.task, report.protocol.data_source) is not None
    if not report.fixed or not is_public:  # rows of a user's file may be private
        return None
    texts: dict[str, str] = {}
    for key, name, passed in _EXAMPLE:
        for line in json_files.read_finished_lines(run / "evaluation" / f"{name}.jsonl"):
            if str(line.get("task_id")) == report.fixed[0].task_id and line.get("passed") == passed:
                texts.setdefault(key, str(line.get("question") or line.get("completion")))
    return texts if len(texts) == 3 else None


def own_dataset(task: str | None, source: str | None) -> str | None:
    """Return the Hub dataset of a task, "" for a task with bundled rows, or None if the rows are from elsewhere."""
    if task not in TASK_NAMES:
        return None
    own = getattr(get_task(task), "HUB_DATASET", "")
    return own if source in (None, own) else None


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
    if model_files.is_folder_name(name) or (fingerprint and not revision) or not is_hub_id(name):
        shown = model_files.last_part(name)
        license_entries = _license(Path(name).expanduser())
        return Base(shown, fingerprint=fingerprint, license=license_entries, trust_remote_code=trusted)
    return Base(name, name, revision, license=_license(name, revision), trust_remote_code=trusted)


def is_hub_id(name: str) -> bool:
    """Return whether a name may be that of a repository on the Hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.isascii() and name.isprintable()


def _license(base: Path | str, revision: str | None = None) -> dict[str, str]:
    """Return the license entries of the model card in a folder or of a model on the Hub; {} if there are none.

    The card on the Hub is read by one request. If that fails, the reason is a note on stderr.
    """
    from huggingface_hub import HfApi, ModelCard, get_token

    data: Any = None
    try:
        if isinstance(base, Path):
            data = ModelCard.load(base / "README.md", ignore_metadata_errors=True).data
        else:
            data = HfApi().model_info(base, revision=revision, timeout=_SECONDS).card_data
    except Exception as error:  # noqa: BLE001 - a card without a license is better than no push
        if isinstance(base, str):
            reason = token.scrub(first_line(error), get_token() or "")
            console.note(f"note: the card has no license, because {base} was not read: {reason}")
    names = ("license", "license_name", "license_link")
    found = {name: value for name in names if isinstance(value := getattr(data, name, None), str)}
    # The Hub rejects other license ids, such as "Apache 2.0".
    if not re.fullmatch(r"[a-z0-9.+-]+", found.get("license", "")):
        return {}
    if isinstance(base, str) and "://" not in found.get("license_link", "://"):  # a file in the base's repository
        found["license_link"] = f"https://huggingface.co/{base}/blob/main/{found['license_link']}"
    return found


def _vllm_rank(adapter: Path) -> int | None:
    try:
        return served_rank(adapter)
    except UserError as error:
        console.note(f"the card does not mention vLLM: {error}")
        return None


def _evaluations(
    reports: Mapping[Path, Report], folder: Path, kind: str, merge: MergeReport | None
) -> Iterator[Evaluation]:
    """Yield the evaluations of the pushed weights, or of the adapter that they were made from."""
    adapter = adapter_sha256(source_adapter(folder)) if reports else None
    is_from_adapter = merge is not None and merge.identity.get("adapter_sha256") == adapter
    for path, report in reports.items():
        measured = report.evaluated.source
        of_adapter = of_upload = measured.get("adapter_sha256") == adapter
        if kind != "adapter":
            is_model = kind == "merged" and not measured.get("adapter_sha256")
            of_upload = is_model and measured.get("weights_sha256") == model_files.weights_fingerprint(folder)
        if of_upload or (of_adapter and is_from_adapter):
            yield Evaluation(report, of_upload)
        else:
            console.note(f"{path}/report.json measured other weights; it is left out")
