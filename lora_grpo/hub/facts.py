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
from lora_grpo.hub.uploads import is_hub_id
from lora_grpo.merging import MergeReport, source_adapter
from lora_grpo.merging import read_report as read_merge_report
from lora_grpo.models import (
    ADAPTER_CONFIG,
    BEST,
    ModelFlags,
    adapter_sha256,
    completion_ends,
    model_files,
    resolve,
    stop_tokens,
    tokenizer_of,
)
from lora_grpo.runs import read_record
from lora_grpo.sampling import served_rank
from lora_grpo.tasks import TASK_NAMES, get_task
from lora_grpo.verify import verified

_LICENSE_SECONDS = 10
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

    folder: Path
    report: Report
    of_upload: bool


@dataclass(frozen=True)
class Facts:
    """All facts that a card may include; `kind` is one of `uploads.KINDS`."""

    kind: str
    base: Base
    record: Mapping[str, Any]
    """run.json, or nothing for a model that is not part of a run."""
    teacher: Base | None
    """The base of the run's teacher, if it has one of its own."""
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

    All texts come from a data set or a model, and must not be rendered.
    """
    also: Joint | None = None
    """The report on the tasks in `eval.also`, if the card has the evaluation that the run itself made."""
    ggufs: GgufSection | None = None
    """The GGUF files, if any of them was measured."""
    verified: tuple[str, ...] = ()
    """What `lora-grpo verify` found about these files, or about engines and servers with the adapter."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `generate` with which the model samples and ends as in lora_grpo, if its own settings differ."""


def gather(folder: Path, kind: str) -> Facts:
    """Read the facts about the model in a folder and the run that produced it."""
    folder = folder.resolve()
    trained_adapter = _trained_adapter(folder)
    run = trained_adapter.parent if trained_adapter else None
    record: dict[str, Any] = {}
    reports: dict[Path, Report] = {}
    adapter_folder = trained_adapter or folder
    if run:
        record = read_record(run)
        reports = read_reports(run)
    policy = record.get("policy", {})
    adapter: dict[str, Any] = {}
    if (adapter_folder / ADAPTER_CONFIG).is_file():
        adapter = json_files.read_object(adapter_folder / ADAPTER_CONFIG)
    best: dict[str, Any] = {}
    if adapter_folder.name == BEST:
        best = record.get("best") or {}
    merge = read_merge_report(folder)

    # Evaluations. Those of GGUF files are in a table of their own, and only on the card of GGUF files. If none of these
    # files was measured, there is no table, and `_evaluations` says that the reports are left out.
    ggufs = None
    if kind == "gguf":
        ggufs = gguf_section(list(folder.glob("*.gguf")), reports)
    if kind != "gguf" or ggufs:
        reports = {path: report for path, report in reports.items() if "gguf_sha256" not in report.evaluated.source}
    evaluations = list(_evaluations(reports, adapter_folder, folder, kind, merge))
    evaluations.sort(key=lambda evaluation: not evaluation.of_upload)
    if run and not evaluations:
        flags = ["--what", BEST] if adapter_folder.name == BEST else []
        evaluate_command = command("evaluate", run, *flags, "--compare", "base")
        console.note(f"the card has no evaluation of {adapter_folder}; to measure it: {evaluate_command}")

    # The evaluation that the run itself made has the texts of an example.
    example = None
    also = None
    for evaluation in evaluations:
        if run and evaluation.folder == run / "evaluation":
            example = _example(evaluation)
            also = read_also(evaluation.folder)

    # How to use the model.
    base = _base(policy, adapter, merge)
    teacher_record = record.get("teacher") or {}
    teacher = None
    if teacher_record.get("base_model"):
        # The digest says whether the name was that of a folder.
        teacher = _base({**teacher_record, "fingerprint": policy.get("teacher_sha256")}, {}, None)
    vllm_rank = None
    if kind == "adapter":
        vllm_rank = _vllm_rank(folder)
    generation = {}
    if kind != "gguf":
        generation = _generation(folder, _base_folder(policy, adapter))

    return Facts(
        kind=kind,
        base=base,
        record=record,
        teacher=teacher,
        best=best,
        adapter=adapter,
        vllm_rank=vllm_rank,
        merge=merge,
        evaluations=tuple(evaluations),
        plot=_plot(run, record),
        example=example,
        also=also,
        ggufs=ggufs,
        verified=tuple(verified(run, adapter_folder, folder)) if run else (),
        generation=generation,
    )


def _trained_adapter(folder: Path) -> Path | None:
    """Return the adapter of a run that is in a folder of it, or from which the models in the folder were made.

    Only `adapter` and `best` count: the card describes the run, which did not produce other models in it.
    """
    adapter = source_adapter(folder)
    if adapter and adapter.parent == folder.parent and adapter.name in ("adapter", BEST):
        return adapter
    return None


def _base_folder(policy: Mapping[str, Any], adapter: Mapping[str, Any]) -> Path | None:
    """Return the folder of an adapter's base, if it is on this machine. Asks no server."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    name = policy.get("base_model") or adapter.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return None
    config = Path(model_files.source(name)) / "config.json"
    if not model_files.is_folder_name(str(config.parent)):
        revision = policy.get("revision") or adapter.get("revision")
        with contextlib.suppress(HFValidationError):
            cached = try_to_load_from_cache(name, "config.json", revision=revision)
            if isinstance(cached, str):
                config = Path(cached)
    return config.parent if config.is_file() else None


def _generation(folder: Path, base: Path | None) -> dict[str, Any]:
    """Return the arguments of `generate` that the example needs, by reading the settings of the model that it loads.

    These are the tokens that end a completion, if the model does not declare all of them, and no repetition penalty,
    if the model has one, because lora_grpo samples without it. There are none for files that cannot be read: the card
    is still right about everything else.

    Raises:
        WrongTokenId: the model's configuration declares an end that is not one of its tokens.
    """
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if is_adapter and base is None:
        return {}
    arguments: dict[str, Any] = {}
    try:
        spec = resolve(str(folder), ModelFlags(base=str(base) if is_adapter else None))
        settings = stop_tokens.generation_config(spec.base, spec.base_name)
        end_ids = completion_ends(spec, tokenizer_of(spec))
        declared_ids = stop_tokens.as_ids(settings.eos_token_id)
        if not set(end_ids) <= set(declared_ids):
            arguments["eos_token_id"] = end_ids
        if settings.repetition_penalty not in (None, 1.0):
            arguments["repetition_penalty"] = 1.0
    except stop_tokens.WrongTokenId:  # nothing could generate with it
        raise
    except (UserError, RunError):
        return {}
    return arguments


def _plot(run: Path | None, record: Mapping[str, Any]) -> Path | None:
    """Return the image of a run's report; None without one, or for a link to a file outside the run."""
    if run is None:
        return None
    is_sft = record.get("config", {}).get("method") == "sft"
    path = run / "report" / ("sft-loss.png" if is_sft else "reward.png")
    if path.is_file() and path.resolve().is_relative_to(run):
        return path
    return None


def _example(evaluation: Evaluation) -> dict[str, str] | None:
    """Return a fixed problem of the run's own evaluation, with its first failed and its first passed answer."""
    report = evaluation.report
    is_public = has_own_rows(measured_task(report), report.protocol.data_source)
    if not report.fixed or not is_public:  # rows of a user's file may be private
        return None
    problem_id = report.fixed[0].problem_id
    question = _first_text(evaluation.folder / "rows.jsonl", problem_id, passed=None)
    before = _first_text(evaluation.folder / "base.samples.jsonl", problem_id, passed=False)
    after = _first_text(evaluation.folder / "trained.samples.jsonl", problem_id, passed=True)
    if question is None or before is None or after is None:
        return None
    return {"question": question, "before": before, "after": after}


def _first_text(path: Path, problem_id: str, *, passed: bool | None) -> str | None:
    """Return the question or the completion in the first line of a file with this problem and this verdict."""
    for line in json_files.read_finished_lines(path):
        if str(line.get("task_id")) == problem_id and line.get("passed") == passed:
            return str(line.get("question") or line.get("completion"))
    return None


def trained_task(record: Mapping[str, Any]) -> str | None:
    """Return the task that a run was trained on, as its settings name it; None without a run."""
    return record["config"]["data"]["task"] if record else None


def evaluated_task(record: Mapping[str, Any]) -> str | None:
    """Return the task that a run was evaluated on, as its settings name it; None without a run."""
    return (record["config"]["data"].get("eval_task") or trained_task(record)) if record else None


def measured_task(report: Report) -> str | None:
    """Return the name of the built-in task of an evaluation; None for a user's, whose title may be the same."""
    return report.protocol.task if report.protocol.task_sha256 is None else None


def has_own_rows(task: str | None, source: str | None) -> bool:
    """Return whether the rows are those of a built-in task, and not a user's: public, and in English.

    Args:
        task: the name of the task, not its title: a file `gsm8k.py` has the title of the built-in task `gsm8k`.
        source: the file or Hub dataset of the rows; None for the task's own.
    """
    return task in TASK_NAMES and source in (None, get_task(task).HUB_DATASET)


def own_dataset(task: str | None, source: str | None) -> str:
    """Return the Hub dataset with the rows of a built-in task; "" for bundled rows, and for those of a user.

    For the arguments, see `has_own_rows`.
    """
    if task is not None and has_own_rows(task, source):
        return get_task(task).HUB_DATASET
    return ""


def _base(policy: Mapping[str, Any], adapter: Mapping[str, Any], merge: MergeReport | None) -> Base:
    """Describe the base as the merge report records it, else the run, else the adapter."""
    name: Any
    recorded: Mapping[str, Any]
    if merge:
        name = merge.base.name
        recorded = merge.base.model_dump()
    else:
        name = policy.get("base_model") or adapter.get("base_model_name_or_path")
        recorded = policy or adapter
    if not isinstance(name, str) or not name:
        return Base(None)
    revision = recorded.get("revision")
    if not isinstance(revision, str) or not re.fullmatch("[0-9a-f]{40}", revision):  # a branch or a tag
        revision = None
    fingerprint = recorded.get("fingerprint")

    starter_path = starter.model_path()
    if name == STARTER or Path(name).resolve() == starter_path.resolve():
        return Base(STARTER, fingerprint=fingerprint, license=_license(starter_path))
    trust_remote_code = bool(policy.get("trust_remote_code"))
    # A name such as `models/base` may be a folder or a Hub id.
    was_folder = fingerprint and not revision  # a base from the Hub has a commit
    if was_folder or model_files.is_folder_name(name) or not is_hub_id(name):
        path: Any = name
        if merge:  # its report has the last part of the path only, and run.json the path
            is_of_run = policy.get("fingerprint") == merge.base.fingerprint
            path = policy.get("base_model") if is_of_run else None
        return Base(
            name=model_files.last_part(name),
            fingerprint=fingerprint,
            license=_license(Path(path).expanduser()) if path else {},
            trust_remote_code=trust_remote_code,
        )
    return Base(
        name=name,
        hub_id=name,
        revision=revision,
        license=_license(name, revision),
        trust_remote_code=trust_remote_code,
    )


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
            data = HfApi().model_info(base, revision=revision, timeout=_LICENSE_SECONDS).card_data
    except Exception as error:  # noqa: BLE001 - a card without a license is better than no push
        if isinstance(base, str):
            reason = token.scrub(first_line(error), get_token() or "")
            console.note(f"note: the card has no license, because {base} was not read: {reason}")
    entries = {}
    for name in ("license", "license_name", "license_link"):
        value = getattr(data, name, None)
        if isinstance(value, str):
            entries[name] = value
    # The Hub rejects other license ids, such as "Apache 2.0".
    if not re.fullmatch(r"[a-z0-9.+-]+", entries.get("license", "")):
        return {}
    link = entries.get("license_link")
    if isinstance(base, str) and link is not None and "://" not in link:  # a file in the base's repository
        entries["license_link"] = f"https://huggingface.co/{base}/blob/main/{link}"
    return entries


def _vllm_rank(adapter: Path) -> int | None:
    try:
        return served_rank(adapter)
    except UserError as error:
        console.note(f"the card does not mention vLLM: {error}")
        return None


def _evaluations(
    reports: Mapping[Path, Report], adapter: Path, folder: Path, kind: str, merge: MergeReport | None
) -> Iterator[Evaluation]:
    """Yield the evaluations of the pushed weights, or of the adapter that they were made from."""
    if not reports:
        return
    adapter_digest = adapter_sha256(adapter)
    is_merged_from_adapter = merge is not None and merge.identity.get("adapter_sha256") == adapter_digest
    for report_folder, report in reports.items():
        source = report.evaluated.source
        is_of_adapter = source.get("adapter_sha256") == adapter_digest
        if kind == "adapter":
            of_upload = is_of_adapter
        elif kind == "merged" and not source.get("adapter_sha256"):
            of_upload = source.get("weights_sha256") == model_files.weights_fingerprint(folder)
        else:
            of_upload = False
        if of_upload or (is_of_adapter and is_merged_from_adapter):
            yield Evaluation(report_folder, report, of_upload)
        else:
            console.note(f"{report_folder}/report.json measured other weights; it is left out")
