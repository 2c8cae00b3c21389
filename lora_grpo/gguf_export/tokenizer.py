"""A tokenizer as llama.cpp reads it: byte-level BPE (`gpt2`) or SentencePiece with byte fallback (`llama`).

What counts is the tokenizer that transformers loads, not a file of the folder. llama.cpp knows the expressions that cut
text into words by name, and has none for others: a tokenizer that cuts otherwise is refused, since every number and
every line break would reach the model as tokens it has not seen.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.gguf_export.sentencepiece import merge_scores, space_prefix
from lora_grpo.tasks import chat

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN2_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")
PRE_TOKENIZERS = {
    (("Split", QWEN2_WORDS), ("ByteLevel", False)): {False: "qwen2"},
    (("Split", LLAMA3_WORDS), ("ByteLevel", False)): {True: "llama-bpe", False: "smaug-bpe"},
    (("Digits", True), ("ByteLevel", True)): {False: "smollm"},
    (("ByteLevel", True),): {False: "gpt-2"},
}
"""How text is cut into words -> whether words of the vocabulary skip their merges -> llama.cpp's name for both."""

BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Vocabulary:
    """All that a GGUF says of a tokenizer."""

    model: str
    """`gpt2` or `llama`, llama.cpp's names for byte-level BPE and SentencePiece."""
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    ids: dict[str, int]
    """Special tokens: `bos`, `eos`, `eot`, `eom`, `unk`, `pad`."""
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    ends: list[int]
    """Every token that ends an answer."""
    chat_template: str | list[dict[str, str]] | None
    notes: list[str] = field(default_factory=list)
    """What a user should know, one line each."""

    def add_to(self, writer: Any) -> None:
        """Add everything to a GGUF that is being written."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        for kind, token_id in self.ids.items():
            getattr(writer, f"add_{kind}_token_id")(token_id)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        writer.add_add_space_prefix(self.add_space_prefix)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def read_vocabulary(tokenizer: Any, vocab_size: int, ends: Sequence[int], bos_id: int | None) -> Vocabulary:
    """Return a tokenizer as llama.cpp reads it.

    Args:
        tokenizer: a Hugging Face tokenizer.
        vocab_size: rows of the embedding; those without a token get one that is never produced, as in the reference.
        ends: every token that ends an answer.
        bos_id: the model's first token, where the tokenizer names none.

    Raises:
        UserError: llama.cpp would turn text into other tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"a {type(tokenizer).__name__} cannot be exported; save the model with a tokenizer.json")
    spec = json.loads(backend.to_str())
    model = spec["model"]
    if model["type"] != "BPE":
        raise UserError(f"the tokenizer is {model['type']}; llama.cpp is given byte-level BPE or SentencePiece's BPE")
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    added = {token["id"]: token for token in spec["added_tokens"]}
    tokens = {token_id: text for text, token_id in model["vocab"].items()}
    tokens |= {token_id: token["content"] for token_id, token in added.items()}
    if max(tokens) >= vocab_size:
        raise UserError(f"the tokenizer has {max(tokens) + 1} tokens and the model {vocab_size}; resize its embeddings")

    notes = [
        f"{token['content']} swallows white space beside it in transformers, and does not in llama.cpp"
        for token in added.values()
        if token["lstrip"] or token["rstrip"]
    ]
    begins, ends_itself = _added_around(tokenizer)
    opening = chat.render(tokenizer, [{"role": "user", "content": "a"}])
    if tokenizer.chat_template:
        # llama.cpp puts a first token before a chat once, and only where this says so.
        wanted, begins = begins, bool(tokenizer.bos_token) and opening.startswith(tokenizer.bos_token)
        if wanted and not begins:
            notes.append(f"no {tokenizer.bos_token} is put before a text, as the chat template puts none")
    else:
        notes.append(
            "there is no chat template: llama.cpp and LM Studio put ChatML around a chat, which the model has not "
            "seen; give it text"
        )
    vocabulary = Vocabulary(
        model="gpt2",
        pre="",
        tokens=[tokens.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)],
        types=_types(tokens, added, vocab_size, tokenizer.unk_token_id, bytes_have_tokens=model["byte_fallback"]),
        scores=None,
        merges=[" ".join(merge) for merge in merges],
        ids=_special_ids(tokenizer, ends, bos_id),
        add_bos=begins,
        add_eos=ends_itself,
        add_space_prefix=False,
        ends=list(ends),
        chat_template=_chat_template(tokenizer),
        notes=notes,
    )
    if not model["byte_fallback"]:
        return dataclasses.replace(vocabulary, pre=_pre_tokenizer(spec))
    scheme = space_prefix(spec)
    prefix = scheme in ("prepend", "always")
    if scheme == "first":
        # transformers puts a space before the text, llama.cpp before the text after every special token too.
        prefix = not any(opening.startswith(token["content"]) for token in added.values())
    if scheme in ("first", "always"):  # transformers puts none before a space
        notes.append(
            "text beside a special token, or that begins with a space, may become other tokens in llama.cpp than in "
            "transformers"
        )
    return dataclasses.replace(
        vocabulary,
        model="llama",
        pre="default",
        scores=merge_scores(vocabulary.tokens, vocabulary.types, merges),
        merges=None,
        ids=vocabulary.ids | ({"unk": tokenizer.unk_token_id} if tokenizer.unk_token_id is not None else {}),
        add_space_prefix=prefix,
    )


def _pre_tokenizer(spec: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way a byte-level tokenizer cuts text into words."""
    model, problem = spec["model"], ""
    normalizer = spec["normalizer"] or {"type": "Sequence", "normalizers": []}
    # llama.cpp composes no characters: text in NFD becomes other tokens there, whatever a GGUF says.
    if normalizer not in ({"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        problem = f"normalizes text by {normalizer['type']}"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        problem = "marks parts of words"
    steps = []
    pre = spec["pre_tokenizer"] or {"type": "nothing"}
    for step in pre.get("pretokenizers", [pre]):
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            steps.append(("Split", step["pattern"].get("Regex")))
        elif step["type"] == "Digits":
            steps.append(("Digits", step["individual_digits"]))
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            steps.append(("ByteLevel", step["use_regex"]))
        else:
            problem = f"cuts words by {step['type']}"
    names = PRE_TOKENIZERS.get(tuple(steps), {})
    name = names.get(bool(model.get("ignore_merges")))
    if problem or name is None:
        known = ", ".join(name for names in PRE_TOKENIZERS.values() for name in names.values())
        raise UserError(
            f"the tokenizer {problem or 'cuts text into words in its own way'}; llama.cpp would make other tokens of a "
            f"text. What can be exported is cut as {known}"
        )
    return name


def _types(
    tokens: Mapping[int, str],
    added: Mapping[int, Mapping[str, Any]],
    size: int,
    unknown: int | None,
    *,
    bytes_have_tokens: bool,
) -> list[int]:
    from gguf import TokenType

    def kind(token_id: int) -> TokenType:
        if token_id not in tokens:
            return TokenType.UNUSED
        text = tokens[token_id]
        if bytes_have_tokens and token_id == unknown:
            return TokenType.UNKNOWN
        if token_id in added:
            # As the reference: <|fim_prefix|> is declared as plain text by Qwen and is none.
            looks = text.startswith(("<|", "<｜")) and text.endswith(("|>", "｜>"))
            return TokenType.CONTROL if added[token_id]["special"] or looks else TokenType.USER_DEFINED
        return TokenType.BYTE if bytes_have_tokens and BYTE.fullmatch(text) else TokenType.NORMAL

    return [int(kind(token_id)) for token_id in range(size)]


def _special_ids(tokenizer: Any, ends: Sequence[int], bos_id: int | None) -> dict[str, int]:
    """Name the special tokens; llama.cpp stops at `eos`, `eot` and `eom`, and at others whose text it knows."""
    first = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
    found = {"bos": tokenizer.bos_token_id if tokenizer.bos_token_id is not None else bos_id, "eos": first}
    found |= dict(zip(("eot", "eom"), (token_id for token_id in ends if token_id != first), strict=False))
    found["pad"] = tokenizer.pad_token_id
    return {kind: token_id for kind, token_id in found.items() if token_id is not None}


def _added_around(tokenizer: Any) -> tuple[bool, bool]:
    """Tell whether the tokenizer puts its first and its last token around a text."""
    ids = tokenizer("a")["input_ids"]
    return (
        tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id,
        tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id,
    )


def _chat_template(tokenizer: Any) -> str | list[dict[str, str]] | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return [{"name": name, "template": text} for name, text in template.items()]
    return template
