"""The flags of `scripts/export_gguf.py`, and what the command says at its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lora_grpo.errors import UserError
from lora_grpo.gguf_export import export

TypeName = Literal[
    "q8_0", "f16", "bf16", "f32", "q5_1", "q5_0", "q4_1", "q4_0",
    "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_m", "q2_k", "iq4_xs",
]  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Flags of `scripts/export_gguf.py`."""

    merged: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MERGED")]
    """A merged model's folder: config.json, safetensors of 16 or 32 bits, and the tokenizer."""
    type: TypeName = "q8_0"
    """Of the weights. `q8_0` is half of 16 bits and answers as they do; `q4_0` to `q5_1` are smaller and lose more;
    those with a `k`, and iq4_xs, are better at their size and need llama.cpp's llama-quantize on the PATH."""
    modelfile: bool = False
    """Write an Ollama Modelfile beside it, with the chat template and what ends an answer."""
    output: Path | None = None
    """The file; None is MERGED-gguf/NAME.Q8_0.gguf beside the folder."""


def default_output(folder: Path, kind: str) -> Path:
    """Return where a folder's GGUF goes, beside it and named after it and its type."""
    folder = folder.absolute()
    return folder.with_name(f"{folder.name}-gguf") / f"{folder.name}.{kind.upper()}.gguf"


def export_and_say(options: Options) -> None:
    """Export the folder and say what there is and how to use it.

    Raises:
        UserError: it cannot be exported.
    """
    folder = options.merged.expanduser()
    if not folder.is_dir():
        raise UserError(f"{options.merged} is no folder; give a merged model's, or make one with scripts/merge.py")
    output = options.output or default_output(folder, options.type)
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; give a file such as {output / 'model.gguf'}")
    done = export(folder, output, options.type, modelfile=options.modelfile)
    for note in done.notes:
        print(f"note: {note}")
    print(f"{done.path}  {done.path.stat().st_size / 1e6:.1f} MB")
    print(f"  llama-cli -m {done.path}")
    if done.modelfile:
        print(f"  ollama create {folder.absolute().name.lower()} -f {done.modelfile}")
