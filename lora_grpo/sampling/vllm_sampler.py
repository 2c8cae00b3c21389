"""Completions by vLLM, for evaluation: one engine for a base and its adapter, which is never merged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.sampling.sampler import Draw, Drawn, Rollout, Sampler
from lora_grpo.sampling.vllm_engine import VllmEngine, served_rank
from lora_grpo.sampling.vllm_server import VllmServer


class VllmSampler(Sampler):
    """Samples by a vLLM engine of its own.

    A completion's draws depend on its seed; its logits, within rounding, also on what shares its batch.

    Args:
        settings: the base model, and its bits.
        tokenizer: what prompts and completions are read with.
        eos_token_ids: the tokens that end a completion.
        adapter: a PEFT adapter's folder; None serves the base alone.
        max_sequence_tokens: the most that a prompt and its completion take.
        gpu_memory_share: share of the GPU's memory for weights and cache, 0 to 1.
        seed: of vLLM's own random numbers; completions have their own seeds.

    Raises:
        UserError: vLLM is missing, or cannot serve this adapter.
        RunError: the engine does not start, or leaves the adapter out.
    """

    serves_training = False
    streams = True

    def __init__(
        self,
        settings: ModelConfig,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        *,
        adapter: Path | None,
        max_sequence_tokens: int,
        gpu_memory_share: float = 0.85,
        seed: int = 0,
    ) -> None:
        rank = served_rank(adapter) if adapter else None
        super().__init__(None, tokenizer, eos_token_ids)
        self.engine: VllmEngine | VllmServer
        self.engine = engine = VllmEngine(
            settings,
            rank=rank,
            max_sequence_tokens=max_sequence_tokens,
            gpu_memory_share=gpu_memory_share,
            seed=seed,
            flag="--backend",
        )
        self._adapter = self._request = self._load(engine, adapter) if adapter else None

    def _load(self, engine: VllmEngine, adapter: Path) -> Any:
        """Hand the adapter to the engine and see that it is heard; return what asks for it."""
        from safetensors.torch import load_file

        try:
            request = engine.load(adapter)
        except UserError:
            self.close()
            raise
        weights = load_file(adapter / "adapter_model.safetensors")
        if any(bool(weight.any()) for name, weight in weights.items() if "lora_B" in name or "embedding_B" in name):
            text = self.encode(["Tom has 12 plums and buys 3 more. How many plums does Tom have now?"])[0]
            ids = text[: engine.longest - 1]
            base, again, adapted = (engine.prompt_log_probs(ids, asked) for asked in (None, None, request))
            noise = max(abs(one - other) for one, other in zip(base, again, strict=True))
            if max(abs(one - other) for one, other in zip(base, adapted, strict=True)) <= noise:
                self.close()
                raise RunError(
                    f"vLLM leaves the adapter in {adapter} out: log-probabilities are the same with it and without it; "
                    "use --backend transformers"
                )
        return request

    def refresh(self, *, adapter: bool) -> None:
        """Sample with the adapter, or from the base alone; takes hold at the next call."""
        self._request = self._adapter if adapter else None

    def find_batch_size(self, longest_prompt: int, max_tokens: int) -> int:
        """Return the most completions that vLLM decodes at once."""
        return self.engine.most_at_once

    def rollouts(
        self,
        prompts: Sequence[str],
        num_samples: int,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | Sequence[int],
    ) -> list[list[Rollout]]:
        """Sample `num_samples` completions of each prompt; as `Sampler.rollouts`."""
        draw = Draw(num_samples, max_tokens, temperature, top_p, seed)
        drawn = dict(self._groups(prompts, draw, log_probs=self.serves_training))
        return [drawn[place] for place in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[str],
        num_samples: int,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | Sequence[int],
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """Yield (place of the prompt, its G rollouts) as soon as all of them have ended.

        The engine has all requests at once. Closing the generator early drops those that have not ended.

        Raises:
            UserError: a prompt leaves too little room.
            RunError: the engine gave up on a completion.
        """
        yield from self._groups(prompts, Draw(num_samples, max_tokens, temperature, top_p, seed), log_probs=False)

    def _groups(self, prompts: Sequence[str], draw: Draw, *, log_probs: bool) -> Iterator[tuple[int, list[Rollout]]]:
        total, group, seed = len(prompts) * draw.num_samples, draw.num_samples, draw.seed
        seeds = [_derived(seed, place) for place in range(total)] if isinstance(seed, int) else list(seed)
        if len(seeds) != total:
            raise ValueError(f"{len(seeds)} seeds for {total} completions; pass one each")
        ids = self.encode(prompts) if prompts else []
        longest = max(map(len, ids), default=0)
        if longest + draw.max_tokens > self.engine.longest:
            raise UserError(
                f"the longest prompt has {longest} tokens, and {draw.max_tokens} more exceed the {self.engine.longest} "
                "that the engine was started for; pass a smaller --max-completion-tokens"
            )
        asked = [each for each in ids for _ in range(group)]
        # Of a greedy choice they say nothing.
        log_probs = log_probs and draw.temperature > 0
        ended: list[dict[int, tuple[list[int], list[float] | None]]] = [{} for _ in prompts]
        for place, drawn, told in self.engine.draw(
            asked, draw, seeds, self.eos_token_ids, self._request, log_probs=log_probs
        ):
            whole = ended[place // group]
            whole[place] = drawn, told
            if len(whole) == group:
                in_order = [whole.pop(each) for each in sorted(whole)]
                each_told = [told or [] for _, told in in_order] if log_probs else None
                yield place // group, self._read(Drawn([drawn for drawn, _ in in_order], each_told))

    def close(self) -> None:
        """End the engine and free what it holds; nothing can be drawn after it."""
        self.engine.close()


def _derived(seed: int, place: int) -> int:
    """Return a completion's own seed where one was given for all."""
    return int.from_bytes(hashlib.sha256(f"{seed} {place}".encode()).digest()[:8], "big")
