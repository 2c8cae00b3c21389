"""Ollama Modelfile: the Go template renders the same text as the chat template, and values are read back unchanged."""

import ast
import json
import re

import pytest
from helpers.gguf_models import (
    CHATML,
    ZEPHYR,
    chatml,
    llama2_tokenizer,
    llama3_tokenizer,
    published_template,
    qwen_tokenizer,
)

from lora_grpo.gguf.modelfile import write_modelfiles
from lora_grpo.gguf.tokenizer import read_vocabulary
from lora_grpo.prompts.chat import render

# Llama 2's template: the system prompt is part of the first question.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set start = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' %}"
    "{% set messages = messages[1:] %}{% else %}{% set start = '' %}{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<s>[INST] {{ (start if loop.first else '') + message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }} </s>{% endif %}{% endfor %}"
)
# Drops all answers except the last one.
FORGETFUL = chatml(messages="messages if message.role != 'assistant' or loop.last")
DATED = "{{ strftime_now('%d %b %Y') }}" + CHATML


def vocabulary(tokenizer):
    return read_vocabulary(tokenizer, len(tokenizer), [tokenizer.eos_token_id], None)


def as_ollama(template, messages):
    """Render the subset of Go templates that is used here: text, strings, fields, `if`, `not`, `eq`, `range`."""
    parts = re.split(r"\{\{(.*?)\}\}", template)
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")

    def value(words, message):
        if words[0] == "not":
            return not value(words[1:], message)
        if words[0] == "eq":
            return value(words[1:2], message) == value(words[2:], message)
        if words[0].startswith('"'):
            return ast.literal_eval(words[0])  # escapes are Go's
        fields = {".System": system, ".Messages": messages}
        if message is not None:
            fields |= {".Role": message["role"], ".Content": message["content"]}
        return fields[words[0]]

    def block(at, message, writes):
        text = ""
        while at < len(parts):
            if at % 2 == 0:
                text += parts[at] if writes else ""
                at += 1
                continue
            words = parts[at].split()
            if words == ["end"]:
                return text, at + 1
            if words[0] == "if":
                inner, at = block(at + 1, message, writes and bool(value(words[1:], message)))
                text += inner
            elif words[0] == "range":
                start = at + 1
                for inner_message in value(words[1:], message):
                    inner, at = block(start, inner_message, writes)
                    text += inner
            else:
                text += str(value(words, message)) if writes else ""
                at += 1
        return text, at

    return block(0, None, True)[0]


def as_ollama_reads(text):
    """Parse a Modelfile like Ollama: a value continues until it is complete at the end of a line."""
    entries = []
    name = ""  # ends with a space
    value = ""
    for character in text:
        if not character.isprintable() and character not in "\t\r\n":
            continue
        if not name.endswith(" "):
            name += character
            continue
        if character in "\r\n" and is_complete(value.strip()):
            entries.append((name.strip(), without_quotes(value.strip())))
            name = ""
            value = ""
        else:
            value += character
    assert name == "", f"{name} does not end"
    return entries


def quotes_of(value):
    return next((quotes for quotes in ('"""', '"') if value.startswith(quotes)), "")


def is_complete(value):
    quotes = quotes_of(value)
    return len(value) >= 2 * len(quotes) and value.endswith(quotes)


def without_quotes(value):
    num_quotes = len(quotes_of(value))
    return value[num_quotes : len(value) - num_quotes]


ROLES = (
    ["user"],
    ["system", "user"],
    ["user", "assistant", "user"],
    ["system", "user", "assistant", "user"],
    ["system", "user", "assistant", "user", "assistant", "user"],
)


def conversation(roles):
    """Return messages with what Go's and Jinja's templates could take for their own, and a space at the end."""
    messages = []
    for number, role in enumerate(roles):
        content = f"{role} {number}: " + '{{ .Content }} <b>\n\n"quoted" {% if %} '
        messages.append({"role": role, "content": content})
    return messages


TOKENIZERS = {
    "ChatML": lambda: qwen_tokenizer(CHATML),
    "Qwen2.5": lambda: qwen_tokenizer(published_template("qwen2_5")),
    "Qwen3, an empty thinking block in every prompt": lambda: qwen_tokenizer(published_template("qwen3")),
    "base model, questions and answers in plain text": lambda: qwen_tokenizer(None),
    "braces of Go": lambda: qwen_tokenizer(chatml(start="{{-", end="{{x}}")),
    "triple quotes": lambda: qwen_tokenizer(chatml(end='<|im_end|>"""')),
    "invisible characters": lambda: qwen_tokenizer(chatml(start="\u200d\xa0")),
    "Llama 2's vocabulary": lambda: llama2_tokenizer(ZEPHYR),
    "Llama 3": llama3_tokenizer,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ollama_renders_what_the_chat_template_does(name, tmp_path):
    tokenizer = TOKENIZERS[name]()
    converted = vocabulary(tokenizer)
    notes = write_modelfiles([tmp_path / "m.gguf"], tokenizer, converted, None)
    template = dict(as_ollama_reads((tmp_path / "m.Modelfile").read_text()))["TEMPLATE"]
    trims = "trim" in str(tokenizer.chat_template)
    assert ["removes spaces" in note for note in notes] == [True] * trims
    # Ollama adds the BOS token itself if the GGUF file says so.
    first_token = tokenizer.bos_token if converted.add_bos else ""
    for roles in ROLES:
        messages = conversation(roles)
        if trims:
            messages = [{**message, "content": message["content"].strip()} for message in messages]
        assert first_token + as_ollama(template, messages) == render(tokenizer, messages)


TRIMMED_CONTENTS = {
    "all messages": "(message['content'] | trim)",
    "a method": "message['content'].strip()",
    "only at the end": "message['content'].rstrip('\\n')",
    "only questions": "(message['content'] | trim if message.role == 'user' else message.content)",
    "only system": "(message['content'] | trim if message.role == 'system' else message.content)",
}


@pytest.mark.parametrize("content", TRIMMED_CONTENTS.values(), ids=TRIMMED_CONTENTS)
def test_a_chat_template_that_trims_messages_has_a_note(content, tmp_path):
    tokenizer = qwen_tokenizer(chatml(content=content))
    (note,) = write_modelfiles([tmp_path / "m.gguf"], tokenizer, vocabulary(tokenizer), "s")
    assert "removes spaces" in note and "\n" not in note
    assert "TEMPLATE" in dict(as_ollama_reads((tmp_path / "m.Modelfile").read_text()))


@pytest.mark.parametrize("template", [CHATML, LLAMA2])
def test_a_lone_surrogate_in_the_system_prompt_is_replaced(template, tmp_path):
    tokenizer = qwen_tokenizer(template)
    notes = write_modelfiles([tmp_path / "m.gguf"], tokenizer, vocabulary(qwen_tokenizer()), "a \ud800 b \U0001f600")
    assert len([note for note in notes if "surrogate" in note]) == 1
    written = (tmp_path / "m.Modelfile").read_text(encoding="utf-8")
    assert dict(as_ollama_reads(written))["SYSTEM"] == "a ? b \U0001f600"
    assert (tmp_path / "system").read_text(encoding="utf-8") == "a ? b \U0001f600"


@pytest.mark.parametrize("template", [LLAMA2, FORGETFUL, DATED])
def test_a_chat_template_that_does_more_is_left_out_with_a_note(template, tmp_path):
    tokenizer = qwen_tokenizer(template)
    notes = write_modelfiles([tmp_path / "m.gguf"], tokenizer, vocabulary(qwen_tokenizer()), None)
    assert "TEMPLATE" not in (tmp_path / "m.Modelfile").read_text()
    assert len(notes) == 1
    assert notes[0].startswith("the Modelfile has no TEMPLATE")
    assert "\n" not in notes[0]


def test_the_modelfile_has_the_file_the_system_prompt_and_the_stop_tokens(tmp_path):
    tokenizer = qwen_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    converted = read_vocabulary(tokenizer, len(tokenizer), ends, None)
    system = 'Answer in this format:\n<answer>\n...\n</answer>\nSay """so""", and say "so"'
    notes = write_modelfiles([tmp_path / "maths.Q8_0.gguf"], tokenizer, converted, system)
    entries = as_ollama_reads((tmp_path / "maths.Q8_0.Modelfile").read_text())
    assert entries[0] == ("FROM", "./maths.Q8_0.gguf")
    assert [entry for entry in entries if entry[0] not in ("FROM", "TEMPLATE")] == [
        ("SYSTEM", system),
        ("PARAMETER", 'stop "<|endoftext|>"'),
        ("PARAMETER", 'stop "<|im_end|>"'),
    ]
    assert notes == []
    # `ollama run hf.co/...` reads the same from these files.
    assert (tmp_path / "template").read_text() == dict(entries)["TEMPLATE"]
    assert (tmp_path / "system").read_text() == system
    assert json.loads((tmp_path / "params").read_text()) == {"stop": ["<|endoftext|>", "<|im_end|>"]}


SYSTEMS = {
    "triple quotes at the end of a line": 'Write docstrings:\n"""\nText.\n"""\nThen code.',
    "triple quotes and spaces at the end of a line": 'a """  \nb',
    "triple quotes at the start": '"""a""" is a string.\nAnswer.',
    "triple quotes at the end": 'End with\n"""',
    "only triple quotes": '"""',
    "quotes at the start": '"Yes" or "no".\nNothing else.',
    "a quote at the end": 'Say "so"',
    "a quote at the end of a line": 'Say "so"\nor "no"',
    "only a quote": '"',
    "backslashes": 'C:\\n is "\\n", \\" too\\',
    "CRLF": "a\r\nb\r\n",
    "triple quotes before CRLF": 'a """\r\nb',
    "braces of Go": "Use {{ .System }} and {{ if }}, {{",
    "lines like commands": "a\nSYSTEM b\nFROM c\n# d\nMESSAGE user e",
    "spaces around": "  a\n\tb  \n",
    "invisible characters": "a\u200db\xa0c\ufeff",
    "emoji of several characters": "\U0001f469\u200d\U0001f4bb",
    "one line": "a",
}


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_ollama_reads_the_system_prompt_that_was_written(system, tmp_path):
    tokenizer = qwen_tokenizer(CHATML)
    assert write_modelfiles([tmp_path / "m.gguf"], tokenizer, vocabulary(tokenizer), system) == []
    entries = dict(as_ollama_reads((tmp_path / "m.Modelfile").read_bytes().decode()))
    assert [name for name in entries if name != "SYSTEM"] == ["FROM", "TEMPLATE", "PARAMETER"]
    question = {"role": "user", "content": "q"}
    # Ollama puts SYSTEM in front of the messages.
    messages = [question]
    if "SYSTEM" in entries:
        messages = [{"role": "system", "content": entries["SYSTEM"]}, question]
    expected = render(tokenizer, [{"role": "system", "content": system}, question])
    assert as_ollama(entries["TEMPLATE"], messages) == expected
    # Another system prompt takes its place.
    messages = [{"role": "system", "content": "another"}, question]
    assert as_ollama(entries["TEMPLATE"], messages) == render(tokenizer, messages)
    assert (tmp_path / "system").read_bytes().decode() == system


@pytest.mark.parametrize("system", [None, ""])
def test_without_a_system_prompt_there_is_none(system, tmp_path):
    tokenizer = qwen_tokenizer(CHATML)
    write_modelfiles([tmp_path / "m.gguf"], tokenizer, vocabulary(tokenizer), system)
    assert "SYSTEM" not in dict(as_ollama_reads((tmp_path / "m.Modelfile").read_text()))
    assert not (tmp_path / "system").exists()


def test_a_system_prompt_that_nothing_can_write_is_a_note(tmp_path):
    """Without a TEMPLATE, an unreadable SYSTEM would make the whole Modelfile unreadable."""
    converted = vocabulary(qwen_tokenizer())
    notes = write_modelfiles([tmp_path / "m.gguf"], qwen_tokenizer(LLAMA2), converted, 'a """\nb')
    entries = as_ollama_reads((tmp_path / "m.Modelfile").read_text())
    assert [name for name, _ in entries] == ["FROM", "PARAMETER"]
    assert len(notes) == 2
    assert (tmp_path / "system").read_text() == 'a """\nb'
