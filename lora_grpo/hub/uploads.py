"""What is uploaded: the kinds of models, their files in a repository, and the card."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_grpo.gguf import HUB_FILES
from lora_grpo.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS, model_files

CARD = "README.md"
CARD_MARK = "<!-- This card was written by lora_grpo. -->"
"""The last line of a generated card. A README.md without it was written by the user."""
MODELFILES = ("Modelfile", "*.Modelfile")
_TOKENIZER = (
    *model_files.TOKENIZER_FILES,
    *model_files.PROCESSOR_FILES,
    "vocab.txt",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
_LICENSE = (
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "LICENCE",
    "LICENCE.txt",
    "LICENCE.md",
    "NOTICE",
    "NOTICE.txt",
    "NOTICE.md",
    "USE_POLICY.md",
)


@dataclass(frozen=True)
class Kind:
    """A kind of model that can be pushed. Its files are patterns of names in the repository."""

    identified_by: tuple[str, ...]
    """Files that every folder of this kind has."""
    other_files: tuple[str, ...]
    """More files to upload, if they are there."""
    replaced: tuple[str, ...]
    """Files of an earlier push that would act as a part of the new one: weights, and the settings loaded with them."""
    library: str
    """The `library_name` of its card, which decides the code that the Hub shows."""
    verb: str | None
    """The command that makes such a model from a run; None for the adapter, which training makes."""

    @property
    def uploaded(self) -> tuple[str, ...]:
        return (*self.identified_by, *self.other_files)


KINDS = {
    "adapter": Kind(
        identified_by=(ADAPTER_CONFIG, ADAPTER_WEIGHTS),
        other_files=(*_TOKENIZER, *_LICENSE),
        replaced=("adapter_model*.safetensors", *_TOKENIZER),
        library="peft",
        verb=None,
    ),
    "merged": Kind(
        identified_by=("config.json", "*.safetensors"),
        other_files=(model_files.GENERATION_CONFIG, "*.safetensors.index.json", *_TOKENIZER, *_LICENSE),
        replaced=(
            *("model*.safetensors", "model*.safetensors.index.json"),
            *(model_files.GENERATION_CONFIG, *_TOKENIZER),
        ),
        library="transformers",
        verb="merge",
    ),
    "gguf": Kind(
        identified_by=("*.gguf",),
        other_files=(*MODELFILES, *HUB_FILES, *_LICENSE),
        replaced=("*.gguf", *MODELFILES, *HUB_FILES),
        library="gguf",
        verb="export-gguf",
    ),
}
"""The kinds by name. A folder of a run has the name of the kind that it contains."""


@dataclass(frozen=True)
class UploadFile:
    """One file to upload: its path in the repository, and its content or the path of a file with the content."""

    name: str
    content: Path | bytes

    @property
    def size(self) -> int:
        if isinstance(self.content, bytes):
            return len(self.content)
        return self.content.stat().st_size

    def read(self) -> bytes:
        if isinstance(self.content, bytes):
            return self.content
        return self.content.read_bytes()


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether the path of a file matches a pattern. `*.gguf` does not match files in subfolders."""
    depth = name.count("/")
    return any(depth == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_hub_id(name: str) -> bool:
    """Return whether a name may be that of a repository on the Hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.isascii() and name.isprintable()
