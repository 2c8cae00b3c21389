"""`--lora.from`: the adapter that a run starts from, read without importing torch.

A run keeps a copy in its `start` folder, so that it can be resumed and evaluated when the original is gone.
"""

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.errors import UserError, first_line, suggestion
from lora_grpo.files import atomic, file_tensors, unquantized
from lora_grpo.flags import flag
from lora_grpo.models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SavedAdapter, read_adapter
from lora_grpo.models.adapter_formats import (
    MLX_HUB,
    adapted_modules,
    holds_adapter,
    nested_adapter,
    origin_of,
    peft_folder,
    target_modules,
)
from lora_grpo.models.model_files import TOKENIZER_FILES, chat_templates, source, weights_fingerprint
from lora_grpo.models.stop_tokens import eos_token_ids
from lora_grpo.models.target import START, run_of
from lora_grpo.prompts import chat, template_variables
from lora_grpo.runs import Run, read_record

_TEMPLATE_FLAG = "--model.chat-template"


def with_start(config: RunConfig, requested: Collection[str], *, resumed: bool) -> RunConfig:
    """Return a configuration with the settings of the adapter that the run starts from, if any.

    Args:
        requested: the names of the settings in `lora` that the command line gives.
        resumed: whether the output folder contains a run that continues.
    """
    folder = start_folder(config, resumed=resumed)
    if not resumed:
        if config.lora.from_ is not None:
            check_outside("--lora.from", config.lora.from_, config.folder)
        check_outside("--model.name", config.model.name, config.folder)
    if folder is None:
        return config
    adapter = read_adapter(folder)
    adapter_settings = _lora_settings(adapter)
    run_settings = vars(config.lora) | {"targets": tuple(sorted(config.lora.targets))}  # as in `_lora_settings`
    for name, value in adapter_settings.items():
        if name in requested and run_settings[name] != value:
            raise UserError(
                f"{flag(f'lora.{name}')} is {run_settings[name]}, but the adapter in {folder} has {value}; leave the "
                "flag out"
            )
    _check_base(config, adapter)
    revision = _revision_of_base(config, adapter)
    return replace(config, {"lora": adapter_settings, "model": {"revision": revision}})


def check_outside(flag_name: str, value: str, output: Path) -> None:
    """Raise a UserError if a path is in the output folder, which a new run replaces. A Hub id is no path."""
    path = Path(value).expanduser().resolve()
    if path.exists() and path.is_relative_to(output.resolve()):
        raise UserError(f"{flag_name} {value} is inside --output-dir {output}; pass another folder")


def start_folder(config: RunConfig, *, resumed: bool = False) -> Path | None:
    """Return the folder of the adapter that a run starts from, or None for a new adapter. See `with_start`."""
    name = config.lora.from_
    if name is None:
        return None
    copy = config.folder / START
    if resumed and copy.is_dir():
        return copy
    return adapter_folder("--lora.from", name)


def adapter_folder(flag_name: str, name: str) -> Path:
    """Return the folder of an adapter, or of the one in a run, in PEFT's format. Raises UserError if there is none."""
    folder = Path(name).expanduser()
    if (folder / "run.json").is_file():
        folder = folder / "adapter"
    if not holds_adapter(folder):
        adapter = nested_adapter(folder)
        fix = f"pass {adapter or 'the folder of an adapter, or of a run that has one'}"
        raise UserError(f"{flag_name} {name}: {folder / ADAPTER_CONFIG} does not exist; {fix}")
    return peft_folder(folder)


def keep_start(run: Run, origin: Path | None) -> None:
    """Copy the adapter that a run starts from into its folder, and record where it came from."""
    copy = run.folder / START
    if origin and origin != copy:
        origin_run = run_of(origin)
        if origin_run is None:
            run.update(start={"name": origin.resolve().name, "run": None})
        else:
            relative = os.path.relpath(origin_run.resolve(), run.folder.resolve())
            run.update(start={"name": origin_run.resolve().name, "run": relative})
        with atomic.new_folder(copy) as folder:
            for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, *TOKENIZER_FILES):
                if (origin / name).is_file():
                    shutil.copyfile(origin / name, folder / name)


def prepare_tokenizer(tokenizer: Any, config: RunConfig, start: Path | None, *, quiet: bool = False) -> dict[str, Any]:
    """Set the chat template and its variables.

    The template is that of the adapter that the run starts from, if this adapter has one, and else the base's.
    `model.chat_template` replaces the base's. A run that starts from an adapter cannot change the template.

    Args:
        start: folder of the adapter that the run starts from, if any.
        quiet: whether to print nothing.

    Returns:
        The variables that are set in the template. See `template_variables.set_variables`.

    Raises:
        UserError: `model.chat_template` is not that of the adapter, or does not fit the tokenizer.
    """
    if start:
        tokenizer.chat_template = chat_templates(start).get("default", tokenizer.chat_template)
    name = config.model.chat_template
    if name:
        template = _read_template(name)
        if start is None:
            tokenizer.chat_template = template
            _check_end_of_answer(tokenizer, config.model)
        elif template != template_variables.without_variables(tokenizer.chat_template or ""):
            raise UserError(
                f"{_TEMPLATE_FLAG} {name} is not the template of the adapter in {start}; leave the flag out"
            )
    requested_variables = template_variables.parse_kwargs(config.model.chat_template_kwargs)
    return template_variables.set_variables(
        tokenizer, requested_variables, config.sampling.max_completion_tokens, quiet=quiet
    )


def _read_template(name: str) -> str:
    """Return the template of `model.chat_template`: the name of a template that TRL has, or a file."""
    trl_folder = Path(str(find_spec("trl").origin)).with_name("chat_templates")  # type: ignore[union-attr]
    trl_templates = {path.stem: path for path in trl_folder.glob("*.jinja")}
    path = trl_templates.get(name, Path(name).expanduser())
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        similar = suggestion(name, trl_templates, otherwise="expected a Jinja file, or a name such as qwen2_5")
        raise UserError(f"{_TEMPLATE_FLAG} {name} cannot be read ({first_line(error)}); {similar}") from None


def _check_end_of_answer(tokenizer: Any, model: ModelConfig) -> None:
    """Raise a UserError if the chat template does not end an answer with a token that ends the model's completions.

    With another token, completions would run to their maximum length.
    """
    ends = []
    for token_id in eos_token_ids(model, tokenizer, model.name):
        text = tokenizer.convert_ids_to_tokens(token_id)
        ends.append(text or f"token {token_id}")  # an embedding may have rows without a token
    template_end = chat.end_of_turn(tokenizer)
    if template_end not in ends:
        raise UserError(
            f"{_TEMPLATE_FLAG} {model.chat_template} ends an answer with "
            f"{template_end or 'none of the special tokens of the model'}, and completions of {model.name} end with "
            f"{' or '.join(ends)}; pass a template for this model"
        )


def _lora_settings(adapter: SavedAdapter) -> dict[str, Any]:
    """Return the settings `lora` of an adapter, or raise a UserError if it cannot be trained further."""
    problem = (
        "which cannot be trained here; merge the adapter into its base and pass the merged model with --model.name"
    )
    adapter.check({"use_dora", "exclude_modules"}, problem)
    targets = adapter.target_modules
    if targets == "all-linear":
        targets = ["all-linear"]
    elif isinstance(targets, str):  # a regular expression, as Unsloth writes it
        targets = target_modules(adapted_modules(adapter.folder))
    is_whole_alpha = adapter.lora_alpha >= 1 and adapter.lora_alpha == int(adapter.lora_alpha)
    if not isinstance(targets, list) or not is_whole_alpha:
        raise UserError(
            f"{adapter.folder / ADAPTER_CONFIG} has target_modules {targets!r} and lora_alpha {adapter.lora_alpha}; "
            "expected names and a whole number of at least 1"
        )
    if any(target.startswith("layers.") for target in targets):  # of mlx-lm
        raise UserError(f"{origin_of(adapter.folder)} adapts only the last layers, {problem}")
    weights = adapter.folder / ADAPTER_WEIGHTS
    unquantized(file_tensors(weights), weights, "pass another adapter")  # raises UserError for a truncated file too
    return {
        "rank": adapter.r,
        "alpha": int(adapter.lora_alpha),
        "targets": tuple(sorted(targets)),
        "rslora": adapter.use_rslora,
        "dora": adapter.use_dora,
    }


@dataclass(frozen=True)
class BaseOfAdapter:
    """The base that an adapter was trained on."""

    name: str
    """A folder or a Hub id."""
    revision: str | None
    """The commit, if it is known."""
    fingerprint: str | None
    """SHA-256 of its weights, if a run recorded it."""


def base_of_adapter(config: RunConfig, adapter: SavedAdapter) -> BaseOfAdapter:
    """Return the base of an adapter. Raises UserError if it is not known, or in the format of MLX.

    Args:
        config: of the run that reads the adapter, for the advice.
    """
    name = config.model.name
    folder = origin_of(adapter.folder)
    run = run_of(folder)
    fingerprint = None
    revision = adapter.revision
    trained_on = adapter.base_model_name_or_path
    if run:
        record = read_record(run)
        fingerprint = record["policy"].get("fingerprint")
        revision = record["policy"].get("revision")
        trained_on = record["config"]["model"]["name"]
    if trained_on and trained_on.startswith(MLX_HUB):
        raise UserError(
            f"the adapter in {folder} was trained on {trained_on}, a model in the format of MLX; if it was made from "
            f'{name}, write "model": "{name}" in {folder / ADAPTER_CONFIG}'
        )
    if not trained_on:
        raise UserError(f"{folder / ADAPTER_CONFIG} names no base; set base_model_name_or_path to {name}")
    return BaseOfAdapter(trained_on, revision, fingerprint)


def is_base_of_run(config: RunConfig, base: BaseOfAdapter) -> bool:
    """Return whether the base of an adapter is `model.name`.

    The weights decide if they are known, else the folders or Hub ids.
    """
    base_of_run = Path(source(config.model.name))
    folder = Path(source(base.name))  # that of a Hub id does not exist
    if base.fingerprint and base_of_run.is_dir():
        return weights_fingerprint(base_of_run) == base.fingerprint
    if folder.is_dir():
        return base_of_run.resolve() == folder.resolve()
    return base_of_run == folder


def _check_base(config: RunConfig, adapter: SavedAdapter) -> None:
    """Raise a UserError unless an adapter was trained on the base of a run."""
    base = base_of_adapter(config, adapter)
    if not is_base_of_run(config, base):
        raise UserError(
            f"--model.name is {config.model.name}, but the adapter in {origin_of(adapter.folder)} was trained on "
            f"{base.name}, another model or other weights; pass --model.name {base.name}"
        )


def _revision_of_base(config: RunConfig, adapter: SavedAdapter) -> str | None:
    """Return the commit of the base that an adapter was trained on, if its run recorded it, else `model.revision`."""
    run = run_of(adapter.folder)
    commit = read_record(run)["policy"].get("revision") if run else None
    revision = config.model.revision
    if commit and revision not in (None, commit):
        raise UserError(
            f"--model.revision is {revision}, but the adapter in {adapter.folder} was trained on {commit}; leave the "
            "flag out"
        )
    return commit or revision
