"""Measure how much rounding changed the merged model's predictions, compared with how much training changed them.

The adapter's weights are W + D in float32, computed from the merge plan. An error in the plan would affect both sides
of the comparison, so the tests compare plans with PEFT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import Rows, StoredTensor, json_files, model_tensors
from lora_grpo.merging.base_weights import MergeTarget, base_tensors
from lora_grpo.merging.mapping import Plan, make_plan
from lora_grpo.merging.report import Divergences
from lora_grpo.merging.streamed_model import StreamedModel, divergences
from lora_grpo.models import ModelSpec, base_model, run_of
from lora_grpo.runs import read_record, system_prompt
from lora_grpo.tasks import chat

_TEXTS = 2
_PROMPT_TOKENS = 64
"""Longer prompts are truncated on the left, because every token costs a pass through the whole model."""
_COMPLETION_TOKENS = 64
"""Longer completions are truncated on the right."""
_PLAIN_TEXTS = (
    "A pen costs 3 dollars, so 4 pens cost 4 * 3 = 12 dollars. Tom has 15 apples and eats 6 of them, so he has 9 left.",
    "The train leaves at seven in the morning and needs five hours, so it arrives at noon if it stops nowhere else.",
)
"""Texts for an adapter that has no completions. Its prompts are unknown, so these have none."""
_PLAIN_TOKENS = 32


def measure_divergences(
    target: ModelSpec, model: Any, base: Mapping[str, StoredTensor], plan: Plan, merged: Path, onto: MergeTarget
) -> Divergences:
    """Measure KL divergences over tokens of the run's completions and their prompts, if there are any.

    `model` is the result of `empty_model` and cannot be used afterward. `merged` is the folder of the merged shards.
    """
    if plan.vocab_size is not None:
        return Divergences(not_measured="the vocabulary was resized, so the KL divergence is undefined")
    try:
        assert target.adapter is not None
        tokenizer = dataclasses.replace(target.base, name=str(target.tokenizer), revision=None)
        run = run_of(target.adapter) if target.run else None
        ids, keep = texts_of(base_model.load_tokenizer(tokenizer), run, _TEXTS)
        weights: dict[str, Mapping[str, Rows]] = {
            "adapter": plan.outputs,
            "merged": model_tensors(merged),
            "base": base,
        }
        pairs = [("adapter", "merged"), ("adapter", "base")]
        if onto == "full" and target.run and target.run["config"]["model"]["bits"] == 4:
            four_bit = base_tensors(Path(target.base.name), "dequantized", model)
            weights["trained"] = make_plan(four_bit, target.adapter, model).outputs
            pairs.append(("trained", "merged"))
        found = _between(weights, pairs, model, ids, keep)
        figures: dict[str, Any] = {"_".join(pair): value for pair, value in found.items()}
        return Divergences(tokens=keep * len(ids), **figures)
    except Exception as error:  # noqa: BLE001 - models vary without limit, and a figure must not fail the merge
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return Divergences(not_measured=kind + first_line(error))


def divergences_from(
    reference: Mapping[str, Rows],
    others: Mapping[str, Mapping[str, Rows]],
    model: Any,
    ids: Sequence[Sequence[int]],
    keep: int,
) -> dict[str, float]:
    """Return KL(reference || other) in nats per token for other weights of the same model, by their names.

    `model` is the result of `empty_model` and cannot be used afterward. `ids` and `keep` come from `texts_of`.
    """
    found = _between({"": reference, **others}, [("", name) for name in others], model, ids, keep)
    return {name: value for (_, name), value in found.items()}


def _between(
    weights: Mapping[str, Mapping[str, Rows]],
    pairs: Sequence[tuple[str, str]],
    model: Any,
    ids: Sequence[Sequence[int]],
    keep: int,
) -> dict[tuple[str, str], float]:
    streamed = StreamedModel(model)
    return divergences({name: streamed.states(each, ids, keep) for name, each in weights.items()}, pairs)


def texts_of(tokenizer: Any, run: Path | None, count: int) -> tuple[list[list[int]], int]:
    """Return token ids of up to `count` prompts with completions, and the number of trailing tokens to compare.

    The completions are of the last steps of the run. Without any, these are one or two plain texts.
    """
    paths = sorted((run / "completions").glob("step-*.jsonl"))[-4:] if run else []
    lines = [row for path in paths for _, row in json_files.read_lines(path, "completions")]
    rows = list({(row["id"], row["completion"]): row for row in lines}.values())
    rows = rows[:: max(1, len(rows) // count)][:count]  # a step has many completions for each of its few questions
    system = system_prompt(read_record(run)) if run else None
    ids = []
    for row in rows:
        messages = [{"role": "system", "content": system}] if system else []
        prompt = chat.render(tokenizer, [*messages, {"role": "user", "content": row["question"]}])
        ids.append(
            tokenizer(prompt, add_special_tokens=False)["input_ids"][-_PROMPT_TOKENS:]
            + tokenizer(row["completion"], add_special_tokens=False)["input_ids"][:_COMPLETION_TOKENS]
        )
    ids = ids or [tokenizer(text)["input_ids"][:_PLAIN_TOKENS] for text in _PLAIN_TEXTS[: (count + 1) // 2]]
    return ids, min(_COMPLETION_TOKENS, *map(len, ids))
