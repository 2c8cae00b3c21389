"""From a row to chat messages: the system prompt of each answer style, and few-shot turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, str]

SYSTEM_PROMPTS: dict[str, str] = {
    "xml": "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>",
    "hashes": "Solve the problem step by step. End with the final answer on its own line after '#### '.",
    "think": "Think first, then answer, in this format:\n<think>...</think>\n<answer>...</answer>",
}
"""`prompt_style` -> system prompt. The style decides what GSM8K's strict rule looks for."""
