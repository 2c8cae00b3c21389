"""`scripts/merge.py`: merge an adapter into its base and report the rounding error."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from lora_grpo import __version__
from lora_grpo.errors import UserError, first_line
from lora_grpo.files import atomic, json_files, lock
from lora_grpo.merging import writer
from lora_grpo.merging.base_weights import Onto, base_tensors, head_weight
from lora_grpo.merging.divergence import measure_divergences
from lora_grpo.merging.fidelity import Choice, check_finite, choose
from lora_grpo.merging.mapping import Plan, make_plan
from lora_grpo.merging.report import (
    REPORT,
    Adapter,
    Base,
    Divergences,
    MergeReport,
    ShardFile,
    TensorCounts,
    check_current,
    read_report,
    show,
)
from lora_grpo.models import ModelSpec, Overrides, base_model, resolve, run_of


@dataclass(frozen=True)
class MergeOptions:
    """Flags of `scripts/merge.py`."""

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|ADAPTER")]
    """A run folder, an adapter folder, or the Hub id of an adapter."""
    output: Path | None = None
    """Folder of the merged model; default: `merged` in the run, or `<adapter>-merged` next to an adapter."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the merged weights; `auto` uses the smallest that keeps 99% of the update."""
    onto: Onto = "full"
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
    """A resolved merge request: the adapter, the base, and the output folder."""

    options: MergeOptions
    target: ModelSpec
    adapter: Path
    output: Path

    @property
    def base(self) -> Path:
        """The base's folder."""
        return Path(self.target.base.name)

    @property
    def trusted(self) -> bool:
        """Whether Python code that comes with the base may run."""
        return self.target.base.trust_remote_code

    def identity(self) -> dict[str, str]:
        """Return everything that determines the merged bytes, except for the dtype."""
        known = self.target.identity
        return {
            "base_sha256": base_model.weights_fingerprint(self.base),
            **{name: known[name] for name in ("config_sha256", "adapter_sha256", "tokenizer_sha256")},
            "onto": self.options.onto,
            "kit": __version__,
        }


def merge(options: MergeOptions) -> Path:
    """Merge the adapter, print the report, and return the merged model's folder.

    Raises:
        UserError: the adapter cannot be merged; nothing is written.
        RunError: a merged weight is NaN or infinite.
    """
    base_model.wait_without_spinning()
    job = _resolve(options)
    identity = job.identity()
    report = _existing(job, identity)
    if report:
        writer.tidy(job.output)
    else:
        report = _merge(job, identity)
    show(job.output, report)
    return job.output


def merged_model(folder: Path) -> Path:
    """Return the folder of a run's merged model, merging it first if needed. A model folder is returned unchanged.

    Raises:
        UserError: the run's adapter has changed since it was merged.
    """
    if not (folder / "run.json").is_file():
        return folder
    if (folder / "merged").is_dir():
        check_current(folder / "merged")
        return folder / "merged"
    return merge(MergeOptions(str(folder)))


def default_output(what: str, adapter: Path) -> Path:
    """Return the default output folder of a merge.

    This is `merged` in the adapter's run, or a folder in `outputs` for a Hub id, or a folder next to the adapter.

    Args:
        what: the requested run, adapter folder, or Hub id.
        adapter: the adapter's folder. For a Hub id, it is in the Hub cache.
    """
    if not base_model.is_folder_name(what):
        return Path("outputs") / f"{what.rpartition('/')[2]}-merged"
    run, adapter = run_of(adapter), adapter.resolve()
    if run is not None and adapter == (run / "adapter").resolve():
        return run / "merged"
    return adapter.with_name(f"{adapter.name}-merged")


def _resolve(options: MergeOptions) -> _Merge:
    if Path(options.what).is_file():
        raise UserError(f"{options.what} is a file; pass the folder of a run or of an adapter")
    overrides = Overrides(
        base=options.base,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        any_base=options.force_base,
    )
    target = resolve(options.what, overrides)
    if target.adapter is None:
        raise UserError(f"{options.what} is a full model; pass a run or an adapter to merge")
    output = options.output or default_output(options.what, target.adapter)
    return _Merge(options, target, target.adapter, output.expanduser().resolve())


def _existing(job: _Merge, identity: Mapping[str, str]) -> MergeReport | None:
    """Return the report if the output folder already contains this merge.

    Raises:
        UserError: the output folder contains something else.
    """
    output, dtype = job.output, job.options.dtype
    if output.is_file():
        raise UserError(f"--output {output} is a file; pass a folder")
    if not output.is_dir() or not any(output.iterdir()):
        return None
    report = read_report(output)
    if report is None:
        raise UserError(f"{output} holds other files; pass another --output")
    differs = [name for name in identity if report.identity.get(name) != identity[name]]
    if not differs and dtype not in (report.requested_dtype, report.dtype):
        differs = [f"dtype ({report.dtype}, now {dtype})"]
    paths = [(output / shard.file, shard.bytes) for shard in report.shards]
    if not all(path.is_file() and path.stat().st_size == size for path, size in paths):
        differs = ["shards (damaged)"]
    if differs:
        raise UserError(
            f"{output} holds another merge: {', '.join(differs)} differ; delete it or pass another --output"
        )
    return report


def _merge(job: _Merge, identity: dict[str, str]) -> MergeReport:
    for name in base_model.TOKENIZER_FILES:
        if name.endswith(".json") and (job.target.tokenizer / name).is_file():
            json_files.read_object(job.target.tokenizer / name)
    base = base_tensors(job.base, job.options.onto, trust_remote_code=job.trusted)
    plan = make_plan(base, job.adapter, _read_config(job))
    _check_new_head(job, plan, base.keys())
    dtype, staging = job.options.dtype, writer.staging_folder(job.output)
    # A lower bound: the check is repeated below with the chosen dtype.
    writer.check_disk(staging, writer.lay_out(plan, "bf16" if dtype == "auto" else dtype))
    base_model.silence_libraries()
    check_finite(plan.outputs)
    choice = choose(dtype, plan)
    shards = writer.lay_out(plan, choice.dtype)
    writer.check_disk(staging, shards)
    with lock.holding(staging, "--output"):
        if report := _existing(job, identity):  # another process finished the same merge
            shutil.rmtree(staging)
            return report
        try:
            files = writer.write_shards(staging, shards, {**identity, "dtype": choice.dtype})
        except KeyboardInterrupt:
            print(f"interrupted; run the same command to continue from {staging}", file=sys.stderr)
            raise
        writer.write_index(staging, shards)
        writer.write_config(staging, plan, choice.dtype)
        _copy_other_files(job, plan, staging)
        if job.identity() != identity:
            raise UserError(f"{job.adapter} or its base changed during the merge; run the command again")
        kl = measure_divergences(job.target, base, plan, staging, job.options.onto)
        report = _report(job, identity, plan, choice, files, kl)
        atomic.write_json(staging / REPORT, report.model_dump())
        writer.publish(staging, job.output)
    return report


def _report(
    job: _Merge, identity: dict[str, str], plan: Plan, choice: Choice, shards: list[ShardFile], kl: Divergences
) -> MergeReport:
    recorded = (job.target.run or {}).get("policy", {})
    revision = job.target.base.revision
    is_recorded = bool(recorded.get("fingerprint")) or (revision is not None and recorded.get("revision") == revision)
    return MergeReport(
        identity=identity,
        requested_dtype=job.options.dtype,
        dtype=choice.dtype,
        reason=choice.reason,
        onto=job.options.onto,
        base=Base(
            name=_public(job.target.base_name),
            revision=revision,
            fingerprint=identity["base_sha256"],
            checked=is_recorded and not job.options.force_base,
        ),
        adapter=Adapter(name=_public(job.options.what), sha256=identity["adapter_sha256"]),
        trust_remote_code=job.trusted,
        retained=choice.measured[choice.dtype],
        other_dtypes={name: kept for name, kept in choice.measured.items() if name != choice.dtype},
        kl=kl,
        tensors=TensorCounts(changed=sum(each.changed for each in plan.outputs.values()), all=len(plan.outputs)),
        untied=plan.tie_word_embeddings is False,
        vocab_size=plan.vocab_size,
        shards=shards,
    )


def _public(name: str) -> str:
    """Return a Hub id unchanged, or only the last part of a path, because reports are published."""
    return Path(name).expanduser().resolve().name if base_model.is_folder_name(name) else name


def _copy_other_files(job: _Merge, plan: Plan, staging: Path) -> None:
    """Copy the tokenizer, generation config, license, and custom model code."""
    paths = [job.target.tokenizer / name for name in base_model.TOKENIZER_FILES]
    paths += [job.base / "generation_config.json"]
    paths += [path for pattern in base_model.LICENSE_FILES for path in job.base.glob(pattern)]
    if "auto_map" in plan.config:
        paths += job.base.glob("*.py")
    for path in paths:
        if path.is_file():
            shutil.copyfile(path, staging / path.name)


def _read_config(job: _Merge) -> dict[str, Any]:
    """Return the base's config.json. If it does not set `tie_word_embeddings`, use the transformers default.

    Raises:
        UserError: config.json cannot be read.
    """
    config = base_model.read_config(job.target.base)
    if not any("tie_word_embeddings" in inner for inner in (config, config.get("text_config") or {})):
        from transformers import AutoConfig

        try:
            known = AutoConfig.from_pretrained(job.base, trust_remote_code=job.trusted).get_text_config()
        except Exception as error:  # damaged or unknown configurations raise many exception types
            raise UserError(f"{job.base / 'config.json'} cannot be read: {first_line(error)}") from error
        config["tie_word_embeddings"] = bool(getattr(known, "tie_word_embeddings", False))
    return config


def _check_new_head(job: _Merge, plan: Plan, base_names: Any) -> None:
    """Raise an error if the model expects the new head under a different name."""
    for name in plan.outputs.keys() - base_names:
        if name != (expected := head_weight(job.base, trust_remote_code=job.trusted)):
            raise UserError(f"the head of {job.base.name} is {expected}, and the merge would write it as {name}")
