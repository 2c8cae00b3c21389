"""The tokenizer, architecture, and pretraining of the starter model.

In the first phase, most documents are drills or careful solutions, which teach arithmetic. In the second phase, the
styles have their final shares, so the model answers carefully only some of the time.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starter_model import corpus

from lora_grpo.prompts import styles

if TYPE_CHECKING:
    import torch

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VOCABULARY = 768


@dataclass(frozen=True)
class Phase:
    """A part of training with one kind of corpus; see `corpus.examples` for the shares."""

    steps: float
    """Share of the optimizer steps, 0 to 1."""
    drills: float
    practice: float
    code: float
    code_mixtures: Mapping[str, tuple[float, float, float]]


PHASES = (Phase(0.6, 0.35, 0.8, 0.2, corpus.MIXTURES), Phase(0.4, 0.15, 0.0, 0.2, corpus.MIXTURES))
"""Pretraining from scratch."""
SETTLING = (Phase(1.0, 0.15, 0.0, 0.5, corpus.SETTLED),)
"""Subsequent training at a lower learning rate, which sets the shares of styles in each family of code problems."""


def build_tokenizer(seed: int) -> Any:
    """Train a byte-level BPE tokenizer on the corpus, with Qwen2's pre-tokenization."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    documents = itertools.islice(corpus.examples(seed, drills=0.0, practice=0.3, code=0.3), 11_000)
    texts = ["".join(text for text, _ in document.parts) for document in documents] + list(
        styles.SYSTEM_PROMPTS.values()
    ) * 50
    rules = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def build_model(tokenizer: Any) -> Any:
    """Return a randomly initialized Qwen2 model with about 2 M parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def collate(documents: list[corpus.Example], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded token ids and labels, both (B, T). Padding and parts outside the loss have label -100."""
    import torch

    rows = []
    for document in documents:
        tokens = [(tokenizer(text).input_ids, in_loss) for text, in_loss in document.parts]
        ids = [token for part, _ in tokens for token in part]
        rows.append((ids, [token if in_loss else -100 for part, in_loss in tokens for token in part]))
    length = -(-max(len(ids) for ids, _ in rows) // 8) * 8  # Fewer distinct shapes keep oneDNN's caches small.
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in rows])
    return ids, labels


def batches(
    seed: int, steps: int, size: int, tokenizer: Any, phases: Sequence[Phase] = PHASES
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield `steps` batches through the phases. Prompts in a batch have similar lengths, to reduce padding.

    Sorting by total length would result in batches with a single style, and short styles would be overrepresented.
    """
    rng = random.Random(seed)
    left = [round(phase.steps * steps) for phase in phases[:-1]]
    left.append(steps - sum(left))
    for count, phase in zip(left, phases, strict=True):
        stream = corpus.examples(seed, phase.drills, phase.practice, phase.code, phase.code_mixtures)
        while count > 0:
            now = min(count, 16)
            documents = sorted(itertools.islice(stream, now * size), key=lambda d: len(d.parts[0][0]))
            starts = rng.sample(range(0, len(documents), size), now)
            yield from (collate(documents[start : start + size], tokenizer) for start in starts)
            count -= now


def pretrain(
    model: Any,
    tokenizer: Any,
    seed: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    phases: Sequence[Phase] = PHASES,
) -> None:
    """Train the model in place through the phases with a new optimizer, and print the loss.

    Args:
        model: the float32 model from `build_model`.
        tokenizer: the tokenizer from `build_tokenizer`.
        seed: seed of the corpus.
        steps: optimizer steps of all phases.
        batch_size: documents per step.
        learning_rate: peak learning rate of AdamW, with 50 warmup steps and cosine decay to 1/20.
        phases: `PHASES` or `SETTLING`.
    """
    fit(model, batches(seed, steps, batch_size, tokenizer, phases), steps, learning_rate)


def fit(model: Any, data: Iterable[tuple[torch.Tensor, torch.Tensor]], steps: int, learning_rate: float) -> None:
    """Train the model in place on batches of `collate`; see `pretrain`."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.05)
    warmup = min(50, steps // 4 + 1)

    def scale(step: int) -> float:
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        return min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * decay)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    started, total, count = time.perf_counter(), 0.0, 0
    model.train()
    for step, (ids, labels) in enumerate(data, start=1):
        in_loss = labels[:, 1:] != -100
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][in_loss]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), labels[:, 1:][in_loss])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        total, count = total + loss.item(), count + 1
        if step % 50 == 0 or step == steps:
            seconds = time.perf_counter() - started
            print(f"step {step}/{steps}  loss {total / count:.3f}  {seconds:.0f} s", flush=True)
            total, count = 0.0, 0


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the config, bf16 weights, tokenizer, and generation settings to the folder."""
    import torch
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
