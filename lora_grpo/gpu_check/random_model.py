"""Models with published shapes and random weights, made on the spot: what a card does with them costs no download.

A random model never ends a completion (each token is about as likely as any other), so every rollout is as long as it
may be: the worst case for memory and time.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_grpo import starter
from lora_grpo.files import atomic

SPREAD = 0.02
"""Standard deviation of the weights, Qwen2's own."""
_SHARD_BYTES = 1 << 30
"""Held in memory at once."""
_END, _PAD = 2, 0
"""The embedded tokenizer's `<|im_end|>` and `<|endoftext|>`."""


@dataclass(frozen=True)
class Sizes:
    """A Qwen2 model with tied embeddings, in the words of its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 151_936
    max_position_embeddings: int = 32_768

    def config(self) -> dict[str, Any]:
        """Return config.json as it was published for such models."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            **asdict(self),
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": _END,
            "pad_token_id": _PAD,
        }


QWEN = {
    "0.5B": Sizes(896, 4864, 24, 14, 2),
    "1.5B": Sizes(1536, 8960, 28, 12, 2),
    "3B": Sizes(2048, 11008, 36, 16, 2),
}
"""Of Qwen2.5-0.5B, -1.5B and -3B, as published in their config.json."""
_BUILD = """
import sys
from pathlib import Path
from lora_grpo.random_model import Sizes, build
build(Path(sys.argv[1]), Sizes(*map(int, sys.argv[2:])))
"""


def build_command(folder: Path, sizes: Sizes) -> list[str]:
    """Return the command that builds a model in a process of its own, whose share of the GPU ends with it."""
    return [sys.executable, "-c", _BUILD, str(folder), *map(str, asdict(sizes).values())]


def build(folder: Path, sizes: Sizes, seed: int = 0) -> None:
    """Write a model that transformers, vLLM and Unsloth load: bfloat16 weights, a tokenizer with a chat template.

    The weights are drawn on the GPU where there is one, and differ there from those of a CPU.

    Args:
        folder: new folder.
        sizes: of the model; its vocabulary is at least the embedded tokenizer's.
        seed: of the weights.
    """
    folder.mkdir(parents=True)
    _write_weights(folder, sizes, seed)
    _write_tokenizer(folder, sizes.vocab_size)
    atomic.write_json(folder / "generation_config.json", {"eos_token_id": _END, "pad_token_id": _PAD})
    atomic.write_json(folder / "config.json", sizes.config())


def _tensors(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    keys = hidden // sizes.num_attention_heads * sizes.num_key_value_heads
    yield "model.embed_tokens.weight", (sizes.vocab_size, hidden)
    for layer in range(sizes.num_hidden_layers):
        name = f"model.layers.{layer}"
        for part, width in (("q", hidden), ("k", keys), ("v", keys)):
            yield f"{name}.self_attn.{part}_proj.weight", (width, hidden)
            yield f"{name}.self_attn.{part}_proj.bias", (width,)
        yield f"{name}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{name}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{name}.mlp.up_proj.weight", (inner, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, inner)
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _write_weights(folder: Path, sizes: Sizes, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    where: dict[str, str] = {}
    shard: dict[str, Any] = {}
    total = held = 0

    def write() -> None:
        name = f"model-{len(set(where.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in _tensors(sizes):
        if name.endswith("bias"):
            tensor = torch.zeros(shape, dtype=torch.bfloat16)
        elif len(shape) == 1:
            tensor = torch.ones(shape, dtype=torch.bfloat16)
        else:
            drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
            tensor = drawn.normal_(std=SPREAD, generator=generator).cpu()
        shard[name] = tensor
        total, held = total + tensor.nbytes, held + tensor.nbytes
        if held >= _SHARD_BYTES:
            write()
            held = 0
    if shard:
        write()
    atomic.write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the embedded tokenizer with a word for every id of the vocabulary, so that any completion decodes.

    No merge leads to the new words: texts are encoded as before.
    """
    source = starter.model_path()
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"x{number}": number for number in range(vocab_size) if number not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    # The embedded model's length is in there; a longer prompt would only be warned of.
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["model_max_length"] = 32_768
    atomic.write_json(folder / "tokenizer_config.json", settings)
