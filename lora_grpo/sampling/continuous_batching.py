"""Continuous batching: finished completions leave the batch, and waiting ones join it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_grpo.hardware import machine
from lora_grpo.memory import CPU_FRACTION, MAX_BATCH_SIZE, estimate

if TYPE_CHECKING:
    import torch

START_FRACTION = 1 / 4
"""Fraction of the batch that is refilled at once. Refilling runs a prefill and copies the cache, which takes as long
as several decoding steps. Waiting until a quarter is free leaves an eighth of the batch empty on average."""

SPARE_COLUMNS = 32
"""Number of later tokens for which there is space when a cache is copied."""

_MIN_SAVED_TOKENS = 64
"""Minimum number of tokens for which a forward pass on the common tokens of all prompts saves time."""

_GPU_FRACTION = 0.8
"""Fraction of free memory to use. The rest is for allocator fragmentation and library workspace."""


@dataclass
class Batch:
    """R completions that are decoded together, with the state that their next tokens depend on."""

    indices: torch.Tensor
    """(R,) index of each completion in the call."""
    steps: torch.Tensor
    """(R,) number of tokens sampled so far."""
    positions: torch.Tensor
    """(R,) position of the newest token in its own sequence."""
    mask: torch.Tensor
    """(R, L) 1 where the cache contains a token of the row, 0 for left padding."""
    cache: Any
    logits: torch.Tensor
    """(R, V) logits of the next token."""

    def __len__(self) -> int:
        return len(self.indices)

    def advance(self, model: Any, tokens: torch.Tensor, running: torch.Tensor) -> None:
        """Remove rows that are not in `running`, and run the model on the newest of the (R,) `tokens` of the others."""
        import torch

        if len(running) < len(self):
            running = _fill_gaps(running)
            tokens, self.indices, self.steps = tokens[running], self.indices[running], self.steps[running]
            self.positions, self.mask = self.positions[running], self.mask[running]
            self.cache.reorder_cache(running)
        self.positions = self.positions + 1
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self), 1)], dim=1)
        if len(self):
            self.logits = _forward(model, tokens[:, None], self.mask, self.positions[:, None], self.cache)

    def copy(self, rows: torch.Tensor) -> Batch:
        """Return a batch with copies of some rows."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        for layer in cache.layers:
            layer.keys, layer.values, layer._spare = layer.keys[rows], layer.values[rows], 0
        indices, steps, positions, mask = self.indices[rows], self.steps[rows], self.positions[rows], self.mask[rows]
        return Batch(indices, steps, positions, mask, cache, self.logits[:0])  # logits of earlier tokens are not needed

    @classmethod
    def continued(cls, rows: Sequence[tuple[Batch, int]]) -> Batch:
        """Return a batch of some rows, (batch, row), of batches that it consumes. Its indices are places in `rows`."""
        import torch

        parts: dict[int, tuple[Batch, list[int], list[int]]] = {}
        for place, (batch, row) in enumerate(rows):
            _, taken, places = parts.setdefault(id(batch), (batch, [], []))
            taken.append(row)
            places.append(place)
        device, copies = rows[0][0].mask.device, []
        for batch, taken, _ in parts.values():
            copies.append(batch.copy(torch.tensor(taken, device=device)))
            batch.cache = None  # so that no more than one batch exists twice
        first, *others = copies
        first.join(*others)
        first.indices = torch.tensor([place for *_, places in parts.values() for place in places], device=device)
        return first

    def read(self, model: Any, prompts: Sequence[list[int]], pad_token_id: int) -> None:
        """Run the model on the tokens of the prompts, one for each index, that follow those in the cache."""
        import torch

        device, read = self.mask.device, (self.positions + 1).tolist()
        new = [prompts[index][count:] for index, count in zip(self.indices.tolist(), read, strict=True)]
        longest = max(map(len, new))
        # Shorter rows get columns of padding between their earlier tokens and the new ones.
        input_ids = torch.tensor([[pad_token_id] * (longest - len(ids)) + ids for ids in new], device=device)
        is_new = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in new], device=device)
        positions = self.positions[:, None] + is_new.cumsum(dim=1)
        self.mask = torch.cat([self.mask, is_new], dim=1)
        self.logits = _forward(model, input_ids, self.mask, positions, self.cache, logits_to_keep=1)
        self.positions, self.steps = positions[:, -1], torch.zeros_like(self.indices)

    def trim(self) -> None:
        """Remove left columns that no row uses, so that the cache is as long as its longest row. See `can_join`."""
        if unused := int(self.mask.any(dim=0).int().argmax()):
            self.mask = self.mask[:, unused:]
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]

    def join(self, *others: Batch) -> None:
        """Append the rows of other batches, which are consumed. See `can_join`."""
        import torch
        from torch.nn.functional import pad

        batches = (self, *others)
        length = max(batch.mask.shape[1] for batch in batches)
        self.mask = torch.cat([pad(batch.mask, (length - batch.mask.shape[1], 0)) for batch in batches])
        # Copy and free layer by layer, so that only one layer exists twice.
        for layer, *more in zip(*(batch.cache.layers for batch in batches), strict=True):
            layer.copy([layer, *more])
            for other in more:
                other.keys = other.values = None
        for name in ("indices", "steps", "positions", "logits"):
            setattr(self, name, torch.cat([getattr(batch, name) for batch in batches]))


def read_common_tokens(model: Any, prompts: Sequence[list[int]]) -> Any:
    """Run the model once on the tokens that all prompts start with, such as a system prompt or worked examples.

    Return their cache, or None if they are few or cannot be read separately.
    """
    import torch

    low, high = min(prompts), max(prompts)
    common = next((number for number, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))
    common = min(common, min(map(len, prompts)) - 1)
    rope = getattr(model.config, "rope_parameters", None) or {}
    rotates_by_length = rope.get("rope_type") in ("dynamic", "longrope")  # of the longest sequence in a pass
    if common * (len(prompts) - 1) < _MIN_SAVED_TOKENS or rotates_by_length or not can_join(model.config):
        return None
    input_ids = torch.tensor([prompts[0][:common]], device=next(model.parameters()).device)
    mask, cache = torch.ones_like(input_ids), new_cache(model.config)
    _forward(model, input_ids, mask, mask.cumsum(dim=1) - 1, cache, logits_to_keep=1)
    return cache


def _forward(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any, **options: Any
) -> Any:
    """Run the model on (R, T) new tokens, extend the cache, and return the (R, V) logits of the next tokens."""
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}
    return model(**inputs, use_cache=True, **options).logits[:, -1]


def prefill(
    model: Any, pad_token_id: int, prompts: Sequence[list[int]], indices: range, num_samples: int, common: Any = None
) -> Batch:
    """Run the model on the prompts of the completions `indices`, out of all B·G, once per prompt.

    Shorter prompts are padded on the left, or after the common tokens, the result of `read_common_tokens`.
    """
    import torch

    device = next(model.parameters()).device
    first = indices[0] // num_samples
    start = common.get_seq_length() if common else 0
    needed = [ids[start:] for ids in prompts[first : indices[-1] // num_samples + 1]]
    longest = max(map(len, needed))
    input_ids = torch.tensor([[pad_token_id] * (longest - len(ids)) + ids for ids in needed], device=device)
    mask = torch.tensor([[1] * start + [0] * (longest - len(ids)) + [1] * len(ids) for ids in needed], device=device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, start:]
    cache = new_cache(model.config)
    if common:
        for layer, shared in zip(cache.layers, common.layers, strict=True):
            layer.lazy_initialization(shared.keys, shared.values)
            layer.keys, layer.values = (each.expand(len(needed), -1, -1, -1) for each in (shared.keys, shared.values))
    logits = _forward(model, input_ids, mask, positions, cache, logits_to_keep=1)
    rows = torch.arange(indices.start, indices.stop, device=device)
    prompt = rows // num_samples - first
    cache.reorder_cache(prompt)  # one copy per sample; unlike batch_repeat_interleave, all layer types support it
    return Batch(rows, torch.zeros_like(rows), positions[prompt, -1], mask[prompt], cache, logits[prompt])


def _fill_gaps(running: torch.Tensor) -> torch.Tensor:
    """Reorder rows so that the last ones take the places of those that are missing, and the others stay in place."""
    import torch

    count = len(running)
    order = torch.arange(count, device=running.device)
    stay = running[running < count]
    gap = torch.ones_like(order, dtype=torch.bool).index_fill_(0, stay, False)
    order[gap] = running[len(stay) :]
    return order


def can_join(config: Any) -> bool:
    """Return whether completions can join a running batch. Only full attention supports left padding."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def num_to_start(batch_size: int, *, running: int, waiting: int, joining: bool) -> int:
    """Return how many completions to start now: `START_FRACTION` of the batch once it is free.

    Without `joining`, a full batch starts once all completions have finished.
    """
    if not joining:
        return 0 if running else min(batch_size, waiting)
    new = min(max(1, int(batch_size * START_FRACTION)), waiting)
    return new if new <= batch_size - running else 0


def new_cache(config: Any) -> Any:
    """Return an empty DynamicCache, of growing layers if all layers of the model have full attention."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=config)
    if can_join(config):
        layer = type("GrowingDynamicLayer", (GrowingLayer, DynamicLayer), {})
        cache.layers = [layer() for _ in cache.layers]
    return cache


class GrowingLayer:
    """The (R, heads, L, width) keys and values of one layer, as views of tensors with more columns on the right.

    Mixed into transformers' `DynamicLayer`, which copies the layer for every token, and when rows leave.
    """

    keys: torch.Tensor
    values: torch.Tensor
    is_initialized: bool
    lazy_initialization: Callable[..., None]
    _spare = 0
    """Number of columns on the right that are not used yet."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens, and return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        if self._spare < key_states.shape[-2]:
            self.copy([self], columns=key_states.shape[-2])
        self._spare -= key_states.shape[-2]
        self.keys, self.values = _append(self.keys, key_states), _append(self.values, value_states)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep the given rows, in this order. Only rows that move are copied, unless there are more than before."""
        import torch

        count = len(beam_idx)
        if count > len(self.keys):
            self.keys, self.values, self._spare = self.keys[beam_idx], self.values[beam_idx], 0
            return
        moved = (beam_idx != torch.arange(count, device=beam_idx.device)).nonzero().squeeze(1)
        for tensor in (self.keys, self.values):
            tensor[moved] = tensor[beam_idx[moved]]
        self.keys, self.values = self.keys[:count], self.values[:count]

    def copy(self, layers: Sequence[GrowingLayer], columns: int = 0) -> None:
        """Take the rows of some layers, with spare columns for `columns` and for later tokens."""
        self._spare = columns + SPARE_COLUMNS
        self.keys = _with_spare_columns([layer.keys for layer in layers], self._spare)
        self.values = _with_spare_columns([layer.values for layer in layers], self._spare)


def _with_spare_columns(parts: Sequence[torch.Tensor], spare: int) -> torch.Tensor:
    """Return a copy of the rows of all parts. Shorter rows are padded on the left."""
    from torch.nn.functional import pad

    _, heads, _, width = parts[0].shape
    length = max(part.shape[2] for part in parts)
    buffer = parts[0].new_empty(sum(map(len, parts)), heads, length + spare, width)
    start = 0
    for part in parts:
        # Zeros instead of uninitialized memory, because zero attention to NaN is NaN.
        buffer[start : start + len(part), :, :length] = pad(part, (0, 0, length - part.shape[2], 0))
        start += len(part)
    return buffer[:, :, :length]


def _append(used: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Write new columns into the spare ones, and return a view that includes them."""
    rows, heads, length, width = used.shape
    longer = used.as_strided((rows, heads, length + new.shape[2], width), used.stride())
    longer[:, :, length:] = new
    return longer


def max_batch_size(model: Any, longest_prompt: int, max_tokens: int) -> int:
    """Return how many completions can be decoded at once in the available memory, as a power of two.

    On a CPU, the result depends only on the machine, so that a resumed command decodes the same batches.
    """
    import torch

    device = next(model.parameters()).device
    if device.type == "cuda":
        # The driver counts memory that torch caches after freeing tensors as used.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        available = _GPU_FRACTION * (torch.cuda.mem_get_info(device)[0] + unused)
    else:
        available = CPU_FRACTION * machine.machine_memory()[0]
    fit = int(min(available // bytes_per_completion(model, longest_prompt, max_tokens), MAX_BATCH_SIZE))
    return 1 << max(0, fit.bit_length() - 1)


def bytes_per_completion(model: Any, longest_prompt: int, max_tokens: int) -> int:
    """Return an upper bound of the bytes per completion during decoding. Lengths are in tokens."""
    import torch
    from torch.utils._pytree import tree_leaves
    from transformers import DynamicCache

    config = model.config.get_text_config()
    linears = (module for module in model.get_decoder().modules() if isinstance(module, torch.nn.Linear))
    inner = max(module.out_features for module in linears)
    width = model.get_input_embeddings().weight.element_size()  # not from a 4-bit layer, whose dtype is uint8

    # The cache of one token: keys and values grow, recurrent states do not. Unsloth returns pairs of keys and values.
    was_training, ids = model.training, torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        model.eval()
        cache = model(input_ids=ids, past_key_values=DynamicCache(config=model.config), use_cache=True).past_key_values
    model.train(was_training)
    layers = [vars(each) for each in getattr(cache, "layers", ())] or [{"keys": k, "values": v} for k, v in cache]
    growing = [2 * layer["keys"].nbytes if layer.get("keys") is not None else 0 for layer in layers]
    tensors = [each for each in tree_leaves(layers) if isinstance(each, torch.Tensor)]
    # Two additional layers, because the cache is copied layer by layer when it grows. All states are copied at once.
    token = sum(growing) + 2 * max(growing)
    states = 2 * (sum(each.nbytes for each in tensors) - sum(growing))
    selection = config.vocab_size * estimate.SELECTION_BYTES
    # Per layer: the residual, its norm, queries to outputs; gate, inner values and product of the feed-forward block.
    prefill = longest_prompt * ((8 * config.hidden_size + 6 * inner) * width + 4 * longest_prompt)
    started = START_FRACTION if can_join(model.config) else 1
    return int((longest_prompt + max_tokens + SPARE_COLUMNS) * token + states + max(selection, prefill * started))


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means out of memory. The CPU allocator has no error class of its own."""
    messages = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    return any(words in str(error) for words in messages)
