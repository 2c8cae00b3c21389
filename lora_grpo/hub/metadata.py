"""Metadata that the Hub reads: the card's front matter and files of evaluation results.

Scores are included only if they were measured on the uploaded weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lora_grpo.hub.evaluations import Evaluation, dataset_of
from lora_grpo.hub.facts import Facts

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_LIBRARIES = {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}
_BENCHMARK_ROWS = {"gsm8k": 1319, "humaneval": 164}
"""Rows of each benchmark with a leaderboard on the Hub. Partial results are not submitted."""


def front_matter(repo_id: str, facts: Facts) -> str:
    """Return the card's front matter as YAML."""
    from huggingface_hub import ModelCardData

    record, base = facts.record, facts.base
    data = record["data"] if record else {}
    tags = ["grpo", "lora", "trl", str(data.get("task"))] if record else ["lora"] if facts.kind == "adapter" else []
    dataset = dataset_of(data.get("task"), (data.get("train") or {}).get("source"))
    results = [result for evaluation in facts.evaluations if evaluation.of_upload for result in _results(evaluation)]
    # A merged model is a finetune. `quantized` would mean that a GGUF file contains the base itself.
    relation = "adapter" if facts.kind == "adapter" else "finetune"
    return str(
        ModelCardData(
            base_model=base.hub_id,
            base_model_relation=relation if base.hub_id else None,
            library_name=_LIBRARIES[facts.kind],
            **base.license,
            pipeline_tag="text-generation",
            tags=[plain(tag) for tag in tags],
            datasets=[dataset] if dataset else None,
            model_name=repo_id.split("/")[-1] if results else None,
            eval_results=results or None,
        ).to_yaml()
    )


def plain(text: object) -> str:
    """Replace all characters except letters, digits, dots, dashes, and underscores, as required in a tag."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(text)).strip("-") or "unnamed"


def _results(evaluation: Evaluation) -> Iterator[EvalResult]:
    from huggingface_hub import EvalResult

    protocol = evaluation.report.protocol
    assert protocol.sampling is not None
    for name, score in evaluation.report.evaluated.scores.items():
        greedy = name == "greedy" or not protocol.sampling.temperature
        sampled = f"{protocol.sampling.num_samples} samples at temperature {protocol.sampling.temperature:g}"
        metric = "pass@1" if name == "greedy" else name
        yield EvalResult(
            task_type="text-generation",
            dataset_type=evaluation.dataset or plain(protocol.task),
            dataset_name=plain(protocol.task),
            metric_type=metric,
            metric_name=f"{metric}, {'greedy' if greedy else sampled}, {protocol.rows} rows",
            metric_value=round(100 * score, 2),
        )


def eval_results(facts: Facts) -> dict[str, str]:
    """Return files in the Hub's leaderboard format by name. Includes only greedy results on a full benchmark."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml
    from huggingface_hub.utils import yaml_dump

    files: dict[str, str] = {}
    for evaluation in facts.evaluations:
        protocol, scores = evaluation.report.protocol, evaluation.report.evaluated.scores
        assert protocol.sampling is not None
        score = scores.get("greedy", scores.get("pass@1") if protocol.sampling.temperature == 0 else None)
        is_whole = protocol.rows == _BENCHMARK_ROWS.get(protocol.task) and not protocol.left_out_as_trained_on
        if score is None or not (evaluation.of_upload and evaluation.dataset and is_whole) or protocol.contaminated:
            continue
        entry = EvalResultEntry(
            dataset_id=evaluation.dataset,
            task_id=protocol.task,
            value=round(100 * score, 2),
            notes=f"{protocol.sampling.few_shot}-shot, greedy, {protocol.sampling.prompt_style} answer format",
        )
        name = f".eval_results/lora-grpo-{protocol.task}.yaml"
        files.setdefault(name, yaml_dump(eval_result_entries_to_yaml([entry])))
    return files
