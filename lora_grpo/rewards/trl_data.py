"""Rows and completions in the form in which TRL passes them to its trainer and to rewards."""

from collections.abc import Sequence
from typing import Any

from lora_grpo.grading import Row
from lora_grpo.prompts import chat, plain_text


def trl_prompt(tokenizer: Any, row: Row) -> Any:
    """Return a row's prompt: chat messages, or plain text for a base model, which has no chat template."""
    if getattr(tokenizer, "chat_template", None):
        return row["prompt"]
    return chat.render_row(tokenizer, row)


def trl_completion(completion: Any, prompt: Any, row: Row) -> Any:
    """Return a completion as TRL passes it to rewards: a message if the prompt consists of messages, or else a text."""
    if not isinstance(completion, str):
        return completion
    is_chat = not isinstance(prompt, str)
    if is_chat:
        return [{"role": "assistant", "content": completion}]
    continues_program = bool(row.get("completion_prefix"))  # its prompt has no `Question:`
    if continues_program:
        return completion
    # Unsloth's trainer, which samples by itself, does not end a completion at the next question.
    return plain_text.before_next_question(completion)


def training_set(tokenizer: Any, rows: Sequence[Row], order: Sequence[int]) -> Any:
    """Build the dataset for TRL's trainer: ids and prompts in the order of training, which lists row indices.

    The dataset itself holds the ids only, and prompts are looked up. Arrow has one type for a column, so it would
    reject messages whose tool calls have arguments of different types, and add None for keys that only other rows have.
    """
    from datasets import Dataset

    prompts = {row["id"]: trl_prompt(tokenizer, row) for row in rows}

    def with_prompts(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        return {"id": batch["id"], "prompt": [prompts[row_id] for row_id in batch["id"]]}

    ids = [rows[index]["id"] for index in order]
    return Dataset.from_dict({"id": ids}).with_transform(with_prompts)
