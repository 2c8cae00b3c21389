"""`scripts/merge.py`: an adapter and its base made one model, with a report of what that cost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from lora_grpo import __version__, base_model, merge
from lora_grpo.adapter_plan import Plan, make_plan
from lora_grpo.atomic import write_json
from lora_grpo.errors import UserError
from lora_grpo.fidelity import Dtype, Fidelity, candidates, check_finite, choose, measure, share
from lora_grpo.folder_lock import claim
from lora_grpo.frozen_base import Onto, base_tensors
from lora_grpo.merge_divergence import measure_divergences
from lora_grpo.merge_report import FORMAT, REPORT, check_current, read_report
from lora_grpo.subjects import LICENCES, TOKENIZER_FILES, Overrides, Subject, resolve, run_of


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
    overrides = Overrides(
        base=options.base,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        any_base=options.force_base,
    )
    subject = resolve(options.what, overrides)
    if subject.adapter is None:
        raise UserError(f"{options.what} is a whole model; give a run or an adapter to merge")
    output = (options.output or default_output(subject.adapter)).expanduser()
    identity = _identity(subject, options)
    if _is_there(output, identity, options.dtype):
        merge.tidy(output)
        _show(output, read_report(output) or {})
        return output

    folder = Path(subject.base.name)
    trusted = subject.base.trust_remote_code
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    base = base_tensors(folder, options.onto, trust_remote_code=trusted)
    plan = make_plan(base, subject.adapter, config)
    staging = merge.staging_folder(output)
    # The smallest that is possible; what is chosen is checked again below.
    merge.check_disk(staging, merge.lay_out(plan, "bf16" if options.dtype == "auto" else options.dtype))
    base_model.quieten()
    check_finite(plan.outputs)
    dtype, reason, measured = _choose(options.dtype, plan)
    shards = merge.lay_out(plan, dtype)
    merge.check_disk(staging, shards)

    claim(staging, "--output")
    files = merge.write_shards(staging, shards, {**identity, "dtype": dtype})
    merge.write_index(staging, shards)
    merge.write_config(staging, config, plan, dtype)
    _copy_rest(subject, config, staging)
    if _identity(subject, options) != identity:
        raise UserError(f"{subject.adapter} or its base changed during the merge; run the command again")
    report = {
        "lora_grpo_merge": FORMAT,
        "identity": identity,
        "asked": options.dtype,
        "dtype": dtype,
        "reason": reason,
        "onto": options.onto,
        "base": {
            "name": _public(subject.base_name),
            "revision": subject.base.revision,
            "fingerprint": identity["base_sha256"],
            "checked": _was_checked(subject, options),
        },
        "adapter": {"name": _public(options.what), "sha256": identity["adapter_sha256"]},
        "trust_remote_code": trusted,
        "retained": measured[dtype].to_dict(),
        "other_dtypes": {name: found.to_dict() for name, found in measured.items() if name != dtype},
        "kl": measure_divergences(subject, base, plan, staging, options.onto),
        "tensors": {
            "changed": sum(output.changed for output in plan.outputs.values()),
            "all": len(plan.outputs),
        },
        "untied": plan.tie_word_embeddings is False,
        "vocab_size": plan.vocab_size,
        "shards": files,
    }
    write_json(staging / REPORT, report)
    merge.publish(staging, output)
    _show(output, report)
    return output


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


def default_output(adapter: Path) -> Path:
    """Return where an adapter is merged to: `merged` in its run, else beside it."""
    run = run_of(adapter)
    if run is not None and adapter.resolve() == (run / "adapter").resolve():
        return run / "merged"
    return adapter.with_name(f"{adapter.name}-merged")


def _identity(subject: Subject, options: Options) -> dict[str, Any]:
    """Return what makes two merges the same in every bit, but for the dtype."""
    known = subject.identity
    return {
        "base_sha256": base_model.weights_fingerprint(Path(subject.base.name)),
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


def _choose(asked: Dtype | Literal["auto"], plan: Plan) -> tuple[Dtype, str, dict[Dtype, Fidelity]]:
    """Return the dtype to write, why, and what each candidate keeps."""
    heaviest = max(plan.outputs.values(), key=lambda output: len(output.shape) and output.shape[0])
    measured = measure(plan.outputs, candidates(asked, heaviest.origin.dtype))
    if asked != "auto":
        return asked, f"{asked}, as asked", measured
    dtype, reason = choose(measured, plan.outputs)
    if dtype not in measured:
        measured |= measure(plan.outputs, [dtype])
    return dtype, reason, measured


def _copy_rest(subject: Subject, config: Mapping[str, Any], staging: Path) -> None:
    """Copy the tokenizer with its chat template, the generation config, the licence, and the model's own code."""
    folder = Path(subject.base.name)
    wanted = [subject.tokenizer / name for name in TOKENIZER_FILES]
    wanted += [folder / "generation_config.json"]
    wanted += [path for pattern in LICENCES for path in folder.glob(pattern)]
    if "auto_map" in config:
        wanted += folder.glob("*.py")
    for path in wanted:
        if path.is_file():
            shutil.copyfile(path, staging / path.name)


def _public(name: str) -> str:
    """Return a Hub id as it is, and of a folder its own name: the report is published, and a path is private."""
    return Path(name).expanduser().resolve().name if base_model.is_folder_name(name) else name


def _was_checked(subject: Subject, options: Options) -> bool:
    """Whether the base is known to be the one that the adapter was trained on."""
    recorded = (subject.run or {}).get("policy", {})
    same_commit = recorded.get("revision") is not None and recorded["revision"] == subject.base.revision
    return not options.force_base and (bool(recorded.get("fingerprint")) or same_commit)


def _show(output: Path, report: Mapping[str, Any]) -> None:
    for word, text in report_lines(output, report):
        print(f"{word:<10}{text}")
    run = output.parent if (output.parent / "run.json").is_file() else None
    asked = f"{run} --compare {output}" if run else f"{output} --task gsm8k"
    print(f"\nevaluate  python scripts/evaluate.py {asked}")
    print(f"GGUF      python scripts/export_gguf.py {run or output} --modelfile")
    print(f"share     python scripts/push.py {run or output} YOU/NAME{' --what merged' if run else ''} --dry-run")


def report_lines(output: Path, report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield merge_report.json in words, each line with what it is about."""
    base = f"{report['base']['name']} ({report['onto']})"
    size = _size(sum(shard["bytes"] for shard in report["shards"]))
    yield "merged", f"{output}: {report['dtype']}, {size}, onto {base}"
    yield "dtype", report["reason"]
    kept = report["retained"]
    if kept["overall"] is not None:
        least = f"least {share(kept['worst'])} in {kept['worst_layer']}"
        yield "update", f"{share(kept['overall'])} kept, {least}; rounding adds {kept['error']:.2g} times its size"
    kl = report["kl"]
    if "not_measured" in kl:
        yield "KL", f"not measured: {kl['not_measured']}"
    else:
        both = f"adapter‖merged {kl['adapter_merged']:.2g}, adapter‖base {kl['adapter_base']:.2g} nats a token"
        yield "KL", f"{both}, over {kl['tokens']} tokens of {kl['texts']} texts"
        if "trained_merged" in kl:
            yield "", f"adapter on its 4-bit base‖merged {kl['trained_merged']:.2g}; --onto dequantized keeps that base"
    if not report["base"]["checked"]:
        yield "base", "not checked: nothing says which weights the adapter was trained on"
    if report["untied"]:
        yield "head", "apart from the embedding now: the adapter changed one of the two alone"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
