"""Convert a tokenizer for llama.cpp: byte-level BPE (`gpt2`) or SentencePiece with byte fallback (`llama`).

The reference is the tokenizer that transformers loads. llama.cpp supports a fixed list of named regular expressions
that split text into words. A tokenizer that splits text differently raises an error, because numbers and line breaks
would become tokens that the model has not seen.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.prompts import chat, template_variables

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN2_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")


@dataclass(frozen=True)
class _Step:
    """A step that splits text, with those of its settings that the supported tokenizers set."""

    type: str
    pattern: str | None = None
    individual_digits: bool = False
    use_regex: bool = False


@dataclass(frozen=True)
class _Splitting:
    """How a byte-level tokenizer splits text into words."""

    steps: tuple[_Step | None, ...]
    """None for a step that llama.cpp does not have."""
    ignore_merges: bool = False
    """Whether words in the vocabulary skip merges."""


_PRE_TOKENIZERS = {
    _Splitting((_Step("Split", pattern=QWEN2_WORDS), _Step("ByteLevel"))): "qwen2",
    _Splitting((_Step("Split", pattern=LLAMA3_WORDS), _Step("ByteLevel")), ignore_merges=True): "llama-bpe",
    _Splitting((_Step("Digits", individual_digits=True), _Step("ByteLevel", use_regex=True))): "smollm",
    _Splitting((_Step("ByteLevel", use_regex=True),)): "gpt-2",
}
"""llama.cpp's name of each way of splitting that it supports."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as llama.cpp reads it."""

    fields: dict[str, Any]
    """Values of the GGUF file, by the names that `gguf.GGUFWriter` has for them: {"tokenizer_model": "gpt2", ...}."""
    tokens: list[str]
    eos_token_ids: list[int]
    """All tokens that end an answer."""
    add_bos: bool
    notes: list[str]
    """Notes for the user, one line each."""


def read_vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int], bos_id: int | None) -> Vocabulary:
    """Convert a tokenizer to the fields that llama.cpp reads.

    Args:
        tokenizer: a tokenizer of transformers.
        vocab_size: number of rows of the embedding. Rows without a token get an unused token, as in the reference
            converter.
        eos_token_ids: the tokens that end an answer.
        bos_id: the model's BOS token, used if the tokenizer has none.

    Raises:
        UserError: llama.cpp would tokenize text differently.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"a {type(tokenizer).__name__} cannot be exported; save the model with a fast tokenizer")
    spec = json.loads(backend.to_str())  # tokenizer.json
    model = spec["model"]
    if model["type"] != "BPE":
        raise UserError(f"the tokenizer is {model['type']}; supported are byte-level BPE and SentencePiece's BPE")
    is_sentencepiece = bool(model["byte_fallback"])  # or byte-level BPE

    # Tokens, and those that are never split.
    added_tokens = {token["id"]: token for token in spec["added_tokens"]}
    tokens = {token_id: text for text, token_id in model["vocab"].items()}
    tokens |= {token_id: token["content"] for token_id, token in added_tokens.items()}
    if max(tokens) >= vocab_size:
        raise UserError(f"the tokenizer has {max(tokens) + 1} tokens and the model {vocab_size}; resize the embeddings")

    # Tokens that are added around a text.
    notes = []
    ids_of_text = tokenizer("a")["input_ids"]
    text_has_bos = ids_of_text[0] == tokenizer.bos_token_id
    opening = chat.render_example(tokenizer, [{"role": "user", "content": "a"}])
    if tokenizer.chat_template:
        # llama.cpp has one setting for chats and plain text, so the chat template decides.
        add_bos = bool(tokenizer.bos_token) and opening.startswith(tokenizer.bos_token)
        if text_has_bos and not add_bos:
            notes.append(f"llama.cpp will not add {tokenizer.bos_token} to plain text; the chat template has none")
    else:
        add_bos = text_has_bos
        notes.append(
            "the model has no chat template, and llama.cpp and LM Studio would use ChatML, which it was not trained "
            "on; prompt it with plain text"
        )

    # Special tokens by the names of llama.cpp's fields.
    ends = _ends(tokenizer, eos_token_ids)
    ends_without_field = set(eos_token_ids) - set(ends.values())
    if ends_without_field:
        names = sorted(tokens.get(token_id, f"token {token_id}") for token_id in ends_without_field)
        notes.append(f"llama.cpp has no field for another end of an answer, {' and '.join(names)}; pass it as a stop")
    special_ids = {
        "bos": bos_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        "unk": tokenizer.unk_token_id if is_sentencepiece else None,
        "pad": tokenizer.pad_token_id,
        **ends,
    }

    # SentencePiece's BPE applies merges by the scores of tokens, and byte-level BPE by the list of merges.
    texts = [tokens.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)]
    types = _types(tokens, added_tokens, vocab_size, special_ids["unk"], has_bytes=is_sentencepiece)
    merges = [tuple(merge) for merge in model["merges"]]
    fields: dict[str, Any] = {
        "tokenizer_model": "llama" if is_sentencepiece else "gpt2",
        "tokenizer_pre": "default" if is_sentencepiece else _pre_tokenizer(spec),
        "token_list": texts,
        "token_types": types,
    }
    if is_sentencepiece:
        fields["token_scores"] = _merge_scores(texts, types, merges)
    else:
        fields["token_merges"] = [" ".join(merge) for merge in merges]
    for kind, token_id in special_ids.items():
        if token_id is not None:
            fields[f"{kind}_token_id"] = token_id
    fields["add_bos_token"] = add_bos
    fields["add_eos_token"] = ids_of_text[-1] == tokenizer.eos_token_id
    fields["add_space_prefix"] = is_sentencepiece and _space_prefix(spec, opening)
    if tokenizer.chat_template:
        fields["chat_template"] = template_variables.with_fixed_variables(tokenizer.get_chat_template())
    return Vocabulary(fields, texts, list(eos_token_ids), add_bos, notes)


def _pre_tokenizer(spec: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for how a byte-level tokenizer splits text into words."""
    # llama.cpp does not normalize text. With NFC, only text in NFD would differ.
    is_normalized = spec["normalizer"] not in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []})
    pre_tokenizer = spec["pre_tokenizer"] or {"type": "none"}
    steps = map(_read_step, pre_tokenizer.get("pretokenizers", [pre_tokenizer]))
    splitting = _Splitting(tuple(steps), ignore_merges=bool(spec["model"].get("ignore_merges")))
    name = _PRE_TOKENIZERS.get(splitting)
    if is_normalized or name is None:
        raise UserError(
            "the tokenizer normalizes text or splits it into words in its own way, and llama.cpp would make other "
            f"tokens; supported are {', '.join(_PRE_TOKENIZERS.values())}"
        )
    return name


def _read_step(step: Mapping[str, Any]) -> _Step | None:
    """Return a step of tokenizer.json; None if llama.cpp does not have it."""
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return _Step("Split", pattern=step["pattern"].get("Regex"))
    if step["type"] == "Digits":
        return _Step("Digits", individual_digits=step["individual_digits"])
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        return _Step("ByteLevel", use_regex=step["use_regex"])
    return None


def _space_prefix(spec: Mapping[str, Any], opening: str) -> bool:
    """Return whether llama.cpp should add a space before text. `opening` is a rendered chat.

    Raises UserError if tokenizer.json, `spec`, normalizes text differently from SentencePiece.
    """
    normalizer = spec["normalizer"]
    pre_tokenizer = spec["pre_tokenizer"]

    # An older tokenizer.json normalizes text: a space is added and spaces are replaced.
    add_space = {"type": "Prepend", "prepend": "▁"}
    replace_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if normalizer is not None and pre_tokenizer is None:
        steps = normalizer.get("normalizers", [normalizer])
        if steps == [add_space, replace_spaces]:
            return True
        if steps == [replace_spaces]:
            return False

    # A newer tokenizer.json has a pre-tokenizer that does the same.
    is_metaspace = pre_tokenizer is not None and pre_tokenizer["type"] == "Metaspace" and not pre_tokenizer["split"]
    if normalizer is not None or not is_metaspace:
        raise UserError("the tokenizer does not normalize text as SentencePiece does; llama.cpp makes other tokens")
    if pre_tokenizer["prepend_scheme"] != "first":
        return bool(pre_tokenizer["prepend_scheme"] == "always")
    # transformers adds a space at the start of a prompt only, and llama.cpp also after every special token. The chat
    # template decides, because a model that follows instructions is prompted through it: if a chat begins with a
    # special token, transformers adds no space.
    begins_with_token = any(opening.startswith(token["content"]) for token in spec["added_tokens"])
    return not begins_with_token


def _merge_scores(tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Return scores with which llama.cpp applies the merges in order. tokenizer.json has no scores.

    SentencePiece joins any two pieces that form a token, highest score first. A list of merges may allow fewer joins.
    All splits of a token must therefore be in the list and adjacent, as in any list made from a SentencePiece model.

    Raises:
        UserError: a split of a token is missing or not adjacent to the others.
    """
    from gguf import TokenType

    # How many merges make each token. `elements` repeats every token so many times, in the order of its first merge, so
    # it equals the list only if the merges of a token are adjacent.
    merged_tokens = [left + right for left, right in merges]
    num_merges = Counter(merged_tokens)
    is_grouped = merged_tokens == list(num_merges.elements())
    # Some converters list special tokens as pieces. llama.cpp never merges text that contains one.
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    is_complete = all(_num_splits(token, pieces) <= num_merges[token] for token in pieces)
    if not (is_grouped and is_complete):
        raise UserError("the tokenizer's merges are not those of a SentencePiece model; llama.cpp would merge others")

    rank_of = {token: rank for rank, token in enumerate(num_merges)}
    scores = []
    for token, kind in zip(tokens, types, strict=True):
        if kind == TokenType.BYTE:
            scores.append(0.0)
        else:
            scores.append(-float(rank_of.get(token, len(rank_of))))
    return scores


def _num_splits(token: str, pieces: Collection[str]) -> int:
    """Return in how many ways a token can be split into two pieces."""
    count = 0
    for end in range(1, len(token)):
        if token[:end] in pieces and token[end:] in pieces:
            count += 1
    return count


def _types(
    tokens: Mapping[int, str], added: Mapping[int, Any], vocab_size: int, unknown: int | None, *, has_bytes: bool
) -> list[int]:
    """Return llama.cpp's type of each token."""
    from gguf import TokenType

    types = []
    for token_id in range(vocab_size):
        text = tokens.get(token_id)
        if text is None:
            kind = TokenType.UNUSED
        elif token_id == unknown:
            kind = TokenType.UNKNOWN
        elif token_id in added:
            # As in the reference converter: Qwen declares <|fim_prefix|> as plain text, but it is a special token.
            is_marker = text.startswith(("<|", "<｜")) and text.endswith(("|>", "｜>"))
            kind = TokenType.CONTROL if added[token_id]["special"] or is_marker else TokenType.USER_DEFINED
        else:
            is_byte = has_bytes and re.fullmatch(r"<0x[0-9A-F]{2}>", text)
            kind = TokenType.BYTE if is_byte else TokenType.NORMAL
        types.append(int(kind))
    return types


def _ends(tokenizer: Any, eos_token_ids: Sequence[int]) -> dict[str, int]:
    """Return the tokens that end an answer, by the names of the three for which llama.cpp has a field.

    `eos` is the tokenizer's, `eot` is the first one after an answer in the chat template, and `eom` is another one.
    """
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id in eos_token_ids else eos_token_ids[0]
    end_of_turn = chat.end_of_turn(tokenizer, eos_token_ids)
    eot = tokenizer.convert_tokens_to_ids(end_of_turn) if end_of_turn else eos
    ends = {"eos": eos, "eot": eot}
    others = [token_id for token_id in eos_token_ids if token_id not in (eos, eot)]
    if others:
        ends["eom"] = others[0]
    return ends
