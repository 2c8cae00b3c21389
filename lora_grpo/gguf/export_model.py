"""`lora-grpo export-gguf`: its flags, where the files go, and what is printed."""

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
from lora_grpo.merging import MADE_FROM, REPORT, merged_model, read_report, source_adapter
from lora_grpo.models import ADAPTER_CONFIG, choose_adapter, model_files
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
    """Folder of the files; default: RUN/gguf or RUN/best-gguf, or MERGED-gguf for another model."""


def export(options: ExportOptions) -> tuple[Path, ...]:
    """Export a run or a model, and return the path of each file. Tells how to use them."""
    source = choose_adapter(str(options.source), options.what)
    source_folder = model_files.existing_folder(source, f"a run, or a model from {command('merge')}")
    if options.output_dir and options.output_dir.suffix == ".gguf":
        raise UserError(f"--output-dir {options.output_dir} is the name of a file; pass a folder")
    folder = merged_model(source_folder, read_model).resolve()

    # Write the files.
    output_folder, name = _default_output(folder)
    if options.output_dir:
        output_folder = options.output_dir.expanduser()
    outputs: dict[str, Path] = {
        file_type: output_folder / f"{name}.{file_type.upper()}.gguf" for file_type in options.type
    }
    prompt = _system_prompt(folder)
    with lock.holding(output_folder):
        notes = write_gguf(folder, outputs, modelfile=options.modelfile, system_prompt=prompt)
        merge_report = folder / REPORT
        if merge_report.is_file():  # for the card
            atomic.write_text(output_folder / REPORT, merge_report.read_text(encoding="utf-8"))

    # Say how to use them.
    for note in notes:
        console.result(f"note: {note}")
    for path in outputs.values():
        console.result(f"{path}  {disk.size(path.stat().st_size)}")
    first_output = next(iter(outputs.values()))
    llama_cli = ["llama-cli", "-m", str(first_output)]
    if prompt:
        llama_cli += ["-sys", prompt]
    console.result(f"  {shlex.join(llama_cli)}")
    if options.modelfile:
        ollama_name = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.") or "model"
        console.result(f"  ollama create {ollama_name} -f {shlex.quote(str(modelfile_path(first_output)))}")
    adapter = _adapter(source_folder, folder)
    if adapter is not None:
        console.result(f"  {command('verify', adapter, '--against', *outputs.values())}")
    return tuple(outputs.values())


def _adapter(source: Path, folder: Path) -> Path | None:
    """Return the adapter of a merged model, or None if it is not known."""
    adapter = source_adapter(folder)
    if adapter is None and (source / ADAPTER_CONFIG).is_file():
        return source
    return adapter


def _default_output(folder: Path) -> tuple[Path, str]:
    """Return the folder of the GGUF files of a model, and the model's name in their names."""
    run = folder.parent
    output = folder.with_name(f"{folder.name}-gguf")
    if not (run / "run.json").is_file():
        return output, folder.name
    if folder.name not in MADE_FROM:
        return output, f"{run.name}-{folder.name}"
    adapter = MADE_FROM[folder.name]
    name = run.name if adapter == "adapter" else f"{run.name}-{adapter}"
    return folder.with_name(folder.name.removesuffix("merged") + "gguf"), name


def _system_prompt(folder: Path) -> str | None:
    """Return the system prompt of the run that trained a model; None if it had none or is unknown."""
    for parent in folder.parents[:2]:  # a checkpoint is two levels below its run
        if (parent / "run.json").is_file():
            return system_prompt(read_record(parent))
    report = read_report(folder)
    return report.system_prompt if report else None
