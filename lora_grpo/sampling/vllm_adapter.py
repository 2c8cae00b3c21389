"""Check which adapters vLLM can serve, and write the adapter of a policy for vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM (0.27) can reserve memory for. An adapter uses the next larger one."""
_NOT_SERVED = (
    *("use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "rank_pattern", "alpha_pattern"),
    *("layer_replication", "target_parameters", "alora_invocation_tokens", "arrow_config", "use_bdlora"),
    *("use_qalora", "kasa_config", "monteclora_config", "velora_config"),
)
"""Fields of adapter_config.json that change the model but that vLLM rejects or silently ignores."""


def served_rank(adapter: Path) -> int:
    """Return `reserved_rank` for a saved adapter, using only adapter_config.json.

    Args:
        adapter: folder of a PEFT adapter.

    Raises:
        UserError: vLLM cannot serve this adapter.
    """
    path = adapter / "adapter_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, kind, bias = int(config["r"]), config["peft_type"], config.get("bias", "none")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as a LoRA adapter's: {first_line(error)}") from None
    reasons = [name for name in _NOT_SERVED if config.get(name)]
    if kind != "LORA":
        reasons.append(f"of type {kind}")
    if bias != "none":
        reasons.append(f"bias={bias}")
    if reasons:
        raise UserError(
            f"vLLM cannot serve the adapter in {adapter} ({', '.join(reasons)}); use --backend transformers"
        )
    return reserved_rank(rank, "--backend")


def reserved_rank(rank: int, flag: str) -> int:
    """Return the rank that vLLM must reserve memory for to serve an adapter of this rank.

    Args:
        rank: rank of the adapter.
        flag: the flag that selects vLLM or transformers, for error messages.

    Raises:
        UserError: vLLM does not serve this rank.
    """
    if not 1 <= rank <= _RANKS[-1]:
        raise UserError(f"vLLM cannot serve an adapter of rank {rank}, at most {_RANKS[-1]}; use {flag} transformers")
    return min(served for served in _RANKS if served >= rank)


def write_adapter(model: Any, folder: Path) -> None:
    """Write the adapter of a PEFT model into an existing folder."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    # Otherwise PEFT queries the Hub to find out whether the vocabulary was resized.
    state = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    weights = folder / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights)
    weights.chmod(0o644)  # safetensors makes the file private, but a server may run as another user
    model.peft_config["default"].save_pretrained(folder)
