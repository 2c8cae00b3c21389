"""Map a model to llama.cpp: architecture, hyperparameters, rotary embedding, and tensor names.

A model that llama.cpp would compute differently from transformers raises an error. Nothing is approximated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import StoredTensor, same_values
from lora_grpo.merging import empty_model

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Map a transformers class to a llama.cpp architecture."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Tensor:
    """A tensor to export, with its name in the GGUF file."""

    name: str
    source: StoredTensor
    heads: int | None
    """Number of attention heads if llama.cpp interleaves their rows; None for other tensors."""


def read_model(folder: Path) -> Any:
    """Return the model without weights. Raises UserError if it cannot be exported."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} contains no config.json; pass the folder of a merged transformers model")
    model = empty_model(folder)
    config = model.config
    class_name = (config.architectures or ["none"])[0]
    if class_name not in ARCHITECTURES:
        raise UserError(f"{folder} is a {class_name}; supported are {', '.join(ARCHITECTURES)}")
    if config.hidden_act != "silu":
        raise UserError(f"{path}: hidden_act is {config.hidden_act}; llama.cpp computes silu in this architecture")
    architecture = llama_cpp_name(config)
    if architecture != "llama" and "sliding_attention" in (config.layer_types or ()):
        raise UserError(f"{path}: use_sliding_window is on; llama.cpp has no sliding window in this architecture")
    if architecture == "qwen3" and config.attention_bias:
        raise UserError(f"{path}: attention_bias is on; llama.cpp has no biases in this architecture")
    return model


def llama_cpp_name(config: Any) -> str:
    """Return llama.cpp's name of a model's architecture."""
    return ARCHITECTURES[config.architectures[0]]


def head_dim(config: Any) -> int:
    """Return the width of an attention head."""
    declared = getattr(config, "head_dim", None)
    return int(declared or config.hidden_size // config.num_attention_heads)


def context_length(config: Any) -> int:
    """Return the maximum context in tokens, limited to a sliding window because llama.cpp's `llama` has none."""
    max_tokens = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None)
    if window and llama_cpp_name(config) == "llama":
        return min(max_tokens, window)
    return max_tokens


def add_hyperparameters(writer: Any, config: Any) -> None:
    """Add the hyperparameters from which llama.cpp builds the network. Raises UserError for unsupported ones."""
    rope = config.rope_parameters
    has_known_type = rope.get("rope_type", "default") in ("default", "llama3")
    rotates_whole_heads = rope.get("partial_rotary_factor", 1.0) == 1.0
    if not has_known_type or not rotates_whole_heads:
        raise UserError(f"the rotary embedding is {rope}; supported are the rope types default and llama3")
    writer.add_rope_freq_base(rope["rope_theta"])
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


def rope_factors(config: Any) -> Any:
    """Return the divisors of Llama 3's rotary frequencies, (head_dim / 2,), which llama.cpp reads from a tensor.

    None for models without them.
    """
    if config.rope_parameters.get("rope_type") != "llama3":
        return None
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled_frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = head_dim(config)
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / config.rope_parameters["rope_theta"] ** exponents
    return (frequencies / scaled_frequencies).numpy()


def named_tensors(model: Any, stored: Mapping[str, StoredTensor], folder: Path) -> list[Tensor]:
    """Return the model's tensors with their names in the GGUF file.

    Args:
        model: the result of `read_model`.
        stored: the tensors of its checkpoint by name.
        folder: the model's folder, for errors.

    Raises:
        UserError: a tensor is missing or unknown, or its shape does not match config.json.
    """
    import gguf

    config = model.config
    architecture = llama_cpp_name(config)
    architecture_key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    gguf_names = gguf.get_tensor_name_map(architecture_key, config.num_hidden_layers)
    heads_of_module: dict[str, int] = {}
    if architecture == "llama":  # the only one in which llama.cpp interleaves the rows of a head
        heads_of_module = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    # A checkpoint may store a tied head. If its values differ, transformers does not tie it.
    stores_both = HEAD in stored and EMBEDDING in stored
    skips_head = config.tie_word_embeddings and stores_both and same_values(stored[HEAD], stored[EMBEDDING])

    # The shapes that config.json implies, by name. Each tensor of the checkpoint takes out its own.
    remaining_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors = []
    for name, tensor in stored.items():
        if name.endswith(".rotary_emb.inv_freq"):  # in old checkpoints
            continue
        if name == HEAD and skips_head:
            continue
        gguf_name = gguf_names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None or name not in remaining_shapes:
            raise UserError(f"{folder} contains {name}, which a {config.architectures[0]} does not have in llama.cpp")
        shape = remaining_shapes.pop(name)
        if tensor.shape != shape:
            raise UserError(f"{folder}: {name} is {list(tensor.shape)}, and config.json implies {list(shape)}")
        module_name = name.split(".")[-2]
        tensors.append(Tensor(gguf_name, tensor, heads_of_module.get(module_name)))
    if config.tie_word_embeddings:
        remaining_shapes.pop(HEAD, None)
    if remaining_shapes:
        raise UserError(f"{folder} lacks {next(iter(remaining_shapes))}, which config.json implies")
    return tensors
