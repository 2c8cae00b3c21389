"""Render the model card from card.md.jinja.

The card includes only measured values. The Jinja environment escapes every value, so a name from a file cannot end the
front matter, break a table, or start a heading.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.hub.evaluations import dataset_of
from lora_grpo.hub.facts import Facts
from lora_grpo.hub.files import CARD_MARK, UploadFile
from lora_grpo.hub.metadata import front_matter, plain
from lora_grpo.runs import flat
from lora_grpo.tasks import CODE_TASKS, chat

_SPECIAL = re.compile(r"([\\`*{}\[\]<>#|~$&!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_QUANTIZATION = re.compile(r"[-._]((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4))\.gguf$", re.IGNORECASE)
_LORA = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora")
_SETTINGS = (
    *("rewards", "train.prompts_per_step", "sampling.num_generations", "sampling.max_completion_tokens"),
    *("sampling.temperature", "train.learning_rate", "train.lr_scheduler", "train.warmup_steps", "train.optimizer"),
    *("train.beta", "train.max_grad_norm", "grpo"),
)
"""Settings of run.json that a card lists, by flag."""


def write(repo_id: str, facts: Facts, files: Sequence[UploadFile]) -> str:
    """Return the README.md of a repository.

    Args:
        repo_id: the repository that the card's examples load.
        facts: facts about the model and its run.
        files: the other files to upload.
    """
    from jinja2 import ChainableUndefined, Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # macros return Markup, which `_printed` does not escape again
        finalize=_printed,
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": _code, "quoted": _quoted, "shell": _shell}
    record = facts.record or {}
    config = record.get("config", {})
    names = [file.name for file in files]
    ggufs = [name for name in names if name.endswith(".gguf")]
    text = environment.get_template("card.md.jinja").render(
        repo_id=repo_id,
        name=repo_id.split("/")[-1],
        facts=facts,
        base=facts.base,
        record=record,
        config=config,
        lora=_rows(_LORA, facts.adapter or {}),
        settings=_rows(_SETTINGS, flat(config)),
        data=_data(record.get("data", {})),
        system_prompt=chat.SYSTEM_PROMPTS.get(str(config.get("data", {}).get("prompt_style"))),
        is_code=record.get("data", {}).get("task") in CODE_TASKS,
        has_chat="chat_template.jinja" in names and "tokenizer.json" in names,
        ggufs=ggufs,
        quantizations=[found[1] for found in map(_QUANTIZATION.search, ggufs) if found],
        modelfiles=[name for name in names if name.endswith("Modelfile")],
    )
    body = re.sub(r"\n{3,}", "\n\n", text).strip()
    return f"---\n{front_matter(repo_id, facts)}\n---\n\n{body}\n\n{CARD_MARK}\n"


def escape(value: object) -> str:
    """Return a value as Markdown that renders as exactly this text, on one line or in a table cell."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return re.sub(r"^(\d*)([-+=.)])(?=\s|$)", r"\1\\\2", _SPECIAL.sub(r"\\\1", text))


def _rows(names: Sequence[str], values: Any) -> list[tuple[str, Any]]:
    return [(name, values[name]) for name in names if values.get(name) not in (None, False, [])]


def _data(data: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the split, source, number of rows, and digest of a run's data."""
    for split, task in (("train", data.get("task")), ("eval", data.get("eval_task"))):
        if rows := data.get(split):
            source = rows.get("source")
            shown = dataset_of(task, source) or (Path(source).name if source else task)
            yield split, shown, rows.get("rows"), _code(rows.get("sha256"))


def _printed(value: Any) -> Any:
    from markupsafe import Markup

    if isinstance(value, Markup):
        return value
    if isinstance(value, list):
        return Markup(", ".join(map(escape, value)))
    return Markup(f"{value:.4g}" if isinstance(value, float) else escape(value))


def _code(value: object) -> Any:
    """Filter for text in backticks, where Markdown does not support escapes."""
    from markupsafe import Markup

    return Markup(f"`{plain(value)}`")


def _quoted(value: object) -> Any:
    """Filter for a string literal in Python code."""
    from markupsafe import Markup

    return Markup(json.dumps(value, ensure_ascii=False))


def _shell(value: str) -> Any:
    """Filter for an argument of a shell command."""
    from markupsafe import Markup

    return Markup(shlex.quote(value))
