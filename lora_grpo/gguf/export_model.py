"""`lora-grpo export-gguf`: command-line flags and printed output."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lora_grpo import console
from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, disk, lock
from lora_grpo.flags import Flag
from lora_grpo.gguf.architecture import read_model
from lora_grpo.gguf.modelfile import modelfile_path
from lora_grpo.gguf.types import TypeName
from lora_grpo.gguf.writer import write_gguf
from lora_grpo.merging import REPORT, merged_model
from lora_grpo.models import BEST, choose_adapter, source_adapter
from lora_grpo.runs import read_record, system_prompt


@dataclass(frozen=True)
class ExportOptions:
    """Flags of `lora-grpo export-gguf`."""

    source: Annotated[Path, Flag("RUN|ADAPTER|MERGED")]
    """A run or an adapter, which is merged first if needed, or the folder of a merged model with config.json, 16-bit or
    32-bit safetensors, and the tokenizer."""
    what: Literal["merged", "best"] = "merged"
    """`merged`: a model with the run's last adapter. `best`: a model with the adapter that has the highest
    validation reward, RUN/best."""
    type: tuple[TypeName, ...] = ("q8_0",)
    """Weight types, one file each. q8_0 is half the size of 16-bit weights and nearly as accurate. `q4_0` to `q5_1` are
    smaller and less accurate. Types with a `k` and iq4_xs are more accurate for their size and require llama.cpp's
    llama-quantize."""
    modelfile: bool = False
    """Also write an Ollama Modelfile with the chat template, the system prompt and the stop tokens, and the files
    `template`, `system` and `params` that `ollama run hf.co/YOU/NAME` reads after a push."""
    output_dir: Annotated[Path | None, Flag("--output-dir", "--output")] = None
    """Folder of the files; default: RUN/gguf or RUN/best-gguf, or MERGED-gguf for a model outside a run."""


def export(options: ExportOptions) -> tuple[Path, ...]:
    """Export a run or a model, and return the path of each file. Tells how to use them."""
    folder = Path(choose_adapter(str(options.source), options.what)).expanduser()
    if not folder.is_dir():
        raise UserError(f"{options.source} is not a folder; pass a run, or a model from {command('merge')}")
    if options.output_dir and options.output_dir.suffix == ".gguf":
        raise UserError(f"--output-dir {options.output_dir} is the name of a file; pass a folder")
    folder = merged_model(folder, read_model).resolve()
    run, parent, name = folder.parent, folder.with_name(f"{folder.name}-gguf"), folder.name
    if (run / "run.json").is_file():
        is_best = source_adapter(folder).name == BEST
        parent, name = (run / "best-gguf", f"{run.name}-best") if is_best else (run / "gguf", run.name)
    parent = options.output_dir or parent
    outputs: dict[str, Path] = {kind: parent / f"{name}.{kind.upper()}.gguf" for kind in options.type}
    above = folder.parents[:2]  # a checkpoint is two levels below its run
    trained_by = next((each for each in above if (each / "run.json").is_file()), None)
    prompt = system_prompt(read_record(trained_by)) if trained_by else None
    with lock.holding(parent):
        notes = write_gguf(folder, outputs, modelfile=options.modelfile, system_prompt=prompt)
        if (folder / REPORT).is_file():  # for the card
            atomic.write_text(parent / REPORT, (folder / REPORT).read_text(encoding="utf-8"))
    for note in notes:
        console.result(f"note: {note}")
    for path in outputs.values():
        console.result(f"{path}  {disk.size(path.stat().st_size)}")
    output = next(iter(outputs.values()))
    system = ["-sys", prompt] if prompt else []
    console.result(f"  {shlex.join(['llama-cli', '-m', str(output), *system])}")
    if options.modelfile:
        name = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.") or "model"
        console.result(f"  ollama create {name} -f {shlex.quote(str(modelfile_path(output)))}")
    return tuple(outputs.values())
