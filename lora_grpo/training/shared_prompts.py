"""Process each prompt once per group, in TRL's own trainer."""

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

from lora_grpo.training.packing import ATTENTION, pack, register_attention
from lora_grpo.training.token_logprobs import logprob_tolerance
from lora_grpo.training.trl_compat import TrlHooks

_TEXT = "The children walked along the river to the old mill, where their friends were baking bread for all of them."


def base_of(model: Any) -> Any:
    """Return the base of a PEFT model, or the model itself if it is none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


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
    keeps_groups_together = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.why_padded = self.why_plain or self._why_padded()
        if self.why_padded and not self.why_plain:
            print(f"reading each prompt once per completion, which takes longer: {self.why_padded}", file=sys.stderr)

    def token_logprobs(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        score = super().token_logprobs
        if self.why_padded:
            return score(model, *args, **kwargs)
        _, _, completion_width, *_ = args
        with self._packed(completion_width):
            return score(model, *args, **kwargs)

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
        ids = torch.tensor(self.processing_class(text=_TEXT)["input_ids"], device=next(model.parameters()).device)
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
