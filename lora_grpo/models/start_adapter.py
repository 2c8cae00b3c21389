"""`--lora.from`: the adapter that a run starts from, read without importing torch.

A run keeps a copy in its `start` folder, so that it can be resumed and evaluated when the original is gone.
"""

import os
import shutil
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.errors import UserError, first_line, suggestion
from lora_grpo.files import atomic, file_tensors, unquantized
from lora_grpo.flags import flag
from lora_grpo.models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SavedAdapter, read_adapter
from lora_grpo.models.base_model import eos_token_ids
from lora_grpo.models.model_files import TOKENIZER_FILES, chat_templates, source, weights_fingerprint
from lora_grpo.models.target import run_of
from lora_grpo.prompts import chat, template_variables
from lora_grpo.runs import Run, read_record


def with_start(config: RunConfig, given: Collection[str], *, resumed: bool) -> RunConfig:
    """Return a configuration with the settings of the adapter that the run starts from, if any.

    Args:
        given: the names of the settings in `lora` that the command line gives.
        resumed: whether the output folder contains a run that continues.
    """
    folder = start_folder(config, resumed=resumed)
    for name, value in (("--lora.from", folder and config.lora.from_), ("--model.name", config.model.name)):
        path = Path(value or "").expanduser().resolve()
        if value and not resumed and path.exists() and path.is_relative_to(config.folder.resolve()):
            raise UserError(f"{name} {value} is inside --output-dir {config.folder}; pass another folder")
    if folder is None:
        return config
    adapter = read_adapter(folder)
    settings = _lora_settings(adapter)
    asked = vars(config.lora) | {"targets": tuple(sorted(config.lora.targets))}
    for name, value in settings.items():
        if name in given and asked[name] != value:
            raise UserError(
                f"{flag(f'lora.{name}')} is {asked[name]}, but the adapter in {folder} has {value}; leave the flag out"
            )
    return replace(config, {"lora": settings, "model": {"revision": _check_base(config, adapter)}})


def start_folder(config: RunConfig, *, resumed: bool = False) -> Path | None:
    """Return the folder of the adapter that a run starts from, or None for a new adapter. See `with_start`."""
    name = config.lora.from_
    if name is None:
        return None
    kept = config.folder / "start"
    if resumed and kept.is_dir():
        return kept
    folder = Path(name).expanduser()
    if (folder / "run.json").is_file():
        folder = folder / "adapter"
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / file).is_file():
            raise UserError(
                f"--lora.from {name}: {folder / file} does not exist; pass the folder of an adapter, or of a run that "
                "has one (pickled weights are not loaded)"
            )
    return folder


def keep_start(run: Run, origin: Path | None) -> None:
    """Copy the adapter that a run starts from into its folder, and record where it came from."""
    kept = run.folder / "start"
    if origin and origin != kept and distributed.is_main():
        first = run_of(origin)
        relative = first and os.path.relpath(first.resolve(), run.folder.resolve())
        run.update(start={"name": (first or origin).resolve().name, "run": relative})
        with atomic.new_folder(kept) as folder:
            for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, *TOKENIZER_FILES):
                if (origin / name).is_file():
                    shutil.copyfile(origin / name, folder / name)
    distributed.barrier()


def prepare_tokenizer(tokenizer: Any, config: RunConfig, start: Path | None, *, quiet: bool = False) -> dict[str, Any]:
    """Set the chat template: that of the adapter that the run starts from, else `model.chat_template`, else the base's.

    Returns the variables that are set in it. See `template_variables.set_variables`.

    Raises:
        UserError: `model.chat_template` is not that of the adapter, or does not fit the tokenizer.
    """
    if start:
        tokenizer.chat_template = chat_templates(start).get("default", tokenizer.chat_template)
    if config.model.chat_template:
        _set_template(tokenizer, config.model, start)
    given = template_variables.parse_kwargs(config.model.chat_template_kwargs)
    return template_variables.set_variables(tokenizer, given, config.sampling.max_completion_tokens, quiet=quiet)


def _set_template(tokenizer: Any, model: ModelConfig, start: Path | None) -> None:
    """Set `model.chat_template`, or check that the adapter `start` was trained with it."""
    name, given = str(model.chat_template), f"--model.chat-template {model.chat_template}"
    folder = Path(str(find_spec("trl").origin)).with_name("chat_templates")  # type: ignore[union-attr]
    known = {path.stem: path for path in folder.glob("*.jinja")}
    try:
        template = known.get(name, Path(name).expanduser()).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        similar = suggestion(name, known, otherwise="expected a Jinja file, or a name such as qwen2_5")
        raise UserError(f"{given} cannot be read ({first_line(error)}); {similar}") from None
    if start:
        if template_variables.without_variables(tokenizer.chat_template or "") != template:
            raise UserError(f"{given} is not the template of the adapter in {start}; leave the flag out")
        return
    tokenizer.chat_template = template
    end_ids = eos_token_ids(model, tokenizer, model.name)
    # An embedding may have rows without a token.
    ends = [tokenizer.convert_ids_to_tokens(token_id) or f"token {token_id}" for token_id in end_ids]
    if (end := chat.end_of_turn(tokenizer)) not in ends:
        raise UserError(
            f"{given} ends an answer with {end or 'none of the special tokens of the model'}, and completions of "
            f"{model.name} end with {' or '.join(ends)}; pass a template for this model"
        )


def _lora_settings(adapter: SavedAdapter) -> dict[str, Any]:
    """Return the settings `lora` of an adapter, or raise a UserError if it cannot be trained further."""
    problem = (
        "which cannot be trained here; merge the adapter into its base and pass the merged model with --model.name"
    )
    adapter.check({"use_dora", "exclude_modules"}, problem)
    targets = ["all-linear"] if adapter.target_modules == "all-linear" else adapter.target_modules
    path = adapter.folder / ADAPTER_CONFIG
    if not isinstance(targets, list) or adapter.lora_alpha < 1 or adapter.lora_alpha != int(adapter.lora_alpha):
        raise UserError(
            f"{path} has target_modules {targets!r} and lora_alpha {adapter.lora_alpha}; expected names and a "
            "whole number of at least 1"
        )
    weights = adapter.folder / ADAPTER_WEIGHTS
    unquantized(file_tensors(weights), weights, "pass another adapter")  # raises UserError for a truncated file too
    return {
        "rank": adapter.r,
        "alpha": int(adapter.lora_alpha),
        "targets": tuple(sorted(targets)),
        "rslora": adapter.use_rslora,
        "dora": adapter.use_dora,
    }


def _check_base(config: RunConfig, adapter: SavedAdapter) -> str | None:
    """Check that an adapter was trained on the base of a run, and return the commit of the base to use."""
    name, folder, run = config.model.name, adapter.folder, run_of(adapter.folder)
    record = read_record(run) if run else None
    policy = record["policy"] if record else {}
    trained = record["config"]["model"]["name"] if record else adapter.base_model_name_or_path
    if not trained:
        raise UserError(f"{folder / ADAPTER_CONFIG} names no base; set base_model_name_or_path to {name}")
    here, there = Path(source(name)), Path(source(trained))
    if here.is_dir() and (known := policy.get("fingerprint")):
        is_same = weights_fingerprint(here) == known
    else:
        is_same = here == there or (there.is_dir() and here.resolve() == there.resolve())
    if not is_same:
        raise UserError(
            f"--model.name is {name}, but the adapter in {folder} was trained on {trained}, another model or other "
            f"weights; pass --model.name {trained}"
        )
    commit, revision = policy.get("revision"), config.model.revision
    if commit and revision not in (None, commit):
        raise UserError(
            f"--model.revision is {revision}, but the adapter in {folder} was trained on {commit}; leave the flag out"
        )
    return commit or revision
