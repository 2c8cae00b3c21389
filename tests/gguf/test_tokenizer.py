"""Tokenizers in GGUF files produce the same tokens as the original. Tokenizers that llama.cpp would split differently
are rejected."""

import itertools
import json

import gguf
import pytest
from helpers.gguf_models import (
    LLAMA3_WORDS,
    ODD,
    QWEN2_WORDS,
    TEXT,
    byte_level,
    llama2_tokenizer,
    llama3_tokenizer,
    qwen_tokenizer,
    save,
    sentencepiece,
    wrapped,
)
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from lora_grpo import starter
from lora_grpo.errors import UserError
from lora_grpo.gguf.tokenizer import read_vocabulary
from lora_grpo.gguf.writer import write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
LINES = [*TEXT.splitlines(), TEXT, *ODD]


def vocabulary(tokenizer, *, spare=0, ends=None, bos_id=None):
    return read_vocabulary(tokenizer, len(tokenizer) + spare, ends or [tokenizer.eos_token_id], bos_id)


def read(path):
    return {name: entry.contents() for name, entry in gguf.GGUFReader(path).fields.items()}


def special(vocabulary):
    """The ids of the special tokens by kind."""
    suffix = "_token_id"
    return {name.removesuffix(suffix): value for name, value in vocabulary.fields.items() if name.endswith(suffix)}


def kinds(vocabulary, *texts):
    return [vocabulary.fields["token_types"][vocabulary.tokens.index(text)] for text in texts]


# Byte-level BPE


def test_the_starters_tokenizer_comes_back_as_it_was(tmp_path, real_data):
    write_gguf(starter.model_path(), {"q8_0": tmp_path / "starter.gguf"})
    tokenizer = AutoTokenizer.from_pretrained(starter.model_path())
    again = AutoTokenizer.from_pretrained(tmp_path, gguf_file="starter.gguf")
    rows = (real_data / "gsm8k" / "test.jsonl").read_text().splitlines()
    texts = [json.loads(row)["question"] for row in rows]
    assert len(texts) == 1319
    texts += [tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False) for text in texts[:50]]
    assert again(texts + LINES)["input_ids"] == tokenizer(texts + LINES)["input_ids"]
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    ("pre", "words", "ignore_merges", "name"),
    [
        (None, QWEN2_WORDS, False, "qwen2"),
        (None, LLAMA3_WORDS, True, "llama-bpe"),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), "", False, "gpt-2"),
        (
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
            "",
            False,
            "smollm",
        ),
    ],
)
def test_the_way_text_is_cut_into_words_has_llama_cpps_name(pre, words, ignore_merges, name):
    tokenizer = byte_level(words, pre=pre, ignore_merges=ignore_merges)
    converted = vocabulary(wrapped(tokenizer, eos_token="<|im_end|>"))
    fields = converted.fields
    assert (fields["tokenizer_model"], fields["tokenizer_pre"]) == ("gpt2", name)
    assert not fields["add_space_prefix"] and "token_scores" not in fields
    # Like llama.cpp: the named pre-tokenizer, then byte merges in order.
    again = Tokenizer(
        models.BPE(
            {text: i for i, text in enumerate(converted.tokens)},
            [tuple(merge.split(" ")) for merge in fields["token_merges"]],
            ignore_merges=name == "llama-bpe",
        )
    )
    again.pre_tokenizer = tokenizer.pre_tokenizer
    again.add_special_tokens(
        [text for text, kind in zip(converted.tokens, fields["token_types"], strict=True) if kind == CONTROL]
    )
    for line in LINES:
        assert again.encode(line).ids == tokenizer.encode(line).ids


def own_words():
    return byte_level(QWEN2_WORDS.replace(r"\p{N}", r"\p{N}{1,2}"))


def lower_case():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (own_words, "splits it into words in its own way, .* supported are qwen2, llama-bpe, smollm, gpt-2$"),
        (lambda: byte_level(ignore_merges=True), "splits it into words in its own way"),
        (lower_case, "normalizes text or splits it"),
        (lambda: sentencepiece(complete=False), "merges are not those of a SentencePiece model"),
    ],
)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(make, message):
    with pytest.raises(UserError, match=message) as refused:
        vocabulary(wrapped(make(), eos_token="<|im_end|>", unk_token="<unk>"))
    assert "\n" not in str(refused.value)


# SentencePiece


def as_llama_cpp(converted, text):
    """Tokenize text with llama.cpp's algorithm: repeatedly join the neighbors that form the best-scored token."""
    ids = {token: i for i, token in enumerate(converted.tokens)}
    parts = list((" " * converted.fields["add_space_prefix"] + text).replace(" ", "▁"))
    while True:
        joins = [
            (-converted.fields["token_scores"][ids[left + right]], at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in ids
        ]
        if not joins:
            break
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    token_ids = []
    for part in parts:
        token_ids += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return token_ids


@pytest.mark.parametrize("scheme", [None, "always", "first", "never"])
def test_sentencepiece_scores_make_the_tokens_that_merges_make(scheme):
    tokenizer = sentencepiece(scheme=scheme)
    converted = vocabulary(wrapped(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"), spare=2)
    fields = converted.fields
    assert (fields["tokenizer_model"], fields["tokenizer_pre"], converted.add_bos) == ("llama", "default", True)
    assert "token_merges" not in fields
    assert converted.fields["add_space_prefix"] is (scheme != "never")
    assert len(fields["token_scores"]) == len(converted.tokens)
    for line in LINES:
        if line and "s>" not in line and not (scheme in ("always", "first") and line[0] == " "):
            assert as_llama_cpp(converted, line) == tokenizer.encode(line, add_special_tokens=False).ids
    assert kinds(converted, "<unk>", "<s>", "</s>", "<0x0A>", "e") == [UNKNOWN, CONTROL, CONTROL, BYTE, NORMAL]
    assert converted.fields["token_types"][-2:] == [UNUSED, UNUSED]
    assert fields["unk_token_id"] == 0


def test_a_sentencepiece_tokenizer_comes_back_as_it_was(tmp_path):
    tokenizer = llama2_tokenizer()
    save(tmp_path / "merged", "LlamaForCausalLM", tokenizer)
    write_gguf(tmp_path / "merged", {"f16": tmp_path / "m.gguf"})
    again = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    # transformers reads a GGUF file by rules of its own where a space is added to a text that is empty, that starts
    # with a space, or that follows a special token. The test above compares such texts with llama.cpp's rule.
    lines = [line for line in LINES if line and line[0] != " " and "</s>" not in line]
    assert (
        again(lines, add_special_tokens=False)["input_ids"] == tokenizer(lines, add_special_tokens=False)["input_ids"]
    )


def test_a_space_before_the_text_alone_is_left_to_the_user():
    tokenizer = wrapped(sentencepiece(scheme="first"), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for message in messages %}<s>[{{ message['content'] }}]{% endfor %}"
    converted = vocabulary(tokenizer)
    assert not converted.fields["add_space_prefix"]  # a chat starts with a special token, so transformers adds no space
    lines = [line for line in LINES if line and "s>" not in line and line[0] not in " \n\r"]
    expected = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines]
    assert [as_llama_cpp(converted, f" {line}") for line in lines] == expected
    assert all(as_llama_cpp(converted, line) != ids for line, ids in zip(lines, expected, strict=True))


# Special tokens


def test_special_tokens_are_control_and_added_words_are_not():
    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("<|fim_prefix|>", special=False)])
    converted = vocabulary(tokenizer, spare=2)
    assert kinds(converted, "<|im_end|>", "<|fim_prefix|>", "<tool_call>", "a") == [
        CONTROL,
        CONTROL,
        USER_DEFINED,
        NORMAL,
    ]
    assert converted.tokens[-2:] == [f"[PAD{len(tokenizer)}]", f"[PAD{len(tokenizer) + 1}]"]
    assert converted.fields["token_types"][-2:] == [UNUSED, UNUSED]


def test_the_end_of_a_turn_is_eot_and_other_ends_are_kept():
    tokenizer = llama3_tokenizer()
    text, turn, header = tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>"])
    converted = vocabulary(tokenizer, ends=[text, header, turn])
    assert special(converted) == {"bos": tokenizer.bos_token_id, "eos": turn, "eot": turn, "eom": text}
    assert converted.eos_token_ids == [text, header, turn]
    tokenizer.eos_token = "<|end_of_text|>"  # a base model's
    assert special(vocabulary(tokenizer, ends=[text, turn])) == {
        "bos": tokenizer.bos_token_id,
        "eos": text,
        "eot": turn,
    }
    tokenizer.chat_template = None
    assert special(vocabulary(tokenizer, ends=[text, turn]))["eot"] == text


def test_an_end_without_a_field_is_a_note():
    """llama.cpp has fields for three tokens."""
    tokenizer = llama3_tokenizer()
    names = ["<|eot_id|>", "<|end_of_text|>", "<|start_header_id|>", "<|begin_of_text|>"]
    ends = tokenizer.convert_tokens_to_ids(names)
    assert vocabulary(tokenizer, ends=ends[:2]).notes == []
    converted = vocabulary(tokenizer, ends=ends)
    missing = {*ends} - {special(converted)[kind] for kind in ("eos", "eot", "eom")}
    assert len(missing) == 2 and len(converted.notes) == 1
    assert all(name in converted.notes[0] for name in tokenizer.convert_ids_to_tokens([*missing]))


def test_the_ends_of_the_generation_config_are_in_the_file(tmp_path):
    folder = save(tmp_path / "merged", "Qwen2ForCausalLM", qwen_tokenizer())
    ends = qwen_tokenizer().convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "temperature": 0.7}))
    write_gguf(folder, {"f16": tmp_path / "m.gguf"})
    fields = read(tmp_path / "m.gguf")
    assert [fields[f"tokenizer.ggml.{kind}_token_id"] for kind in ("eos", "eot")] == [ends[0]] * 2
    assert fields["general.sampling.temp"] == pytest.approx(0.7)


def test_a_first_token_is_put_where_the_chat_template_puts_it():
    assert vocabulary(llama3_tokenizer()).add_bos  # added by the template only
    assert vocabulary(llama2_tokenizer(None)).add_bos  # by the tokenizer
    converted = vocabulary(llama2_tokenizer())  # added by the tokenizer but not by the template
    assert not converted.add_bos
    assert converted.notes == ["llama.cpp will not add <s> to plain text; the chat template has none"]
    converted = vocabulary(qwen_tokenizer(), bos_id=0)
    assert (converted.add_bos, special(converted)["bos"]) == (False, 0)
