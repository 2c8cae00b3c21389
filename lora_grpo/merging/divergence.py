"""How far rounding moved a merged model's answers from the adapter's, beside how far those are from the base's.

The adapter's side is W + Δ in float32 as the plan of the merge has it: what a plan gets wrong is wrong on both sides.
That plans are right is what the tests hold against PEFT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import json_files, model_tensors
from lora_grpo.merging.base_weights import Onto, base_tensors
from lora_grpo.merging.delta import Output, Tensor
from lora_grpo.merging.mapping import Plan, make_plan
from lora_grpo.merging.merged_tensors import MergedTensor
from lora_grpo.merging.streamed_model import StreamedModel, divergences
from lora_grpo.merging.tied import embedding_and_head
from lora_grpo.models import ModelSpec, base_model, run_of
from lora_grpo.tasks import chat

_TEXTS = 4
_PROMPT_TOKENS = 96
"""Of a longer prompt the end is taken: every token costs a pass through the whole model."""
_COMPLETION_TOKENS = 32
"""Of a longer completion the beginning is taken."""
_QUESTIONS = (
    ("A pen costs 3 dollars. How much do 4 pens cost?", "Each pen costs 3 dollars, so 4 pens cost 4 * 3 = 12.", "12"),
    ("Tom has 15 apples and eats 6. How many are left?", "He eats 6 of 15, which leaves 15 - 6 = 9 apples.", "9"),
)
"""Texts for an adapter that no run says anything of."""


def measure_divergences(
    target: ModelSpec, base: Mapping[str, Tensor], plan: Plan, merged: Path, onto: Onto
) -> dict[str, Any]:
    """Measure KL divergences in nats a token, on completions' first tokens; all models are computed in float32.

    Args:
        target: what was merged; a run lends the newest completions it wrote down.
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
    folder, trusted = Path(target.base.name), target.base.trust_remote_code
    try:
        ids, keep = _texts(target, base)
        model = StreamedModel(folder, trust_remote_code=trusted)
        states = {
            "adapter": model.states(_Exact(plan.outputs), ids, keep),
            "merged": model.states(model_tensors(merged), ids, keep),
            "base": model.states(base, ids, keep),
        }
        pairs = [("adapter", "merged"), ("adapter", "base")]
        if onto == "full" and target.run and target.run["config"]["model"]["bits"] == 4:
            seen = base_tensors(folder, "dequantized", trust_remote_code=trusted)
            assert target.adapter is not None
            states["trained"] = model.states(_Exact(make_plan(seen, target.adapter, plan.config).outputs), ids, keep)
            pairs.append(("trained", "merged"))
        found = {"_".join(pair): value for pair, value in divergences(states, pairs).items()}
        return {"texts": len(ids), "tokens": keep * len(ids), **found}
    except Exception as error:  # noqa: BLE001 - models differ without end, and a figure must not cost the merge
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return {"not_measured": kind + first_line(error)}


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


def _texts(target: ModelSpec, base: Mapping[str, Tensor]) -> tuple[list[list[int]], int]:
    """Return token ids of a few prompts with their completions, and how many of the last tokens to look at."""
    settings = dataclasses.replace(target.base, name=str(target.tokenizer), revision=None)
    tokenizer = base_model.load_tokenizer(settings)
    ids = [
        [
            *tokenizer(chat.render(tokenizer, prompt), add_special_tokens=False)["input_ids"][-_PROMPT_TOKENS:],
            *tokenizer(completion, add_special_tokens=False)["input_ids"][:_COMPLETION_TOKENS],
        ]
        for prompt, completion in _pairs(target)
    ]
    embedding, _ = embedding_and_head(base)
    if not all(ids) or (embedding and max(map(max, ids)) >= base[embedding].shape[0]):
        raise UserError("the tokenizer has tokens that the model has not")
    return ids, min(_COMPLETION_TOKENS, *map(len, ids))


def _pairs(target: ModelSpec) -> list[tuple[Any, str]]:
    """Return chat prompts and what was answered."""
    style = chat.DEFAULT_STYLE
    rows: list[dict[str, Any]] = []
    run = run_of(target.adapter) if target.adapter else None
    if run is not None and target.run is not None:
        style = target.run["config"]["data"]["prompt_style"]
        written = sorted((run / "completions").glob("step-*.jsonl"))
        found = {
            (row["id"], row["completion"]): row
            for path in written[-4:]
            for _, row in json_files.read_lines(path, "rows")
        }
        rows = list(found.values())
        rows = rows[:: max(1, len(rows) // _TEXTS)]  # a step asks few questions, each of them many times
    if not rows:
        rows = [
            {"question": asked, "completion": chat.write_completion(thought, answer)}
            for asked, thought, answer in _QUESTIONS
        ]
    rows = rows[:_TEXTS]
    return [
        (asked["prompt"], row["completion"]) for row, asked in zip(rows, chat.add_prompts(rows, style), strict=True)
    ]
