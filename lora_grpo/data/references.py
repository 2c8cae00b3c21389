"""Reference answers: episodes in which the model gives the `gold` answer of each row, as SFT trains them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.commands import command
from lora_grpo.config import RunConfig
from lora_grpo.errors import UserError
from lora_grpo.grading import Row
from lora_grpo.prompts import chat, thoughts, turns
from lora_grpo.rollouts import Episode
from lora_grpo.tasks import get_task, is_task_file, task_title

_UNLIMITED_TOKENS = 10**9
"""Budget of reference answers, whose lengths are checked later."""


def gold_episodes(tokenizer: Any, rows: Sequence[Row], ends: Sequence[int] = ()) -> list[Episode]:
    """Return the episodes of the rows' reference answers. If the task has an Environment, it answers each turn.

    Args:
        ends: the tokens that can end a completion; by default, any special token. A turn ends with the one of them that
            the chat template writes after an answer.

    Raises:
        UserError: the chat template writes a tool call that is read back as another one.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    end_id = _end_of_turn_id(tokenizer, ends)
    answer_lead = chat.answer_lead(tokenizer)

    prompts = [chat.render_row(tokenizer, row) for row in rows]
    prompts_ids = tokenizer(prompts, add_special_tokens=not has_template)["input_ids"]
    call_format = turns.response_format(tokenizer) if rows[0].get("tools") else None

    episodes = []
    for row, prompt, prompt_ids in zip(rows, prompts, prompts_ids, strict=True):
        episode = Episode(row, prompt, prompt_ids, tokenizer, [end_id], _UNLIMITED_TOKENS, call_format)
        gold = get_task(row["task"]).gold(row)
        references = [gold]
        if episode.session:  # the model's messages of a conversation
            references = [turns.answer_text(tokenizer, message) for message in gold]

        for reference in references:
            if episode.is_over:
                break
            text = thoughts.continuation(episode.opened_text, reference, answer_lead)
            if not has_template and not episode.opened_text:  # plain text prompts end with `Answer:`
                text = f" {text}"
            token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            episode.take([*token_ids, end_id], text, logprobs=None, truncated=False)

        if episode.session:
            _check_calls(episode, gold)
        if not episode.is_over:
            episode.end("limit")
        episodes.append(episode)
    return episodes


def _end_of_turn_id(tokenizer: Any, ends: Sequence[int]) -> int:
    """Return the token that ends a turn: the chat template's, or else the tokenizer's, or else any of `ends`."""
    end_token = chat.end_of_turn(tokenizer, ends)
    if end_token:
        return int(tokenizer.convert_tokens_to_ids(end_token))
    if tokenizer.eos_token_id:
        return int(tokenizer.eos_token_id)
    return ends[0] if ends else 0


def _check_calls(episode: Episode, gold: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError if a tool call of the reference messages is read back as another one."""
    messages_read = [message for message in episode.messages if message["role"] == "assistant"]
    for message, message_read in zip(gold, messages_read, strict=False):
        calls = turns.calls_of(message)
        calls_read = turns.calls_of(message_read)
        for call, call_read in itertools.zip_longest(calls, calls_read):
            if call != call_read:
                raise UserError(
                    f"{episode.row['id']}: the chat template writes the call {call} of gold(row) as {call_read}; pass "
                    "another --model.chat-template"
                )


def sft_command(config: RunConfig) -> str | None:
    """Return the command that trains on the task's reference answers first.

    None if the task has none, or if the run already starts from an adapter.
    """
    has_references = get_task(config.data.task).has_gold
    if config.lora.from_ or not has_references:
        return None
    # The default, `auto`, would choose another preset.
    preset = ["--preset", "laptop"] if config.preset == "laptop" else []
    folder = []
    if is_task_file(config.data.task):  # each has a folder of its own, as for GRPO
        folder = ["--output-dir", f"outputs/{task_title(config.data.task)}_sft"]
    return command("train sft", *preset, "--task", config.data.task, *folder)
