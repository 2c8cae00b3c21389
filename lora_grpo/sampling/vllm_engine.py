"""A vLLM engine in this process, with the frozen base model and at most one adapter."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.sampling.sampler import SamplingParams


class VllmEngine:
    """A base model in vLLM, with memory for one adapter. The adapter is never merged.

    Args:
        engine: vLLM's `LLMEngine`. See `start_engine`.
        max_sequence_tokens: maximum length of a prompt and its completion, in tokens.
        flag: the flag that selects vLLM or transformers, for error messages.
        sleeps: whether the engine supports sleep mode.
    """

    def __init__(self, engine: Any, max_sequence_tokens: int, flag: str, *, sleeps: bool) -> None:
        self._engine, self._sleeps = engine, sleeps
        self.max_sequence_tokens, self.flag = max_sequence_tokens, flag
        self._calls, self._adapters = itertools.count(), itertools.count(1)
        self._served: Any = None

    def load_adapter(self, adapter: Path) -> Any:
        """Load an adapter in place of the previous one, and return its LoRARequest.

        Each adapter gets a new number and name, because vLLM caches prompts by adapter name.

        Args:
            adapter: folder of a PEFT adapter. It is read before this method returns.

        Raises:
            UserError: vLLM cannot serve the adapter.
        """
        from vllm.lora.request import LoRARequest

        number = next(self._adapters)
        request = LoRARequest(f"adapter-{number}", number, str(adapter.resolve()))
        try:
            self._engine.add_lora(request)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise UserError(
                f"vLLM cannot serve the adapter in {adapter}: {reason(error)}; use {self.flag} transformers"
            ) from error
        if self._served is not None:
            self._engine.remove_lora(self._served.lora_int_id)
        self._served = request
        return request

    def stream(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        eos_token_ids: list[int],
        request: Any,
        *,
        logprobs: bool,
    ) -> Iterator[tuple[int, list[int], list[float] | None]]:
        """Yield (index, token ids, logprobs) of each completion when it is finished.

        All requests are submitted at once. If the generator is closed early, unfinished requests are aborted.

        Args:
            prompts: R lists of token ids, one per completion.
            params: sampling parameters.
            seeds: R seeds, one per completion.
            eos_token_ids: tokens that end a completion.
            request: from `load_adapter`, or None for the base model.
            logprobs: if False, yield None instead of logprobs.

        Raises:
            RunError: the engine aborted a completion.
        """
        import vllm
        from vllm.sampling_params import RequestOutputKind

        if self._engine.has_unfinished_requests():
            raise RuntimeError("another stream of this sampler is running; finish or close it first")
        call = next(self._calls)
        pending = {f"{call}-{index}": index for index in range(len(prompts))}
        try:
            for name, index in pending.items():
                options = vllm.SamplingParams(
                    max_tokens=params.max_tokens,
                    temperature=params.temperature,
                    top_p=params.top_p,
                    seed=seeds[index] % 2**63,
                    stop_token_ids=eos_token_ids,
                    detokenize=False,
                    logprobs=0 if logprobs else None,  # only for the sampled token
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                self._engine.add_request(name, {"prompt_token_ids": prompts[index]}, options, lora_request=request)
            while pending:
                if not self._engine.has_unfinished_requests():
                    raise RunError(
                        f"vLLM lost {len(pending)} of {len(prompts)} completions; use {self.flag} transformers"
                    )
                for output in self._engine.step():
                    [completion] = output.outputs
                    if completion.finish_reason not in ("stop", "length"):
                        raise RunError(
                            f"vLLM aborted a completion ({completion.finish_reason}); use {self.flag} transformers"
                        )
                    each = token_logprobs(completion) if logprobs else None
                    yield pending.pop(output.request_id), list(completion.token_ids), each
        finally:
            if pending:
                self._engine.abort_request(list(pending))

    def prompt_logprobs(self, ids: list[int], request: Any) -> list[float]:
        """Return the logprobs of all prompt tokens except the first, and of the most likely next token.

        Args:
            ids: token ids of the prompt.
            request: from `load_adapter`, or None for the base model.
        """
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, logprobs=0, detokenize=False)
        name = f"check-{next(self._calls)}"
        self._engine.add_request(name, {"prompt_token_ids": ids}, params, lora_request=request)
        while True:
            for output in self._engine.step():
                first = dict(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True))
                tokens = [*zip(ids[1:], output.prompt_logprobs[1:], strict=True), *first.items()]
                return [candidates[token].logprob for token, candidates in tokens]

    def sleep(self) -> None:
        """Move the weights to host memory and free the cache, if the engine was created with `sleeps`."""
        if self._sleeps and not self._engine.is_sleeping():
            self._engine.sleep(level=1)

    def wake_up(self) -> None:
        """Restore the weights and the cache that `sleep` released."""
        if self._sleeps and self._engine.is_sleeping():
            import torch

            gc.collect()
            torch.cuda.empty_cache()  # vLLM does not allocate this memory through torch
            self._engine.wake_up()

    def close(self) -> None:
        """Shut down the engine and free its memory, so that another model can be loaded."""
        import torch

        if self._engine is not None:
            self._engine.engine_core.shutdown()
        self._engine = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def token_logprobs(completion: Any) -> list[float]:
    """Return the logprob of each token of a completion that was requested with `logprobs=0`."""
    tokens = zip(completion.token_ids, completion.logprobs, strict=True)
    return [candidates[token].logprob for token, candidates in tokens]


def reason(error: Exception) -> str:
    """Return the cause of an error in one sentence. pydantic's errors have it on a later line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    cause = next((line.removeprefix("Value error, ") for line in lines if line.startswith("Value error, ")), None)
    return (cause or first_line(error)).split(" [type=")[0].split(". ")[0].rstrip(".")
