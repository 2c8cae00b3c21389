"""Training rollouts by vLLM: the base is loaded once, and at every step the adapter alone moves."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo.config import ModelConfig
from lora_grpo.vllm_engine import VllmEngine, served_rank
from lora_grpo.vllm_sampler import VllmSampler

_FLAG = "--sampling.backend"


class HotSwapSampler(VllmSampler):
    """Samples from the policy by vLLM, the adapter handed over at every `refresh`.

    TRL's own vLLM mode merges the adapter into the base and takes it out again for each hand-over, which rounds a 4-bit
    base every time. Here the base is never written: a few megabytes of adapter are saved, read by the engine under a
    new name, and used beside the base.

    Args:
        model: the policy, a PEFT model.
        tokenizer: its tokenizer.
        eos_token_ids: the tokens that end a completion.
        settings: the base model, and its bits.
        max_sequence_tokens: the most that a prompt and its completion take.
        gpu_memory_share: share of the GPU's memory for vLLM's weights and cache, 0 to 1.
        most_at_once: completions decoded together; None takes vLLM's own default.
        seed: of vLLM's own random numbers.

    Raises:
        UserError: vLLM is missing, or cannot serve this kind of adapter.
        RunError: the engine does not start.
    """

    serves_training = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        settings: ModelConfig,
        *,
        max_sequence_tokens: int,
        gpu_memory_share: float,
        most_at_once: int | None,
        seed: int,
    ) -> None:
        super(VllmSampler, self).__init__(model, tokenizer, eos_token_ids)
        with tempfile.TemporaryDirectory(prefix="lora_grpo-adapter-") as folder:
            write_adapter(model, Path(folder))
            rank = served_rank(Path(folder), _FLAG)
        self._adapter = self._request = None
        self.engine = VllmEngine(
            settings,
            rank=rank,
            max_sequence_tokens=max_sequence_tokens,
            gpu_memory_share=gpu_memory_share,
            seed=seed,
            flag=_FLAG,
            model=model,
            most_at_once=most_at_once,
            sleeps=True,
        )

    def refresh(self, *, adapter: bool) -> None:
        """Hand over the adapter as it is now; without it, sample from the base alone."""
        self.engine.wake()
        self._request = None
        if adapter:
            with tempfile.TemporaryDirectory(prefix="lora_grpo-adapter-") as folder:
                write_adapter(self.model, Path(folder))
                self._request = self.engine.load(Path(folder))

    def rest(self) -> None:
        """Lend the GPU's memory to training until the next `refresh`."""
        self.engine.sleep()


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
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "adapter_model.safetensors")
    model.peft_config["default"].save_pretrained(folder)
