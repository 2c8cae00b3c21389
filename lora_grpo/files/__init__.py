"""Files that are complete or absent, locks, JSON lines and safetensors."""

from lora_grpo.files import atomic, json_lines, json_objects, lock
from lora_grpo.files.atomic import MANIFEST, damage, sha256, write_json, write_text
from lora_grpo.files.lock import claim, holding
from lora_grpo.files.safetensors import INDEX, SIZES, TORCH_DTYPES, Stored, Writer, file_tensors, model_tensors

__all__ = [
    "INDEX",
    "MANIFEST",
    "SIZES",
    "TORCH_DTYPES",
    "Stored",
    "Writer",
    "atomic",
    "claim",
    "damage",
    "file_tensors",
    "holding",
    "json_lines",
    "json_objects",
    "lock",
    "model_tensors",
    "sha256",
    "write_json",
    "write_text",
]
