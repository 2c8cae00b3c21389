"""`lora-grpo merge`: merge an adapter into its base and report the rounding error."""

from __future__ import annotations

import dataclasses
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lora_grpo import __version__
from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, disk, json_files, lock
from lora_grpo.merging import writer
from lora_grpo.merging.base_weights import MergeTarget, base_tensors, empty_model
from lora_grpo.merging.divergence import measure_divergences
from lora_grpo.merging.fidelity import choose
from lora_grpo.merging.mapping import make_plan, read_mergeable
from lora_grpo.merging.report import REPORT, Base, MergeReport, check_current, check_sizes, read_report, show
from lora_grpo.merging.vocabulary import check_vocabulary
from lora_grpo.models import (
    ADAPTER_CONFIG,
    ModelSpec,
    Overrides,
    adapter_sha256,
    base_model,
    choose_adapter,
    model_files,
    resolve,
    run_of,
)


@tyro.conf.configure(tyro.conf.FlagCreatePairsOff)
@dataclass(frozen=True)
class MergeOptions:
    """Flags of `lora-grpo merge`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|ADAPTER")]
    """A run folder, an adapter folder, or the Hub id of an adapter."""
    what: Literal["adapter", "best"] = "adapter"
    """Which adapter of a run: the last one, or the one with the highest validation reward, in RUN/best."""
    output: Annotated[Path | None, tyro.conf.arg(name="output-dir", aliases=["--output"])] = None
    """Folder of the merged model; default: `merged` or `best-merged` in the run, or `<adapter>-merged` next to an
    adapter."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the merged weights; `auto` uses the lowest that keeps 99% of the update."""
    onto: MergeTarget = "full"
    """Merge into the base's own weights (`full`) or into the NF4 values that 4-bit training used (`dequantized`)."""
    base: str | None = None
    """The base model (a folder or Hub id), if it has moved or the adapter does not name it."""
    revision: str | None = None
    """Hub commit, branch or tag of the base."""
    force_base: bool = False
    """Accept a base with weights that differ from those recorded in run.json."""
    trust_remote_code: bool = False
    """Run Python code that comes with the base."""


@dataclass(frozen=True)
class _Merge:
    """A merge, with the files that its options refer to."""

    options: MergeOptions
    target: ModelSpec
    adapter: Path
    output: Path
    identity: Future[dict[str, str]]
    """Everything that determines the merged bytes, except for the dtype. Another thread hashes the files."""


def merge(options: MergeOptions) -> Path:
    """Merge the adapter, print the report, and return the merged model's folder.

    Raises:
        UserError: the adapter cannot be merged; nothing is written.
        RunError: a merged weight is NaN or infinite, or the disk is full.
    """
    with ThreadPoolExecutor(1) as thread:
        job = _resolve(dataclasses.replace(options, source=choose_adapter(options.source, options.what)), thread)
        show(job.output, _finished_report(job) or _merge(job, thread))
    return job.output


def merged_model(folder: Path) -> Path:
    """Return a model folder unchanged, or the merged model of a run or an adapter, merging it first if needed."""
    is_run = (folder / "run.json").is_file()
    if not is_run and not (folder / ADAPTER_CONFIG).is_file():
        return folder
    merged = default_output(str(folder.absolute()), folder / "adapter" if is_run else folder)
    if merged.is_dir():
        check_current(merged)
        return merged
    try:
        return merge(MergeOptions(str(folder)))
    except UserError as error:  # names flags of merge, which the caller's command does not have
        raise UserError(f"{command('merge', folder)}: {error}") from error


def default_output(source: str, adapter: Path) -> Path:
    """Return `merged` in the adapter's run, or a folder in `outputs` for a Hub id, or a folder next to the adapter."""
    if not model_files.is_folder_name(source):
        return Path("outputs") / f"{source.rpartition('/')[2]}-merged"
    run, adapter = run_of(adapter), adapter.resolve()
    if run is not None and adapter == (run / "adapter").resolve():
        return run / "merged"
    return adapter.with_name(f"{adapter.name}-merged")


def _resolve(options: MergeOptions, thread: ThreadPoolExecutor) -> _Merge:
    local = Path(options.source).expanduser()
    if local.is_file():
        raise UserError(f"{options.source} is a file; pass the folder of a run or of an adapter")
    local = local / "adapter" if (local / "run.json").is_file() else local
    if (local / ADAPTER_CONFIG).is_file():
        read_mergeable(local)  # an adapter that cannot be merged is refused before its base is downloaded
    overrides = Overrides(
        base=options.base,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        any_base=options.force_base,
    )
    target = resolve(options.source, overrides)
    if target.adapter is None:
        raise UserError(f"{options.source} is a full model; pass a run or an adapter to merge")
    output = (options.output or default_output(options.source, target.adapter)).expanduser().resolve()
    if not (above := next(path for path in (output, *output.parents) if path.exists())).is_dir():
        raise UserError(f"--output-dir {output}: {above} is not a folder; pass a folder")

    def identity() -> dict[str, str]:
        base_sha256 = model_files.weights_fingerprint(Path(target.base.name))
        digests = {name: target.identity[name] for name in ("config_sha256", "adapter_sha256", "tokenizer_sha256")}
        return {**digests, "base_sha256": base_sha256, "onto": options.onto, "kit": __version__}

    return _Merge(options, target, target.adapter, output, thread.submit(identity))


def _finished_report(job: _Merge) -> MergeReport | None:
    """Return the report if the output folder already contains this merge; anything else in it is an error."""
    output, dtype = job.output, job.options.dtype
    if not output.is_dir() or not any(output.iterdir()):
        return None
    report = read_report(output)
    if report is None:
        raise UserError(f"{output} holds other files; pass another --output-dir")
    differs = [name for name, value in job.identity.result().items() if report.identity.get(name) != value]
    differs += ["dtype"] if dtype not in (report.requested_dtype, report.dtype) else []
    if differs:
        raise UserError(
            f"{output} holds another merge ({report.onto}, {report.dtype}), with another {', '.join(differs)}; delete "
            "it or pass another --output-dir"
        )
    check_sizes(output, report)
    writer.tidy(output)
    return report


def _merge(job: _Merge, thread: ThreadPoolExecutor) -> MergeReport:
    options, target, folder = job.options, job.target, Path(job.target.base.name)
    for name in model_files.TOKENIZER_FILES:
        if name.endswith(".json") and (target.tokenizer / name).is_file():
            json_files.read_object(target.tokenizer / name)  # a damaged file must not be copied
    base_model.silence_libraries()
    model = empty_model(folder, trust_remote_code=target.base.trust_remote_code)
    base = base_tensors(folder, options.onto, model)
    plan = make_plan(base, job.adapter, model)
    check_vocabulary(target, plan.vocab_size or model.get_input_embeddings().num_embeddings)
    choice = choose(options.dtype, plan)
    shards = writer.lay_out(plan, choice.dtype)
    identity = job.identity.result()
    staging = writer.staging_folder(job.output)
    writer.check_disk(staging, shards)
    with lock.holding(staging), disk.writing(job.output):
        files = writer.write_shards(staging, shards, {**identity, "dtype": choice.dtype})
        writer.write_index(staging, shards)
        writer.write_config(staging, folder, plan, choice.dtype)
        _copy_other_files(target, staging)
        for path, now, before in (
            (job.adapter, adapter_sha256(job.adapter), identity["adapter_sha256"]),
            (folder, model_files.weights_fingerprint(folder), identity["base_sha256"]),
        ):
            if now != before:
                raise UserError(f"{path} changed during the merge; run the command again")
        synced = thread.submit(writer.sync, staging)  # beside the divergence
        report = MergeReport(
            identity=identity,
            requested_dtype=options.dtype,
            dtype=choice.dtype,
            reason=choice.reason,
            onto=options.onto,
            base=_base(job, identity["base_sha256"]),
            adapter=_public(options.source),
            retained=choice.measured[choice.dtype],
            other_dtypes={name: kept for name, kept in choice.measured.items() if name != choice.dtype},
            kl=measure_divergences(target, model, base, plan, staging, options.onto),
            untied=plan.tie_word_embeddings is False,
            vocab_size=plan.vocab_size,
            tokenizer="adapter" if target.tokenizer == job.adapter else "base",
            shards=files,
            files=writer.other_files(staging, files),
        )
        with atomic.write_errors(staging):
            synced.result()
        atomic.write_json(staging / REPORT, report.model_dump())
        writer.publish(staging, job.output)
    return report


def _base(job: _Merge, fingerprint: str) -> Base:
    """Describe the base, and whether run.json confirms that the adapter was trained on it."""
    recorded = (job.target.run or {}).get("policy", {})
    revision = job.target.base.revision
    is_recorded = bool(recorded.get("fingerprint")) or (revision is not None and recorded.get("revision") == revision)
    return Base(
        name=_public(job.target.base_name),
        revision=revision,
        fingerprint=fingerprint,
        checked=is_recorded and not job.options.force_base,
    )


def _public(name: str) -> str:
    """Return a Hub id unchanged, or only the last part of a path, because reports are published."""
    return Path(name).expanduser().resolve().name if model_files.is_folder_name(name) else name


def _copy_other_files(target: ModelSpec, staging: Path) -> None:
    """Copy the tokenizer, generation config, licenses, and custom model code."""
    base = Path(target.base.name)
    paths = [target.tokenizer / name for name in model_files.TOKENIZER_FILES]
    for pattern in ("generation_config.json", "*.py", *model_files.LICENSE_FILES):
        paths += base.glob(pattern)
    for path in paths:
        if path.is_file():
            shutil.copyfile(path, staging / path.name)
