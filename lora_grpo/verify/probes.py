"""The prompts of a verification: those of the user, those of the run, or general ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_grpo import console
from lora_grpo.errors import UserError
from lora_grpo.files import json_files
from lora_grpo.models import ModelSpec
from lora_grpo.runs import last_completions, system_prompt

Prompt = list[dict[str, Any]]
"""The messages of a chat prompt."""

_GENERAL_QUESTIONS = (
    "Tom has 3 plums and buys 4 more. How many plums does he have?",
    "A train travels 60 miles in 2 hours. What is its average speed?",
    "What is the capital of France?",
    "Write a Python function that returns the larger of two numbers.",
    "Explain in one sentence why the sky is blue.",
    "Translate into French: The cat sleeps on the chair.",
    "List three animals that can fly.",
    "Is 17 a prime number? Answer yes or no, and say why.",
    "Write a short poem about the sea.",
    "What comes next: 2, 4, 8, 16?",
    "Summarize in five words: The meeting was moved from Monday to Thursday because of the holiday.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron?",
    "Give me a recipe for pancakes.",
    "Correct the sentence: She go to school every days.",
    "A box holds 12 eggs. How many eggs are in 5 boxes?",
    "Who wrote Romeo and Juliet?",
)
_STEPS = 4
"""Number of last steps of a run whose prompts are read."""


def choose_prompts(file: Path | None, spec: ModelSpec, number: int) -> tuple[list[Prompt], str]:
    """Return at most `number` prompts, and where they are from.

    Args:
        file: the user's prompts: a text file with one on each line, or JSON Lines with `messages`, or with a text
            `prompt` or `question`.
        spec: the adapter. If it is of a run, its last steps have prompts.

    Raises:
        UserError: the file has no lines, or one of them is no prompt.
    """
    if file is not None:
        return _of_file(file)[:number], str(file)
    prompts: list[Prompt] = []
    opening: list[dict[str, Any]] = []
    origin = "general questions"
    if spec.run_folder and spec.run:
        system = system_prompt(spec.run)
        opening = [{"role": "system", "content": system}] if system else []
        prompts = _of_run(spec.run_folder, opening)
    if prompts:
        origin = "questions of the run's last steps"
        # A step has many completions of the same few prompts, so prompts are taken at equal distances.
        stride = max(1, len(prompts) // number)
        prompts = prompts[::stride][:number]

    # General questions fill up.
    missing = number - len(prompts)
    prompts += [[*opening, *_asked(question)] for question in _GENERAL_QUESTIONS[:missing]]
    if len(prompts) < number:
        console.note(f"note: {len(prompts)} prompts, and not {number} (--num-prompts); for more, pass --prompts FILE")
    return prompts, origin


def _of_file(path: Path) -> list[Prompt]:
    """Return the prompts of a file of JSON Lines, or of a text file with one on each line."""
    expected = "a prompt on each line"
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix in (".jsonl", ".ndjson", ".json"):
        return [_of_row(row, location) for location, row in json_files.read_lines(path, expected)]
    lines = json_files.read_text(path, expected).splitlines()
    return [_asked(line.strip()) for line in lines if line.strip()]


def _of_row(row: Any, where: str) -> Prompt:
    if not isinstance(row, dict):
        row = {}
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return messages
    for key in ("prompt", "question"):
        if isinstance(row.get(key), str):
            return _asked(row[key])
    raise UserError(
        f"{where} has no prompt; expected a list `messages` with `role` and `content`, or a text `prompt` or `question`"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _of_run(run: Path, opening: Prompt) -> list[Prompt]:
    """Return the different prompts of the last steps of a run, which begin with `opening`."""
    prompts: list[Prompt] = []
    for row in last_completions(run, _STEPS):
        prompt = [*opening, *_asked(row["question"])]
        if row.get("messages"):  # of a conversation, up to the model's last turn
            prompt = row["messages"][:-1]
            if not prompt or any(message["role"] == "tool" or "tool_calls" in message for message in prompt):
                continue  # an episode that failed, or one whose prompts have tools
        if prompt not in prompts:
            prompts.append(prompt)
    return prompts


def _asked(question: str) -> Prompt:
    return [{"role": "user", "content": question}]
