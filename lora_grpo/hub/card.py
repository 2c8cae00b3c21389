"""Render the model card: front matter for the Hub, and the text of card.md.jinja.

The first screen of the page describes the model, its results, and its usage. The rest is folded.

The card includes only measured values. The Jinja environment escapes every value and reduces paths to their last part,
so a name from a file cannot end the front matter, break a table, or start a heading. Prompts, questions and answers are
only in fenced blocks and string literals, where neither Markdown nor HTML is rendered.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lora_grpo.config import UNUSED_BY_SFT
from lora_grpo.evaluation import Report
from lora_grpo.files import markdown, markdown_table
from lora_grpo.hub.facts import Facts, own_dataset
from lora_grpo.hub.files import CARD_MARK, UploadFile, without_paths
from lora_grpo.models import model_files
from lora_grpo.prompts import chat
from lora_grpo.runs import flatten, system_prompt
from lora_grpo.tasks import CODE_TASKS

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_LIBRARIES = {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}
_SETTINGS = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora"),
    *("rewards", "train.prompts_per_step", "sampling.num_generations", "sampling.max_completion_tokens"),
    *("sampling.temperature", "train.learning_rate", "train.lr_scheduler", "train.warmup_steps", "train.optimizer"),
    *("train.beta", "train.max_grad_norm", "grpo"),
)
"""Settings of adapter_config.json, and flags of run.json, that a card lists."""
_TOOL_PARSERS = {"<function=": "qwen3_coder", "<tool_call>": "hermes", "<|python_tag|>": "llama3_json"}
"""vLLM's parsers for tool calls, by a text that a chat template contains."""


def write(repo_id: str, facts: Facts, files: Sequence[UploadFile]) -> str:
    """Return the README.md of a repository that also has `files`."""
    from jinja2 import ChainableUndefined, Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # macros return Markup, which `_printed` does not escape again
        finalize=_printed,
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "code": lambda value: Markup(f"`{_plain(value)}`"),  # Markdown does not support escapes in backticks
        "fenced": _fenced,
        "nats": lambda value: f"{Decimal(f'{value:.2g}'):f}",  # two significant digits, without an exponent
        "percent": lambda value: f"{100 * value:.1f}",
        "quoted": _quoted,
        "shell": lambda value: Markup(shlex.quote(value)),
    }
    record = facts.record
    config, data = record.get("config", {}), record.get("data", {})
    names = [file.name for file in files]
    template = next((file.read() for file in files if file.name == "chat_template.jinja"), b"").decode(errors="replace")
    chat_variables = {name: value for name, value in chat.variables(template).items() if name in template}
    # The commands run the smallest file that was evaluated, or else the first. Ollama chooses a file by its type.
    # Source: https://huggingface.co/docs/hub/ollama
    evaluated = facts.ggufs.evaluations if facts.ggufs else {}
    gguf = next(reversed(evaluated), next((name for name in names if name.endswith(".gguf")), ""))
    gguf_type = re.search(r"[.-](I?Q[0-9]\w*|B?F16|F32)\.gguf$", gguf, re.IGNORECASE | re.ASCII)
    values, is_sft = {**facts.adapter, **flatten(config)}, config.get("method") == "sft"
    settings = [name for name in _SETTINGS if not (is_sft and name in UNUSED_BY_SFT)]
    is_code = data.get("task") in CODE_TASKS
    model_config = next((file.read() for file in files if file.name == "config.json"), b"")
    is_multimodal = b'"text_config"' in model_config or isinstance(facts.adapter.get("exclude_modules"), str)
    text = environment.get_template("card.md.jinja").render(
        table=_table,
        facts=facts,
        base=facts.base,
        record=record,
        repo_id=repo_id,
        name=repo_id.split("/")[-1],
        names=names,
        auto_class="AutoModelForImageTextToText" if is_multimodal else "AutoModelForCausalLM",
        steps=facts.best.get("step") or record.get("trained_steps"),
        is_sft=is_sft,
        question="Write a function is_even(n) that tells whether n is even." if is_code else "What is 12 times 7?",
        generation=facts.generation,
        max_new_tokens=config.get("sampling", {}).get("max_completion_tokens") or 256,
        settings=[(name, values[name]) for name in settings if values.get(name) not in (None, False, [])],
        data=[*_data(data)],
        system_prompt=system_prompt(record),
        has_chat=template and "tokenizer.json" in names,
        chat_variables={
            name: _quoted(value) if isinstance(value, str) else value for name, value in chat_variables.items()
        },
        chat_variables_json=json.dumps(chat_variables),
        tools=data.get("tools") or [],
        tool_parser=next((parser for mark, parser in _TOOL_PARSERS.items() if mark in template), "PARSER"),
        gguf=gguf,
        gguf_type=gguf_type and gguf_type[1].upper(),
    )
    body = re.sub(r"\n{3,}", "\n\n", text).strip()
    license_entries = dict(facts.base.license)
    link = license_entries.get("license_link", "")
    if link and "://" not in link and link not in names:  # a file of the base's folder that is not uploaded
        del license_entries["license_link"]
    return f"---\n{_front_matter(repo_id, facts, license_entries)}\n---\n\n{body}\n\n{CARD_MARK}\n"


def _front_matter(repo_id: str, facts: Facts, license_entries: Mapping[str, Any]) -> str:
    from huggingface_hub import ModelCardData

    base, record, data = facts.base, facts.record, facts.record.get("data", {})
    method = "sft" if record.get("config", {}).get("method") == "sft" else "grpo"
    tags = [method, "lora", "trl", "lora_grpo", data.get("task")] if record else []
    dataset = own_dataset(data.get("task"), data.get("train", {}).get("source"))
    reports = [(each.report, "") for each in facts.evaluations if each.of_upload]
    reports += [(report, file) for file, report in facts.ggufs.evaluations.items()] if facts.ggufs else []
    results: dict[tuple[str, str | None], EvalResult] = {}
    for result in (result for report, file in reports for result in _results(report, file)):
        results.setdefault((result.dataset_name, result.metric_name), result)  # an evaluation may have been repeated
    # A merged model is a finetune. `quantized` would mean that a GGUF file contains the base itself.
    relation = "adapter" if facts.kind == "adapter" else "finetune"
    return str(
        ModelCardData(
            base_model=base.hub_id,
            base_model_relation=relation if base.hub_id else None,
            library_name=_LIBRARIES[facts.kind],
            language="en" if dataset is not None else None,  # the rows of all built-in tasks are English
            **license_entries,
            pipeline_tag="text-generation",
            tags=[_plain(tag) for tag in tags or ["lora"]],
            datasets=[dataset] if dataset else None,
            model_name=repo_id.split("/")[-1] if results else None,
            eval_results=[*results.values()] or None,
        ).to_yaml()
    )


def _results(report: Report, file: str = "") -> Iterator[EvalResult]:
    """Yield a result for each metric of an evaluation of the model, or of one of its files."""
    from huggingface_hub import EvalResult

    protocol, sampling = report.protocol, report.protocol.sampling
    assert sampling is not None
    for name, score in report.evaluated.scores.items():
        metric = "pass@1" if name == "greedy" else name
        how = "greedy"
        if name != "greedy" and sampling.temperature:
            how = f"{sampling.num_samples} samples at temperature {sampling.temperature:g}"
            how += f" and top-p {sampling.top_p:g}" if sampling.top_p < 1 else ""
        how += f", {sampling.few_shot}-shot" if sampling.few_shot else ""
        yield EvalResult(
            task_type="text-generation",
            dataset_type=own_dataset(protocol.task, protocol.data_source) or _plain(protocol.task),
            dataset_name=_plain(protocol.task),
            metric_type=metric,
            metric_name=", ".join([metric, how, f"{protocol.rows} rows", *([_plain(file)] if file else [])]),
            metric_value=round(100 * score, 2),
        )


def _data(data: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the split, source, number of rows, and digest of a run's data."""
    for split, task in (("train", data.get("task")), ("eval", data.get("eval_task"))):
        if rows := data.get(split):
            source = rows.get("source")
            shown = own_dataset(task, source) or (model_files.last_part(source) if source else task)
            yield split, shown, rows.get("rows"), rows.get("sha256")


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    cells = ([*map(_text, row)] for row in rows)
    return Markup("\n".join(markdown_table(headings, cells, left=len(headings))).rstrip("\n"))


def _plain(text: object) -> str:
    """Replace all characters except letters, digits, dots, dashes, and underscores, as required in a tag."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(text)).strip("-") or "unnamed"


def _printed(value: Any) -> Markup:
    return value if isinstance(value, Markup) else Markup(markdown(_text(value)))


def _text(value: Any) -> str:
    """Return a value without the path of a file or folder on this machine."""
    value = without_paths(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _quoted(text: str) -> Markup:
    """Return a string literal in Python, on one line and without invisible characters."""
    literal = json.dumps(text, ensure_ascii=False)
    return Markup("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in literal))


def _fenced(text: str) -> Markup:
    lines = ("".join(c if c.isprintable() or c == "\t" else " " for c in line) for line in text.split("\n"))
    text = "\n".join(lines)
    fence = "`" * max(3, *(1 + len(run) for run in re.findall("`+", text)), 0)
    return Markup(f"{fence}\n{text}\n{fence}")
