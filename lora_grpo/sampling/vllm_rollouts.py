"""Training rollouts by vLLM: the base is loaded once, and at every step the adapter alone moves."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo.sampling.vllm_engine import VllmEngine, served_rank
from lora_grpo.sampling.vllm_sampler import VllmSampler
from lora_grpo.sampling.vllm_server import VllmServer

FLAG = "--sampling.backend"
"""Chooses between vLLM and transformers, for messages."""


class HotSwapSampler(VllmSampler):
    """Samples from the policy by vLLM, the adapter handed over at every `refresh`.

    TRL's own vLLM mode merges the adapter into the base and takes it out again for each hand-over, which rounds a 4-bit
    base every time. Here the base is never written: a few megabytes of adapter are saved, read by the engine under a
    new name, and used beside the base.

    Args:
        model: the policy, a PEFT model.
        tokenizer: its tokenizer.
        eos_token_ids: the tokens that end a completion.
        engine: holds the same base, in this process or on a server.
    """

    serves_training = True
    is_other_engine = True

    def __init__(
        self, model: Any, tokenizer: Any, eos_token_ids: Sequence[int], engine: VllmEngine | VllmServer
    ) -> None:
        super(VllmSampler, self).__init__(model, tokenizer, eos_token_ids)
        self.engine, self._request = engine, None

    def refresh(self, *, adapter: bool) -> None:
        """Hand over the adapter as it is now; without it, sample from the base alone."""
        self.engine.wake()
        self._request = None
        if adapter:
            self._request = self.engine.hand_over(functools.partial(write_adapter, self.model))

    def sleep(self) -> None:
        """Lend the GPU's memory to training until the next `refresh`."""
        self.engine.sleep()


def adapter_rank(model: Any) -> int:
    """Return the rank that vLLM must make room for.

    Args:
        model: a PEFT model.

    Raises:
        UserError: vLLM cannot serve this kind of adapter; says why.
    """
    with tempfile.TemporaryDirectory(prefix="lora_grpo-adapter-") as folder:
        write_adapter(model, Path(folder))
        return served_rank(Path(folder), FLAG)


def write_adapter(model: Any, folder: Path) -> None:
    """Write the policy's adapter as PEFT does.

    Args:
        model: a PEFT model.
        folder: exists and is empty.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    # Left to itself PEFT asks the Hub whether the vocabulary was resized.
    state = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    weights = folder / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights)
    weights.chmod(0o644)  # safetensors lets nobody else read it; a server may be another user's
    model.peft_config["default"].save_pretrained(folder)
