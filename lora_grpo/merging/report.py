"""merge_report.json: what a merged model's folder says of where it comes from, and whether that still is so."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.merging.fidelity import share
from lora_grpo.models import adapter_sha256

REPORT = "merge_report.json"
FORMAT = 1


def read_report(folder: Path) -> dict[str, Any] | None:
    """Return the report in a folder, or None where there is none that this version reads."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    needed = {"identity", "asked", "dtype", "reason", "onto", "base", "retained", "kl", "untied", "shards"}
    known = isinstance(report, dict) and report.get("lora_grpo_merge") == FORMAT and not needed - report.keys()
    return report if known and isinstance(report["identity"], dict) else None


def check_current(folder: Path) -> None:
    """Refuse what a run's folder holds of an adapter that it no longer has: `merged`, and `gguf` made of that.

    Raises:
        UserError: says how to make it again.
    """
    report, adapter = read_report(folder), folder.parent / "adapter"
    if report is None or not (folder.parent / "run.json").is_file() or not adapter.is_dir():
        return
    if report["identity"].get("adapter_sha256") != adapter_sha256(adapter):
        raise UserError(
            f"{folder} was merged from another adapter than {adapter} now is; delete it and run scripts/merge.py "
            f"{folder.parent} again"
        )


def show(output: Path, report: Mapping[str, Any]) -> None:
    """Print what a report says of the merged model in `output`, and what can be done with it."""
    for word, text in _lines(output, report):
        print(f"{word:<10}{text}")
    run = output.parent if (output.parent / "run.json").is_file() else None
    merged, source = shlex.quote(str(output)), shlex.quote(str(run or output))
    asked = f"{source} --compare {merged}" if run else f"{merged} --task gsm8k"
    print(f"\nevaluate  python scripts/evaluate.py {asked}")
    print(f"GGUF      python scripts/export_gguf.py {source} --modelfile")
    print(f"share     python scripts/push.py {source} YOU/NAME{' --what merged' if run else ''} --dry-run")


def _lines(output: Path, report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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
