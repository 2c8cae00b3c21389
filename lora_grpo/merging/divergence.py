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
from lora_grpo.files import Rows, StoredTensor, model_tensors, row_blocks
from lora_grpo.merging.base_weights import MergeTarget, base_tensors, by_module, weight_name
from lora_grpo.merging.mapping import MergePlan, plan_merge
from lora_grpo.merging.report import Divergences
from lora_grpo.models import ModelSpec, tokenizer_of
from lora_grpo.prompts import chat
from lora_grpo.runs import last_completions, read_record, system_prompt

Weights = Mapping[str, Rows]

_TEXTS = 2
_STEPS = 4
"""Number of last steps of a run whose completions are read."""
_PROMPT_TOKENS = 64
"""Longer prompts are truncated on the left, because every token costs a pass through the whole model."""
_COMPLETION_TOKENS = 64
"""Longer completions are truncated on the right."""
_PLAIN_TEXT = (
    "A pen costs 3 dollars, so 4 pens cost 4 * 3 = 12 dollars. Tom has 15 apples and eats 6 of them, so he has 9 left."
)
"""The text for an adapter without completions. The prompts of such an adapter are unknown, so the text has none."""
_PLAIN_TOKENS = 32


def measure_divergences(
    target: ModelSpec, model: Any, base: Mapping[str, StoredTensor], plan: MergePlan, merged: Path, onto: MergeTarget
) -> Divergences:
    """Measure KL divergences over tokens of the run's completions and their prompts, if there are any.

    Args:
        target: the adapter and its base.
        model: the result of `empty_model`, which cannot be used afterward.
        base: the base's tensors by name.
        plan: the merge.
        merged: the folder of the merged shards.
        onto: the weights that the adapter was merged into.
    """
    try:
        assert target.adapter is not None
        texts = _texts(tokenizer_of(target), target.run_folder)

        # The same texts run through every model, one after the other.
        weights: dict[str, Weights] = {
            "adapter": plan.outputs,
            "merged": by_module(model_tensors(merged), model),
            "base": base,
        }
        pairs = [("adapter", "merged"), ("adapter", "base")]
        was_trained_in_4_bit = target.run is not None and target.base.loaded_bits == 4
        if onto == "full" and was_trained_in_4_bit:
            four_bit_base = base_tensors(Path(target.base.name), "dequantized", model)
            weights["trained"] = plan_merge(four_bit_base, target.adapter, model).outputs
            pairs.append(("trained", "merged"))
        streamed = StreamedModel(model)
        states = {name: streamed.states(tensors, texts.ids, texts.compared) for name, tensors in weights.items()}

        # The names of a pair are those of a field of `Divergences`: `adapter_merged`.
        divergences = between(states, pairs)
        figures: dict[str, Any] = {f"{first}_{second}": value for (first, second), value in divergences.items()}
        return Divergences(tokens=texts.compared * len(texts.ids), **figures)
    except Exception as error:  # noqa: BLE001 - models vary without limit, and a figure must not fail the merge
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return Divergences(not_measured=kind + first_line(error))


@dataclass(frozen=True)
class _Texts:
    """Texts for which the models are compared."""

    ids: list[list[int]]
    """Token ids of each text."""
    compared: int
    """Number of tokens at the end of each text that count."""


def _texts(tokenizer: Any, run: Path | None) -> _Texts:
    """Return two prompts with completions of the last steps of a run, or a plain text if there are none."""
    ids = _completions(tokenizer, run) if run else []
    if not ids:
        ids = [tokenizer(_PLAIN_TEXT)["input_ids"][:_PLAIN_TOKENS]]
    # The same number of tokens of each text, so at most those of the shortest text.
    shortest = min(len(text) for text in ids)
    return _Texts(ids, compared=min(_COMPLETION_TOKENS, shortest))


def _completions(tokenizer: Any, run: Path) -> list[list[int]]:
    """Return the token ids of `_TEXTS` prompts with completions; [] if the run has none."""
    row_of_completion = {}
    for row in last_completions(run, _STEPS):
        row_of_completion[row["id"], row["completion"]] = row
    rows = list(row_of_completion.values())
    # A step has many completions for each of its few questions, so the rows are taken at equal distances.
    stride = max(1, len(rows) // _TEXTS)
    rows = rows[::stride][:_TEXTS]

    system = system_prompt(read_record(run))
    opening: list[chat.Message] = [{"role": "system", "content": system}] if system else []
    texts = []
    for row in rows:
        prompt = chat.render(tokenizer, [*opening, {"role": "user", "content": row["question"]}])
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        completion_ids = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        texts.append(prompt_ids[-_PROMPT_TOKENS:] + completion_ids[:_COMPLETION_TOKENS])
    return texts


@dataclass(frozen=True)
class States:
    """The head of a model, (V, hidden size), and its inputs, (T, hidden size)."""

    hidden: Any
    head: Rows


class StreamedModel:
    """The result of `empty_model`, with hooks that read the weights of a module before it runs and drop them after."""

    def __init__(self, model: Any) -> None:
        import torch

        self._model = model
        self._embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        self._check(head)
        self._head_name = weight_name(model, head)
        self._embedding_name = weight_name(model, self._embedding)
        self._embedding.padding_idx = None

        # The model ends before the head, whose logits would not fit in memory.
        self._end = torch.nn.Identity()
        model.set_output_embeddings(self._end)

        # Each module with weights reads them before it runs and drops them after.
        self._weights: Weights = {}
        for name, module in model.named_modules():
            has_weights = next(module.parameters(recurse=False), None) is not None
            if module is self._embedding or not has_weights:
                continue
            called_module = module
            if isinstance(module, torch.nn.Conv1d):
                # Recurrent layers use the weight of their convolution without calling it.
                called_module = model.get_submodule(name.rpartition(".")[0])
            called_module.register_forward_pre_hook(functools.partial(self._read, name, module))
            called_module.register_forward_hook(functools.partial(_drop, module))

    def _check(self, head: Any) -> None:
        """Raise a UserError for a model that needs more than reading one module's weights at a time."""
        import torch

        for name, parameter in self._model.named_parameters():
            if parameter.dim() > 2 and "conv" not in name:
                raise UserError("the model is a mixture of experts")
        embeddings = [module for module in self._model.modules() if isinstance(module, torch.nn.Embedding)]
        token_embeddings = [
            embedding for embedding in embeddings if embedding.num_embeddings == self._embedding.num_embeddings
        ]
        if head.bias is not None or len(token_embeddings) > 1:
            raise UserError(f"{type(self._model).__name__} has a head with a bias, or several embeddings of tokens")

    def states(self, weights: Weights, ids: Sequence[Sequence[int]], compared: int) -> States:
        """Run texts through all layers before the head.

        Args:
            weights: the model's weights by name. A missing head is tied to the embedding.
            ids: token ids of each of the N texts, at least `compared`.
            compared: number of states at the end of each text to keep, so that T = N * compared.

        Raises:
            UserError: a weight is missing, or the logits are not just the product of the states and the head.
        """
        import torch

        self._weights = weights
        longest = max(len(text) for text in ids)
        # Right padding needs no mask, because no token attends to later tokens.
        batch = torch.tensor([[*text, *[0] * (longest - len(text))] for text in ids])  # (N, longest)
        compared_positions = torch.tensor([range(len(text) - compared, len(text)) for text in ids])  # (N, compared)

        # The embedding has only the rows of the tokens in the batch, which are renumbered accordingly.
        tokens, renumbered = batch.unique(return_inverse=True)
        embedding = _find(weights, self._embedding_name)
        rows = [embedding.rows(token, token + 1) for token in tokens.tolist()]
        self._embedding.weight = _parameter(torch.cat(rows))

        outputs_of_end: list[Any] = []
        remember = self._end.register_forward_hook(lambda module, inputs, output: outputs_of_end.append(output))
        with remember, torch.no_grad():
            hidden = self._model(input_ids=renumbered, use_cache=False).logits  # (N, longest, hidden size)
        if len(outputs_of_end) != 1 or hidden is not outputs_of_end[0]:
            raise UserError(f"{type(self._model).__name__} changes its logits after the head")
        hidden_size = hidden.shape[-1]
        compared_hidden = hidden.gather(1, compared_positions.unsqueeze(-1).expand(-1, -1, hidden_size))
        return States(compared_hidden.flatten(0, 1), weights.get(self._head_name) or embedding)

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

    # For each token (T,), up to the current block: the largest logit m, sum(exp(a - m)), and for each pair
    # sum(exp(a - m) (a - b)).
    largest = {name: torch.full((len(model.hidden),), -torch.inf).double() for name, model in models.items()}
    exp_sum = {name: torch.zeros_like(values) for name, values in largest.items()}
    difference_sum = {(first, second): torch.zeros_like(exp_sum[first]) for first, second in pairs}
    head_shape = next(iter(models.values())).head.shape
    for start, stop in row_blocks(head_shape):
        logits = {}
        exps = {}
        shrink = {}
        for name, model in models.items():
            values = (model.head.rows(start, stop).float() @ model.hidden.T).double()  # (rows of the block, T)
            before = largest[name]
            largest[name] = torch.maximum(before, values.amax(dim=0))
            # The sums so far are relative to the largest logit before this block.
            shrink[name] = (before - largest[name]).exp()
            exps[name] = (values - largest[name]).exp()
            exp_sum[name] = exp_sum[name] * shrink[name] + exps[name].sum(dim=0)
            logits[name] = values
        for first, second in pairs:
            differences = (exps[first] * (logits[first] - logits[second])).sum(dim=0)
            difference_sum[first, second] = difference_sum[first, second] * shrink[first] + differences

    log_z = {name: largest[name] + exp_sum[name].log() for name in models}
    divergences = {}
    for first, second in pairs:
        kl = difference_sum[first, second] / exp_sum[first] - log_z[first] + log_z[second]  # (T,)
        divergences[first, second] = float(kl.mean())
    return divergences
