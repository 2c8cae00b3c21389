"""The sampler: generates completions from the current policy or its base model.

It differs from `model.generate` in four ways: each prompt is prefilled once for its whole group, and the tokens that
all prompts start with once for all of them; finished completions leave the batch (and waiting ones join it if
`batch_size` is set); each completion has its own seed; and the cache is not copied for every token.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lora_grpo import console
from lora_grpo.errors import RunError
from lora_grpo.prompts import plain_text, thoughts
from lora_grpo.sampling import batch_memory, growing_cache
from lora_grpo.sampling import continuous_batching as batching
from lora_grpo.sampling.requests import RequestQueue
from lora_grpo.sampling.samples import (
    Decoded,
    Prompts,
    SampledTokens,
    SamplingParams,
    asks_next_question,
    end_at_question,
)
from lora_grpo.sampling.streams import by_prompt
from lora_grpo.sampling.token_selection import completion_seed, select_tokens, uniform_numbers

_PART_TOKENS = 4
"""Tokens in a part of `stream_text`."""


class Sampler:
    """Samples from a transformers model, or a PEFT model that wraps one, with a key-value cache."""

    serves_training = True
    """False if the engine's trainer generates its own rollouts, so that this sampler is only used for evaluation."""
    streams = False
    """True if `stream` yields the completions of a prompt as soon as they are finished."""
    adds_bos = False
    """True if the BOS token must be added to a prompt that a chat template rendered."""
    phase_seconds: Mapping[str, float] = {}
    """Seconds of the phases of the last `wake_up`, which are logged as metrics `time/PHASE`; {} if it takes none."""
    batch_size: int | None = None
    """Maximum number of completions that are decoded at once. None decodes all completions of a call together."""

    def __init__(self, model: Any, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.eos_token_ids = list(eos_token_ids)
        self._previous_call: dict[int, batching.CachedCompletion] | None = None
        """The completions of the previous call, by index; see `SamplingParams.continues`."""
        self._woken_with_adapter = True

    def sample(
        self, prompts: Prompts, params: SamplingParams, seeds: Sequence[int], *, adapter: bool = True
    ) -> list[list[SampledTokens]]:
        """Sample G completions for each of B prompts.

        On a CPU, all completions are decoded together, so that rounding does not depend on free memory.

        Args:
            prompts: B prompts.
            params: with G completions per prompt.
            seeds: B·G seeds. Each determines one completion, independent of the rest of the call.
            adapter: if False, sample from the base model.
        """
        import torch

        with self.awake(adapter=adapter):
            if torch.cuda.is_available():
                self.fit_batch(prompts, params.max_tokens)
            groups = dict(self.stream(prompts, params, seeds))
        return [groups[index] for index in range(len(prompts))]

    @contextlib.contextmanager
    def awake(self, *, adapter: bool) -> Iterator[None]:
        """Keep the sampler awake inside the block, with the current adapter or without an adapter."""
        self._woken_with_adapter = adapter
        self.wake_up(adapter=adapter)
        try:
            yield
        finally:
            self.batch_size = None
            self.sleep()

    def wake_up(self, *, adapter: bool) -> None:
        """Load the current adapter, or disable it."""
        if not hasattr(self.model, "enable_adapter_layers"):
            return
        if adapter:
            self.model.enable_adapter_layers()
        else:
            self.model.disable_adapter_layers()

    def sleep(self) -> None:
        """Release the memory that only sampling needs."""
        self._previous_call = None

    def close(self) -> None:
        """Release all memory. The sampler cannot be used afterwards."""
        self.model = None

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Return the token ids of prompts. Special tokens are added only to text, unless a chat template has them."""
        # Prompts are either all token ids, which stay as they are, or all text.
        token_ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
        if token_ids:
            return token_ids
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        add_special_tokens = self.adds_bos or not has_template
        return self.tokenizer(list(prompts), add_special_tokens=add_special_tokens)["input_ids"]

    def fit_batch(self, prompts: Prompts, max_tokens: int, caches_per_completion: int = 1) -> None:
        """Set `batch_size` to the number of completions that fit in memory. Engines that stream keep None."""
        if self.streams:
            return
        longest_prompt = max(len(ids) for ids in self.encode(prompts))
        num_caches = batch_memory.max_batch_size(self.model, longest_prompt, max_tokens)
        self.batch_size = max(1, num_caches // caches_per_completion)

    def stream(
        self, prompts: Prompts, params: SamplingParams, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """Yield (index of the prompt, its completions). The sampler must be awake. See `sample` for arguments."""
        decoded = self._decode_in_memory(self.encode(prompts), params, seeds)
        samples = self._to_samples(decoded, params)
        yield from by_prompt(enumerate(samples), params.num_samples)

    def stream_text(self, prompt: str, params: SamplingParams, seed: int) -> Iterator[str]:
        """Yield the text of one completion in parts, while it is generated. The sampler must be awake."""
        [prompt_ids] = self.encode([prompt])
        token_ids: list[int] = []
        shown_text = ""
        is_over = False
        while not is_over:
            # Sample a few more tokens like the next turn of a conversation, so that the cache of those so far is kept.
            part_params = replace(
                params,
                max_tokens=min(_PART_TOKENS, params.max_tokens - len(token_ids)),
                continues=(0,) if token_ids else (),
                ends_at_next_question=False,  # a part may begin or end within `Question:`; see below
            )
            part_seed = completion_seed(seed, "part", len(token_ids))
            [(_, [part])] = self.stream([prompt_ids + token_ids], part_params, [part_seed])
            token_ids = token_ids + part.token_ids
            has_eos = not part.truncated
            is_over = has_eos or len(token_ids) >= params.max_tokens

            # All tokens are decoded again, because a character may have tokens of two parts. The end-of-sequence token
            # is not shown.
            text_ids = token_ids[:-1] if has_eos else token_ids
            [text] = thoughts.decode(self.tokenizer, [text_ids])
            if params.ends_at_next_question:
                answer = plain_text.before_next_question(text)
                is_over = is_over or answer != text
                # Hold back a line that may become the next question.
                earlier_lines, line_break, last_line = answer.rpartition("\n")
                if line_break and not is_over and plain_text.may_become_next_question(last_line):
                    answer = earlier_lines
                text = answer

            ends_within_character = text.endswith("\ufffd")
            if is_over or not ends_within_character:
                yield text.removeprefix(shown_text)
                shown_text = text

    def serve(self, queue: RequestQueue) -> None:
        """Sample what other threads ask for, until the queue is closed and empty. The sampler must be awake.

        It runs in the thread that owns the model. An error is raised here and in all threads that wait.
        """
        try:
            self._serve(queue)
        except BaseException as error:
            queue.fail(error)
            raise

    def _serve(self, queue: RequestQueue) -> None:
        """Sample in waves; see `RequestQueue`."""
        while (wave := queue.next_wave()) is not None:
            for waiting in wave:
                request = waiting.request
                params = SamplingParams(1, request.temperature, request.top_p, request.max_tokens)
                [(_, [sample])] = self.stream([request.prompt_ids], params, [request.seed])
                waiting.finish(sample)

    def _to_samples(self, decoded: Sequence[Decoded], params: SamplingParams) -> list[SampledTokens]:
        texts = thoughts.decode(self.tokenizer, [completion.token_ids for completion in decoded])
        samples = []
        for completion, text in zip(decoded, texts, strict=True):
            token_ids = completion.token_ids
            has_ended = bool(token_ids) and token_ids[-1] in self.eos_token_ids
            samples.append(SampledTokens(token_ids, text, truncated=not has_ended, logprobs=completion.logprobs))
        if params.ends_at_next_question:
            samples = [end_at_question(self.tokenizer, sample) for sample in samples]
        return samples

    @functools.cached_property
    def _colon_ids(self) -> list[int]:
        """The tokens that can end `Question:`."""
        return sorted(token_id for token, token_id in self.tokenizer.get_vocab().items() if ":" in token)

    def _decode_in_memory(
        self, prompts: list[list[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Decoded]:
        """Decode. If memory runs out and `batch_size` is set, halve it and start over."""
        import torch

        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self._decode(prompts, params, seeds)
        except RuntimeError as error:
            if self.batch_size is None or not batch_memory.ran_out_of_memory(error):
                raise
            failed_batch_size = min(self.batch_size, len(seeds))
            if failed_batch_size == 1:
                raise RunError(
                    "out of memory with a single completion; allow fewer tokens in a completion, or load the model in "
                    f"4 bits ({' '.join(str(error).split())})"
                ) from error
        finally:
            self.model.train(was_training)
        # The batch is freed only here, after the error and its frames are gone.
        gc.collect()
        torch.cuda.empty_cache()
        self.batch_size = failed_batch_size // 2
        console.note(f"out of memory with batch size {failed_batch_size}; retrying with {self.batch_size}")
        return self._decode_in_memory(prompts, params, seeds)

    def _decode(self, prompts: list[list[int]], params: SamplingParams, seeds: Sequence[int]) -> list[Decoded]:
        """Return N = B·G completions.

        The batch has R ≤ N rows. At each step, every row gets a token; rows that have finished leave; the model reads
        the new tokens of the others. The rows change, so results are stored by the completion's index in the call.
        """
        import torch

        device = next(self.model.parameters()).device
        pad_token_id = self.tokenizer.pad_token_id
        num_completions = len(seeds)
        max_tokens = params.max_tokens

        # How the batch is filled. Without a batch size, all completions start together, and the batch only shrinks.
        batch_size = min(self.batch_size or num_completions, num_completions)
        full_attention = growing_cache.has_full_attention(self.model.config)
        refills = self.batch_size is not None and full_attention
        # In a conversation, the caches of finished completions are kept for the next call.
        keeps_caches = params.continues is not None and batch_size == num_completions and full_attention
        # `_previous_call` is emptied before decoding, so that a second try after an error reads whole prompts.
        previous_call = self._previous_call
        self._previous_call = None
        finished: dict[int, batching.CachedCompletion] = {}

        # What each completion samples, and when it ends.
        uniform = uniform_numbers(seeds, max_tokens, device)  # (N, max_tokens) in [0, 1)
        sampled = torch.zeros((num_completions, max_tokens), dtype=torch.long, device=device)
        logprobs = torch.zeros((num_completions, max_tokens), device=device)
        lengths = torch.full((num_completions,), max_tokens, device=device)
        limits = torch.tensor([params.token_limit(index) for index in range(num_completions)], device=device)
        eos = torch.tensor(self.eos_token_ids, device=device)
        colon_ids = self._colon_ids if params.ends_at_next_question else []
        colons = torch.tensor(colon_ids, dtype=torch.long, device=device)

        # Start: the conversations go on in the caches of their previous turns, or prompts are read as places are free.
        batch: batching.Batch | None = None
        common_cache = None
        num_started = 0
        if previous_call and params.continues:
            batch = batching.Batch.continued([previous_call[index] for index in params.continues])
            previous_call = None  # frees the caches of conversations that are over
            batch.read(self.model, prompts, pad_token_id)
            num_started = num_completions
        else:
            common_cache = batching.read_common_tokens(self.model, prompts)

        num_running = len(batch) if batch is not None else 0
        while num_running or num_started < num_completions:
            # Waiting completions take the places of those that have finished.
            while num_new := batching.num_to_start(
                batch_size, running=num_running, waiting=num_completions - num_started, refills=refills
            ):
                indices = range(num_started, num_started + num_new)
                new_batch = batching.prefill(
                    self.model, pad_token_id, prompts, indices, params.num_samples, common_cache
                )
                if batch is not None and num_running:
                    batch.join(new_batch)
                else:
                    batch = new_batch
                num_started += num_new
                num_running = len(batch)
            assert batch is not None  # at least one completion has started

            # Every row gets a token, by its own random number for this step.
            numbers = uniform[batch.indices, batch.steps]  # (R,)
            tokens, token_logprobs = select_tokens(batch.logits.float(), params.temperature, params.top_p, numbers)
            sampled[batch.indices, batch.steps] = tokens
            logprobs[batch.indices, batch.steps] = token_logprobs
            batch.steps = batch.steps + 1

            # Which rows have ended: (R,) booleans.
            has_ended = torch.isin(tokens, eos) | (batch.steps == limits[batch.indices])
            if params.ends_at_next_question:
                # Text is decoded only where the newest token can end `Question:`.
                for row in torch.isin(tokens, colons).nonzero().squeeze(1).tolist():
                    row_tokens = sampled[batch.indices[row], : batch.steps[row]].tolist()
                    has_ended[row] |= asks_next_question(self.tokenizer, row_tokens)
            lengths[batch.indices[has_ended]] = batch.steps[has_ended]
            if keeps_caches and has_ended.any():
                ended_batch = batch.copy(has_ended.nonzero().squeeze(1))
                for row, index in enumerate(ended_batch.indices.tolist()):
                    finished[index] = batching.CachedCompletion(ended_batch, row)

            # The others go on: the model reads their new tokens.
            batch.advance(self.model, tokens, running=(~has_ended).nonzero().squeeze(1))
            if refills:
                batch.trim()  # the longest rows may have left
            num_running = len(batch)

        if keeps_caches:
            self._previous_call = finished
        is_greedy = params.temperature == 0  # then the tokens have no logprobs
        completions = []
        for ids, ids_logprobs, length in zip(sampled.tolist(), logprobs.tolist(), lengths.tolist(), strict=True):
            completions.append(Decoded(ids[:length], None if is_greedy else ids_logprobs[:length]))
        return completions
