"""The model card: what is pushed, what was measured of it, how it was made and how it is loaded.

A figure that was not measured is not there. Whatever comes from files is escaped: a name cannot end the front matter,
break a table or begin a heading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.config import STARTER
from lora_grpo.evaluation import Report
from lora_grpo.hub import card_snippets, metadata
from lora_grpo.hub.card_figures import data_sets
from lora_grpo.hub.facts import Facts
from lora_grpo.hub.files import CARD_MARK
from lora_grpo.hub.metadata import plain
from lora_grpo.rewards import parse_reward_specs

_SPECIAL = re.compile(r"([\\`*{}\[\]<>#|~$&!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_ONTO = {"full": "the base in full precision", "dequantized": "the 4-bit base, unpacked"}
_MERGE = (
    ("dtype", "weights"),
    ("onto", "merged into"),
    ("retained", "overall", "share of the adapter's update that rounding left"),
    ("retained", "error", "size of what rounding added, in sizes of the update"),
    ("retained", "worst", "least share of a tensor's update"),
    ("retained", "worst_layer", "of the tensor"),
    ("kl", "adapter_merged", "KL divergence, adapter from merged, nats a token"),
    ("kl", "adapter_base", "for comparison: adapter from base"),
    ("kl", "trained_merged", "adapter on its 4-bit base from merged"),
    ("kl", "tokens", "measured on tokens"),
    ("kl", "not_measured", "KL divergence not measured"),
)
"""Where figures stand in merge_report.json, and what they are called here."""


def write(repo_id: str, facts: Facts) -> str:
    """Return the README.md of a repository."""
    sections = [
        _opening(repo_id, facts),
        _measured(facts),
        _merge(facts),
        "\n\n".join(["## How to load it", *card_snippets.write(repo_id, facts)]),
        _rewards(facts),
        _settings(facts),
        _data(facts),
        _versions(facts),
    ]
    return (
        f"---\n{metadata.front_matter(repo_id, facts)}\n---\n\n"
        + "\n\n".join(part for part in (*sections, CARD_MARK) if part)
        + "\n"
    )


def escape(value: object) -> str:
    """Return a value as text in a line or cell of Markdown that is that text and nothing else."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return re.sub(r"^(\d*)([-+=.)])(?=\s|$)", r"\1\\\2", _SPECIAL.sub(r"\\\1", text))


# What it is


def _opening(repo_id: str, facts: Facts) -> str:
    base, record = facts.base, facts.record
    if base.hub_id:
        below = f"[{escape(base.hub_id)}](https://huggingface.co/{base.hub_id})"
        below += f" at commit `{base.revision}`" if base.revision else ""
        below += ", a 4-bit copy of a model that is not named here" if base.hub_id.endswith("-bnb-4bit") else ""
    elif base.name == STARTER:
        below = "lora_grpo's embedded starter model, which has 2 million parameters and was made to be improvable"
    elif base.name:
        below = f"a model in a folder called {escape(base.name)}, which has no name on the Hub"
    else:
        below = "a base model that nothing here names"
    if base.fingerprint:
        below += f"; SHA-256 over its weights `{escape(base.fingerprint)}`"
    what = {
        "adapter": "A LoRA adapter for",
        "merged": "A whole model: a LoRA adapter merged into",
        "gguf": "GGUF files of a LoRA adapter merged into",
    }[facts.kind]
    if facts.kind != "adapter" and facts.adapter is None and facts.merge is None:
        what = "A model made from" if facts.kind == "merged" else "GGUF files of a model made from"
    lines = [f"# {escape(repo_id.split('/')[-1])}", "", f"{what} {below}."]
    if record:
        steps = f" for {int(record['trained_steps'])} steps" if record.get("trained_steps") else ""
        kit = escape(f"lora_grpo {record['versions'].get('lora_grpo') or ''}")
        recipe = f", recipe `{plain(str(record['recipe']))}`" if record.get("recipe") else ""
        lines.append(f"Trained with GRPO on `{plain(str(record['data']['task']))}`{steps} by {kit}{recipe}.")
    if record and record.get("status") != "complete":
        lines += ["", f"**The run was not finished:** its status is {escape(record.get('status') or 'unknown')}."]
    if base.trust_remote_code:
        lines += [
            "",
            "**Code that comes with the base's repository was run** (`trust_remote_code`); loading needs it too.",
        ]
    if base.licence is None:
        lines += ["", "The base's licence was not found on the machine that pushed this: see the base."]
    if facts.kind == "adapter" and not base.hub_id and base.name:
        named = f"`adapter_config.json` calls the base `{plain(base.name)}`, which is no repository"
        lines += ["", f"{named}: load the base first, as below."]
    return "\n".join(lines)


# What was measured


def _measured(facts: Facts) -> str:
    if not facts.evaluations:
        return ""
    lines = ["## Measured"]
    for found in facts.evaluations:
        # The page ends with its protocol as JSON, which has paths and hardware in it; the lines below say what matters.
        page = _escaped(found.report).markdown().rsplit("\n\nProtocol:", 1)[0]
        title, table, details, *said = page.split("\n\n")
        lines += [f"**{title}**", table]
        if not found.of_upload:
            lines.append(
                "These are figures of the adapter on its base as it was trained. The files of this repository were not "
                "measured."
            )
        lines += [*said, "\n".join(f"- {line}" for line in _protocol(found.report))]
        lines.append(f"<details><summary>Rules and statuses, % (samples)</summary>\n\n{details}\n\n</details>")
    return "\n\n".join(line for line in lines if line.strip())


def _escaped(report: Report) -> Report:
    """Return a report whose names cannot break out of a card."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {(escape(key) if level_is_free(key) else key): clean(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(entry) for entry in value]
        return escape(value) if isinstance(value, str) else value

    def level_is_free(key: object) -> bool:
        return not re.fullmatch(r"[A-Za-z0-9_@]+", str(key))

    return Report.model_validate(clean(report.model_dump()))


def _protocol(report: Report) -> Iterator[str]:
    """Yield what a figure needs to be compared with another one."""
    protocol, sampling, source = report.protocol, report.protocol.sampling, report.evaluated.source
    yield "95 % intervals over rows; p is of the paired test that is named, base against trained"
    yield f"rows: {protocol.rows} of `{plain(protocol.task)}`, SHA-256 `{escape(protocol.data_sha256)}`"
    if sampling:
        how = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}" if sampling.temperature else "greedy"
        length = f"at most {sampling.max_completion_tokens} tokens, seed {protocol.seed}"
        yield f"samples: {sampling.num_samples} a row, {how}, {length}"
        yield f"prompts: {escape(sampling.prompt_style)} style, {sampling.few_shot} worked examples"
    yield f"grading: {escape(protocol.grading)}"
    model = [f"{source.bits}-bit base" if source.bits else None, source.engine, source.dtype, source.device]
    if known := [word for word in model if word]:
        yield f"model: {escape(', '.join(known))}"
    if protocol.sandbox:
        yield f"programs ran in: {escape(protocol.sandbox)}"


def _merge(facts: Facts) -> str:
    """Return what merge_report.json says, as far as it says it."""
    cells = []
    for *keys, said in _MERGE:
        value: Any = facts.merge or {}
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, (str, int, float)):
            cells.append((said, _figure(_ONTO.get(str(value), value))))
    return _table("## Merge", ("", ""), cells)


# How it was made


def _rewards(facts: Facts) -> str:
    if not facts.record:
        return ""
    cells = []
    for item in facts.record["config"]["rewards"]:
        name, _, scale = item.rpartition("=")
        if ".py:" in item:  # whose file need not be here any more
            cells.append((escape(Path(name or item).name), escape(scale if name else "1.0")))
        else:
            (spec,) = parse_reward_specs([item])
            cells.append((escape(spec.name), _figure(spec.weight)))
    return _table("## Rewards", ("reward", "full marks are worth"), cells)


def _settings(facts: Facts) -> str:
    """Return the hyperparameters, of the run or at least of the adapter."""
    rows: list[tuple[str, Any]] = []
    if facts.adapter:
        targets = facts.adapter.get("target_modules")
        rows += [("LoRA rank", facts.adapter.get("r")), ("LoRA alpha", facts.adapter.get("lora_alpha"))]
        rows += [("LoRA dropout", facts.adapter.get("lora_dropout"))]
        rows += [("LoRA on", _joined(*targets) if isinstance(targets, list) else targets)]
        rows += [
            (name, True) for name, key in (("rsLoRA", "use_rslora"), ("DoRA", "use_dora")) if facts.adapter.get(key)
        ]
    if facts.record:
        config, policy = facts.record["config"], facts.record["policy"]
        train, sampling = config["train"], config["sampling"]
        group, prompts = sampling.get("num_generations"), train.get("prompts_per_step")
        bits, engine, warmup = policy.get("bits"), policy.get("engine"), train.get("warmup_steps")
        rows += [
            ("base while training", _joined(bits and f"{bits} bits", engine and f"engine {engine}")),
            ("steps", facts.record.get("trained_steps")),
            ("prompts a step", prompts),
            ("completions a prompt (G)", group),
            ("completions a step", prompts * group if prompts and group else None),
            ("longest completion, tokens", sampling.get("max_completion_tokens")),
            ("sampling temperature", sampling.get("temperature")),
            ("learning rate", train.get("learning_rate")),
            ("schedule", _joined(train.get("lr_scheduler"), warmup is not None and f"{warmup} steps of warm-up")),
            ("optimizer", train.get("optimizer")),
            ("KL weight (beta)", train.get("beta")),
            ("gradient norm at most", train.get("max_grad_norm")),
            ("GRPO settings of its own", _joined(*(config.get("grpo") or ()))),
            ("seed", facts.record.get("seed")),
        ]
    cells = [(escape(name), _figure(value)) for name, value in rows if value is not None]
    return _table("## Settings", ("", ""), cells)


def _data(facts: Facts) -> str:
    if not facts.record:
        return ""
    data, sets = facts.record["data"], data_sets(facts.record)
    cells = []
    for split, task in (("train", data.get("task")), ("eval", data.get("eval_task"))):
        entry = data.get(split) or {}
        if entry.get("rows") is None:
            continue
        generated = f"{task}, generated" if task else "generated"
        source = sets[split] or (Path(entry["source"]).name if entry.get("source") else generated)
        digest = f"`{escape(entry['sha256'])}`" if entry.get("sha256") else ""
        cells.append((split, escape(source), escape(entry["rows"]), digest))
    return _table("## Data", ("", "source", "rows", "SHA-256 of the rows"), cells)


def _versions(facts: Facts) -> str:
    if not facts.record:
        return ""
    said = _joined(*(f"{escape(name)} {escape(found)}" for name, found in facts.record["versions"].items() if found))
    return f"## Versions\n\n{said}" if said else ""


def _joined(*parts: Any) -> str | None:
    """Return the parts that there are, as one text."""
    return ", ".join(str(part) for part in parts if part) or None


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(value)


def _table(heading: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join([heading, "", *lines, *("| " + " | ".join(cells) + " |" for cells in rows)])
