"""Tokens are told by their texts exactly, or not at all: by GPT-2's vocabularies, and by SentencePiece's."""

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers

from lora_grpo import starter
from lora_grpo.verify.token_texts import TokenTexts


@pytest.fixture(scope="module")
def byte_level():
    return transformers.AutoTokenizer.from_pretrained(starter.model_path())


@pytest.fixture(scope="module")
def sentence_piece():
    """A vocabulary as Llama 2's: spaces are `▁`, there is one at the start of a text, and bytes are tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcth"]
    merges = [("t", "h"), ("▁", "a"), ("▁", "th")]
    tokens += ["".join(merge) for merge in merges]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def pieces_of(tokenizer, token_ids):
    return [tokenizer.decode([token_id]) for token_id in token_ids]


def test_a_text_names_its_token_however_the_text_is_split(byte_level):
    """A sampled text may be split in other ways than the tokenizer's own."""
    split = byte_level.convert_tokens_to_ids(["Ġ", "t", "h", "e", "Ġresult", "<|im_end|>"])
    assert byte_level(" the result")["input_ids"] != split[:-1]
    assert TokenTexts(byte_level).ids(pieces_of(byte_level, split), " the result") == split


def test_parts_of_a_character_are_told_by_their_bytes_or_by_the_whole_text(byte_level):
    texts = TokenTexts(byte_level)
    token_ids = byte_level("a 🙂 b")["input_ids"] + [byte_level.eos_token_id]
    pieces = pieces_of(byte_level, token_ids)
    assert "\N{REPLACEMENT CHARACTER}" in pieces
    assert texts.ids(pieces, "a 🙂 b") == token_ids
    assert texts.ids(pieces[:-1], "a 🙂 b") == token_ids[:-1]
    assert texts.ids([piece.encode() for piece in pieces], "a 🙂 b") == token_ids  # bytes of what was decoded

    # Without a part, with another text, or split in another way, they are not known.
    part = pieces.index("\N{REPLACEMENT CHARACTER}")
    assert texts.ids(pieces[:part] + pieces[part + 1 :], "a 🙂 b") is None
    assert texts.ids(pieces, "a 🙂 c") is None
    assert texts.ids(pieces, "a 🙂") is None

    # By their bytes, they are, also if the text ends within a character.
    parts = [bytes([byte]) for byte in "🙂".encode()[:3]]
    token_ids = texts.ids(["a", " ", *parts], "a ")
    assert len(token_ids) == 5
    assert byte_level.decode([*token_ids, *texts.ids(["🙂".encode()[3:]], "")]) == "a 🙂"


def test_sentence_piece_has_spaces_and_bytes(sentence_piece):
    texts = TokenTexts(sentence_piece)
    names = ["th", "▁a", "<0x0A>", "▁th", "</s>"]
    token_ids = sentence_piece.convert_tokens_to_ids(names)
    assert texts.ids(["th", " a", "\n", " th", "</s>"], "th a\n th") == token_ids
    parts = ["▁a", "<0xC3>", "<0xA9>"]
    assert texts.ids([" a", b"\xc3", b"\xa9"], " aé") == sentence_piece.convert_tokens_to_ids(parts)
    assert texts.ids(["QQ"], "QQ") is None  # not in the vocabulary


def test_a_continuation_has_no_space_at_its_start(sentence_piece):
    texts = TokenTexts(sentence_piece)
    assert sentence_piece.tokenize("th a") == ["▁th", "▁a"]
    assert sentence_piece.convert_ids_to_tokens(texts.encode("th a")) == ["th", "▁a"]
    assert sentence_piece.convert_ids_to_tokens(texts.encode(" th")) == ["▁th"]
    assert sentence_piece.convert_ids_to_tokens(texts.encode("\nc")) == ["<0x0A>", "c"]


def test_a_greedy_text_has_as_many_tokens_as_were_counted(byte_level):
    texts = TokenTexts(byte_level)
    token_ids = byte_level(" the result")["input_ids"]
    for num_tokens in (len(token_ids), len(token_ids) + 1):  # with or without an end token
        assert texts.ids_of_greedy(" the result", num_tokens) == token_ids
    for num_tokens in (None, len(token_ids) - 1, len(token_ids) + 2):
        assert texts.ids_of_greedy(" the result", num_tokens) is None


def test_the_text_of_a_prompt_has_no_bos_that_the_tokenizer_adds(byte_level, sentence_piece):
    prompt = byte_level("<|im_start|>user\na")["input_ids"]
    assert TokenTexts(byte_level).text_of_prompt(prompt) == "<|im_start|>user\na"
    prompt = [1, *sentence_piece("a th")["input_ids"]]
    assert TokenTexts(sentence_piece).text_of_prompt(prompt).startswith("<s>")  # its tokenizer adds none
