"""`--lora.from`: the adapter that a run starts from, read without importing torch.

A run keeps a copy in its `start` folder, so that it can be resumed and evaluated when the original is gone.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import RunConfig, flag, replace
from lora_grpo.errors import UserError
from lora_grpo.files import adapter_tensors, atomic, json_files
from lora_grpo.models import base_model
from lora_grpo.models.target import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_lora_config, run_of
from lora_grpo.runs import Run, read_record
from lora_grpo.tasks import chat

_UNSET: tuple[Any, ...] = (None, False, "none", [], {})
_SETTINGS = {"r", "lora_alpha", "target_modules", "use_rslora", "use_dora"}
"""Fields of adapter_config.json that the run's settings `lora` contain."""
_NO_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode"),
    *("init_lora_weights", "loftq_config", "lora_dropout", "megatron_core", "peft_type", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "task_type"),
}
"""Fields that are checked separately, or that do not change a trained adapter. All others must be unset."""


def with_start(config: RunConfig, given: Collection[str], *, resumed: bool) -> RunConfig:
    """Return a configuration with the settings of the adapter that the run starts from, if any.

    Args:
        given: the flags of the command line.
        resumed: whether the output folder holds a run that continues.

    Raises:
        UserError: the adapter is missing, damaged, or of another base; it has features that this kit does not train;
            or a flag contradicts it.
    """
    folder = start_folder(config, resumed=resumed)
    if folder is None:
        return config
    if not resumed and folder.resolve().is_relative_to(config.folder.resolve()):
        raise UserError(f"--lora.from {config.lora.from_} is inside --output-dir {config.folder}; pass another folder")
    adapter = _read_adapter(folder)
    flags = {argument.partition("=")[0].replace("--lora.no-", "--lora.") for argument in given}
    for name, value in adapter.items():
        asked = getattr(config.lora, name)
        same = set(asked) == set(value) if name == "targets" else asked == value
        if flag(f"lora.{name}") in flags and not same:
            raise UserError(
                f"{flag(f'lora.{name}')} is {_shown(asked)}, but the adapter in {folder} has {_shown(value)}; leave "
                "the flag out"
            )
    revision = _check_base(config, folder)
    return replace(config, {"lora": adapter, "model": {"revision": revision}})


def start_folder(config: RunConfig, *, resumed: bool = False) -> Path | None:
    """Return the folder of the adapter that a run starts from, or None for a new adapter. See `with_start`."""
    name = config.lora.from_
    if name is None:
        return None
    kept = config.folder / "start"
    if resumed and kept.is_dir():
        return kept
    folder = Path(name).expanduser()
    problem, fix = "", "pass the folder of a run or of a PEFT adapter"
    if not name or not folder.is_dir():
        problem = "is not a folder"
    elif (folder / "run.json").is_file():
        folder = folder / "adapter"
        if not (folder / ADAPTER_WEIGHTS).is_file():
            problem, fix = "is a run without an adapter", "finish it with --resume, or pass one of its checkpoints"
    elif not (folder / ADAPTER_CONFIG).is_file():
        problem = f"has neither run.json nor {ADAPTER_CONFIG}"
        if (folder / "config.json").is_file():
            problem, fix = "is a full model", f"pass it with --model.name {name}"
    elif not (folder / ADAPTER_WEIGHTS).is_file():
        problem, fix = f"has no {ADAPTER_WEIGHTS}", "save the adapter as safetensors; pickled weights are not loaded"
    if problem:
        raise UserError(f"--lora.from {name} {problem}; {fix}")
    return folder


def keep_start(run: Run, source: Path | None) -> None:
    """Copy the adapter that a run starts from into its folder, and record where it came from."""
    kept = run.folder / "start"
    if source and source != kept and distributed.is_main():
        first = run_of(source)
        relative = first and os.path.relpath(first.resolve(), run.folder.resolve())
        run.update(start={"name": (first or source).resolve().name, "run": relative})
        with atomic.new_folder(kept) as folder:
            for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, *base_model.TOKENIZER_FILES):
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)
    distributed.barrier()


def prepare_tokenizer(tokenizer: Any, config: RunConfig, start: Path | None) -> dict[str, Any]:
    """Set the chat template: that of the adapter that the run starts from, if it has one, else that of the base.

    Returns the variables that are set in it. See `chat.set_variables`.
    """
    if start and (start / "chat_template.jinja").is_file():
        tokenizer.chat_template = (start / "chat_template.jinja").read_text(encoding="utf-8")
    elif start and (start / "tokenizer_config.json").is_file():  # saved by transformers 4
        saved = json_files.read_object(start / "tokenizer_config.json").get("chat_template")
        tokenizer.chat_template = saved or tokenizer.chat_template
    given = chat.parse_kwargs(config.model.chat_template_kwargs)
    return chat.set_variables(tokenizer, given, config.sampling.max_completion_tokens)


def _read_adapter(folder: Path) -> dict[str, Any]:
    """Return the settings `lora` of a saved adapter, or raise a UserError if it cannot be trained further."""
    path, values = folder / ADAPTER_CONFIG, read_lora_config(folder, "trained")
    unsupported = sorted(
        name for name, value in values.items() if name not in _SETTINGS | _NO_EFFECT and value not in _UNSET
    )
    if unsupported:
        raise UserError(
            f"{path} sets {', '.join(unsupported)}, which cannot be trained here; merge the adapter into its base and "
            "pass the merged model with --model.name"
        )
    targets = values.get("target_modules")
    targets = [targets] if targets == "all-linear" else targets
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) and name for name in targets):
        raise UserError(f"{path} has target_modules {targets!r}; expected a list of module names")
    rank = _integer(values, "r", path)
    ranks = {t.shape[0] for name, t in adapter_tensors(folder / ADAPTER_WEIGHTS).items() if "lora_A.weight" in name}
    if ranks != {rank}:
        raise UserError(f"{folder / ADAPTER_WEIGHTS} has ranks {sorted(ranks)}, but {path.name} has r={rank}")
    return {
        "rank": rank,
        "alpha": _integer(values, "lora_alpha", path),
        "targets": tuple(sorted(targets)),
        "rslora": bool(values.get("use_rslora")),
        "dora": bool(values.get("use_dora")),
    }


def _integer(values: Mapping[str, Any], name: str, path: Path) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1 or value != int(value):
        raise UserError(f"{path} has {name} {value!r}; expected a whole number of at least 1")
    return int(value)


def _check_base(config: RunConfig, folder: Path) -> str | None:
    """Check that an adapter was trained on the base of a run, and return the commit of the base to use.

    Raises:
        UserError: it was trained on another base, or on another commit of it.
    """
    name, run = config.model.name, run_of(folder)
    here = Path(base_model.source(name))
    if run is None:
        trained = json_files.read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if not isinstance(trained, str) or not trained:
            raise UserError(f"{folder / ADAPTER_CONFIG} names no base; set base_model_name_or_path to {name}")
        if not _same_name(trained, name):
            raise UserError(
                f"--model.name is {name}, but the adapter in {folder} was trained on {trained}; pass --model.name "
                f"{trained}, or correct base_model_name_or_path in its {ADAPTER_CONFIG} if the base has moved"
            )
        return config.model.revision
    record = read_record(run)
    trained, policy = record["config"]["model"]["name"], record["policy"]
    known, commit, revision = policy.get("fingerprint"), policy.get("revision"), config.model.revision
    if known and here.is_dir():
        if base_model.weights_fingerprint(here) != known:
            raise UserError(
                f"--model.name is {name}, but the adapter in {folder} was trained on {trained}, whose weights differ; "
                f"pass --model.name {trained} with the weights of that run"
            )
    elif not _same_name(trained, name):
        raise UserError(
            f"--model.name is {name}, but the adapter in {folder} was trained on {trained}; pass --model.name {trained}"
        )
    bits = record["config"]["model"].get("bits", config.model.bits)
    if bits != config.model.bits:
        print(
            f"note: the adapter in {folder} was trained on the base in {bits} bits, and this run uses it in "
            f"{config.model.bits}; --model.bits {bits} uses the same",
            file=sys.stderr,
        )
    if commit and revision not in (None, commit):
        raise UserError(
            f"--model.revision is {revision}, but the adapter in {folder} was trained on {commit}; leave the flag out"
        )
    return commit or revision


def _same_name(first: str, second: str) -> bool:
    """Return whether two names are the same Hub id or lead to the same folder."""
    first, second = base_model.source(first), base_model.source(second)
    return first == second or (Path(first).is_dir() and Path(first).resolve() == Path(second).resolve())


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
