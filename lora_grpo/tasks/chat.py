"""Chat messages and prompt styles: build and render the prompt of a row, write and parse completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError, suggestion

Message = dict[str, str]
"""A chat message: `role` ("system", "user" or "assistant") and `content`."""

SYSTEM_PROMPTS: dict[str, str] = {
    "xml": "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>",
    "hashes": "Solve the problem step by step. End with the final answer on its own line after '#### '.",
    "think": "Think first, then answer, in this format:\n<think>...</think>\n<answer>...</answer>",
    "code": "Answer with one Python code block:\n```python\n...\n```",
}
"""The system prompt of each prompt style. The style also decides what GSM8K's strict rule accepts."""

_COMPLETIONS = {
    "xml": "<reasoning>\n{}\n</reasoning>\n<answer>\n{}\n</answer>",
    "hashes": "{}\n#### {}",
    "think": "<think>{}</think>\n<answer>{}</answer>",
    "code": "{}\n```python\n{}\n```",
}

DEFAULT_STYLE = "xml"

TEMPLATE_VARIABLES: dict[str, Any] = {
    # Models with both modes, such as Qwen3, do not think: the prompt styles ask for the reasoning in the answer, and a
    # thinking model rarely finishes within the length of a completion.
    "enable_thinking": False,
    # Llama 3.2 shows today's date, and a run that is resumed or evaluated on another day must have the same prompts.
    # This is the template's own default.
    "date_string": "26 Jul 2024",
}
"""Variables of chat templates. Templates that do not have them ignore them."""


def check_style(style: str) -> None:
    """Raise UserError if there is no such prompt style."""
    if style not in SYSTEM_PROMPTS:
        raise UserError(f"unknown prompt style {style!r}; {suggestion(style, SYSTEM_PROMPTS)}")


def add_prompts(
    rows: Sequence[Mapping[str, Any]], style: str, examples: Sequence[tuple[str, str]] = ()
) -> list[dict[str, Any]]:
    """Return copies of rows with `prompt`, a list of `{"role", "content"}` messages, and `prompt_style`.

    Examples, as (question, completion), follow the system message. A prompt never includes the solution of its own
    row. Rows of a task file have their messages already.
    """
    check_style(style)
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


def render(tokenizer: Any, prompt: Sequence[Message]) -> str:
    """Return the text that the model continues.

    If the tokenizer has no chat template, as with many base models, the prompt is plain text: the system prompt, then
    `Question: ...` and `Answer: ...` turns, and `Answer:` at the end.
    """
    if getattr(tokenizer, "chat_template", None):
        from jinja2 import TemplateError

        try:
            return str(
                tokenizer.apply_chat_template(
                    list(prompt), tokenize=False, add_generation_prompt=True, **TEMPLATE_VARIABLES
                )
            )
        except TemplateError as error:
            raise UserError(
                f"the model's chat template rejects the messages ({error}); use a template with a system role, or "
                "another model"
            ) from None
    plain = {"system": "{}\n\n", "user": "Question: {}\nAnswer:", "assistant": " {}\n\n"}
    return "".join(plain[message["role"]].format(message["content"]) for message in prompt)


def render_row(tokenizer: Any, row: Mapping[str, Any]) -> str:
    """Return a row's rendered `prompt`. For a base model, it is the row's `completion_prefix` if there is one."""
    if row.get("completion_prefix") and not getattr(tokenizer, "chat_template", None):
        return str(row["completion_prefix"])
    return render(tokenizer, row["prompt"])


def write_completion(reasoning: str, answer: str, style: str = DEFAULT_STYLE) -> str:
    """Return a completion in the given style. `read_completion` parses it."""
    return _COMPLETIONS[style].format(reasoning, answer).removeprefix("\n")


def read_completion(text: str, style: str = DEFAULT_STYLE) -> tuple[str, str] | None:
    """Split a completion into reasoning and answer. Return None if the completion does not follow the style.

    Only whitespace may appear before, between, and after the sections. `xml` and `think` must contain each of their
    four tags exactly once. `hashes` must have a single `####`, at the start of the last line.
    `code_extraction` reads programs.
    """
    # String methods, because a pattern such as `<a>.*?</a>.*?` takes quadratic time on a completion full of tags.
    text = text.strip()
    if style == "hashes":
        reasoning, _, last_line = text.rpartition("\n")
        if text.count("####") != 1 or not last_line.startswith("#### "):
            return None
        return reasoning.strip(), last_line.removeprefix("#### ").strip()
    thought = "think" if style == "think" else "reasoning"
    if any(text.count(tag) != 1 for tag in (f"<{thought}>", f"</{thought}>", "<answer>", "</answer>")):
        return None
    before, _, rest = text.partition(f"<{thought}>")
    reasoning, _, rest = rest.partition(f"</{thought}>")
    between, _, rest = rest.partition("<answer>")
    answer, closed, after = rest.partition("</answer>")
    # A tag out of order leaves the later partitions empty, so `closed` also implies the correct order.
    if not closed or (before + between + after).strip():
        return None
    return reasoning.strip(), answer.strip()
