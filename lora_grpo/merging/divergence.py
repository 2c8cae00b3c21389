"""Measure how much rounding changed the merged model's predictions, compared with how much training changed them.

A merge is evaluated even on machines without enough memory to load the model: a forward pass in float32 reads the
weights of one module at a time from disk, and the embedding and the head, the largest tensors, in blocks of rows.

The adapter's weights are W + D in float32, computed from the merge plan. An error in the plan would affect both sides
of the comparison, so the tests compare plans with PEFT.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import Rows, StoredTensor, json_files, model_tensors, row_blocks
from lora_grpo.merging.base_weights import MergeTarget, base_tensors, by_module, weight_name
from lora_grpo.merging.mapping import MergePlan, plan_merge
from lora_grpo.merging.report import Divergences
from lora_grpo.models import ModelSpec, run_of, tokenizer_of
from lora_grpo.prompts import chat
from lora_grpo.runs import read_record, system_prompt

Weights = Mapping[str, Rows]

_TEXTS = 2
_PROMPT_TOKENS = 64
"""Longer prompts are truncated on the left, because every token costs a pass through the whole model."""
_COMPLETION_TOKENS = 64
"""Longer completions are truncated on the right."""
_PLAIN_TEXT = (
    "A pen costs 3 dollars, so 4 pens cost 4 * 3 = 12 dollars. Tom has 15 apples and eats 6 of them, so he has 9 left."
)
"""The text for an adapter that has no completions. Its prompts are unknown, so this has none."""
_PLAIN_TOKENS = 32


def measure_divergences(
    target: ModelSpec, model: Any, base: Mapping[str, StoredTensor], plan: MergePlan, merged: Path, onto: MergeTarget
) -> Divergences:
    """Measure KL divergences over tokens of the run's completions and their prompts, if there are any.

    `model` is the result of `empty_model` and cannot be used afterward. `merged` is the folder of the merged shards.
    """
    try:
        assert target.adapter is not None
        run = run_of(target.adapter) if target.run else None
        ids, keep = _texts(tokenizer_of(target), run)
        written = by_module(model_tensors(merged), model)
        weights: dict[str, Weights] = {"adapter": plan.outputs, "merged": written, "base": base}
        pairs = [("adapter", "merged"), ("adapter", "base")]
        if onto == "full" and target.run and target.run["config"]["model"]["bits"] == 4:
            four_bit = base_tensors(Path(target.base.name), "dequantized", model)
            weights["trained"] = plan_merge(four_bit, target.adapter, model).outputs
            pairs.append(("trained", "merged"))
        streamed = StreamedModel(model)
        found = between({name: streamed.states(each, ids, keep) for name, each in weights.items()}, pairs)
        figures: dict[str, Any] = {"_".join(pair): value for pair, value in found.items()}
        return Divergences(tokens=keep * len(ids), **figures)
    except Exception as error:  # noqa: BLE001 - models vary without limit, and a figure must not fail the merge
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return Divergences(not_measured=kind + first_line(error))


def _texts(tokenizer: Any, run: Path | None) -> tuple[list[list[int]], int]:
    """Return token ids of two prompts with completions, and the number of trailing tokens to compare.

    The completions are of the last steps of the run. Without any, this is a plain text.
    """
    paths = sorted((run / "completions").glob("step-*.jsonl"))[-4:] if run else []
    lines = [row for path in paths for _, row in json_files.read_lines(path, "completions")]
    rows = list({(row["id"], row["completion"]): row for row in lines}.values())
    rows = rows[:: max(1, len(rows) // _TEXTS)][:_TEXTS]  # a step has many completions for each of its few questions
    system = system_prompt(read_record(run)) if run else None
    ids = []
    for row in rows:
        messages = [{"role": "system", "content": system}] if system else []
        prompt = chat.render(tokenizer, [*messages, {"role": "user", "content": row["question"]}])
        ids.append(
            tokenizer(prompt, add_special_tokens=False)["input_ids"][-_PROMPT_TOKENS:]
            + tokenizer(row["completion"], add_special_tokens=False)["input_ids"][:_COMPLETION_TOKENS]
        )
    ids = ids or [tokenizer(_PLAIN_TEXT)["input_ids"][:_PLAIN_TOKENS]]
    return ids, min(_COMPLETION_TOKENS, *map(len, ids))


@dataclass(frozen=True)
class States:
    """The head of a model, (V, hidden size), and its inputs, (T, hidden size)."""

    hidden: Any
    head: Rows


class StreamedModel:
    """The result of `empty_model`, with hooks that read the weights of a module before it runs and drop them after."""

    def __init__(self, model: Any) -> None:
        import torch

        head, self._embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if any(each.dim() > 2 and "conv" not in name for name, each in model.named_parameters()):
            raise UserError("the model is a mixture of experts")
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, torch.nn.Embedding)]
        if head.bias is not None or sizes.count(self._embedding.num_embeddings) > 1:
            raise UserError(f"{type(model).__name__} has a head with a bias, or several embeddings of tokens")
        self._model = model
        self._head_name, self._embedding_name = weight_name(model, head), weight_name(model, self._embedding)
        self._embedding.padding_idx = None
        # The model ends before the head, whose logits would not fit in memory.
        self._end = torch.nn.Identity()
        model.set_output_embeddings(self._end)
        self._weights: Weights = {}
        for name, module in model.named_modules():
            if module is not self._embedding and next(module.parameters(recurse=False), None) is not None:
                # Recurrent layers use the weight of their convolution without calling it.
                user = model.get_submodule(name.rpartition(".")[0]) if isinstance(module, torch.nn.Conv1d) else module
                user.register_forward_pre_hook(functools.partial(self._read, name, module))
                user.register_forward_hook(functools.partial(_drop, module))

    def states(self, weights: Weights, ids: Sequence[Sequence[int]], keep: int) -> States:
        """Run texts of at least `keep` tokens through all layers before the head. Keep that many states of each text.

        The weights are given by name. A missing head is tied to the embedding.

        Raises:
            UserError: a weight is missing, or the logits are not just the product of the states and the head.
        """
        import torch

        self._weights = weights
        longest = max(map(len, ids))
        # Right padding needs no mask, because no token attends to later tokens.
        batch = torch.tensor([[*text, *[0] * (longest - len(text))] for text in ids])
        indices = torch.tensor([range(len(text) - keep, len(text)) for text in ids])
        # The embedding has only the rows of the tokens in the batch, which are renumbered accordingly.
        tokens, numbers = batch.unique(return_inverse=True)
        rows = _find(weights, self._embedding_name)
        self._embedding.weight = _parameter(torch.cat([rows.rows(token, token + 1) for token in tokens.tolist()]))
        ends: list[Any] = []
        with self._end.register_forward_hook(lambda module, inputs, output: ends.append(output)), torch.no_grad():
            after = self._model(input_ids=numbers, use_cache=False).logits
        if len(ends) != 1 or after is not ends[0]:
            raise UserError(f"{type(self._model).__name__} changes its logits after the head")
        hidden = after.gather(1, indices.unsqueeze(-1).expand(-1, -1, after.shape[-1])).flatten(0, 1)
        return States(hidden, weights.get(self._head_name) or rows)

    def _read(self, name: str, module: Any, *_: Any) -> None:
        import torch

        for part, _ in list(module.named_parameters(recurse=False)):
            weight = _find(self._weights, f"{name}.{part}")
            values = torch.empty(weight.shape)
            for start, stop in row_blocks(weight.shape):  # a whole weight in its own dtype would need as much again
                values[start:stop] = weight.rows(start, stop)
            setattr(module, part, _parameter(values))


def _drop(module: Any, *_: Any) -> None:
    for part, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, part, _parameter(parameter.to("meta")))


def _parameter(values: Any) -> Any:
    import torch

    return torch.nn.Parameter(values.float(), requires_grad=False)


def _find(weights: Weights, name: str) -> Rows:
    if name not in weights:
        raise UserError(f"the weights have no {name}")
    return weights[name]


def between(models: Mapping[str, States], pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Return the mean KL(first || second) in nats per token for each pair of models.

    Logits are computed for one block of the vocabulary at a time and then discarded. With logits a and b and
    Z = sum(exp), KL = sum(exp(a) (a - b)) / Z_a - log Z_a + log Z_b. Sums are relative to the largest logit so far and
    in float64, because the rounding error of two nearly equal float32 softmaxes exceeds their divergence.
    """
    import torch

    largest = {name: torch.full((len(model.hidden),), -torch.inf).double() for name, model in models.items()}
    total = {name: torch.zeros_like(values) for name, values in largest.items()}
    weighted = {pair: torch.zeros_like(total[pair[0]]) for pair in pairs}
    shape = next(iter(models.values())).head.shape
    for start, stop in row_blocks(shape):
        logits, terms, shrink = {}, {}, {}
        for name, model in models.items():
            values = (model.head.rows(start, stop).float() @ model.hidden.T).double()
            before = largest[name]
            largest[name] = torch.maximum(before, values.amax(dim=0))
            # The sums so far are relative to the largest logit before this block.
            shrink[name] = (before - largest[name]).exp()
            terms[name] = (values - largest[name]).exp()
            total[name] = total[name] * shrink[name] + terms[name].sum(dim=0)
            logits[name] = values
        for first, second in pairs:
            summed = (terms[first] * (logits[first] - logits[second])).sum(dim=0)
            weighted[first, second] = weighted[first, second] * shrink[first] + summed
    log_z = {name: largest[name] + total[name].log() for name in models}
    return {
        (first, second): float((summed / total[first] - log_z[first] + log_z[second]).mean())
        for (first, second), summed in weighted.items()
    }
