"""The forward and backward passes of a GRPO step, exact and without work that cannot change the gradient.

    class Trainer(SkipZeroAdvantage, SharedPrompts, ChunkedLogProbs, GRPOTrainer): ...

A micro-batch of a plain GRPOTrainer is a rectangle: a prompt is read once for each of its completions, and short rows
are padded. With these mixins, the layers read only distinct tokens:

    prompt A  answer A1  answer A2  answer A3 | prompt B  answer B1  answer B2  answer B3
       ▲          │          │          │
       └──────────┴──────────┴──────────┘  each answer attends to its prompt and to itself

The gradient of a prompt is the sum over its group, as before. TRL computes the loss, its normalization and its metrics.
Unsloth replaces the model's layers and the loss, so its trainer does without these mixins.

zero_advantage.py    leaves out completions whose group has equal rewards
shared_prompts.py    packs the rows before the backbone and restores TRL's layout after it; decides whether a model can
packing.py           where each token of a packed micro-batch stands, and what it attends to
attention.py         attention over a packed micro-batch
chunked_logprobs.py  logprobs without materializing the full logits
"""

from lora_grpo.loss_pass.chunked_logprobs import ChunkedLogProbs
from lora_grpo.loss_pass.shared_prompts import SharedPrompts
from lora_grpo.loss_pass.zero_advantage import SkipZeroAdvantage

__all__ = ["ChunkedLogProbs", "SharedPrompts", "SkipZeroAdvantage"]
