"""What the checks of a model share: a few tokens to read, and how far two correct methods may differ."""

import itertools
from typing import Any

from lora_grpo.models import base_model

_TEXT = "The children walked along the river to the old mill, where their friends were baking bread for all of them."


def probe_tokens(model: Any, tokenizer: Any, count: int) -> list[int]:
    """Return `count` tokens of an English sentence, which is repeated if it is shorter.

    Tokens that the model's vocabulary lacks are left out. If none remain, the tokens are the first of the vocabulary.
    """
    vocabulary_size = model.get_input_embeddings().weight.shape[0]
    ids = [token for token in tokenizer(text=_TEXT)["input_ids"] if token < vocabulary_size]
    if not ids:
        ids = list(range(vocabulary_size))
    return list(itertools.islice(itertools.cycle(ids), count))


def logprob_tolerance(model: Any) -> float:
    """Return by how many nats two correct methods may differ. A missing scale or cap of logits changes far more."""
    import torch

    device = model.get_output_embeddings().weight.device
    is_exact = base_model.is_float32(model) and not torch.is_autocast_enabled(device.type)
    return 1e-3 if is_exact else 0.2
