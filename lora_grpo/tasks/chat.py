"""From a row to chat messages, and the answer styles: what the model is asked for, written out, and read back."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError

Message = dict[str, str]

SYSTEM_PROMPTS: dict[str, str] = {
    "xml": "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>",
    "hashes": "Solve the problem step by step. End with the final answer on its own line after '#### '.",
    "think": "Think first, then answer, in this format:\n<think>...</think>\n<answer>...</answer>",
    "code": "Answer with one Python code block:\n```python\n...\n```",
}
"""`prompt_style` -> system prompt. The style decides what GSM8K's strict rule looks for."""

DEFAULT_STYLE = "xml"
"""The style of a row that names none."""


def check_style(style: str) -> None:
    """Refuse an answer style that does not exist.

    Raises:
        UserError: no such style; the nearest name is offered.
    """
    if style not in SYSTEM_PROMPTS:
        near = difflib.get_close_matches(style, SYSTEM_PROMPTS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(SYSTEM_PROMPTS)}"
        raise UserError(f"unknown prompt style {style!r}; {hint}")


def add_prompts(
    rows: Sequence[Mapping[str, Any]],
    style: str,
    few_shot_rows: Sequence[Mapping[str, Any]] = (),
    *,
    gold_completion: Callable[[Mapping[str, Any]], str] | None = None,
    system_prompt: str | None = None,
) -> list[dict[str, Any]]:
    """Return copies of `rows` with the chat messages that ask them.

    Args:
        rows: task rows; each has `question`.
        style: the answer style to ask for, a key of `SYSTEM_PROMPTS`.
        few_shot_rows: solved rows shown first as user and assistant turns. A row is never shown its own solution.
        gold_completion: the task's function that writes a row's solution; needed with `few_shot_rows`.
        system_prompt: text to use instead of the style's own; "" sends no system message.

    Returns:
        New rows with `prompt`, a list of `{"role", "content"}` messages, and `prompt_style`.

    Raises:
        UserError: there is no such style.
    """
    check_style(style)
    system = SYSTEM_PROMPTS[style] if system_prompt is None else system_prompt
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    shots: list[tuple[str, str]] = []
    for row in few_shot_rows:
        if gold_completion is None:
            raise ValueError("few_shot_rows need gold_completion, the task's function that writes a solution")
        shots.append((row["question"], gold_completion({**row, "prompt_style": style})))

    asked = []
    for row in rows:
        prompt = [dict(message) for message in opening]
        for question, completion in shots:
            if question != row["question"]:
                prompt += [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
        prompt.append({"role": "user", "content": row["question"]})
        asked.append({**row, "prompt": prompt, "prompt_style": style})
    return asked


def render(tokenizer: Any, prompt: Sequence[Message]) -> str:
    """Return the text that the model continues.

    A tokenizer without a chat template, as base models have, gets plain text:
    `{system}`, then `Question: ...` and `Answer: ...` turns, ending in `Answer:`.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: chat messages that end with a user turn.
    """
    if getattr(tokenizer, "chat_template", None):
        from jinja2 import TemplateError

        try:
            return str(tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise UserError(
                f"the model's chat template refuses the messages ({error}); a template without a system role needs "
                "another model or an edited template"
            ) from None
    plain = {"system": "{}\n\n", "user": "Question: {}\nAnswer:", "assistant": " {}\n\n"}
    return "".join(plain[message["role"]].format(message["content"]) for message in prompt)


def render_row(tokenizer: Any, row: Mapping[str, Any]) -> str:
    """Return the text that the model continues for a row.

    It is the row's `prompt`, rendered; but a base model is given the start of the program where there is one.

    Args:
        tokenizer: a Hugging Face tokenizer.
        row: a task row with `prompt`, and `completion_prefix` where the task asks for a program to be continued.
    """
    if row.get("completion_prefix") and not getattr(tokenizer, "chat_template", None):
        return str(row["completion_prefix"])
    return render(tokenizer, row["prompt"])


def write_completion(reasoning: str, answer: str, style: str = DEFAULT_STYLE) -> str:
    """Return a completion in the given style; `read_completion` reads it back."""
    check_style(style)
    if style == "hashes":
        return f"{reasoning}\n#### {answer}"
    if style == "think":
        return f"<think>{reasoning}</think>\n<answer>{answer}</answer>"
    if style == "code":
        return f"{reasoning}\n```python\n{answer}\n```".removeprefix("\n")
    return f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>"


def read_completion(text: str, style: str = DEFAULT_STYLE) -> tuple[str, str] | None:
    """Split a completion that keeps to the style into reasoning and answer; None where it does not.

    Nothing but white space may stand before, between or after the sections. `xml` and `think` hold each of their four
    tags exactly once; `hashes` has a single `####`, which opens the last line; `code` ends with its one fenced block.

    String methods rather than one pattern: `<a>.*?</a>.*?` takes quadratic time on a completion made of tags.
    """
    check_style(style)
    text = text.strip()
    if style == "hashes":
        reasoning, _, last_line = text.rpartition("\n")
        if text.count("####") != 1 or not last_line.startswith("#### "):
            return None
        return reasoning.strip(), last_line.removeprefix("#### ").strip()
    if style == "code":
        reasoning, opened, rest = f"\n{text}".partition("\n```python\n")
        if not opened or text.count("```") != 2 or not rest.endswith("\n```"):
            return None
        return reasoning.strip(), rest.removesuffix("\n```").strip("\n")

    thought = "think" if style == "think" else "reasoning"
    if any(text.count(tag) != 1 for tag in (f"<{thought}>", f"</{thought}>", "<answer>", "</answer>")):
        return None
    before, _, rest = text.partition(f"<{thought}>")
    reasoning, _, rest = rest.partition(f"</{thought}>")
    between, _, rest = rest.partition("<answer>")
    answer, closed, after = rest.partition("</answer>")
    # A tag out of order leaves the later partitions empty-handed, so `closed` also proves the order.
    if not closed or (before + between + after).strip():
        return None
    return reasoning.strip(), answer.strip()
