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

from lora_grpo.config import SELF, UNUSED_BY_SFT
from lora_grpo.evaluation import Report
from lora_grpo.files import markdown, markdown_table
from lora_grpo.hub.facts import Facts, evaluated_task, has_own_rows, measured_task, own_dataset, trained_task
from lora_grpo.hub.private_paths import without_paths
from lora_grpo.hub.uploads import CARD_MARK, KINDS, UploadFile
from lora_grpo.models import model_files
from lora_grpo.prompts import template_variables
from lora_grpo.runs import flatten, system_prompt
from lora_grpo.tasks import CODE_TASKS

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_SETTINGS = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora"),
    *("rewards", "train.prompts_per_step", "sampling.num_generations", "sampling.max_completion_tokens"),
    *("sampling.temperature", "train.learning_rate", "train.lr_scheduler", "train.warmup_steps", "train.optimizer"),
    *("train.beta", "train.max_grad_norm", "grpo"),
    *("teacher.loss", "teacher.weight", "teacher.reward_weight"),
)
"""Settings of adapter_config.json, and flags of run.json, that a card lists."""
_TOOL_PARSERS = {"<function=": "qwen3_coder", "<tool_call>": "hermes", "<|python_tag|>": "llama3_json"}
"""vLLM's parsers for tool calls, by a text that a chat template contains."""


def write(repo_id: str, facts: Facts, files: Sequence[UploadFile]) -> str:
    """Return the README.md of a repository that also has `files`."""
    record = facts.record
    config = record.get("config", {})
    data = record.get("data", {})
    is_sft = config.get("method") == "sft"
    names = [file.name for file in files]

    # The example code and commands.
    template = _content("chat_template.jinja", files).decode(errors="replace")
    chat_variables = {name: value for name, value in template_variables.variables(template).items() if name in template}
    chat_literals: dict[str, Any] = {}
    for name, value in chat_variables.items():
        chat_literals[name] = _quoted(value) if isinstance(value, str) else value
    has_text_config = b'"text_config"' in _content("config.json", files)
    # The adapter of a multimodal model names the parts that it excludes.
    is_multimodal = has_text_config or isinstance(facts.adapter.get("exclude_modules"), str)
    question = "What is 12 times 7?"
    if data.get("task") in CODE_TASKS:
        question = "Write a function is_even(n) that tells whether n is even."
    gguf = _gguf_to_run(facts, names)
    prompt = system_prompt(record)
    if not record and facts.merge:  # a merged model outside of its run
        prompt = facts.merge.system_prompt

    text = (
        _environment()
        .get_template("card.md.jinja")
        .render(
            table=_table,
            facts=facts,
            base=facts.base,
            record=record,
            teacher=facts.teacher,
            teacher_text=_teacher_text(facts),
            repo_id=repo_id,
            name=repo_id.split("/")[-1],
            names=names,
            auto_class="AutoModelForImageTextToText" if is_multimodal else "AutoModelForCausalLM",
            steps=facts.best.get("step") or record.get("trained_steps"),
            is_sft=is_sft,
            question=question,
            generation=facts.generation,
            max_new_tokens=config.get("sampling", {}).get("max_completion_tokens") or 256,
            settings=_settings(facts, is_sft=is_sft),
            data=list(_data(record)),
            system_prompt=prompt,
            has_chat=template != "" and "tokenizer.json" in names,
            chat_variables=chat_literals,
            chat_variables_json=json.dumps(chat_variables),
            tools=data.get("tools") or [],
            tool_parser=_tool_parser(template),
            gguf=gguf,
            ollama_name=ollama_name(repo_id, facts, names),
        )
    )
    body = re.sub(r"\n{3,}", "\n\n", text).strip()

    license_entries = dict(facts.base.license)
    link = license_entries.get("license_link", "")
    is_file = link != "" and "://" not in link  # in the base's folder
    if is_file and link not in names:
        del license_entries["license_link"]
    return f"---\n{_front_matter(repo_id, facts, license_entries)}\n---\n\n{body}\n\n{CARD_MARK}\n"


def _teacher_text(facts: Facts) -> Markup:
    """Return what the teacher of a run was, for a sentence; "" without one."""
    record = facts.record.get("teacher")
    if not record:
        return Markup("")
    name = Markup(f"`{_plain(record['name'])}`")
    if record["kind"] == "base":
        text = Markup("its base, without an adapter")
    elif record["name"] == SELF:
        text = Markup("the adapter that training started from")
    elif record["kind"] == "adapter":
        text = Markup(f"the adapter {name} on the same base")
    else:
        base = facts.teacher
        assert base is not None
        model = Markup(f"`{_plain(base.name)}`")
        if base.hub_id:
            model = Markup(f"[{_printed(base.hub_id)}](https://huggingface.co/{base.hub_id})")
        of_model = Markup(f"the adapter {name} of {model}") if record["has_adapter"] else model
        text = Markup(f"{of_model}, in {record['bits']} bits")
    if record["has_own_prompt"]:
        text += Markup(", which read more than this model did")
    return text


def _environment() -> Any:
    """Return the Jinja environment of card.md.jinja, which escapes every value."""
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
    return environment


def _content(name: str, files: Sequence[UploadFile]) -> bytes:
    """Return the content of an uploaded file; b"" if there is none."""
    for file in files:
        if file.name == name:
            return file.read()
    return b""


def _gguf_to_run(facts: Facts, names: Sequence[str]) -> str:
    """Return the GGUF file that the commands run: the smallest that was evaluated, else the first; "" without any."""
    if facts.ggufs and facts.ggufs.evaluations:
        return list(facts.ggufs.evaluations)[-1]  # the largest is first
    return next((name for name in names if name.endswith(".gguf")), "")


def ollama_name(repo_id: str, facts: Facts, names: Sequence[str]) -> str:
    """Return the name of the GGUF file that the commands run, as Ollama gets it from the Hub: hf.co/YOU/NAME:Q8_0.

    The type chooses the file; it is left out if the name of the file has none. Source:
    https://huggingface.co/docs/hub/ollama
    """
    file = _gguf_to_run(facts, names)
    match = re.search(r"[.-](I?Q[0-9]\w*|B?F16|F32)\.gguf$", file, re.IGNORECASE | re.ASCII)
    return f"hf.co/{repo_id}:{match[1].upper()}" if match else f"hf.co/{repo_id}"


def _tool_parser(template: str) -> str:
    """Return vLLM's parser for the tool calls of a chat template, or a placeholder for one that is not known here."""
    for mark, parser in _TOOL_PARSERS.items():
        if mark in template:
            return parser
    return "PARSER"


def _settings(facts: Facts, *, is_sft: bool) -> list[tuple[str, Any]]:
    """Return the names and values of the settings that the card lists."""
    values = {**facts.adapter, **flatten(facts.record.get("config", {}))}
    settings = []
    for name in _SETTINGS:
        is_unused = is_sft and name in UNUSED_BY_SFT
        is_unused |= name.startswith("teacher.") and not values.get("teacher.name")
        if not is_unused and values.get(name) not in (None, False, []):
            settings.append((name, values[name]))
    return settings


def _front_matter(repo_id: str, facts: Facts, license_entries: Mapping[str, Any]) -> str:
    """Return the YAML at the top of the card, which the Hub reads."""
    from huggingface_hub import ModelCardData

    base = facts.base
    record = facts.record
    data = record.get("data", {})
    task = trained_task(record)
    source = data.get("train", {}).get("source")
    tags = ["lora"]
    if record:
        method = "sft" if record.get("config", {}).get("method") == "sft" else "grpo"
        tags = [method, "lora", "trl", "lora_grpo", data.get("task")]
    relation = None
    if base.hub_id and facts.kind == "adapter":
        relation = "adapter"
    elif base.hub_id:  # `quantized` would mean that a GGUF file contains the base itself
        relation = "finetune"
    dataset = own_dataset(task, source)
    results = _all_results(facts)
    return str(
        ModelCardData(
            base_model=base.hub_id,
            base_model_relation=relation,
            library_name=KINDS[facts.kind].library,
            language="en" if has_own_rows(task, source) else None,
            **license_entries,
            pipeline_tag="text-generation",
            tags=[_plain(tag) for tag in tags],
            datasets=[dataset] if dataset else None,
            model_name=repo_id.split("/")[-1] if results else None,
            eval_results=results or None,
        ).to_yaml()
    )


def _all_results(facts: Facts) -> list[EvalResult]:
    """Return a result for each metric that was measured of the uploaded weights or files."""
    all_results: list[EvalResult] = []
    for evaluation in facts.evaluations:
        if evaluation.of_upload:
            all_results += _results(evaluation.report)
    if facts.ggufs:
        for file, report in facts.ggufs.evaluations.items():
            all_results += _results(report, file)

    first_results: dict[tuple[str, str | None], EvalResult] = {}
    for result in all_results:  # an evaluation may have been repeated
        first_results.setdefault((result.dataset_name, result.metric_name), result)
    return list(first_results.values())


def _results(report: Report, file: str = "") -> Iterator[EvalResult]:
    """Yield a result for each metric of an evaluation of the model, or of one of its files."""
    from huggingface_hub import EvalResult

    protocol = report.protocol
    sampling = protocol.sampling
    assert sampling is not None
    for name, score in report.evaluated.scores.items():
        metric = "pass@1" if name == "greedy" else name
        decoding = "greedy"
        if name != "greedy" and sampling.temperature:
            decoding = f"{sampling.num_samples} samples at temperature {sampling.temperature:g}"
            if sampling.top_p < 1:
                decoding += f" and top-p {sampling.top_p:g}"
        if sampling.few_shot:
            decoding += f", {sampling.few_shot}-shot"
        description = [metric, decoding, f"{protocol.rows} rows"]
        if file:
            description.append(_plain(file))
        yield EvalResult(
            task_type="text-generation",
            dataset_type=_dataset_type(report),
            dataset_name=_plain(protocol.task),
            metric_type=metric,
            metric_name=", ".join(description),
            metric_value=round(100 * score, 2),
        )


def _dataset_type(report: Report) -> str:
    """Return the Hub dataset of an evaluation's rows, or a name for rows that are in none.

    The Hub takes `gsm8k` for openai/gsm8k, so the title of a user's task would attribute the scores to that dataset.
    """
    task = measured_task(report)
    source = report.protocol.data_source
    dataset = own_dataset(task, source)
    if dataset:
        return dataset
    name = _plain(report.protocol.task)
    is_users = task is None or source is not None
    return f"{name}-other-rows" if is_users else name


def _data(record: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the split, source, number of rows, and digest of a run's data."""
    data = record.get("data", {})
    for split, title, task in (
        ("train", data.get("task"), trained_task(record)),
        ("eval", data.get("eval_task"), evaluated_task(record)),
    ):
        rows = data.get(split)
        if not rows:
            continue
        source = rows.get("source")
        name = title
        if own_dataset(task, source):
            name = own_dataset(task, source)
        elif source:
            name = model_files.last_part(source)
        yield split, name, rows.get("rows"), rows.get("sha256")


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    cells = [[_text(value) for value in row] for row in rows]
    lines = markdown_table(headings, cells, left=len(headings))
    return Markup("\n".join(lines).rstrip("\n"))


def _plain(text: object) -> str:
    """Replace all characters except letters, digits, dots, dashes, and underscores, as required in a tag."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(text)).strip("-") or "unnamed"


def _printed(value: Any) -> Markup:
    if isinstance(value, Markup):
        return value
    return Markup(markdown(_text(value)))


def _text(value: Any) -> str:
    """Return a value without the path of a file or folder on this machine."""
    value = without_paths(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _quoted(text: str) -> Markup:
    """Return a string literal in Python, on one line and without invisible characters."""
    literal = ""
    for character in json.dumps(text, ensure_ascii=False):
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        literal += character
    return Markup(literal)


def _fenced(text: str) -> Markup:
    """Return a text as a block of code, whose fence is longer than any row of backticks in it."""
    text = "".join(character if character.isprintable() or character in "\t\n" else " " for character in text)
    longest_row = max((len(row) for row in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest_row + 1)
    return Markup(f"{fence}\n{text}\n{fence}")
