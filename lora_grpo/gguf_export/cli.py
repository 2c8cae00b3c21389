"""The flags of `scripts/export_gguf.py`, and what the command says at its end."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lora_grpo.errors import UserError
from lora_grpo.files import lock
from lora_grpo.gguf_export.export import export
from lora_grpo.merging import REPORT, merged_model
from lora_grpo.runs import read_record
from lora_grpo.tasks import chat

TypeName = Literal[
    "q8_0", "f16", "bf16", "f32", "q5_1", "q5_0", "q4_1", "q4_0",
    "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_m", "q2_k", "iq4_xs",
]  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Flags of `scripts/export_gguf.py`."""

    what: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|MERGED")]
    """A run, which is merged first where it is not yet; or a merged model's folder: config.json, safetensors of 16 or
    32 bits, and the tokenizer."""
    type: TypeName = "q8_0"
    """Of the weights. `q8_0` is half of 16 bits and answers as they do; `q4_0` to `q5_1` are smaller and lose more;
    those with a `k`, and iq4_xs, are better at their size and need llama.cpp's llama-quantize on the PATH."""
    modelfile: bool = False
    """Write an Ollama Modelfile beside it, with the chat template and what ends an answer."""
    output: Path | None = None
    """The file; None is RUN/gguf/RUN.Q8_0.gguf, or MERGED-gguf/MERGED.Q8_0.gguf beside a folder of no run."""


def default_output(folder: Path, run: Path | None, kind: str) -> Path:
    """Return where a folder's GGUF goes: into its run, or beside it; named after that and its type."""
    source = (run or folder).resolve()
    place = source / "gguf" if run else source.with_name(f"{source.name}-gguf")
    return place / f"{source.name}.{kind.upper()}.gguf"


def export_and_say(options: Options) -> None:
    """Export the folder and say what there is and how to use it.

    Raises:
        UserError: it cannot be exported.
    """
    named = options.what.expanduser()
    if not named.is_dir():
        raise UserError(f"{options.what} is no folder; give a run, or a merged model's, made with scripts/merge.py")
    if options.output is not None and options.output.is_dir():
        raise UserError(f"--output {options.output} is a folder; give a file such as {options.output / 'model.gguf'}")
    folder = merged_model(named)
    run = folder.resolve().parent if (folder.resolve().parent / "run.json").is_file() else None
    output = options.output or default_output(folder, run, options.type)
    config = read_record(run)["config"] if run else None
    with lock.holding(output.parent, "--output"):
        done = export(
            folder,
            output,
            options.type,
            modelfile=options.modelfile,
            system_prompt=chat.SYSTEM_PROMPTS.get(config["data"]["prompt_style"]) if config else None,
        )
    report, beside = folder / REPORT, done.path.with_name(REPORT)
    if report.is_file() and report.resolve() != beside.resolve():  # what it was made of, a GGUF cannot tell
        shutil.copyfile(report, beside)
    for note in done.notes:
        print(f"note: {note}")
    print(f"{done.path}  {done.path.stat().st_size / 1e6:.1f} MB")
    print(f"  llama-cli -m {shlex.quote(str(done.path))}")
    if done.modelfile:
        name = re.sub(r"[^a-z0-9._-]+", "-", (run or folder).resolve().name.lower()).strip("-.") or "model"
        print(f"  ollama create {name} -f {shlex.quote(str(done.modelfile))}")
