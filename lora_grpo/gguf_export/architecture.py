"""A model's folder as llama.cpp knows it: architecture, hyperparameters, rotary scaling, names of tensors.

What llama.cpp would compute otherwise than transformers is refused, never approximated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import StoredTensor, same_values

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""transformers' class -> llama.cpp's architecture."""

FLOATS = ("F64", "F32", "F16", "BF16")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Tensor:
    """A tensor on its way into the file."""

    name: str
    """In the GGUF."""
    source: StoredTensor
    heads: int | None
    """Attention heads whose rows llama.cpp wants interleaved."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.source.shape)


def read_config(folder: Path) -> Any:
    """Return the folder's configuration.

    Raises:
        UserError: it is no folder of a model that can be exported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no config.json; give the folder of a merged transformers model")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        names = raw.get("architectures") or ["none"]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)})") from None
    if names[0] not in ARCHITECTURES:
        raise UserError(f"{folder} is a {names[0]}; what can be exported is {', '.join(ARCHITECTURES)}")
    if raw.get("quantization_config"):
        refuse_quantised(folder)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # what is damaged raises many types
        raise UserError(f"{path} cannot be read ({first_line(error)})") from error
    if config.hidden_act != "silu":
        raise UserError(f"{path}: hidden_act is {config.hidden_act}; llama.cpp computes silu in this architecture")
    if ARCHITECTURES[names[0]] != "llama" and "sliding_attention" in (config.layer_types or ()):
        raise UserError(f"{path}: use_sliding_window is on; llama.cpp attends to everything in this architecture")
    if ARCHITECTURES[names[0]] == "qwen3" and config.attention_bias:
        raise UserError(f"{path}: attention_bias is on; llama.cpp knows no biases in this architecture")
    return config


def refuse_quantised(folder: Path) -> None:
    """Raise for weights that are quantised already: rounding them again would lose more."""
    raise UserError(
        f"{folder} holds quantised weights; export needs 16-bit ones, so merge onto the 16-bit base first: "
        "python scripts/merge.py RUN"
    )


def head_dim(config: Any) -> int:
    """Return the width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def context_length(config: Any) -> int:
    """Return how far the model can look back; llama.cpp has no sliding window in `llama`, so no further than that."""
    window = getattr(config, "sliding_window", None)
    length = int(config.max_position_embeddings)
    return min(length, window) if window and ARCHITECTURES[config.architectures[0]] == "llama" else length


def add_hyperparameters(writer: Any, config: Any) -> None:
    """Add what llama.cpp builds the network from.

    Raises:
        UserError: the rotary embedding is scaled in a way that llama.cpp does not compute.
    """
    writer.add_context_length(context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_rope_dimension_count(head_dim(config))
    _add_rope(writer, config.rope_parameters)


def _add_rope(writer: Any, rope: Mapping[str, Any]) -> None:
    from gguf import RopeScalingType

    kind = rope.get("rope_type", "default")
    known = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}
    if kind == "llama3":  # goes into a tensor
        known |= {"low_freq_factor", "high_freq_factor"}
    # llama.cpp computes YaRN with these values; a file with others would be read as if it had these.
    usual = {"partial_rotary_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    strange = [
        f"{name}={value}"
        for name, value in rope.items()
        if value is not None and name not in known and not (name in usual and value == usual[name])
    ]
    if kind not in ("default", "linear", "llama3", "yarn") or strange:
        raise UserError(
            f"the rotary embedding is scaled by {kind}{' with ' if strange else ''}{', '.join(strange)}; llama.cpp is "
            "given default, linear, llama3 or yarn, with yarn's usual values"
        )
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def rope_factors(config: Any) -> Any:
    """Return by how much Llama 3 slows each frequency, which llama.cpp reads as a tensor; None for other models."""
    if config.rope_parameters.get("rope_type") != "llama3":
        return None
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = head_dim(config)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    return (plain / slowed).numpy()


def model_tensors_named(config: Any, stored: Mapping[str, StoredTensor], folder: Path) -> list[Tensor]:
    """Return every tensor of the model with its name in the GGUF.

    Args:
        config: the model's.
        stored: its tensors on disk.
        folder: where they lie, for messages.

    Raises:
        UserError: a tensor is missing, unknown, of another shape, or quantised.
    """
    import gguf

    expected = _expected_shapes(config)
    architecture = ARCHITECTURES[config.architectures[0]]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    if (
        config.tie_word_embeddings
        and {HEAD, EMBEDDING} <= stored.keys()
        and same_values(stored[HEAD], stored[EMBEDDING])
    ):
        # A tied head that was written all the same; one that differs is no longer tied, to transformers too.
        stored = {name: tensor for name, tensor in stored.items() if name != HEAD}
    found = []
    for name, tensor in stored.items():
        if name.endswith(".rotary_emb.inv_freq"):  # old checkpoints hold what is computed from rope_theta
            continue
        if tensor.dtype not in FLOATS or ".absmax" in name or ".quant_state" in name:
            refuse_quantised(folder)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None or name not in expected:
            raise UserError(f"{folder} holds {name}, which a {config.architectures[0]} does not have in llama.cpp")
        if tensor.shape != expected.pop(name):
            raise UserError(f"{folder}: {name} is {list(tensor.shape)}, which is not what config.json says")
        heads = None
        if architecture == "llama" and ".self_attn.q_proj." in name:
            heads = config.num_attention_heads
        elif architecture == "llama" and ".self_attn.k_proj." in name:
            heads = config.num_key_value_heads
        found.append(Tensor(gguf_name, tensor, heads))
    if config.tie_word_embeddings:
        expected.pop(HEAD, None)
    if expected:
        raise UserError(f"{folder} lacks {next(iter(expected))}, which config.json says the model has")
    return found


def _expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # sizes that do not go together raise many types
        raise UserError(f"config.json describes no model ({first_line(error)})") from error
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
