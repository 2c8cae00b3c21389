"""The sampler: generates completions from the current policy or its base model.

It differs from `model.generate` in four ways: each prompt is prefilled once for its whole group, and the tokens that
all prompts start with once for all of them; finished completions leave the batch (and waiting ones join it if
`batch_size` is set); each completion has its own seed; and the cache is not copied for every token.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lora_grpo import console
from lora_grpo.errors import RunError
from lora_grpo.prompts import plain_text, thoughts
from lora_grpo.sampling import batch_memory, growing_cache
from lora_grpo.sampling import continuous_batching as batching
from lora_grpo.sampling.requests import RequestQueue, Waiting
from lora_grpo.sampling.samples import (
    Decoded,
    Prompts,
    SampledTokens,
    SamplingParams,
    end_early,
    has_ended_early,
)
from lora_grpo.sampling.streams import by_prompt
from lora_grpo.sampling.token_selection import completion_seed, select_tokens, uniform_numbers

_PART_TOKENS = 4
"""Tokens in a part of `stream_text`."""


class _Options(NamedTuple):
    """What requests share that are decoded together. The groups of a wave are decoded in the order of these values."""

    adapter: bool
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    ends_at_next_question: bool


class Sampler:
    """Samples from a transformers model, or a PEFT model that wraps one, with a key-value cache."""

    serves_training = True
    """False if the engine's trainer generates its own rollouts, so that this sampler is only used for evaluation."""
    streams = False
    """True if `stream` yields the completions of a prompt as soon as they are finished."""
    adds_bos = False
    """True if the BOS token must be added to a prompt that a chat template rendered."""
    returns_logprobs = True
    """Whether completions have logprobs, except for greedy ones."""
    phase_seconds: Mapping[str, float] = {}
    """Seconds of the phases of the last `wake_up`, which are logged as metrics `time/PHASE`; {} if it takes none."""
    batch_size: int | None = None
    """Maximum number of completions that are decoded at once. None decodes all completions of a call together."""

    def __init__(self, model: Any, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.eos_token_ids = list(eos_token_ids)
        self._adapter_is_on = True
        """Whether completions are sampled with the adapter, as far as the caches that are kept are concerned."""
        self._kept: dict[tuple[bool, Hashable], batching.KeptCache] = {}
        """The caches of earlier completions, the oldest first, by adapter (on or off) and `SamplingParams.keys`."""

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
        self._adapter_is_on = adapter
        self.wake_up(adapter=adapter)
        try:
            yield
        finally:
            self.batch_size = None
            self.sleep()

    def wake_up(self, *, adapter: bool) -> None:
        """Load the current adapter, or disable it. Frozen weights stay frozen, and trained ones trained."""
        if not hasattr(self.model, "enable_adapter_layers"):
            return
        # PEFT makes all weights of the adapter trained with the one, and frozen with the other.
        were_trained = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        if adapter:
            self.model.enable_adapter_layers()
        else:
            self.model.disable_adapter_layers()
        for parameter, was_trained in were_trained:
            parameter.requires_grad = was_trained

    def sleep(self) -> None:
        """Release the memory that only sampling needs."""
        self._kept.clear()

    def forget(self, key: Hashable) -> None:
        """Free the cache that is kept under a key of `SamplingParams.keys`, if there is one."""
        for adapter in (False, True):
            self._kept.pop((adapter, key), None)

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
        """Set `batch_size` to the number of completions that fit in memory. Engines that stream keep None.

        Args:
            caches_per_completion: 2 if caches are kept for later prompts. Then as many caches can be kept as
                completions are decoded, so that the oldest are given up if there are more.
        """
        if self.streams:
            return
        longest_prompt = max(len(ids) for ids in self.encode(prompts))
        num_caches = batch_memory.max_batch_size(self.model, longest_prompt, max_tokens)
        self.batch_size = max(1, num_caches // caches_per_completion)

    def stream(
        self, prompts: Prompts, params: SamplingParams, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """Yield (index of the prompt, its completions). The sampler must be awake. See `sample` for arguments."""
        prompt_ids = [ids for ids in self.encode(prompts) for _ in range(params.num_samples)]
        finished: dict[int, Decoded] = {}
        self._decode_in_memory(prompt_ids, params, seeds, finished.__setitem__)
        decoded = [finished[index] for index in range(len(seeds))]
        samples = self.to_samples(decoded, params)
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
                continues=("text",),
                keys=("text",),
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
        self.forget("text")

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
        """Sample in waves; see `RequestQueue`. Requests with the same options are decoded together."""
        woken_with_adapter = self._adapter_is_on
        try:
            while (wave := queue.next_wave()) is not None:
                for key in queue.take_forgotten():
                    self.forget(key)
                groups: dict[_Options, list[Waiting]] = {}
                for waiting in wave:
                    request = waiting.request
                    options = _Options(
                        adapter=request.adapter and woken_with_adapter,
                        temperature=request.temperature,
                        top_p=request.top_p,
                        stop=request.stop,
                        ends_at_next_question=request.ends_at_next_question,
                    )
                    groups.setdefault(options, []).append(waiting)
                for options in sorted(groups):
                    self._switch_adapter(on=options.adapter)
                    self._serve_together(groups[options])
        finally:
            self._switch_adapter(on=woken_with_adapter)

    def _switch_adapter(self, *, on: bool) -> None:
        """Turn the adapter on or off while the sampler is awake."""
        if on != self._adapter_is_on:
            self._adapter_is_on = on
            self.wake_up(adapter=on)

    def _serve_together(self, group: Sequence[Waiting]) -> None:
        """Decode requests with the same options, and answer each as soon as its completion is finished."""
        requests = [waiting.request for waiting in group]
        token_limits = tuple(request.max_tokens for request in requests)
        params = replace(
            requests[0].params,
            max_tokens=max(token_limits),
            max_tokens_by_prompt=token_limits,
            continues=tuple(request.continues for request in requests),
            keys=tuple(request.key for request in requests),
        )

        def answer(index: int, decoded: Decoded) -> None:
            [sample] = self.to_samples([decoded], params)
            is_wanted = group[index].finish(sample)
            key = requests[index].key
            if not is_wanted and key is not None:
                self.forget(key)

        def is_canceled(index: int) -> bool:
            return group[index].future.cancelled()

        prompts = [request.prompt_ids for request in requests]
        self._decode_in_memory(prompts, params, [request.seed for request in requests], answer, is_canceled)

    def to_samples(self, decoded: Sequence[Decoded], params: SamplingParams) -> list[SampledTokens]:
        """Return completions with their text, up to where they end by the parameters; see `end_early`."""
        texts = thoughts.decode(self.tokenizer, [completion.token_ids for completion in decoded])
        samples = []
        for completion, text in zip(decoded, texts, strict=True):
            token_ids = completion.token_ids
            has_ended = bool(token_ids) and token_ids[-1] in self.eos_token_ids
            samples.append(SampledTokens(token_ids, text, truncated=not has_ended, logprobs=completion.logprobs))
        return [end_early(self.tokenizer, sample, params) for sample in samples]

    @functools.cached_property
    def _token_texts(self) -> list[str]:
        """The text of each token of the vocabulary."""
        return list(self.tokenizer.batch_decode([[token_id] for token_id in range(len(self.tokenizer))]))

    def _ending_ids(self, params: SamplingParams) -> list[int]:
        """Return the tokens that can be the last of a stop string or of `Question:`."""
        last_characters = {stop[-1] for stop in params.stop}
        if params.ends_at_next_question:
            last_characters.add(":")
        if not last_characters:
            return []
        if " " in last_characters:  # the text of a single token may be without its space
            return list(range(len(self._token_texts)))
        last_characters.add("\ufffd")  # a part of a character
        return [token_id for token_id, text in enumerate(self._token_texts) if not last_characters.isdisjoint(text)]

    def _decode_in_memory(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        on_finished: Callable[[int, Decoded], object],
        is_canceled: Callable[[int], bool] | None = None,
    ) -> None:
        """Decode. If memory runs out and `batch_size` is set, halve it and start over, also with what has finished."""
        import torch

        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                self._decode(prompts, params, seeds, on_finished, is_canceled)
                return
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
        self._kept.clear()
        gc.collect()
        torch.cuda.empty_cache()
        self.batch_size = failed_batch_size // 2
        console.note(f"out of memory with batch size {failed_batch_size}; retrying with {self.batch_size}")
        self._decode_in_memory(prompts, params, seeds, on_finished, is_canceled)

    def _decode(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        on_finished: Callable[[int, Decoded], object],
        is_canceled: Callable[[int], bool] | None = None,
    ) -> None:
        """Decode N completions.

        The batch has R ≤ N rows. At each step, every row gets a token; rows that have finished leave; the model reads
        the new tokens of the others. The rows change, so results are stored by the completion's index in the call.

        Args:
            prompts: those of the N completions, in the order of `seeds`.
            on_finished: is called with the index and the tokens of each completion when it is finished.
            is_canceled: tells by the index whether nobody waits for a completion any more, which then ends.
        """
        import torch

        device = next(self.model.parameters()).device
        pad_token_id = self.tokenizer.pad_token_id
        num_completions = len(seeds)
        max_tokens = params.max_tokens
        is_greedy = params.temperature == 0  # then the tokens have no logprobs

        # How the batch is filled. Without a batch size, all completions start together, and the batch only shrinks.
        batch_size = min(self.batch_size or num_completions, num_completions)
        full_attention = growing_cache.has_full_attention(self.model.config)
        refills = self.batch_size is not None and full_attention
        keys = params.keys if full_attention else None

        # What each completion samples, and when it ends.
        uniform = uniform_numbers(seeds, max_tokens, device)  # (N, max_tokens) in [0, 1)
        sampled = torch.zeros((num_completions, max_tokens), dtype=torch.long, device=device)
        logprobs = torch.zeros((num_completions, max_tokens), device=device)
        limits = torch.tensor([params.token_limit(index) for index in range(num_completions)], device=device)
        eos = torch.tensor(self.eos_token_ids, device=device)
        ending_ids = torch.tensor(self._ending_ids(params), dtype=torch.long, device=device)

        # Completions whose caches are kept start first, so that as many caches are in memory as before.
        kept_caches = self._take_kept(prompts, params)
        new_indices = [index for index in range(num_completions) if index not in kept_caches]
        waiting = [*kept_caches, *new_indices]
        common_cache = batching.read_common_tokens(self.model, [prompts[index] for index in new_indices])

        batch: batching.Batch | None = None
        num_running = 0
        while num_running or waiting:
            # Waiting completions take the places of those that have finished.
            while num_new := batching.num_to_start(
                batch_size, running=num_running, waiting=len(waiting), refills=refills
            ):
                started = waiting[:num_new]
                waiting = waiting[num_new:]
                new_batches = [batch] if batch is not None and num_running else []

                # They go on in their caches, or their prompts are read.
                continued = {index: kept_caches.pop(index) for index in started if index in kept_caches}
                if continued:
                    continued_batch = batching.Batch.continued(continued)
                    continued_batch.read(self.model, prompts, pad_token_id)
                    new_batches.append(continued_batch)
                unread = [index for index in started if index not in continued]
                if unread:
                    new_batches.append(batching.prefill(self.model, pad_token_id, prompts, unread, common_cache))

                batch, *others = new_batches
                if others:
                    batch.join(*others)
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
            if params.ends_early:
                # Text is decoded only where the newest token can be the last of what ends it.
                for row in torch.isin(tokens, ending_ids).nonzero().squeeze(1).tolist():
                    row_tokens = sampled[batch.indices[row], : batch.steps[row]].tolist()
                    has_ended[row] |= has_ended_early(self.tokenizer, row_tokens, params)
            if is_canceled:
                for row, index in enumerate(batch.indices.tolist()):
                    if is_canceled(index):
                        has_ended[row] = True
            for row in has_ended.nonzero().squeeze(1).tolist():
                index = int(batch.indices[row])
                length = int(batch.steps[row])
                token_ids = sampled[index, :length].tolist()
                if keys is not None and keys[index] is not None:
                    cached_ids = prompts[index] + token_ids[:-1]
                    self._keep(keys[index], batching.KeptCache(cached_ids, batch.copy_row(row)))
                on_finished(index, Decoded(token_ids, None if is_greedy else logprobs[index, :length].tolist()))

            # The others go on: the model reads their new tokens.
            batch.advance(self.model, tokens, running=(~has_ended).nonzero().squeeze(1))
            if refills:
                batch.trim()  # the longest rows may have left
            num_running = len(batch)

    def _take_kept(self, prompts: list[list[int]], params: SamplingParams) -> dict[int, batching.Batch]:
        """Return the caches that completions of a call go on with, by index. They are no longer kept."""
        caches: dict[Hashable, batching.KeptCache] = {}
        batches: dict[int, batching.Batch] = {}
        for index, prompt in enumerate(prompts):
            key = None
            if params.continues is not None:
                key = params.continues[index // params.num_samples]
            if key is None:
                continue
            if key not in caches:
                kept = self._kept.get((self._adapter_is_on, key))
                if kept is None or not kept.begins(prompt):
                    continue
                del self._kept[self._adapter_is_on, key]
                caches[key] = kept
                batches[index] = kept.batch
            elif caches[key].begins(prompt):
                batches[index] = caches[key].batch.copy_row(0)  # another branch
        return batches

    def _keep(self, key: Hashable, cache: batching.KeptCache) -> None:
        """Keep a cache under a key. With a batch size, no more caches are kept than completions are decoded at once."""
        self._kept.pop((self._adapter_is_on, key), None)
        if self.batch_size is not None and len(self._kept) >= self.batch_size:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
        self._kept[self._adapter_is_on, key] = cache
