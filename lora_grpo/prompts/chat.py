"""Chat messages: build the messages of a row's prompt, and render them as the text that the model continues."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.prompts import thoughts
from lora_grpo.prompts.plain_text import render_plain_text
from lora_grpo.prompts.styles import SYSTEM_PROMPTS
from lora_grpo.prompts.template_variables import variables

Message = dict[str, Any]
"""A chat message: `role` ("system", "user", "assistant" or "tool") and `content`; `tool_calls` of a model's turn."""

_SYSTEM_EXAMPLE: Message = {"role": "system", "content": "a"}
_USER_EXAMPLE: Message = {"role": "user", "content": "a"}
_ANSWER_MARK = "\0"
"""Stands for the model's answer in an example, to find what the template writes around it."""
_ANSWER_EXAMPLE: Message = {"role": "assistant", "content": _ANSWER_MARK}


def add_prompts(
    rows: Sequence[Mapping[str, Any]], style: str, examples: Sequence[tuple[str, str]] = ()
) -> list[dict[str, Any]]:
    """Return copies of rows with `prompt`, a list of `{"role", "content"}` messages, and `prompt_style`.

    Rows of a task file have their messages already.

    Args:
        style: one of `styles.SYSTEM_PROMPTS`.
        examples: few-shot examples as (question, completion). They follow the system message. A prompt never includes
            the solution of its own row.
    """
    prompted_rows = []
    for row in rows:
        messages: list[Message] = row.get("prompt") or [
            {"role": "system", "content": SYSTEM_PROMPTS[style]},
            {"role": "user", "content": row["question"]},
        ]
        example_turns: list[Message] = []
        for question, completion in examples:
            if question != row["question"]:
                example_turns.append({"role": "user", "content": question})
                example_turns.append({"role": "assistant", "content": completion})

        num_system_messages = 1 if messages[0]["role"] == "system" else 0
        prompt = [*messages[:num_system_messages], *example_turns, *messages[num_system_messages:]]
        prompted_rows.append({**row, "prompt": prompt, "prompt_style": style})
    return prompted_rows


def render_row(tokenizer: Any, row: Mapping[str, Any]) -> str:
    """Return a row's rendered `prompt`. For a base model, it is the row's `completion_prefix` if there is one."""
    if row.get("completion_prefix") and not _has_template(tokenizer):
        return str(row["completion_prefix"])
    return render_prompt(tokenizer, row["prompt"], row.get("tools") or ())


def render_prompt(tokenizer: Any, prompt: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    """Return the text that the model continues. If the last message is the assistant's, the model continues that.

    As in llama.cpp, its content follows the prompt of the messages before it. transformers' `continue_final_message`
    renders a whole answer instead, in which templates such as Qwen3's write a thought before the content.

    Raises:
        UserError: the template rejects the messages, there is no other message, or the last one calls a tool.
    """
    if not prompt or prompt[-1]["role"] != "assistant":
        return render(tokenizer, prompt, tools)

    begun_answer = prefill(prompt)
    if len(prompt) == 1:
        raise UserError(
            f"a prompt has only a message of the assistant, {begun_answer!r:.60}; put a user's message before it"
        )
    if prompt[-1].get("tool_calls"):
        raise UserError("a prompt ends with a tool call of the assistant; put the tool's result after it")
    starts_with_text = bool(begun_answer[:1].strip())
    if starts_with_text and not _has_template(tokenizer):
        begun_answer = f" {begun_answer}"  # as after any `Answer:`
    return thoughts.with_prefill(render(tokenizer, prompt[:-1], tools), begun_answer)


def prefill(prompt: Sequence[Message]) -> str:
    """Return the content of a prompt's last message if that is the assistant's, which the model continues; else ""."""
    if not prompt or prompt[-1]["role"] != "assistant":
        return ""
    return str(prompt[-1]["content"])


def begun_in(prompt: str, row: Mapping[str, Any]) -> str:
    """Return what the rendered prompt of a row has begun of the model's turn, see `thoughts.begun`."""
    return thoughts.begun(prompt, prefill(row.get("prompt") or ()))


def render(tokenizer: Any, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    """Return messages, and the header of the model's turn after them.

    Without a chat template, as with many base models, the prompt is plain text, see `plain_text.py`.

    Args:
        tools: JSON schemas of tools.

    Raises:
        UserError: the template rejects the messages.
    """
    if not _has_template(tokenizer):
        return render_plain_text(messages)
    try:
        return _apply_template(tokenizer, messages, tools)
    except Exception as error:  # a template is a program; besides TemplateError, it raises Python's errors
        fix = _fix_of_rejected(tokenizer, messages, tools)
        raise UserError(f"the model's chat template rejects the messages ({first_line(error)}); {fix}") from error


def render_example(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    """Return the text of example messages, to see what the chat template writes around them.

    If the template rejects them and demands a system message, they follow one.

    Args:
        messages: messages of the user and the assistant.
        add_generation_prompt: whether the model continues the text, as in `render`. Without it, the conversation ends.

    Raises:
        UserError: the template rejects the messages.
    """
    if not _has_template(tokenizer):
        return render(tokenizer, messages)
    for conversation in (messages, [_SYSTEM_EXAMPLE, *messages]):
        with contextlib.suppress(Exception):  # a template is a program that may raise any error
            return _apply_template(tokenizer, conversation, add_generation_prompt=add_generation_prompt)
    return render(tokenizer, messages)  # raises the template's error as a UserError


def end_of_turn(tokenizer: Any, ends: Sequence[int] = (), *, add_generation_prompt: bool = True) -> str:
    """Return the token with which the chat template ends an answer: the first of `ends` after it, or "" without one.

    Args:
        ends: ids of the tokens that may end an answer; by default, those of all special tokens.
        add_generation_prompt: whether another turn of the model follows the answer. Otherwise, the answer is the last,
            and templates may end it with another token: gpt-oss ends the earlier answers, and thoughts, with `<|end|>`.
    """
    if not _has_template(tokenizer):
        return ""
    try:
        example = [_USER_EXAMPLE, _ANSWER_EXAMPLE]
        text = render_example(tokenizer, example, add_generation_prompt=add_generation_prompt)
    except UserError:  # a template that renders no answers ends none
        return ""

    _, _, text_after_answer = text.partition(_ANSWER_MARK)
    if not ends:
        ends = [token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special]
    for token_id in tokenizer(text_after_answer, add_special_tokens=False)["input_ids"]:
        if token_id in ends:
            return str(tokenizer.convert_ids_to_tokens(token_id))
    return ""


def answer_lead(tokenizer: Any) -> str:
    """Return the text that the template writes between a prompt and its answer, if this text ends a thought; else "".

    Qwen3.5 closes the thought that its prompt has opened, and gpt-oss begins the final channel.
    """
    if not _has_template(tokenizer):
        return ""
    try:
        prompt = render_example(tokenizer, [_USER_EXAMPLE])
        answered = render_example(tokenizer, [_USER_EXAMPLE, _ANSWER_EXAMPLE])
    except UserError:  # a template that renders no answers
        return ""
    if not answered.startswith(prompt):
        return ""
    lead, _, _ = answered.removeprefix(prompt).partition(_ANSWER_MARK)
    return lead if thoughts.ends_a_thought(lead) else ""


def _has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _apply_template(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Return the text that the chat template writes. Raises what the template raises, which may be any exception."""
    template_variables = variables(tokenizer.chat_template)
    if tools:
        template_variables["tools"] = list(tools)
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **template_variables
    )
    return str(text)


def _fix_of_rejected(tokenizer: Any, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
    """Return what to do about messages that the chat template rejects: it may have no system role, or demand one."""
    starts_with_system = bool(messages) and messages[0]["role"] == "system"
    if starts_with_system:
        changed_messages = messages[1:]
        fix = "use a template with a system role, or another model"
    else:
        changed_messages = [_SYSTEM_EXAMPLE, *messages]
        fix = "this template demands a system message, so begin the messages with one, or use another template"
    try:
        _apply_template(tokenizer, changed_messages, tools)
    except Exception:  # noqa: BLE001 - a template is a program, and its first error is the one that is reported
        return "use another chat template or another model"
    return fix
