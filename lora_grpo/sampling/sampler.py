"""The sampler: generates completions from the current policy or its base model.

It differs from `model.generate` in four ways: each prompt is prefilled once for its whole group, and the tokens that
all prompts start with once for all of them; finished completions leave the batch (and waiting ones join it if
`batch_size` is set); each completion has its own seed; and the cache is not copied for every token.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from lora_grpo import console
from lora_grpo.config import SamplingConfig
from lora_grpo.errors import RunError
from lora_grpo.prompts import chat, thoughts
from lora_grpo.sampling import continuous_batching as batching

if TYPE_CHECKING:
    import torch

_PART_TOKENS = 4
"""Tokens in a part of `stream_text`."""

T = TypeVar("T")
Prompts = Sequence[str] | Sequence[list[int]]
"""B rendered prompts, or their token ids."""
Decoded = tuple[list[int], list[float] | None]
"""Token ids of one completion and their logprobs. See `SampledTokens`."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled."""

    num_samples: int
    """Completions per prompt."""
    temperature: float
    """0 decodes greedily."""
    top_p: float
    """Nucleus probability; 1 disables nucleus sampling."""
    max_tokens: int
    """Maximum number of tokens of a completion; in `play`, of a conversation."""
    max_turn_tokens: int | None = None
    """Maximum number of tokens of a turn in a conversation; None for `max_tokens`."""
    max_each: tuple[int, ...] | None = None
    """Maximum number for each prompt, if they differ; `max_tokens` is the largest."""
    continues: tuple[int, ...] | None = None
    """In a conversation, the completion of the previous call that each prompt continues; () in the first call. The
    built-in sampler then keeps the cache of all completions between calls. vLLM and llama.cpp do so by themselves."""
    ends_at_next_question: bool = False
    """Whether a completion ends where the model writes the next `Question:`; see `end_at_question`."""

    @classmethod
    def of(cls, settings: SamplingConfig, num_samples: int) -> SamplingParams:
        """Return the settings of training rollouts."""
        tokens = settings.max_completion_tokens, settings.max_turn_tokens
        return cls(num_samples, settings.temperature, settings.top_p, *tokens)

    def limit(self, index: int) -> int:
        """Return the maximum number of tokens of the completion with this index in the call."""
        return self.max_each[index // self.num_samples] if self.max_each else self.max_tokens


@dataclass(frozen=True)
class SampledTokens:
    """One completion."""

    token_ids: list[int]
    """Sampled tokens, including the end-of-sequence token if one was sampled, or the next `Question:`."""
    text: str
    """The decoded completion, without the next `Question:` and without special tokens but those that mark thoughts."""
    truncated: bool
    """Whether the completion reached the length limit before it ended."""
    logprobs: list[float] | None = field(default=None, compare=False)
    """Logprob of each token in nats, under the distribution it was sampled from (after temperature and top-p). None for
    greedy decoding and for engines that do not return logprobs."""
    asked_next_question: bool = False
    """Whether the completion ended at the next `Question:` of a plain prompt; see `end_at_question`."""


class Sampler:
    """Samples from a transformers model, or a PEFT model that wraps one, with a key-value cache."""

    serves_training = True
    """False if the engine's trainer generates its own rollouts, so that this sampler is only used for evaluation."""
    streams = False
    """True if `stream` yields the completions of a prompt as soon as they are finished."""
    adds_bos = False
    """True if the BOS token must be added to a prompt that a chat template rendered."""
    batch_size: int | None = None
    """Maximum number of completions that are decoded at once. None decodes all completions of a call together."""

    def __init__(self, model: Any, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        self.model, self.tokenizer, self.eos_token_ids = model, tokenizer, list(eos_token_ids)
        self._kept: dict[int, tuple[batching.Batch, int]] | None = None
        """Batch and row of each completion of the previous call; see `SamplingParams.continues`."""

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
        self.wake_up(adapter=adapter)
        try:
            yield
        finally:
            self.batch_size = None
            self.sleep()

    def wake_up(self, *, adapter: bool) -> None:
        """Load the current adapter, or disable it."""
        if hasattr(self.model, "enable_adapter_layers"):
            (self.model.enable_adapter_layers if adapter else self.model.disable_adapter_layers)()

    def sleep(self) -> None:
        """Release the memory that only sampling needs."""
        self._kept = None

    def close(self) -> None:
        """Release all memory. The sampler cannot be used afterwards."""
        self.model = None

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Return the token ids of prompts. Special tokens are added only to text, unless a chat template has them."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        plain = self.adds_bos or not getattr(self.tokenizer, "chat_template", None)
        return self.tokenizer(texts, add_special_tokens=plain)["input_ids"]

    def fit_batch(self, prompts: Prompts, max_tokens: int, caches: int = 1) -> None:
        """Set `batch_size` to the completions that fit in memory, with `caches` each. Engines that stream keep None."""
        if not self.streams:
            longest = max(map(len, self.encode(prompts)))
            self.batch_size = max(1, batching.max_batch_size(self.model, longest, max_tokens) // caches)

    def stream(
        self, prompts: Prompts, params: SamplingParams, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """Yield (index of the prompt, its completions). The sampler must be awake. See `sample` for arguments."""
        samples = self._to_samples(self._decode_in_memory(self.encode(prompts), params, seeds), params)
        yield from by_prompt(enumerate(samples), params.num_samples)

    def stream_text(self, prompt: str, params: SamplingParams, seed: int) -> Iterator[str]:
        """Yield the text of one completion in parts, while it is generated. The sampler must be awake."""
        [prompt_ids] = self.encode([prompt])
        ids: list[int] = []
        shown, is_over = "", False
        while not is_over:
            room = min(_PART_TOKENS, params.max_tokens - len(ids))
            given = replace(params, max_tokens=room, continues=(0,) if ids else (), ends_at_next_question=False)
            [(_, [part])] = self.stream([prompt_ids + ids], given, [completion_seed(seed, "part", len(ids))])
            ids = ids + part.token_ids
            is_over = not part.truncated or len(ids) >= params.max_tokens
            [text] = thoughts.decode(self.tokenizer, [ids if part.truncated else ids[:-1]])
            if params.ends_at_next_question:
                answer = chat.before_next_question(text)
                is_over = is_over or answer != text
                before, line_break, line = answer.rpartition("\n")
                if line_break and not is_over and chat.may_become_next_question(line):
                    answer = before
                text = answer
            if is_over or not text.endswith("\ufffd"):  # the tokens end within a character
                yield text.removeprefix(shown)
                shown = text

    def _to_samples(self, decoded: Sequence[Decoded], params: SamplingParams) -> list[SampledTokens]:
        texts = thoughts.decode(self.tokenizer, [ids for ids, _ in decoded])
        samples = [
            SampledTokens(ids, text, truncated=not ids or ids[-1] not in self.eos_token_ids, logprobs=logprobs)
            for (ids, logprobs), text in zip(decoded, texts, strict=True)
        ]
        if params.ends_at_next_question:
            samples = [end_at_question(self.tokenizer, sample) for sample in samples]
        return samples

    def _asks_next_question(self, token_ids: Sequence[int]) -> bool:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return chat.before_next_question(text) != text

    @functools.cached_property
    def _colon_ids(self) -> list[int]:
        """The tokens that can end `Question:`."""
        return sorted(number for token, number in self.tokenizer.get_vocab().items() if ":" in token)

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
            if self.batch_size is None or not batching.ran_out_of_memory(error):
                raise
            tried = min(self.batch_size, len(seeds))
            if tried == 1:
                raise RunError(
                    "out of memory with a single completion; allow fewer tokens in a completion, or load the model in "
                    f"4 bits ({' '.join(str(error).split())})"
                ) from error
        finally:
            self.model.train(was_training)
        # The batch is freed only here, after the error and its frames are gone.
        gc.collect()
        torch.cuda.empty_cache()
        self.batch_size = tried // 2
        console.note(f"out of memory with batch size {tried}; retrying with {self.batch_size}")
        return self._decode_in_memory(prompts, params, seeds)

    def _decode(self, prompts: list[list[int]], params: SamplingParams, seeds: Sequence[int]) -> list[Decoded]:
        """Return R = B·G completions."""
        import torch

        device = next(self.model.parameters()).device
        total, max_tokens = len(seeds), params.max_tokens
        batch_size = min(self.batch_size or total, total)
        joining = self.batch_size is not None and batching.can_join(self.model.config)
        keeps = params.continues is not None and batch_size == total and batching.can_join(self.model.config)
        # Taken here, so that a second try after an error reads whole prompts.
        earlier, self._kept = self._kept, None
        kept: dict[int, tuple[batching.Batch, int]] = {}
        uniform = uniform_numbers(seeds, max_tokens, device)
        eos = torch.tensor(self.eos_token_ids, device=device)
        colons = torch.tensor(self._colon_ids if params.ends_at_next_question else [], dtype=torch.long, device=device)
        sampled = torch.zeros((total, max_tokens), dtype=torch.long, device=device)
        logprobs = torch.zeros((total, max_tokens), device=device)
        lengths = torch.full((total,), max_tokens, device=device)
        limits = torch.tensor([params.limit(index) for index in range(total)], device=device)
        started, common = 0, None
        batch: batching.Batch | None = None
        if earlier and params.continues:
            batch = batching.Batch.continued([earlier[index] for index in params.continues])
            batch.read(self.model, prompts, self.tokenizer.pad_token_id)
            earlier, started = None, total
        else:
            common = batching.read_common_tokens(self.model, prompts)
        while batch or started < total:
            running = len(batch or ())
            while new := batching.num_to_start(batch_size, running=running, waiting=total - started, joining=joining):
                indices = range(started, started + new)
                pad = self.tokenizer.pad_token_id
                more = batching.prefill(self.model, pad, prompts, indices, params.num_samples, common)
                if batch:
                    batch.join(more)
                else:
                    batch = more
                running, started = len(batch), started + new
            assert batch  # at least one completion has started
            numbers = uniform[batch.indices, batch.steps]
            tokens, each = select_tokens(batch.logits.float(), params.temperature, params.top_p, numbers)
            sampled[batch.indices, batch.steps] = tokens
            logprobs[batch.indices, batch.steps] = each
            batch.steps = batch.steps + 1
            ended = torch.isin(tokens, eos) | (batch.steps == limits[batch.indices])
            if params.ends_at_next_question:
                for row in torch.isin(tokens, colons).nonzero().squeeze(1).tolist():
                    ended[row] |= self._asks_next_question(sampled[batch.indices[row], : batch.steps[row]].tolist())
            lengths[batch.indices[ended]] = batch.steps[ended]
            if keeps and ended.any():
                part = batch.copy(ended.nonzero().squeeze(1))
                kept |= {index: (part, row) for row, index in enumerate(part.indices.tolist())}
            batch.advance(self.model, tokens, (~ended).nonzero().squeeze(1))
            if joining:
                batch.trim()
        self._kept = kept if keeps else None
        return [
            (ids[:length], each[:length] if params.temperature else None)
            for ids, each, length in zip(sampled.tolist(), logprobs.tolist(), lengths.tolist(), strict=True)
        ]


def end_at_question(tokenizer: Any, sample: SampledTokens) -> SampledTokens:
    """Return a completion of a plain prompt up to the next `Question:`, which is not a part of its text.

    Its tokens include those of `Question:`. They are how the model has ended its answer, like an end-of-sequence token,
    so training counts their logprobs. Engines may sample more tokens; the result does not depend on how many.
    """
    answer = chat.before_next_question(sample.text)
    if answer == sample.text:
        return sample

    def asks(length: int) -> bool:
        text = tokenizer.decode(sample.token_ids[:length], skip_special_tokens=True)
        return chat.before_next_question(text) != text

    # The fewest tokens that include `Question:`.
    length = bisect.bisect_left(range(len(sample.token_ids)), True, key=asks)
    logprobs = None if sample.logprobs is None else sample.logprobs[:length]
    return SampledTokens(sample.token_ids[:length], answer, False, logprobs, asked_next_question=True)


def by_prompt(finished: Iterable[tuple[int, T]], group: int) -> Iterator[tuple[int, list[T]]]:
    """Yield (index of a prompt, its completions in order) when all completions of the prompt are finished.

    Args:
        finished: (index, completion) in any order. The completions of prompt b are b·G to b·G + G - 1.
        group: G.
    """
    started: dict[int, dict[int, T]] = {}
    for index, completion in finished:
        whole = started.setdefault(index // group, {})
        whole[index] = completion
        if len(whole) == group:
            yield index // group, [whole[each] for each in sorted(whole)]
            del started[index // group]


def in_threads(complete: Callable[[int], T], count: int, threads: int) -> Iterator[tuple[int, T]]:
    """Yield (index, `complete(index)`) of each index below `count` when it is finished.

    If the generator is closed early, calls that have not begun are canceled.
    """
    pool = ThreadPoolExecutor(threads)
    try:
        pending = {pool.submit(complete, index): index for index in range(count)}
        for done in as_completed(pending):
            yield pending[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def completion_seed(seed: int, name: str, number: str | int) -> int:
    """Return the seed of one completion of a row or a training step, below 2**31."""
    digest = hashlib.sha256(json.dumps([seed, name, number]).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def uniform_numbers(seeds: Sequence[int], max_tokens: int, device: Any) -> torch.Tensor:
    """Return (R, max_tokens) uniform random numbers in [0, 1), one for each completion and token."""
    import torch

    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.rand(max_tokens, generator=each) for each in generators]).to(device)


def select_tokens(
    logits: torch.Tensor, temperature: float, top_p: float, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row with inverse transform sampling.

    From (R, V) logits and (R,) `uniform` random numbers in [0, 1), return (R,) token ids and their (R,) logprobs.
    """
    import torch

    if temperature == 0:
        return logits.argmax(dim=-1), logits.new_zeros(len(logits))
    probabilities = torch.softmax(logits / temperature, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(dim=-1) - ordered >= top_p
        probabilities = probabilities.masked_fill(outside.gather(-1, order.argsort(dim=-1)), 0.0)
    cumulative = probabilities.double().cumsum(dim=-1)
    threshold = uniform.double()[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens.squeeze(1), (probabilities.gather(-1, tokens) / cumulative[:, -1:]).log().float().squeeze(1)
