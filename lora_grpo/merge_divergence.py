"""How far a merged model's answers are from the adapter's, beside how far those are from the base's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_grpo import base_model, json_lines
from lora_grpo.adapter_plan import Output, Plan, Tensor, make_plan
from lora_grpo.errors import UserError
from lora_grpo.frozen_base import Onto, base_tensors
from lora_grpo.merged_tensors import MergedTensor
from lora_grpo.prompts import DEFAULT_STYLE, add_prompts, render, write_completion
from lora_grpo.streamed_model import StreamedModel, divergence
from lora_grpo.subjects import Subject, run_of
from lora_grpo.tensor_files import model_tensors

_TEXTS = 4
_TOKENS_OF_A_TEXT = 32
_LOGITS = 2**24
"""Logits that are held of one model at a time, 64 MiB in float32: they bound the positions of a wide vocabulary."""
_LONGEST = 256
"""Tokens of a text; of longer ones the end is taken."""
_QUESTIONS = (
    ("A pen costs 3 dollars. How much do 4 pens cost?", "Each pen costs 3 dollars, so 4 pens cost 4 * 3 = 12.", "12"),
    ("Tom has 15 apples and eats 6. How many are left?", "He eats 6 of 15, which leaves 15 - 6 = 9 apples.", "9"),
)
"""Texts for an adapter that no run says anything of."""


def divergences(subject: Subject, base: Mapping[str, Tensor], plan: Plan, merged: Path, onto: Onto) -> dict[str, Any]:
    """Measure KL divergences in nats a token, on the last tokens of a few texts; all models computed in float32.

    Args:
        subject: what was merged; a run lends the newest completions it wrote down.
        base: the tensors that were merged onto.
        plan: of the merge.
        merged: the folder of the merged shards.
        onto: what `base` is.

    Returns:
        `adapter_merged`, `adapter_base`, and where a run was trained in 4 bits and merged onto 16, `trained_merged`:
        the adapter on the 4-bit base against the merge. `not_measured` with the reason where that cannot be done.
    """
    if plan.vocab_size is not None:
        return {
            "not_measured": "the vocabulary was resized, and distributions over two vocabularies have no divergence"
        }
    folder, trusted = Path(subject.base.name), subject.base.trust_remote_code
    try:
        ids, keep = _texts(subject, next(iter(_vocabulary_sizes(folder)), 2**18))
        model = StreamedModel(folder, trust_remote_code=trusted)
        adapter = model.logits(_Exact(plan.outputs), ids, keep)
        after = model.logits(model_tensors(merged), ids, keep)
        found: dict[str, Any] = {
            "texts": len(ids),
            "tokens": len(adapter),
            "adapter_merged": divergence(adapter, after),
            "adapter_base": divergence(adapter, model.logits(base, ids, keep)),
        }
        del adapter
        if onto == "full" and subject.run and subject.run["config"]["model"]["bits"] == 4:
            seen = base_tensors(folder, "dequantized", trust_remote_code=trusted)
            assert subject.adapter is not None
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            trained = model.logits(_Exact(make_plan(seen, subject.adapter, config).outputs), ids, keep)
            found["trained_merged"] = divergence(trained, after)
        return found
    except UserError as error:
        return {"not_measured": str(error)}


class _Exact(Mapping[str, MergedTensor]):
    """The live adapter's weights, made when they are asked for."""

    def __init__(self, outputs: Mapping[str, Output]) -> None:
        self._outputs = outputs

    def __getitem__(self, name: str) -> MergedTensor:
        return MergedTensor(self._outputs[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)


def _vocabulary_sizes(folder: Path) -> Iterator[int]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for inner in (config, config.get("text_config") or {}):
        if isinstance(inner.get("vocab_size"), int):
            yield inner["vocab_size"]


def _texts(subject: Subject, vocabulary: int) -> tuple[list[list[int]], int]:
    """Return token ids of a few prompts with their completions, and how many of the last tokens to look at."""
    settings = dataclasses.replace(subject.base, name=str(subject.tokenizer), revision=None)
    tokenizer = base_model.load_tokenizer(settings)
    ids = [
        [
            *tokenizer(render(tokenizer, prompt), add_special_tokens=False)["input_ids"],
            *tokenizer(completion, add_special_tokens=False)["input_ids"],
        ][-_LONGEST:]
        for prompt, completion in _pairs(subject)
    ]
    ids = [text for text in ids if max(text, default=vocabulary) < vocabulary]
    if not ids:
        raise UserError("the tokenizer has tokens that the model has not")
    keep = max(1, min(_TOKENS_OF_A_TEXT, _LOGITS // vocabulary // len(ids), *map(len, ids)))
    return ids, keep


def _pairs(subject: Subject) -> list[tuple[Any, str]]:
    """Return chat prompts and what was answered."""
    style = DEFAULT_STYLE
    rows: list[dict[str, Any]] = []
    run = run_of(subject.adapter) if subject.adapter else None
    if run is not None and subject.run is not None:
        style = subject.run["config"]["data"]["prompt_style"]
        written = sorted((run / "completions").glob("step-*.jsonl"))
        found = {
            (row["id"], row["completion"]): row for path in written[-4:] for _, row in json_lines.read(path, "rows")
        }
        rows = list(found.values())
        rows = rows[:: max(1, len(rows) // _TEXTS)]  # a step asks few questions, each of them many times
    if not rows:
        rows = [
            {"question": asked, "completion": write_completion(thought, answer)}
            for asked, thought, answer in _QUESTIONS
        ]
    rows = rows[:_TEXTS]
    return [(asked["prompt"], row["completion"]) for row, asked in zip(rows, add_prompts(rows, style), strict=True)]
