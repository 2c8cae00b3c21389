"""Process each prompt once per group, in TRL's own trainer."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

from lora_grpo import console
from lora_grpo.errors import one_line
from lora_grpo.models import base_model
from lora_grpo.training.packing import ATTENTION, pack, register_attention
from lora_grpo.training.token_logprobs import logprob_tolerance
from lora_grpo.training.trl_compat import TrlHooks

_TEXT = "The children walked along the river to the old mill, where their friends were baking bread for all of them."


_SHIFT = 64
"""Tokens of padding in `why_padding_counts`."""


def base_of(model: Any) -> Any:
    """Return the base of a PEFT model, or the model itself if it is none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def probe_tokens(trainer: Any, count: int) -> list[int]:
    """Return the first tokens of a text, repeated if they are fewer. A tokenizer may have no English, or few tokens."""
    rows = trainer.model.get_input_embeddings().weight.shape[0]
    ids = [token for token in trainer.processing_class(text=_TEXT)["input_ids"] if token < rows]
    ids = ids or [*range(rows)]
    return [*itertools.islice(itertools.cycle(ids), count)]


def can_pack(ids: Any, mask: Any, completion_width: int) -> bool:
    """Return whether rows are prompts with padding on the left and completions with padding on the right, as TRL's."""
    prompts, completions = mask[:, :-completion_width], mask[:, -completion_width:]
    if not prompts.shape[1]:
        return False
    starts = (prompts.diff(dim=1) >= 0).all() & prompts[:, -1].all()
    return bool(starts & (completions.diff(dim=1) <= 0).all())


def why_padding_counts(trainer: Any) -> str:
    """Return the reason if padding on the left changes the logprobs of the model's loss pass, else "".

    TRL passes no positions. Most models attend by distance, or count positions from the attention mask. Others (GPT-2,
    BioGPT, XGLM) count padding, unlike `generate`, this package's sampler, and packed rows.
    """
    import torch

    model = trainer.model
    device = next(model.parameters()).device
    ids = torch.tensor([probe_tokens(trainer, 16)], device=device)
    config = base_of(model).config.get_text_config()
    shift = min(_SHIFT, (getattr(config, "max_position_embeddings", None) or 2 * _SHIFT) // 2)
    padding = torch.full((1, shift), trainer._tokenizer.pad_token_id, device=device)
    rows = [(ids, torch.ones_like(ids))]
    rows += [(torch.cat([padding, ids], 1), torch.cat([torch.zeros_like(padding), torch.ones_like(ids)], 1))]
    base_model.keep_frozen(model)  # before the first pass in eval mode
    model.eval()
    with torch.no_grad(), trainer.accelerator.autocast():
        logprobs = [TrlHooks.token_logprobs(trainer, model, tokens, mask, 8)[0].float() for tokens, mask in rows]
        tolerance = logprob_tolerance(model) / 2
    apart = (logprobs[0] - logprobs[1]).abs().mean().item()
    if apart <= tolerance:
        return ""
    return f"TRL counts the padding of {config.model_type} ({shift} tokens change logprobs by {apart:.2g} nats)"


class SharedPrompts(TrlHooks):
    """Mixin that packs the rows of a micro-batch before the model reads them. List it before ChunkedLogProbs.

    TRL processes a prompt once for each of its completions, and pads rows to the longest. Here, hooks on the backbone
    replace a padded batch with one sequence (`pack`), and return the hidden states in TRL's layout. TRL computes the
    logprobs and the loss. To keep groups together, micro-batches are slices of the completions in the order of their
    prompts instead of TRL's random order.

    Attributes:
        longest_row: maximum number of tokens of a prompt and its completion, if it is known.
        why_padded: the reason why the model cannot read packed rows, or "" if it can.
    """

    processing_class: Any
    longest_row = math.inf
    why_padded = ""
    _has_packed = False
    """Whether a micro-batch was packed, so that later errors have other causes than the model."""
    keeps_groups_together = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.fallback_reason:
            self.why_padded = self.fallback_reason
            return
        try:
            reason = self._why_padded()
        except self.fallback_errors as error:
            reason = one_line(error)
        if reason:
            self._read_padded_rows(reason)

    def token_logprobs(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        score = super().token_logprobs
        ids, mask, completion_width, *_ = args
        if self.why_padded or not can_pack(ids, mask, completion_width):
            return score(model, *args, **kwargs)
        try:
            with self._packed(completion_width):
                result = score(model, *args, **kwargs)
        except self.fallback_errors as error:
            if self._has_packed:
                raise
            self._read_padded_rows(one_line(error))
            return score(model, *args, **kwargs)
        self._has_packed = True
        return result

    def _read_padded_rows(self, reason: str) -> None:
        """Compute all later losses from padded rows."""
        self.why_padded = reason
        console.warning(f"reading each prompt once per completion, which takes longer: {reason}")

    @contextlib.contextmanager
    def _packed(self, width: int) -> Iterator[None]:
        """Pack the inputs of the backbone, and unpack its outputs. Completions have `width` columns."""
        import torch

        packings = []

        def before(_: Any, __: Any, kwargs: dict[str, Any]) -> Any:
            packing = pack(kwargs["input_ids"], kwargs["attention_mask"], width)
            packings.append(packing)
            # The model creates no mask if it gets one with four dimensions.
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packing.ids.device)
            packed = {"input_ids": packing.ids, "position_ids": packing.positions, "attention_mask": mask}
            return (), {**kwargs, **packed, "packing": packing}

        def after(_: Any, __: Any, output: Any) -> Any:
            # TRL drops the last column, which would predict the token after the completion.
            slots = torch.nn.functional.pad(packings.pop().predecessors, (0, 1))
            output.last_hidden_state = torch.nn.functional.embedding(slots, output.last_hidden_state[0])
            return output

        backbone = base_of(self.model).base_model
        hooks = [backbone.register_forward_pre_hook(before, with_kwargs=True), backbone.register_forward_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _why_padded(self) -> str:
        """Return why the model cannot read packed rows, or "" after one test with equal logprobs."""
        import torch

        if self.aux_loss_enabled:  # type: ignore[attr-defined]
            return "the loss of the router is computed from padded rows"
        model = base_of(self.model)
        config = model.config.get_text_config()
        if config._attn_implementation not in ("sdpa", ATTENTION):
            return f"the model uses the attention implementation {config._attn_implementation}, not sdpa"
        if layers := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
            return f"the model has layers of another kind: {', '.join(sorted(layers))}"
        window = getattr(config, "sliding_window", None)
        if window and window < self.longest_row and getattr(config, "use_sliding_window", True):
            return f"the model attends to the last {window} tokens, and rows may be longer"
        # Two prompts of eight tokens. In 16 bits, rounding moves the logprobs of improbable tokens by up to 5 nats.
        ids = torch.tensor(probe_tokens(self, 22), device=next(model.parameters()).device)
        tokens = torch.nn.utils.rnn.pad_sequence([ids[:11], ids[:9], ids[11:20], ids[11:22]], True, -1)
        mask, tokens = (tokens >= 0).long(), tokens.clamp(min=0)
        score = super().token_logprobs
        self.model.eval()
        with torch.no_grad(), self.accelerator.autocast():
            padded = score(self.model, tokens, mask, 3)[0]
            register_attention()
            model.get_decoder().set_attn_implementation(ATTENTION)
            try:
                with self._packed(3):
                    packed = score(self.model, tokens, mask, 3)[0]
                apart = (packed.float() - padded.float()).abs().mean().item()
                if apart <= logprob_tolerance(model):
                    return ""
                failure = f"packed rows change the model's logprobs by {apart:.2g} nats"  # also NaN
            except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, NotImplementedError) as error:
                failure = f"the model does not take packed rows ({' '.join(str(error).split())})"
        model.get_decoder().set_attn_implementation("sdpa")
        return failure
