"""Render the model card: front matter for the Hub, and the text of card.md.jinja.

The first screen of the page says what the model is, how good it is, and how to use it. The rest is folded.

The card includes only measured values. The Jinja environment escapes every value and reduces paths to their last part,
so a name from a file cannot end the front matter, break a table, or start a heading. Texts of a model or a data set are
only in fenced blocks and string literals, where neither Markdown nor HTML is rendered.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lora_grpo.config import UNUSED_BY_SFT
from lora_grpo.evaluation import Report
from lora_grpo.gguf import files_legend, files_notes, files_table, nats
from lora_grpo.hub.example import own_dataset
from lora_grpo.hub.facts import Facts
from lora_grpo.hub.files import CARD_MARK, UploadFile, without_paths
from lora_grpo.runs import flat, system_prompt
from lora_grpo.tasks import CODE_TASKS, chat

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_SPECIAL = re.compile(r"([\\`*{}\[\]<>#|~$&!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_LIBRARIES = {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}
_SETTINGS = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora"),
    *("rewards", "train.prompts_per_step", "sampling.num_generations", "sampling.max_completion_tokens"),
    *("sampling.temperature", "train.learning_rate", "train.lr_scheduler", "train.warmup_steps", "train.optimizer"),
    *("train.beta", "train.max_grad_norm", "grpo"),
)
"""Settings of adapter_config.json, and flags of run.json, that a card lists."""
_TAUGHT = {
    "gsm8k": "grade-school math word problems",
    "humaneval": "Python functions with unit tests",
    "mbpp": "short Python programs with unit tests",
    "starter": "synthetic math word problems",
    "starter-code": "small Python functions with unit tests",
}
"""What a model of a built-in task was trained on."""
_LONGEST = 1200
"""Characters of a question or an answer that a card shows."""
_LONGEST_QUESTION = 400
"""Characters of a question that the example code asks."""
_LINE = 100
"""Characters of a line of text in a fenced block, which the Hub does not wrap."""


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
        "code": _code,
        "fenced": _fenced,
        "shown": _shown,
        "nats": nats,
        "comment": lambda names: Markup(_quoted(", ".join(names))[1:-1]),
        "percent": lambda value: "–" if value is None else f"{100 * value:.1f}",
        "quoted": _quoted,
        "shell": lambda value: Markup(shlex.quote(value)),
    }
    record = facts.record
    config, data = record.get("config", {}), record.get("data", {})
    names = [file.name for file in files]
    template = next((file.read() for file in files if file.name == "chat_template.jinja"), b"").decode(errors="replace")
    chat_variables = {name: value for name, value in chat.variables(template).items() if name in template}
    ggufs = [name for name in names if name.endswith(".gguf")]
    gguf = _shown_file(facts, ggufs)
    values, is_sft = {**facts.adapter, **flat(config)}, _is_sft(facts)
    named = [name for name in _SETTINGS if not (is_sft and name in UNUSED_BY_SFT)]
    text = environment.get_template("card.md.jinja").render(
        table=_table,
        legend=_legend,
        files_table=files_table,
        files_legend=files_legend,
        files_notes=files_notes,
        kit=_kit(),
        taught=_TAUGHT.get(data.get("task") or ""),
        evaluation=facts.evaluations[0] if facts.evaluations else None,
        question=_question(facts),
        repo_id=repo_id,
        name=repo_id.split("/")[-1],
        facts=facts,
        base=facts.base,
        record=record,
        max_new_tokens=config.get("sampling", {}).get("max_completion_tokens") or 256,
        settings=[(name, values[name]) for name in named if values.get(name) not in (None, False, [])],
        data=[*_data(data)],
        system_prompt=system_prompt(record),
        is_sft=is_sft,
        has_chat=template and "tokenizer.json" in names,
        template_arguments=Markup("".join(f", {name}={value!r}" for name, value in chat_variables.items())),
        chat_variables=json.dumps(chat_variables) if chat_variables else "",
        names=names,
        modelfiles=[name for name in names if name.endswith("Modelfile")],
        ggufs=ggufs,
        gguf=gguf,
        gguf_type=_type_of(gguf) if [*map(_type_of, ggufs)].count(_type_of(gguf)) == 1 else "",
    )
    body = re.sub(r"\n{3,}", "\n\n", text).strip()
    return f"---\n{_front_matter(repo_id, facts)}\n---\n\n{body}\n\n{CARD_MARK}\n"


def _front_matter(repo_id: str, facts: Facts) -> str:
    from huggingface_hub import ModelCardData

    base, data = facts.base, facts.record.get("data", {})
    method = "sft" if _is_sft(facts) else "grpo"
    tags = ["lora"] if facts.kind == "adapter" else []
    if facts.record:
        tags = [method, "lora", "trl", "lora_grpo", data.get("task")]
    dataset = own_dataset(data.get("task"), data.get("train", {}).get("source"))
    files = [(file.report, file.name) for file in facts.measured_files if file.report]
    results = _results([*((each.report, "") for each in facts.evaluations if each.of_upload), *files])
    # A merged model is a finetune. `quantized` would mean that a GGUF file contains the base itself.
    relation = "adapter" if facts.kind == "adapter" else "finetune"
    return str(
        ModelCardData(
            base_model=base.hub_id,
            base_model_relation=relation if base.hub_id else None,
            library_name=_LIBRARIES[facts.kind],
            language="en" if dataset is not None else None,  # the rows of all built-in tasks are English
            **base.license,
            pipeline_tag="text-generation",
            tags=[_plain(tag) for tag in tags],
            datasets=[dataset] if dataset else None,
            model_name=repo_id.split("/")[-1] if results else None,
            eval_results=results,
        ).to_yaml()
    )


def _is_sft(facts: Facts) -> bool:
    return bool(facts.record.get("config", {}).get("method") == "sft")


def _results(reports: Iterable[tuple[Report, str]]) -> list[EvalResult] | None:
    """Return one result for each metric, protocol and file: of the first report that has it. None if there is none."""
    from huggingface_hub import EvalResult

    results: dict[tuple[Any, ...], EvalResult] = {}
    for report, file in reports:
        protocol, sampling = report.protocol, report.protocol.sampling
        assert sampling is not None
        for name, score in report.evaluated.scores.items():
            metric = "pass@1" if name == "greedy" else name
            how = "greedy"
            if name != "greedy" and sampling.temperature:
                how = f"{sampling.num_samples} samples at temperature {sampling.temperature:g}"
                how += f" and top-p {sampling.top_p:g}" if sampling.top_p < 1 else ""
            how += f", {sampling.few_shot}-shot" if sampling.few_shot else ""
            settings = (sampling.prompt_style, sampling.max_completion_tokens)
            key = (file, metric, how, *settings, protocol.task, protocol.task_sha256, protocol.data_sha256)
            results.setdefault(
                key,
                EvalResult(
                    task_type="text-generation",
                    dataset_type=own_dataset(protocol.task, protocol.data_source) or _plain(protocol.task),
                    dataset_name=_plain(protocol.task),
                    metric_type=metric,
                    metric_name=", ".join([metric, how, f"{protocol.rows} rows", *([_plain(file)] if file else [])]),
                    metric_value=round(100 * score, 2),
                ),
            )
    return [*results.values()] or None


def _legend(report: Report) -> str:
    """Return what the figures of a table of scores are."""
    protocol, sampling = report.protocol, report.protocol.sampling
    assert sampling is not None
    drawn = f"mean of {sampling.num_samples} samples" if sampling.num_samples > 1 else "one sample"
    how = f"at temperature {sampling.temperature:g}" if sampling.temperature else "without randomness"
    meanings = {"pass@1": f"{drawn} {how}", "greedy": "one answer, not sampled"}
    held_out = "" if protocol.contaminated else "held-out "
    parts = [f"Percent of {protocol.rows} {held_out}problems solved, with 95% intervals"]
    for name in report.evaluated.scores:
        most = f"any of {name[5:]} samples is right" if name.startswith("pass@") else ""
        if meaning := meanings.get(name, most):
            parts.append(f"{name}: {meaning}")
    return ". ".join([*parts, *(["p: paired test"] if report.table else [])]) + "."


def _question(facts: Facts) -> str:
    """Return the question that the example code asks: that of the example, if it is short."""
    if facts.example and len(facts.example.question) <= _LONGEST_QUESTION:
        return facts.example.question
    if facts.record.get("data", {}).get("task") in CODE_TASKS:
        return "Write a function is_even(n) that tells whether n is even."
    return "What is 12 times 7?"


def _shown_file(facts: Facts, ggufs: Sequence[str]) -> str:
    """Return the GGUF file that the commands run: the smallest that was evaluated, or else the first; "" if none."""
    evaluated = [file.name for file in facts.measured_files if file.report]  # the largest first
    return [*ggufs[:1], *evaluated][-1] if ggufs else ""


def _type_of(gguf: str) -> str:
    """Return the quantization type in the name of a GGUF file, by which Ollama chooses a file on the Hub; or "".

    Source: https://huggingface.co/docs/hub/ollama
    """
    found = re.search(r"[.-](I?Q[0-9]\w*|B?F16|F32)\.gguf$", gguf, re.IGNORECASE | re.ASCII)
    return found[1].upper() if found else ""


def _kit() -> Markup:
    """Return the name of this package, as a link if its metadata have an address."""
    try:
        urls = metadata.metadata("lora-grpo").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        urls = []
    found = [url for entry in urls if re.fullmatch(r"https://[^\s()<>]+", url := entry.partition(",")[2].strip())]
    return Markup(f"[lora_grpo]({found[0]})" if found else "lora_grpo")


def _data(data: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the split, source, number of rows, and digest of a run's data."""
    for split, task in (("train", data.get("task")), ("eval", data.get("eval_task"))):
        if rows := data.get(split):
            source = rows.get("source")
            shown = own_dataset(task, source) or (Path(source).name if source else task)
            yield split, shown, rows.get("rows"), _code(rows.get("sha256"))


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    cells = [map(_printed, row) for row in (headings, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    lines.insert(1, "|" + "---|" * len(headings))
    return Markup("\n".join(lines))


def escape(value: object) -> str:
    """Return a value as Markdown that renders as exactly this text, on one line or in a table cell."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return re.sub(r"^(\d*)([-+=.)])(?=\s|$)", r"\1\\\2", _SPECIAL.sub(r"\\\1", text))


def _plain(text: object) -> str:
    """Replace all characters except letters, digits, dots, dashes, and underscores, as required in a tag."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(text)).strip("-") or "unnamed"


def _printed(value: Any) -> Markup:
    if isinstance(value, Markup):
        return value
    value = without_paths(value)
    if isinstance(value, list):
        return Markup(", ".join(map(escape, value)))
    return Markup(f"{value:.4g}" if isinstance(value, float) else escape(value))


def _quoted(text: str) -> Markup:
    """Return a string literal in Python, on one line and without invisible characters."""
    literal = json.dumps(text, ensure_ascii=False)
    return Markup("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in literal))


def _fenced(text: str) -> Markup:
    lines = ("".join(c if c.isprintable() or c == "\t" else " " for c in line) for line in text.split("\n"))
    text = "\n".join(lines)
    fence = "`" * max(3, *(1 + len(run) for run in re.findall("`+", text)), 0)
    return Markup(f"{fence}\n{text}\n{fence}")


def _shown(text: str) -> Markup:
    """Return a question or an answer in a fenced block, with long lines wrapped, and cut off if it is long."""
    text = text.strip()
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} [...]"
    lines = (textwrap.wrap(line, _LINE, drop_whitespace=False) or [""] for line in text.split("\n"))
    return _fenced("\n".join(part.rstrip() for wrapped in lines for part in wrapped))


def _code(value: object) -> Markup:
    return Markup(f"`{_plain(value)}`")  # Markdown does not support escapes in backticks
