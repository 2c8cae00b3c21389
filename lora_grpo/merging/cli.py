"""`scripts/merge.py`: an adapter and its base made one model, with a report of what that cost."""

from __future__ import annotations

import json
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
from lora_grpo.merging.fidelity import Dtype, Fidelity, candidates, check_finite, choose, measure, too_large
from lora_grpo.merging.mapping import Plan, make_plan
from lora_grpo.merging.report import FORMAT, REPORT, check_current, read_report, show
from lora_grpo.models import ModelSpec, Overrides, base_model, resolve, run_of


@dataclass(frozen=True)
class Options:
    """Flags of `scripts/merge.py`."""

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|ADAPTER")]
    """A run's folder, an adapter's, or an adapter's Hub id."""
    output: Path | None = None
    """Folder of the merged model; None is `merged` in the run, or `<adapter>-merged` beside an adapter."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the merged weights; `auto` takes the smallest that keeps 99 % of the update."""
    onto: Onto = "full"
    """The base's own weights (`full`), or what 4-bit training saw of them: rounded to NF4 and back (`dequantized`)."""
    base: str | None = None
    """The base, where it has moved or is not named: a folder or a Hub id."""
    revision: str | None = None
    """Hub commit, branch or tag of the base."""
    force_base: bool = False
    """Take a base whose weights are not those that run.json names."""
    trust_remote_code: bool = False
    """Run Python code that comes with the base."""


def merge_and_report(options: Options) -> Path:
    """Merge, print the report, and return the merged model's folder.

    Raises:
        UserError: what was asked for cannot be merged; nothing is written.
        RunError: a weight came out as NaN or infinite.
    """
    base_model.wait_without_spinning()
    if Path(options.what).is_file():
        raise UserError(f"{options.what} is a file; give the folder of a run or of an adapter")
    overrides = Overrides(
        base=options.base,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        any_base=options.force_base,
    )
    target = resolve(options.what, overrides)
    if target.adapter is None:
        raise UserError(f"{options.what} is a whole model; give a run or an adapter to merge")
    output = (options.output or default_output(options.what, target.adapter)).expanduser().resolve()
    identity = _identity(target, options)
    if _is_there(output, identity, options.dtype):
        writer.tidy(output)
        show(output, read_report(output) or {})
        return output

    folder = Path(target.base.name)
    trusted = target.base.trust_remote_code
    _check_tokenizer(target.tokenizer)
    base = base_tensors(folder, options.onto, trust_remote_code=trusted)
    plan = make_plan(base, target.adapter, _read_config(folder, trusted))
    _check_new_head(plan, base, folder, trusted)
    staging = writer.staging_folder(output)
    # The smallest that is possible; what is chosen is checked again below.
    writer.check_disk(staging, writer.lay_out(plan, "bf16" if options.dtype == "auto" else options.dtype))
    base_model.silence_libraries()
    check_finite(plan.outputs)
    chosen = _choose(options.dtype, plan)
    shards = writer.lay_out(plan, chosen.dtype)
    writer.check_disk(staging, shards)
    with lock.holding(staging, "--output"):
        if _is_there(output, identity, options.dtype):  # another process has just finished it
            shutil.rmtree(staging)
        else:
            try:
                files = writer.write_shards(staging, shards, {**identity, "dtype": chosen.dtype})
            except KeyboardInterrupt:
                print(f"the same command goes on; what is finished lies in {staging}", file=sys.stderr)
                raise
            writer.write_index(staging, shards)
            writer.write_config(staging, plan, chosen.dtype)
            _copy_rest(target, plan, staging)
            if _identity(target, options) != identity:
                raise UserError(f"{target.adapter} or its base changed during the merge; run the command again")
            divergences = measure_divergences(target, base, plan, staging, options.onto)
            atomic.write_json(staging / REPORT, _report(target, options, identity, plan, chosen, files, divergences))
            writer.publish(staging, output)
    show(output, read_report(output) or {})
    return output


@dataclass(frozen=True)
class _Chosen:
    """The dtype that is written, why, and what each candidate keeps."""

    dtype: Dtype
    reason: str
    measured: dict[Dtype, Fidelity]


def _report(
    target: ModelSpec,
    options: Options,
    identity: Mapping[str, Any],
    plan: Plan,
    chosen: _Chosen,
    shards: list[dict[str, Any]],
    divergences: Mapping[str, Any],
) -> dict[str, Any]:
    """Return merge_report.json."""
    return {
        "lora_grpo_merge": FORMAT,
        "identity": identity,
        "asked": options.dtype,
        "dtype": chosen.dtype,
        "reason": chosen.reason,
        "onto": options.onto,
        "base": {
            "name": _public(target.base_name),
            "revision": target.base.revision,
            "fingerprint": identity["base_sha256"],
            "checked": _was_checked(target, options),
        },
        "adapter": {"name": _public(options.what), "sha256": identity["adapter_sha256"]},
        "trust_remote_code": target.base.trust_remote_code,
        "retained": chosen.measured[chosen.dtype].to_dict(),
        "other_dtypes": {name: kept.to_dict() for name, kept in chosen.measured.items() if name != chosen.dtype},
        "kl": divergences,
        "tensors": {"changed": sum(output.changed for output in plan.outputs.values()), "all": len(plan.outputs)},
        "untied": plan.tie_word_embeddings is False,
        "vocab_size": plan.vocab_size,
        "shards": shards,
    }


def merged_model(named: Path) -> Path:
    """Return the merged model of a run, made now where there is none; a model's own folder is that model.

    Raises:
        UserError: the run's merge is of an adapter that it no longer has.
    """
    if not (named / "run.json").is_file():
        return named
    if (named / "merged").is_dir():
        check_current(named / "merged")
        return named / "merged"
    return merge_and_report(Options(str(named)))


def default_output(what: str, adapter: Path) -> Path:
    """Return where an adapter is merged to: `merged` in its run, else beside it, and of a Hub id to `outputs`.

    Args:
        what: what it was called.
        adapter: its folder, which of a Hub id is in the Hub's cache.
    """
    if not base_model.is_folder_name(what):
        return Path("outputs") / f"{what.rpartition('/')[2]}-merged"
    run, adapter = run_of(adapter), adapter.resolve()
    if run is not None and adapter == (run / "adapter").resolve():
        return run / "merged"
    return adapter.with_name(f"{adapter.name}-merged")


def _identity(target: ModelSpec, options: Options) -> dict[str, Any]:
    """Return what makes two merges the same in every bit, but for the dtype."""
    known = target.identity
    return {
        "base_sha256": base_model.weights_fingerprint(Path(target.base.name)),
        "config_sha256": known["config_sha256"],
        "adapter_sha256": known["adapter_sha256"],
        "tokenizer_sha256": known["tokenizer_sha256"],
        "onto": options.onto,
        "kit": __version__,
    }


def _is_there(output: Path, identity: Mapping[str, Any], dtype: str) -> bool:
    """Whether the folder holds this very merge.

    Raises:
        UserError: it holds something else.
    """
    if output.is_file():
        raise UserError(f"--output {output} is a file; give a folder")
    if not output.is_dir() or not any(output.iterdir()):
        return False
    report = read_report(output)
    if report is None:
        raise UserError(f"{output} holds other files; give another --output")
    found, asked, chosen = report["identity"], report["asked"], report["dtype"]
    shards = {output / shard["file"]: shard["bytes"] for shard in report["shards"]}
    whole = all(path.is_file() and path.stat().st_size == size for path, size in shards.items())
    changed = [name for name in identity if found.get(name) != identity[name]]
    if not changed and dtype not in (asked, chosen):
        changed = [f"dtype ({chosen}, now {dtype})"]
    if not whole:
        changed = ["its own shards, which are damaged"]
    if changed:
        raise UserError(
            f"{output} holds another merge: {', '.join(changed)} differ; delete it or give another --output"
        )
    return True


def _choose(asked: Dtype | Literal["auto"], plan: Plan) -> _Chosen:
    measured = measure(plan.outputs, candidates(asked, plan.base_dtype))
    if asked == "fp16" and (name := too_large(plan.outputs)):
        raise UserError(f"{name} does not fit fp16's range of ±65504; pass --dtype bf16, fp32 or auto")
    if asked != "auto":
        return _Chosen(asked, f"{asked}, as asked", measured)
    dtype, reason = choose(measured, plan.outputs)
    if dtype not in measured:
        measured |= measure(plan.outputs, [dtype])
    return _Chosen(dtype, reason, measured)


def _copy_rest(target: ModelSpec, plan: Plan, staging: Path) -> None:
    """Copy the tokenizer with its chat template, the generation config, the licence, and the model's own code."""
    folder = Path(target.base.name)
    wanted = [target.tokenizer / name for name in base_model.TOKENIZER_FILES]
    wanted += [folder / "generation_config.json"]
    wanted += [path for pattern in base_model.LICENSE_FILES for path in folder.glob(pattern)]
    if "auto_map" in plan.config:
        wanted += folder.glob("*.py")
    for path in wanted:
        if path.is_file():
            shutil.copyfile(path, staging / path.name)


def _read_config(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Return the base's config.json, with what transformers takes where it does not say whether the head is tied.

    Raises:
        UserError: it cannot be read.
    """
    path = folder / "config.json"
    config = json_files.read_object(path)
    if not any("tie_word_embeddings" in inner for inner in (config, config.get("text_config") or {})):
        from transformers import AutoConfig

        try:
            known = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
        except Exception as error:  # what is damaged or unknown raises many types
            raise UserError(f"{path} cannot be read: {first_line(error)}") from error
        config["tie_word_embeddings"] = bool(getattr(known, "tie_word_embeddings", False))
    return config


def _check_new_head(plan: Plan, base: Mapping[str, Any], folder: Path, trust_remote_code: bool) -> None:
    """Refuse to write a head of its own for a model that would look for it under another name."""
    for name in plan.outputs.keys() - base.keys():
        if name != (found := head_weight(folder, trust_remote_code=trust_remote_code)):
            raise UserError(f"the head of {folder.name} is {found}, and the merge would have to write it as {name}")


def _check_tokenizer(folder: Path) -> None:
    """Refuse a tokenizer that would be copied and could not be read."""
    for name in base_model.TOKENIZER_FILES:
        if name.endswith(".json") and (folder / name).is_file():
            try:
                json.loads((folder / name).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UserError(f"{folder / name} cannot be read: {first_line(error)}") from None


def _public(name: str) -> str:
    """Return a Hub id as it is, and of a folder its own name: the report is published, and a path is private."""
    return Path(name).expanduser().resolve().name if base_model.is_folder_name(name) else name


def _was_checked(target: ModelSpec, options: Options) -> bool:
    """Whether the base is known to be the one that the adapter was trained on."""
    recorded = (target.run or {}).get("policy", {})
    same_commit = recorded.get("revision") is not None and recorded["revision"] == target.base.revision
    return not options.force_base and (bool(recorded.get("fingerprint")) or same_commit)
