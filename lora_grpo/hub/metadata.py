"""What the Hub reads of a model: a card's front matter, and files of evaluation results.

Figures are in there only where the files that are pushed were measured themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lora_grpo.hub.card_figures import Evaluation, data_sets
from lora_grpo.hub.facts import Facts

_RELATIONS = {"adapter": "adapter", "merged": "finetune", "gguf": "finetune"}
"""What the files are of the base. `quantized` would say that a GGUF holds the base itself, only smaller."""
_LIBRARIES = {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}
_WHOLE = {"gsm8k": 1319, "humaneval": 164}
"""Rows of the benchmarks that the Hub has leaderboards for; a part of one is no entry."""


def front_matter(repo_id: str, facts: Facts) -> str:
    """Return the front matter, as huggingface_hub writes it."""
    from huggingface_hub import ModelCardData

    record, base = facts.record, facts.base
    policy = record["policy"] if record else {}
    tags = ["grpo", "lora", "trl"] if record else ["lora"] if facts.kind == "adapter" else []
    tags += ["unsloth"] if policy.get("engine") == "unsloth" else []
    sets = data_sets(record) if record else {}
    tags += [str(record["data"]["task"])] if record else []
    # The run's own evaluation and one that was asked for may have the same figure.
    every = [result for found in facts.evaluations if found.of_upload for result in _model_index(found)]
    results = [result for place, result in enumerate(every) if result not in every[:place]]
    data = ModelCardData(
        base_model=base.hub_id,
        base_model_relation=_RELATIONS[facts.kind] if base.hub_id else None,
        library_name=_LIBRARIES[facts.kind],
        license=base.licence.id if base.licence else None,
        license_name=base.licence.name if base.licence else None,
        license_link=base.licence.link if base.licence else None,
        pipeline_tag="text-generation",
        tags=[plain(tag) for tag in tags],
        datasets=[name] if (name := sets.get("train")) else None,
        model_name=repo_id.split("/")[-1] if results else None,
        eval_results=results or None,
    )
    return data.to_yaml()


def plain(text: str) -> str:
    """Return a text of letters, digits, dots, dashes and underscores alone, as tags and identifiers are."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") or "unnamed"


def _model_index(found: Evaluation) -> Iterator[Any]:
    """Yield the figures of what is pushed, for readers of `model-index`."""
    from huggingface_hub import EvalResult

    protocol, sampling = found.report.protocol, found.report.protocol.sampling
    for metric, score in found.report.evaluated.scores.items():
        how = (
            "greedy"
            if metric == "greedy" or not sampling or not sampling.temperature
            else f"{sampling.num_samples} samples at temperature {sampling.temperature:g}"
        )
        yield EvalResult(
            task_type="text-generation",
            dataset_type=found.source or plain(protocol.task),
            dataset_name=plain(protocol.task),
            metric_type="pass@1" if metric == "greedy" else metric,
            metric_name=f"{'pass@1' if metric == 'greedy' else metric}, {how}, {protocol.rows} rows",
            metric_value=round(100 * score, 2),
        )


def eval_results(facts: Facts) -> dict[str, str]:
    """Return files in the Hub's format for leaderboards, by name: of greedy answers to a whole benchmark alone."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml
    from huggingface_hub.utils import yaml_dump

    files: dict[str, str] = {}
    for found in facts.evaluations:
        protocol, sampling, scores = (
            found.report.protocol,
            found.report.protocol.sampling,
            found.report.evaluated.scores,
        )
        task = protocol.task
        score = scores.get("greedy", scores.get("pass@1") if sampling and sampling.temperature == 0 else None)
        whole = protocol.rows == _WHOLE.get(task) and not protocol.left_out_as_trained_on
        if score is None or not sampling or not (found.of_upload and found.source and whole) or protocol.contaminated:
            continue
        entry = EvalResultEntry(
            dataset_id=found.source,
            task_id=task,
            value=round(100 * score, 2),
            notes=f"{sampling.few_shot}-shot, greedy, {sampling.prompt_style} answer format",
        )
        files.setdefault(f".eval_results/lora-grpo-{task}.yaml", yaml_dump(eval_result_entries_to_yaml([entry])))
    return files
