"""Chat messages and prompt styles: build and render the prompt of a row, write and parse completions."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo import console
from lora_grpo.errors import UserError, first_line
from lora_grpo.prompts import thoughts

Message = dict[str, Any]
"""A chat message: `role` ("system", "user", "assistant" or "tool") and `content`; `tool_calls` of a model's turn."""

SYSTEM_PROMPTS: dict[str, str] = {
    "xml": "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>",
    "hashes": "Solve the problem step by step. End with the final answer on its own line after '#### '.",
    "boxed": "Reason step by step. Put the final answer within \\boxed{}.",
    "think": "Think first, then answer, in this format:\n<think>...</think>\n<answer>...</answer>",
    "code": "Answer with one Python code block:\n```python\n...\n```",
}
"""The system prompt of each prompt style. The style also determines the format that GSM8K's strict rule accepts."""

_COMPLETIONS = {
    "xml": "<reasoning>\n{}\n</reasoning>\n<answer>\n{}\n</answer>",
    "hashes": "{}\n#### {}",
    "boxed": "{}\n\\boxed{{{}}}",
    "think": "<think>{}</think>\n<answer>{}</answer>",
    "code": "{}\n```python\n{}\n```",
}

DEFAULT_STYLE = "xml"

KWARGS_FLAG = "--model.chat-template-kwargs"
THINKING_TOKENS = 2048
"""Minimum completion length for which models with a switch think, four times the limit of the GPU presets."""

_SWITCH = "enable_thinking"
_DEFAULTS: dict[str, Any] = {
    # Only for templates that `set_variables` has not seen, such as those of earlier runs.
    _SWITCH: False,
    # Llama 3.2 shows today's date, and a run that is resumed or evaluated on another day must have the same prompts.
    # This is the template's own default.
    "date_string": "26 Jul 2024",
}
_SYSTEM_EXAMPLE: Message = {"role": "system", "content": "a"}
_NEXT_QUESTION = re.compile(r"\n[ \t]*Question:")
_SET = re.compile(r"\{% set (\w+) = \1 \| default\((.*)\) %\}\n")


def add_prompts(
    rows: Sequence[Mapping[str, Any]], style: str, examples: Sequence[tuple[str, str]] = ()
) -> list[dict[str, Any]]:
    """Return copies of rows with `prompt`, a list of `{"role", "content"}` messages, and `prompt_style`.

    Examples, as (question, completion), follow the system message. A prompt never includes the solution of its own
    row. Rows of a task file have their messages already.
    """
    prompted = []
    for row in rows:
        asked: list[Message] = row.get("prompt") or [
            {"role": "system", "content": SYSTEM_PROMPTS[style]},
            {"role": "user", "content": row["question"]},
        ]
        shown: list[Message] = []
        for question, completion in examples:
            if question != row["question"]:
                shown += [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
        start = int(asked[0]["role"] == "system")
        prompted.append({**row, "prompt": [*asked[:start], *shown, *asked[start:]], "prompt_style": style})
    return prompted


def parse_kwargs(items: Sequence[str]) -> dict[str, Any]:
    """Convert `["enable_thinking=false"]` to variables of a chat template. Values are JSON scalars, or else text."""
    values: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        value: Any = text
        with contextlib.suppress(ValueError):
            value = json.loads(text, parse_constant=str)  # NaN is not JSON
        # `False` would be text, which templates take as true.
        is_known = isinstance(value, bool) if name == _SWITCH else not isinstance(value, (dict, list))
        if not equals or not name.isidentifier() or not is_known:
            expected = "true or false" if name == _SWITCH else "KEY=VALUE with text, a number, true or false"
            raise UserError(f"{KWARGS_FLAG} {item}: expected {expected}")
        values[name] = value
    return values


def set_variables(tokenizer: Any, given: Mapping[str, Any], max_tokens: int, *, quiet: bool = False) -> dict[str, Any]:
    """Set variables of the chat template, in lines at its start, and return all that are set.

    The lines are defaults: a caller can still pass other values. They are saved with the
    tokenizer, so the sampler, the trainer, and every program that loads a saved model render the same prompts.

    If the template has a switch for thinking that is not set, the value depends on `max_tokens`. It is printed, unless
    `quiet`.

    Raises:
        UserError: a given variable does not occur in the template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    before, body = _split(tokenizer.get_chat_template() if has_template else "")
    for name in given:
        if not re.search(rf"\b{name}\b", body):
            raise UserError(f"{KWARGS_FLAG} {name}: the model's chat template does not read it; leave it out")
    values = {**before, **given}
    if _SWITCH in body:
        limit = f"completions have at most {max_tokens} tokens"
        why = f"{KWARGS_FLAG} sets {_SWITCH}" if _SWITCH in given else f"its chat template sets {_SWITCH}"
        if _SWITCH not in values:
            values[_SWITCH] = max_tokens >= THINKING_TOKENS
            why = f"{limit}, and {THINKING_TOKENS} leave room for it; to change it: {KWARGS_FLAG} {_SWITCH}="
            why += json.dumps(not values[_SWITCH])
        if not quiet:
            console.note(f"thinking: {'on' if values[_SWITCH] else 'off'}, because {why}")
    if values != before:
        lines = "".join(f"{{% set {name} = {name} | default({_literal(value)}) %}}\n" for name, value in values.items())
        tokenizer.chat_template = lines + body
    return values


def variables(template: Any) -> dict[str, Any]:
    """Return the variables that prompts are rendered with. Templates ignore those that they do not read."""
    return {**_DEFAULTS, **(_split(template)[0] if isinstance(template, str) else {})}


def with_fixed_variables(template: str) -> str:
    """Return a chat template whose variables cannot be changed. llama.cpp, for example, passes `enable_thinking`."""
    values, body = _split(template)
    return "".join(f"{{% set {name} = {_literal(value)} %}}\n" for name, value in values.items()) + body


def without_variables(template: str) -> str:
    """Return a chat template as the model's authors wrote it, without the lines that `set_variables` added."""
    return _split(template)[1]


def _split(template: str) -> tuple[dict[str, Any], str]:
    """Return the variables that `set_variables` has set in a template, and the template without these lines."""
    values: dict[str, Any] = {}
    end = 0
    while line := _SET.match(template, end):
        values[line[1]] = None if line[2] == "none" else json.loads(line[2])
        end = line.end()
    return values, template[end:]


def _literal(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def render(tokenizer: Any, prompt: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    """Return the text that the model continues. `tools` are JSON schemas.

    If the tokenizer has no chat template, as with many base models, the prompt is plain text: the system prompt, then
    `Question: ...` and `Answer: ...` turns, and `Answer:` at the end. A completion ends where the model writes the next
    `Question:`, see `before_next_question`.
    """
    if getattr(tokenizer, "chat_template", None):
        try:
            return _apply_template(tokenizer, prompt, tools)
        except Exception as error:  # a template is a program; besides TemplateError, it raises Python's errors
            fix = _fix_of_rejected(tokenizer, prompt, tools)
            raise UserError(f"the model's chat template rejects the messages ({first_line(error)}); {fix}") from error
    plain = {"system": "{}\n\n", "user": "Question: {}\nAnswer:", "assistant": " {}\n\n"}
    return "".join(plain[message["role"]].format(message["content"]) for message in prompt)


def _apply_template(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Return the text that the chat template writes. Raises what the template raises, which may be any exception."""
    values = variables(tokenizer.chat_template)
    if tools:
        values["tools"] = list(tools)
    return str(
        tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **values
        )
    )


def _fix_of_rejected(tokenizer: Any, prompt: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
    """Return what to do about messages that the chat template rejects: it may have no system role, or demand one."""
    starts_with_system = bool(prompt) and prompt[0]["role"] == "system"
    changed = prompt[1:] if starts_with_system else [_SYSTEM_EXAMPLE, *prompt]
    try:
        _apply_template(tokenizer, changed, tools)
    except Exception:  # noqa: BLE001 - a template is a program, and its first error is the one that is reported
        return "use another chat template or another model"
    if starts_with_system:
        return "use a template with a system role, or another model"
    return "this template demands a system message, so begin the messages with one, or use another template"


def render_example(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    """Return the text of example messages, to see what the chat template writes around them.

    If the template rejects them and demands a system message, they follow one.

    Args:
        messages: messages of the user and the assistant.
        add_generation_prompt: whether the model continues the text, as in `render`. Without it, the conversation ends.

    Raises:
        UserError: the template rejects the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        return render(tokenizer, messages)
    for conversation in (messages, [_SYSTEM_EXAMPLE, *messages]):
        with contextlib.suppress(Exception):  # a template is a program that may raise any error
            return _apply_template(tokenizer, conversation, add_generation_prompt=add_generation_prompt)
    return render(tokenizer, messages)  # raises the template's error as a UserError


def asks_in_plain_text(tokenizer: Any, row: Mapping[str, Any]) -> bool:
    """Return whether a row's prompt has `Question:` and `Answer:` turns. A `completion_prefix` starts a program."""
    return not getattr(tokenizer, "chat_template", None) and not row.get("completion_prefix")


def before_next_question(text: str) -> str:
    """Return a completion of a plain prompt up to the next line that begins with `Question:`.

    A base model continues the prompt's pattern: after its answer, it writes a question of its own and answers that.
    lm-evaluation-harness ends completions of GSM8K at `Question:`, too (`lm_eval/tasks/gsm8k/gsm8k.yaml`), there also
    within a line.
    """
    found = _NEXT_QUESTION.search(text)
    return text[: found.start() + 1] if found else text


def may_become_next_question(line: str) -> bool:
    """Return whether the text after a line break may be the beginning of `Question:`."""
    return "Question:".startswith(line.lstrip(" \t"))


def end_of_turn(tokenizer: Any, ends: Sequence[int] = ()) -> str:
    """Return the special token, or the one of `ends`, with which the chat template ends an answer; "" if it uses none.

    `ends` are the ids of tokens that end a completion.
    """
    tail = ""
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\0"}]
        with contextlib.suppress(UserError):  # a template that ends no turn
            tail = render_example(tokenizer, turns).partition("\0")[2]
    ends = ends or [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    return next((tokenizer.convert_ids_to_tokens(each) for each in ids if each in ends), "")


def answer_lead(tokenizer: Any) -> str:
    """Return the text that the template writes between its prompt and an answer if that ends a thought; otherwise "".

    Qwen3.5 closes the thought that its prompt has opened, and gpt-oss begins the final channel.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ""
    asked: Message = {"role": "user", "content": "a"}
    try:
        prompt = render_example(tokenizer, [asked])
        answered = render_example(tokenizer, [asked, {"role": "assistant", "content": "\0"}])
    except UserError:  # a template that renders no answers
        return ""
    lead = answered.removeprefix(prompt).partition("\0")[0] if answered.startswith(prompt) else ""
    return lead if thoughts.ends_a_thought(lead) else ""


def prefill(prompt: Sequence[Message]) -> str:
    """Return the content of a prompt's last message if that is the assistant's, which the model continues; else ""."""
    return str(prompt[-1]["content"]) if prompt and prompt[-1]["role"] == "assistant" else ""


def render_prompt(tokenizer: Any, prompt: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    """Return the text that the model continues. If the last message is the assistant's, the model continues that.

    As in llama.cpp, its content follows the prompt of the messages before it. transformers' `continue_final_message`
    renders a whole answer instead, in which templates such as Qwen3's write a thought before the content.

    Raises:
        UserError: the template rejects the messages, there is no other message, or the last one calls a tool.
    """
    if not prompt or prompt[-1]["role"] != "assistant":
        return render(tokenizer, prompt, tools)
    begun = prefill(prompt)
    if len(prompt) == 1:
        raise UserError(f"a prompt has only a message of the assistant, {begun!r:.60}; put a user's message before it")
    if prompt[-1].get("tool_calls"):
        raise UserError("a prompt ends with a tool call of the assistant; put the tool's result after it")
    if not getattr(tokenizer, "chat_template", None) and begun[:1].strip():
        begun = f" {begun}"  # as after any `Answer:`
    return thoughts.with_prefill(render(tokenizer, prompt[:-1], tools), begun)


def render_row(tokenizer: Any, row: Mapping[str, Any]) -> str:
    """Return a row's rendered `prompt`. For a base model, it is the row's `completion_prefix` if there is one."""
    if row.get("completion_prefix") and not getattr(tokenizer, "chat_template", None):
        return str(row["completion_prefix"])
    return render_prompt(tokenizer, row["prompt"], row.get("tools") or ())


def begun_in(prompt: str, row: Mapping[str, Any]) -> str:
    """Return what the rendered prompt of a row has begun of the model's turn, see `thoughts.begun`."""
    return thoughts.begun(prompt, prefill(row.get("prompt") or ()))


def write_completion(reasoning: str, answer: str, style: str = DEFAULT_STYLE) -> str:
    """Return a completion in the given style. `read_completion` parses it."""
    return _COMPLETIONS[style].format(reasoning, answer).removeprefix("\n")


def read_completion(text: str, style: str = DEFAULT_STYLE) -> tuple[str, str] | None:
    """Split a completion into reasoning and answer. Return None if the completion does not follow the style.

    Only whitespace may appear before, between, and after the sections. In styles other than `think`, the model's
    thoughts may come first, if they are closed. `xml` and `think` must contain each of their four tags exactly once.
    `hashes` must have a single `####`, at the start of the last line, and `boxed` a single box on the last line.
    `code_extraction` reads programs.
    """
    answer_text = text if style == "think" else thoughts.answer_of(text)
    if answer_text is None:
        return None
    text = answer_text.strip()
    if style == "hashes":
        reasoning, _, last_line = text.rpartition("\n")
        if text.count("####") != 1 or not last_line.startswith("#### "):
            return None
        return reasoning.strip(), last_line.removeprefix("#### ").strip()
    if style == "boxed":
        reasoning, *_, answer = text.rpartition("\\boxed{")
        closed = re.fullmatch(r"(.*)\}[$. ]*", answer)
        return (reasoning.strip(), closed[1].strip()) if closed and "\\boxed" not in reasoning else None
    thought = "think" if style == "think" else "reasoning"
    # Each tag occurs once, so that the pattern takes linear time also on a completion full of tags.
    if any(text.count(tag) != 1 for tag in (f"<{thought}>", f"</{thought}>", "<answer>", "</answer>")):
        return None
    found = re.fullmatch(rf"<{thought}>(.*?)</{thought}>\s*<answer>(.*?)</answer>", text, re.DOTALL)
    return (found[1].strip(), found[2].strip()) if found else None
