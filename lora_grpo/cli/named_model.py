"""The model that a command's argument names: a run, an adapter, a model, a Hub id or a GGUF file."""

from pathlib import Path
from typing import Literal

from lora_grpo.errors import UserError
from lora_grpo.models import ModelFlags, ModelSpec, choose_adapter, resolve
from lora_grpo.sampling import GgufModel, read_gguf


def named_model(name: str, flags: ModelFlags, bits: Literal[4, 16] | None) -> ModelSpec | GgufModel:
    """Return the model with a name, or raise a UserError."""
    source = choose_adapter(name, flags.what)
    if not source.lower().endswith(".gguf"):
        return resolve(source, flags, bits=bits)
    if bits or flags.base or flags.revision or flags.trust_remote_code:
        raise UserError("--bits, --base, --revision and --trust-remote-code do not apply to a GGUF file; omit them")
    return read_gguf(Path(source).expanduser())
