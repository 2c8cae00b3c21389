"""The exact loss pass: the logprobs of TRL's loss, from fewer tokens and in less memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lora_grpo import console
from lora_grpo.errors import one_line
from lora_grpo.loss.attention import PackedAttention
from lora_grpo.loss.compiled_layers import compile_layers, restore_layers
from lora_grpo.loss.distillation import Distillation
from lora_grpo.loss.importance_sampling import ImportanceSampling
from lora_grpo.loss.micro_batch import MicroBatch
from lora_grpo.loss.packing import can_pack
from lora_grpo.loss.scoring import Score, Scored, Tiles, joined
from lora_grpo.loss.shared_prompts import packed_rows, packing_obstacle
from lora_grpo.loss.tiles import report_whole_logits, score_in_slices, tiles_obstacle
from lora_grpo.loss.trees import has_trees, paths_of
from lora_grpo.loss.zero_advantage import rows_with_advantage, zero_of
from lora_grpo.models import base_of

if TYPE_CHECKING:
    import torch


class ExactLossPass:
    """Computes the logprobs that a trainer's loss needs. Loss and gradient are those of TRL's pass except for rounding.

    1. Completions whose advantage is zero are left out (`zero_advantage.py`).
    2. The layers read each prompt once for its group, and no padding (`packing.py`, `shared_prompts.py`).
    3. Logits exist only in tiles (`tiles.py`).
    4. Norms and MLPs are compiled if the trainer asks for it (`compiled_layers.py`).

    The constructor tests on a few tokens whether the model allows 2 to 4, and prints one line for each that it does
    not. It leaves the model in eval mode; a trainer switches to training mode before its first step.

    Args:
        model: the trained model, with or without a PEFT adapter.
        score: the trainer's function for the logprobs of padded rows, from whole logits.
        tokenizer: the model's tokenizer.
        tiles: the trainer's tiles; None if the model cannot use them.
        autocast: the context in which the trainer computes.
        longest_row: maximum number of tokens of a prompt and its completion.
        packed_attention: how packed tokens attend, see `attention.py`.
        compiled_layers: whether to compile norms and MLPs, see `compiled_layers.py`.
        has_router_loss: whether the loss has a term for the router of experts.
        has_entropy_bonus: whether entropies need a gradient.
        fallback_reason: the reason why TRL's pass computes everything, or "".
        fallback_errors: types of exceptions after which TRL's pass is used, as long as this package's has never
            succeeded. Later ones are raised. With (), all are.
    """

    packing_disabled_reason = ""
    """The reason why the model reads padded rows, or "" if it reads packed ones."""
    uses_tiles = False
    """Whether logits exist only in tiles."""
    compiles_layers = False
    """Whether norms and MLPs of the layers are compiled."""

    def __init__(
        self,
        model: Any,
        score: Score,
        tokenizer: Any,
        *,
        tiles: Tiles | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        longest_row: float = math.inf,
        packed_attention: PackedAttention = "sdpa",
        compiled_layers: bool = False,
        has_router_loss: bool = False,
        has_entropy_bonus: bool = False,
        fallback_reason: str = "",
        fallback_errors: tuple[type[Exception], ...] = (),
    ) -> None:
        self._model = model
        self._score = score
        self._has_entropy_bonus = has_entropy_bonus
        self._fallback_reason = fallback_reason
        self._fallback_errors = fallback_errors
        self._has_packed = False  # a micro-batch was packed, so that later errors have other causes than the model
        self._micro_batch: MicroBatch | None = None
        self._hidden_states: list[torch.Tensor] | None = None

        if fallback_reason:
            self.packing_disabled_reason = fallback_reason
            return
        with autocast():
            if tiles is not None:
                self.uses_tiles = self._enable_tiles(tiles)
            restore_layers(model)
            if compiled_layers:
                self.compiles_layers = self._compile_layers()
            if has_router_loss:
                self._disable_packing("the loss of the router is computed from padded rows")
                return
            try:
                reason = packing_obstacle(model, self._score_rows, tokenizer, longest_row, packed_attention)
            except fallback_errors as error:
                reason = one_line(error)
        if reason:
            self._disable_packing(reason)

    @contextlib.contextmanager
    def micro_batch(
        self,
        inputs: MutableMapping[str, Any],
        *,
        may_skip_rows: bool,
        needs_pass: bool = False,
        importance_sampling: ImportanceSampling | None = None,
        distillation: Distillation | None = None,
    ) -> Iterator[MicroBatch]:
        """Restrict `logprobs` to the rows that matter for the loss of a micro-batch, inside the block.

        Args:
            inputs: tensors of TRL's loss. With `importance_sampling`, its weights are added when the logprobs exist.
            may_skip_rows: whether completions whose advantage is zero have no effect on the loss.
            needs_pass: whether the model reads one completion if none has an advantage.
            importance_sampling: corrects the loss for the sampler; None if TRL does, or nothing.
            distillation: what is learned from a teacher, whose logprobs are in `inputs`; None without one. Then no row
                is skipped, because the teacher has something to say about all tokens.
        """
        read_rows = None
        if may_skip_rows and distillation is None and not self._fallback_reason:
            read_rows = rows_with_advantage(inputs, needs_one=needs_pass)
        self._micro_batch = MicroBatch(inputs, read_rows, importance_sampling, distillation)
        try:
            yield self._micro_batch
        finally:
            self._micro_batch = None

    def logprobs(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        predecessors: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Scored:
        """Return the logprobs of the tokens of R completions, their entropies, and the router's loss.

        Inside a `micro_batch`, the rows are those of the micro-batch, and the model reads only those that matter.
        Outside, as for the old logprobs and those of the KL reference, it reads all.

        Args:
            model: the model to score with: the trained one, perhaps wrapped, or a reference.
            input_ids: prompts padded on the left and completions padded on the right, (R, prompt + completion width).
            attention_mask: 1 for tokens and 0 for padding, of the same shape.
            logits_to_keep: the completion width.
            args: more arguments of the trainer's function; so are `kwargs`.
            predecessors: the column before each token of the completions, which may be trees (`trees.py`), shape (R,
                completion width); None if every token follows the one before it.
        """
        micro_batch = self._micro_batch
        if micro_batch is not None and micro_batch.reads_nothing:
            return micro_batch.without_pass(zero_of(model))
        if micro_batch is not None and micro_batch.read_rows is not None:
            input_ids = input_ids[micro_batch.read_rows]
            attention_mask = attention_mask[micro_batch.read_rows]
            if predecessors is not None:
                predecessors = predecessors[micro_batch.read_rows]

        if predecessors is None:
            scored = self._score_packed(model, input_ids, attention_mask, logits_to_keep, None, *args, **kwargs)
        else:
            scored = self._score_trees(model, input_ids, attention_mask, logits_to_keep, predecessors, *args, **kwargs)

        if micro_batch is None:
            return scored
        # TRL's loss asks once, for the trained model. A trainer's subclass may ask again, perhaps for another model.
        if micro_batch.logprobs is None:
            micro_batch.keep_logprobs(scored[0])
        if micro_batch.read_rows is None:
            return scored
        return micro_batch.with_skipped_rows(scored)

    @contextlib.contextmanager
    def keeping_hidden_states(self) -> Iterator[list[torch.Tensor]]:
        """Keep the hidden states from which `logprobs` computes logits, inside the block.

        Yields:
            A list to which each call of `logprobs` appends the states of R completions, shape (R, completion width,
            hidden size). The state in a column predicts the token of that column.
        """
        self._hidden_states = []
        try:
            yield self._hidden_states
        finally:
            self._hidden_states = None

    def _score_trees(
        self,
        model: Any,
        ids: torch.Tensor,
        mask: torch.Tensor,
        completion_width: int,
        predecessors: torch.Tensor,
        *args: Any,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Scored:
        """Score at most `batch_size` rows at once, some of which may be trees."""
        slice_size = batch_size or len(ids)
        parts = []
        for start in range(0, len(ids), slice_size):
            rows = slice(start, start + slice_size)
            columns_before: torch.Tensor | None = predecessors[rows]
            if not has_trees(predecessors[rows], mask[rows, -completion_width:]):
                columns_before = None  # so that these rows are read as in a step without trees
            part = self._score_packed(
                model, ids[rows], mask[rows], completion_width, columns_before, *args, batch_size=batch_size, **kwargs
            )
            parts.append(part)
        return joined(parts)

    def _score_packed(
        self,
        model: Any,
        ids: torch.Tensor,
        mask: torch.Tensor,
        completion_width: int,
        predecessors: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Scored:
        """Score packed rows if the model and the rows allow it, otherwise padded ones.

        `model` may be a wrapper of `self._model`, such as DDP's, which runs its hooks. A separate reference model has
        none, and reads padded rows.

        Args:
            predecessors: None if no row is a tree.
        """
        if self.packing_disabled_reason or not can_pack(ids, mask, completion_width):
            return self._score_padded(model, ids, mask, completion_width, predecessors, *args, **kwargs)
        # A model that does not run the hooks would read trees as if each token followed the one before it.
        if predecessors is not None and base_of(self._model) not in model.modules():
            return self._score_padded(model, ids, mask, completion_width, predecessors, *args, **kwargs)
        try:
            with packed_rows(self._model, completion_width, predecessors):
                scored = self._score_rows(model, ids, mask, completion_width, *args, **kwargs)
        except self._fallback_errors as error:
            if self._has_packed:
                raise
            self._disable_packing(one_line(error))
            return self._score_padded(model, ids, mask, completion_width, predecessors, *args, **kwargs)
        self._has_packed = True
        return scored

    def _score_padded(
        self,
        model: Any,
        ids: torch.Tensor,
        mask: torch.Tensor,
        completion_width: int,
        predecessors: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Scored:
        """Score padded rows, and trees as one row for each of their paths."""
        if predecessors is None:
            return self._score_rows(model, ids, mask, completion_width, *args, **kwargs)
        paths = paths_of(ids, mask, predecessors)
        logprobs, entropies, router_loss = self._score_rows(
            model, paths.ids, paths.mask, paths.path_width, *args, **kwargs
        )
        if self._hidden_states is not None:
            self._hidden_states[-1] = paths.collect(self._hidden_states[-1], predecessors.shape)
        logprobs = paths.collect(logprobs, predecessors.shape)
        if entropies is not None:
            entropies = paths.collect(entropies, predecessors.shape)
        return logprobs, entropies, router_loss

    def _score_rows(
        self, model: Any, ids: torch.Tensor, mask: torch.Tensor, completion_width: int, *args: Any, **kwargs: Any
    ) -> Scored:
        """Score rows, and keep their hidden states if something asks for them."""
        if self._hidden_states is not None:
            with self._kept_hidden_states(completion_width, self._hidden_states):
                return self._score_in_tiles(model, ids, mask, completion_width, *args, **kwargs)
        return self._score_in_tiles(model, ids, mask, completion_width, *args, **kwargs)

    @contextlib.contextmanager
    def _kept_hidden_states(self, completion_width: int, kept: list[torch.Tensor]) -> Iterator[None]:
        """Append the hidden states of the completions that the model reads inside the block, in one or more passes."""
        import torch

        parts: list[torch.Tensor] = []

        def keep(_: Any, __: Any, output: Any) -> None:
            # The states of a row also predict the tokens of its prompt, unless rows are packed, and one more token.
            parts.append(output.last_hidden_state[:, -(completion_width + 1) : -1])

        # The hook is the last one, so it gets the states that `packed_rows` has unpacked.
        hook = base_of(self._model).base_model.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()
        kept.append(torch.cat(parts))

    def _score_in_tiles(self, model: Any, ids: torch.Tensor, mask: torch.Tensor, *args: Any, **kwargs: Any) -> Scored:
        """Score rows with the trainer's function, in tiles if they are enabled."""
        if not self.uses_tiles:
            return self._score(model, ids, mask, *args, **kwargs)
        logprobs, entropies, router_loss = score_in_slices(self._score, model, ids, mask, *args, **kwargs)
        if entropies is not None and not self._has_entropy_bonus:
            entropies = entropies.detach()  # as TRL's from the full logits
        return logprobs, entropies, router_loss

    def _enable_tiles(self, tiles: Tiles) -> bool:
        """Enable tiles, and return whether the model allows them."""
        try:
            reason = tiles_obstacle(self._model, tiles.compare)
        except self._fallback_errors as error:
            reason = one_line(error)
        if reason:
            report_whole_logits(reason)
            return False
        self._score = tiles.enable()
        return True

    def _compile_layers(self) -> bool:
        """Compile norms and MLPs, and return whether that is possible."""
        try:
            reason = compile_layers(self._model)
        except self._fallback_errors as error:
            reason = one_line(error)
        if reason:
            console.warning(f"not compiling the layers: {reason}")
        return not reason

    def _disable_packing(self, reason: str) -> None:
        """Compute all later losses from padded rows."""
        self.packing_disabled_reason = reason
        console.warning(f"reading each prompt once per completion, which takes longer: {reason}")
