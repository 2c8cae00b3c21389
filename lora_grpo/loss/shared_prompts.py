"""Read each prompt once for its group: hooks on the backbone pack its inputs and unpack its outputs.

TRL processes a prompt once for each of its completions, and pads rows to the longest. With the hooks, the backbone
reads one packed sequence in place of the padded rows. It returns the hidden states that predict the completions, one
row for each completion.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lora_grpo.loss.attention import ATTENTIONS, PackedAttention, register_attention
from lora_grpo.loss.packing import Packing, pack
from lora_grpo.loss.probes import logprob_tolerance, probe_tokens
from lora_grpo.loss.scoring import Score
from lora_grpo.models import base_of

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def packed_rows(model: Any, completion_width: int, predecessors: torch.Tensor | None = None) -> Iterator[None]:
    """Pack what the backbone reads inside the block.

    Args:
        completion_width: number of columns of the completions.
        predecessors: the column before each token of the completions, if some are trees; see `pack`. Then the backbone
            must read all rows at once.
    """
    import torch

    # The hook on the inputs leaves the packing here for the hook on the outputs. It is empty between two passes.
    packings: list[Packing] = []

    def pack_inputs(_: Any, __: Any, kwargs: dict[str, Any]) -> Any:
        packing = pack(kwargs["input_ids"], kwargs["attention_mask"], completion_width, predecessors)
        packings.append(packing)
        packed = {
            "input_ids": packing.ids,
            "position_ids": packing.positions,
            # The model creates no mask if it gets one with four dimensions.
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packing.ids.device),
            "packing": packing,
        }
        return (), {**kwargs, **packed}

    def unpack_outputs(_: Any, __: Any, output: Any) -> Any:
        # TRL expects one more column, which would predict the token after the completion, and drops it. It is slot 0.
        slots = torch.nn.functional.pad(packings.pop().predecessors, (0, 1), value=0)  # (R, completion width + 1)
        hidden_states = output.last_hidden_state[0]  # (T, hidden size)
        output.last_hidden_state = torch.nn.functional.embedding(slots, hidden_states)
        return output

    base = base_of(model)
    backbone = base.base_model
    hooks = [
        backbone.register_forward_pre_hook(pack_inputs, with_kwargs=True),
        backbone.register_forward_hook(unpack_outputs),
    ]
    try:
        with labels_of_completions(base, completion_width):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def labels_of_completions(base: Any, completion_width: int) -> Iterator[None]:
    """Cut the labels of a fused head (TRL 1.16) to the columns of the hidden states inside the block.

    Such a head is the `forward` of the model itself, which PEFT calls without hooks. Its labels have a column for each
    token of a prompt, too, and like the hidden states, it drops the first or last of them.
    """
    fused_forward = vars(base).get("forward")
    if fused_forward is None:
        yield
        return

    def forward(*args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if labels is not None:
            kwargs["labels"] = labels[:, -(completion_width + 1) :]
        return fused_forward(*args, **kwargs)

    base.forward = forward
    try:
        yield
    finally:
        base.forward = fused_forward


def packing_obstacle(
    model: Any, score: Score, tokenizer: Any, longest_row: float = math.inf, attention: PackedAttention = "sdpa"
) -> str:
    """Return why a model must read padded rows, or "" if a test with packed rows gives the same logprobs.

    After "", the model keeps this package's attention. It is left in eval mode. Call this in the trainer's autocast.

    Args:
        score: TRL's function, which computes the logprobs of padded rows.
        longest_row: maximum number of tokens of a prompt and its completion.
        attention: how packed tokens attend.
    """
    import torch

    base = base_of(model)
    config = base.config.get_text_config()
    if config._attn_implementation not in ("sdpa", *ATTENTIONS.values()):
        return f"the model uses the attention implementation {config._attn_implementation}, not sdpa"
    layer_types = set(getattr(config, "layer_types", None) or ())
    other_layers = layer_types - {"full_attention", "sliding_attention"}
    if other_layers:
        return f"the model has layers of another kind: {', '.join(sorted(other_layers))}"
    window = getattr(config, "sliding_window", None)
    if window and window < longest_row and getattr(config, "use_sliding_window", True):
        return f"the model attends to the last {window} tokens, and rows may be longer"

    # Four rows of two prompts: prompts of eight tokens, and completions of three, one, one and three.
    ids = torch.tensor(probe_tokens(model, tokenizer, 22), device=next(model.parameters()).device)
    completion_width = 3
    rows = [ids[:11], ids[:9], ids[11:20], ids[11:22]]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    mask = (padded >= 0).long()
    padded = padded.clamp(min=0)

    model.eval()
    # The backbone that `packed_rows` packs may also read images. The packing is for the attention of its text model.
    text_model = base.get_decoder()
    with torch.no_grad():
        expected = score(model, padded, mask, completion_width)[0]
        register_attention()
        text_model.set_attn_implementation(ATTENTIONS[attention])
        try:
            with packed_rows(model, completion_width):
                logprobs = score(model, padded, mask, completion_width)[0]
            # In 16 bits, rounding moves the logprobs of improbable tokens by up to 5 nats, so take the mean.
            difference = (logprobs.float() - expected.float()).abs().mean().item()
            if difference <= logprob_tolerance(base):
                return ""
            reason = f"packed rows change the model's logprobs by {difference:.2g} nats"  # also NaN
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, NotImplementedError) as error:
            reason = f"the model does not take packed rows ({' '.join(str(error).split())})"
    text_model.set_attn_implementation("sdpa")
    return reason
