"""What the adapter and its base compute with transformers and PEFT: the reference of a verification."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import row_blocks
from lora_grpo.models import ModelSpec, base_model, engines, load_adapter
from lora_grpo.sampling import build, plain_copy
from lora_grpo.verify.targets import IN_16_BITS

_BLOCK_WIDTH = 32
"""Number of weights of a row that share a scale in the types of GGUF."""
_BATCH_TOKENS = 1024
"""Maximum number of tokens, with padding, that one forward pass reads."""
_ROUNDING_FACTOR = 4
"""Some engines round what a layer reads to a type like that of the weights."""


@dataclass(frozen=True)
class Text:
    """A prompt and a completion, both as token ids."""

    prompt_ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True)
class Scores:
    """What a model computes for the T tokens of a completion."""

    logprobs: list[float]
    """Logprob of each token, in nats."""
    is_greedy: list[bool]
    """Whether each token is the most probable one."""
    end_probabilities: list[float]
    """At each token, the probability that the completion ends there instead."""


@dataclass(frozen=True)
class Precision:
    """How a target rounds."""

    bits: int
    """Number of bits of most weights, from 2 to 32."""
    engine_rounding: float
    """See `TargetFacts.engine_rounding`."""


class Reference:
    """A base and its adapter as one model, in 16 or 32 bits. The base is the model with its adapter switched off.

    Args:
        spec: the adapter and its base.
        end_token_ids: the tokens that end a completion.
    """

    def __init__(self, spec: ModelSpec, end_token_ids: Sequence[int]) -> None:
        assert spec.adapter is not None
        self._spec = spec
        self._adapter = spec.adapter
        self._end_token_ids = list(end_token_ids)
        self._loaded: Any = None

    @property
    def _model(self) -> Any:
        """The base with the adapter."""
        if self._loaded is None:
            self.load()
        return self._loaded

    def load(self) -> None:
        """Load the model, which is otherwise loaded when it is needed."""
        engines.prepare_torch(0)
        base = base_model.load_base(self._spec.base)
        if self._spec.base.loaded_bits == 4:
            base = plain_copy(base)
        self._loaded = build.with_adapter(base, self._adapter)

    def score(self, texts: Sequence[Text], scale: float = 1.0, adapter: Path | None = None) -> list[Scores]:
        """Score completions.

        Args:
            texts: with completions of at least one token.
            scale: factor of the adapter: 1 for the adapter as it was trained, 0 for the base.
            adapter: another adapter of the same shape, in place of the verified one.

        Raises:
            UserError: a token is not in the vocabulary of the base.
        """
        vocabulary = self._model.get_input_embeddings().num_embeddings
        largest_id = max(max(text.prompt_ids + text.token_ids) for text in texts)
        if largest_id >= vocabulary:
            raise UserError(
                f"the target has token {largest_id}, and the adapter's base has {vocabulary} tokens; it is another "
                "model: correct --against"
            )
        if adapter is not None:
            load_adapter(self._model, adapter)
        try:
            return self._score(texts, scale)
        finally:
            if adapter is not None:
                load_adapter(self._model, self._adapter)

    def _score(self, texts: Sequence[Text], scale: float) -> list[Scores]:
        if scale == 0:
            with self._model.disable_adapter():
                return self._forward(texts)
        layers = [layer for layer in self._model.modules() if hasattr(layer, "lora_A")]
        scaling = [layer.scaling["default"] for layer in layers]  # the factor of B A
        try:
            for layer, factor in zip(layers, scaling, strict=True):
                layer.scaling["default"] = scale * factor
            return self._forward(texts)
        finally:
            for layer, factor in zip(layers, scaling, strict=True):
                layer.scaling["default"] = factor

    def rounding(
        self, texts: Sequence[Text], precision: Precision, base: Sequence[Scores], adapter: Sequence[Scores]
    ) -> float:
        """Return the largest mean difference that rounding the weights explains, in nats per token.

        The matrices of the base, in 16 bits with the adapter merged, are rounded to the type of GGUF with so many bits.
        The difference that this makes to the logprobs is multiplied by `_ROUNDING_FACTOR`.

        Args:
            base: the base's scores of the same texts.
            adapter: those of the base with the adapter.
        """
        engine_rounding = precision.engine_rounding
        if not base_model.is_float32(self._model):
            engine_rounding = max(engine_rounding, IN_16_BITS)
        is_less_than_arithmetic = precision.bits >= 16 and engine_rounding >= IN_16_BITS
        if precision.bits >= 32 or is_less_than_arithmetic:
            return engine_rounding
        is_merged = precision.bits >= 16  # a base that is published in 16 bits is not rounded itself
        exact = _joined(adapter if is_merged else base)
        if is_merged:
            self._model.merge_adapter()
        vocabulary_weights = [self._model.get_output_embeddings().weight, self._model.get_input_embeddings().weight]
        for name, weight in self._model.named_parameters():
            if weight.dim() >= 2 and "lora_" not in name:
                is_vocabulary = any(weight is other for other in vocabulary_weights)  # 8 bits in GGUF files
                _round(weight.data, max(precision.bits, 8) if is_vocabulary else precision.bits)
        rounded = _joined(self._forward(texts) if is_merged else self.score(texts, scale=0))
        self._loaded = None  # it is loaded again when it is needed
        differences = [abs(logprob - other) for logprob, other in zip(exact, rounded, strict=True)]
        return max(engine_rounding, _ROUNDING_FACTOR * sum(differences) / len(differences))

    def _forward(self, texts: Sequence[Text]) -> list[Scores]:
        """Run the model as it is."""
        import torch

        scores: dict[int, Scores] = {}
        for batch in _batches(texts):
            with torch.no_grad():
                for index, row_scores in zip(batch, self._forward_batch([texts[i] for i in batch]), strict=True):
                    scores[index] = row_scores
        return [scores[index] for index in range(len(texts))]

    def _forward_batch(self, texts: Sequence[Text]) -> list[Scores]:
        """Score R completions in one forward pass of T tokens."""
        import torch

        device = next(self._model.parameters()).device
        rows = [torch.tensor(text.prompt_ids + text.token_ids, device=device) for text in texts]
        # Padding on the right needs no mask, because no token attends to later tokens.
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (R, T)
        hidden_of_head = min(len(text.prompt_ids) for text in texts) - 1
        logits_to_keep = ids.shape[1] - hidden_of_head
        logits = self._model(input_ids=ids, logits_to_keep=logits_to_keep, use_cache=False).logits

        scores = []
        for row, text in enumerate(texts):
            # Each token is predicted at the position before it.
            first = len(text.prompt_ids) - 1 - hidden_of_head
            positions = slice(first, first + len(text.token_ids))
            logprobs = torch.log_softmax(logits[row, positions].float(), dim=-1)  # (tokens, V)
            tokens = torch.tensor(text.token_ids, device=device)
            ends = torch.tensor(self._end_token_ids, device=device)
            scores.append(
                Scores(
                    logprobs=logprobs.gather(1, tokens[:, None]).squeeze(1).tolist(),
                    is_greedy=(logprobs.argmax(dim=-1) == tokens).tolist(),
                    end_probabilities=logprobs[:, ends].exp().sum(dim=-1).tolist(),
                )
            )
        return scores


def _batches(texts: Sequence[Text]) -> Iterator[list[int]]:
    """Yield the indices of texts that one forward pass reads: texts of similar length, the shortest first."""
    lengths = [len(text.prompt_ids) + len(text.token_ids) for text in texts]
    batch: list[int] = []
    for index in sorted(range(len(texts)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _joined(scores: Sequence[Scores]) -> list[float]:
    """Return the logprobs of all completions."""
    return [logprob for row in scores for logprob in row.logprobs]


def bits_of(weight_type: str | None) -> int | None:
    """Return the number of bits in the name of a type of weights, such as 4 for `q4_k_m`. None if it names none."""
    name = re.match(r"(?:i?q|nf|fp|b?f|b?float|int)(\d+)", (weight_type or "").lower())
    return int(name[1]) if name else None


def _round(weight: Any, bits: int) -> None:
    """Round a matrix, or a stack of matrices, in place to the type of GGUF with at most so many bits, of at least 4."""
    import torch

    if bits >= 16:
        weight.copy_(weight.to(torch.bfloat16))
        return
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    if bits >= 8:
        kind = GGMLQuantizationType.Q8_0
    elif bits >= 5:
        kind = GGMLQuantizationType.Q5_0
    else:
        kind = GGMLQuantizationType.Q4_0
    if weight.shape[-1] % _BLOCK_WIDTH:
        return  # stored in 16 bits
    matrix = weight.view(-1, weight.shape[-1])
    for start, stop in row_blocks(matrix.shape):
        rows = matrix[start:stop]
        encoded = quantize(rows.float().cpu().numpy(), kind)
        rows.copy_(torch.from_numpy(dequantize(encoded, kind)))
