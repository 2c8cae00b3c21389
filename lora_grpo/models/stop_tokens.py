"""The tokens that end a completion, as a model's generation config and tokenizer declare them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import json_files
from lora_grpo.models.base_model import loading
from lora_grpo.models.model_files import GENERATION_CONFIG, source

_ID_FIELDS = ("eos_token_id", "pad_token_id")
"""Fields of a generation config with the ids of tokens that end or fill a completion."""
NO_PAD = -1
"""The `pad_token_id` of early Llama models, which have no such token. Padding is that of the tokenizer."""


class WrongTokenId(UserError):
    """A model's configuration declares a value that is not the id of one of its tokens."""


def eos_token_ids(settings: ModelConfig, tokenizer: Any, name: str) -> list[int]:
    """Return the ids of all tokens that end a completion, and set the tokenizer's padding token if it has none.

    Args:
        settings: the model to read, which may be the downloaded folder of a Hub id.
        name: the model's name for messages.

    Raises:
        UserError: the generation config cannot be read, or declares what is not the id of a token.
        RunError: no token ends a completion.
    """
    return require_ends(declared_ends(settings, tokenizer, name), tokenizer, name)


def declared_ends(settings: ModelConfig, tokenizer: Any, name: str) -> list[int]:
    """Return the ids that the generation config and the tokenizer declare as ends of a completion; [] for none.

    Without a generation config, config.json declares them. For the arguments, see `eos_token_ids`.
    """
    declared = as_ids(generation_config(settings, name).eos_token_id)
    return sorted({*declared, tokenizer.eos_token_id} - {None})


def require_ends(ids: list[int], tokenizer: Any, name: str) -> list[int]:
    """Return `ids`, the tokens that end a completion, and set the tokenizer's padding token if it has none.

    Raises:
        RunError: `ids` is empty.
    """
    if not ids:
        raise RunError(f"{name} declares no end-of-sequence token; its completions would never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(ids[0])
    return ids


def generation_config(settings: ModelConfig, name: str) -> Any:
    """Return transformers' GenerationConfig of a model: its file, or what config.json implies if there is none.

    Raises:
        UserError: a file cannot be read; the message has `name`.
        WrongTokenId: the end or the padding token is none of the model's tokens.
    """
    from transformers import AutoConfig, GenerationConfig

    folder_or_id = source(settings.name)
    has_generation_config = (Path(folder_or_id) / GENERATION_CONFIG).is_file()
    declaring_file = Path(folder_or_id) / (GENERATION_CONFIG if has_generation_config else "config.json")

    # Check the types in a folder before transformers reads the file, because it raises a TypeError for some.
    declared_in: Path | str = f"the generation config of {name}"
    if declaring_file.is_file():
        declared_in = declaring_file
        declared = json_files.read_object(declaring_file)
        check_token_ids({field: declared.get(field) for field in _ID_FIELDS}, None, declared_in)

    with loading(f"the generation config of {name}"):
        config = AutoConfig.from_pretrained(
            folder_or_id, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
        try:
            generation = GenerationConfig.from_pretrained(folder_or_id, revision=settings.revision)
        except OSError:
            if has_generation_config:  # a damaged one
                raise
            generation = GenerationConfig.from_model_config(config)

    # The size of the vocabulary is known now.
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    check_token_ids({field: getattr(generation, field) for field in _ID_FIELDS}, vocab_size, declared_in)
    return generation


def check_token_ids(ids: Mapping[str, Any], vocab_size: int | None, file: Path | str) -> None:
    """Check that a file declares ids of tokens, which are whole numbers from 0 to `vocab_size` - 1.

    Args:
        ids: values by the names of their fields: {"eos_token_id": [1, 2], "pad_token_id": None}. None declares nothing,
            and only an `eos_token_id` may be a list.
        vocab_size: number of the model's embeddings; None if its configuration does not have it.
        file: where the values are from.

    Raises:
        WrongTokenId: a value is not the id of a token; the message has the file, the field and the value.
    """
    for field, value in ids.items():
        if value is None or (field == "pad_token_id" and value == NO_PAD):
            continue
        may_be_list = field == "eos_token_id"
        token_ids = as_ids(value) if may_be_list else [value]
        if all(_is_token_id(token_id, vocab_size) for token_id in token_ids):
            continue
        expected = "a whole number from 0"
        if vocab_size is not None:
            expected += f" to {vocab_size - 1}"
        if may_be_list:
            expected += " or a list of them"
        raise WrongTokenId(f"{file}: {field} is {value!r:.80}; expected {expected}; correct it, or remove the field")


def _is_token_id(value: Any, vocab_size: int | None) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value >= 0 and (vocab_size is None or value < vocab_size)


def as_ids(declared: Any) -> list[int]:
    """Return the ids in a field of a generation config, which is None, one id or several."""
    if declared is None:
        return []
    return list(declared) if isinstance(declared, (list, tuple)) else [declared]
