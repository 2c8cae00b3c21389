"""Prompts in plain text, for models without a chat template: lines with `Question:` and `Answer:`.

A base model continues the prompt's pattern: after its answer, it writes a question of its own and answers that. Its
completion therefore ends where the next question begins.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError

_MESSAGES = {"system": "{}\n\n", "user": "Question: {}\nAnswer:", "assistant": " {}\n\n"}
_NEXT_QUESTION = re.compile(r"\n[ \t]*Question:")


def render_plain_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the system prompt, then `Question: ...` and `Answer: ...` turns, with `Answer:` at the end.

    Raises:
        UserError: a message is the result of a tool.
    """
    if any(message["role"] == "tool" for message in messages):
        raise UserError("the model has no chat template, so it has no tools; use a model with a chat template")
    return "".join(_MESSAGES[message["role"]].format(message["content"]) for message in messages)


def asks_in_plain_text(tokenizer: Any, row: Mapping[str, Any]) -> bool:
    """Return whether a row's prompt has `Question:` and `Answer:` turns. A `completion_prefix` starts a program."""
    return not getattr(tokenizer, "chat_template", None) and not row.get("completion_prefix")


def before_next_question(text: str) -> str:
    """Return a completion of a plain prompt up to the next line that begins with `Question:`.

    lm-evaluation-harness ends completions of GSM8K at `Question:`, too (`lm_eval/tasks/gsm8k/gsm8k.yaml`), there also
    within a line.
    """
    next_question = _NEXT_QUESTION.search(text)
    if next_question is None:
        return text
    line_break = next_question.start()
    return text[: line_break + 1]


def may_become_next_question(line: str) -> bool:
    """Return whether the text after a line break may be the beginning of `Question:`."""
    return "Question:".startswith(line.lstrip(" \t"))
