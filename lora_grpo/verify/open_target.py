"""Open what `--against` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.models import ModelFlags, ModelSpec, holds_adapter, resolve
from lora_grpo.verify.local import open_local
from lora_grpo.verify.servers import open_gguf, open_server
from lora_grpo.verify.targets import Target

ENGINES = ("transformers", "vllm")
_EXPECTED = (
    "a merged model's folder, a GGUF file, transformers, vllm, or the address of a server: http://127.0.0.1:8000#NAME"
)


def is_address(name: str) -> bool:
    """Return whether a target is a server."""
    return name.startswith(("http://", "https://"))


def check_target(name: str, tokenizer: Any) -> None:
    """Raise a UserError if a target is none of the things that can be verified, or a server that does not answer."""
    if name in ENGINES:
        return
    if is_address(name):
        _open_server(name, tokenizer).close()
        return
    if name == "unsloth":
        raise UserError(
            "--against unsloth: a run with Unsloth compares its sampler with the trained model before the first step; "
            "pass vllm, or the address of a server"
        )
    path = Path(name).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return
    if not path.exists():
        raise UserError(f"--against {name} does not exist; expected {_EXPECTED}")
    if (path / "run.json").is_file() or holds_adapter(path):
        raise UserError(f"--against {name} is an adapter; pass `transformers` or `vllm` to verify it in an engine")
    if not (path / "config.json").is_file():
        raise UserError(f"--against {name} is no model; expected {_EXPECTED}")


def open_target(name: str, spec: ModelSpec, tokenizer: Any, sequence_tokens: int, flags: ModelFlags) -> Target:
    """Open a target, which may start an engine.

    Args:
        name: accepted by `check_target`.
        spec: the adapter.
        tokenizer: that of the adapter.
        sequence_tokens: maximum length of a prompt and its completion.
        flags: those of the command.
    """
    if is_address(name):
        return _open_server(name, tokenizer)
    if name in ENGINES:
        return open_local(name, spec, name, sequence_tokens)
    path = Path(name).expanduser()
    if path.is_file():
        return open_gguf(path, sequence_tokens)
    merged_flags = ModelFlags(trust_remote_code=flags.trust_remote_code)
    merged = resolve(name, merged_flags, bits=16)
    return open_local(name, merged, "transformers", sequence_tokens)


def _open_server(name: str, tokenizer: Any) -> Target:
    address, _, model = name.partition("#")
    return open_server(address, model or None, tokenizer)
