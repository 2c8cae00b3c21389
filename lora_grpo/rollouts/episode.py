"""An episode: the prompt of a row and everything that follows it, one completion or a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lora_grpo.grading import CheckError, Row, Verdict
from lora_grpo.prompts import chat, thoughts, turns
from lora_grpo.tasks import Session, get_task, grade_all

if TYPE_CHECKING:
    from lora_grpo.agents import Played
    from lora_grpo.endpoint import Call

_MAX_CHARACTERS_PER_TOKEN = 200
"""Messages with more characters for each token of the budget are not tokenized, which could take minutes."""


@dataclass
class Episode:
    """A row's prompt, the model's turns, and what its environment adds between them.

    The model's first turn follows the prompt. After each, the environment answers with messages, or the episode ends:

    - `reply`: the environment has nothing to add. An episode without an environment ends after its only turn.
    - `limit`: the model has had its maximum number of turns.
    - `budget`: a turn was cut at its limit, or the next messages leave no space for a turn.
    - `failure`: its agent failed.

    The environment answers the last turn too, unless it was cut.
    """

    row: Row
    prompt: str
    """The rendered prompt."""
    prompt_ids: list[int]
    """The token ids of the prompt."""
    tokenizer: Any
    eos_token_ids: Sequence[int]
    """The tokens that can end a turn."""
    budget: int
    """Maximum number of tokens after the prompt."""
    tool_call_format: Mapping[str, Any] | None = None
    """How tool calls are parsed, see `turns.response_format`; None without tools."""
    token_ids: list[int] = field(default_factory=list)
    """The T tokens after the prompt: the model's, and those of the environment and the chat template."""
    loss_mask: list[int] = field(default_factory=list)
    """(T,) 1 for each token that the model sampled, 0 for others. Only the former are trained on and counted."""
    logprobs: list[float] | None = field(default_factory=list)
    """(T,) logprob of each sampled token in nats, 0 for others; None if the sampler returns none."""
    predecessors: list[int] | None = None
    """(T,) column of the token before each token, as in `token_tree.py`; None if that is always the column before."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation after the prompt."""
    turns: int = 0
    """Number of turns that the model has taken."""
    ended_by: str | None = None
    """`reply`, `limit`, `budget` or `failure`, see above; None until the episode is over."""
    truncated: bool = False
    """Whether the last turn was cut."""
    asked_next_question: bool = False
    """Whether the last turn ended at the next `Question:` of a plain prompt; see `plain_text.before_next_question`."""
    verdict: Verdict | None = None
    """The environment's grade, when the episode is over. See `grade`."""
    session: Session | None = None
    """None without an environment."""
    agent: Played | None = None
    """The result of its agent; None without an agent."""

    def __post_init__(self) -> None:
        self._text_before_turn = self.prompt
        if not has_environment(self.row):
            return
        environment = get_task(self.row["task"]).environment
        assert environment is not None
        self.session = Session(environment, self.row["loaded_row"], self.row["tools"] or ())
        if self.session.opening != self.row["reset_text"]:
            raise CheckError(
                f"{environment.path}: reset returned another text for the same row {self.row['id']}; it must not draw "
                "at random, because the conversations of a group start from the same prompt"
            )

    @property
    def is_over(self) -> bool:
        return self.ended_by is not None

    @property
    def failure(self) -> str:
        """Why its agent failed, so that the episode says nothing about the model; "" if it did not, or without one."""
        return self.agent.failure if self.agent else ""

    @property
    def remaining_tokens(self) -> int:
        """How much of the budget is left."""
        return self.budget - len(self.token_ids)

    @property
    def opened_text(self) -> str:
        """The beginning of the model's next turn that is part of the text before it, such as `<think>`; see
        `thoughts.begun`."""
        if self.turns == 0:
            return chat.begun_in(self.prompt, self.row)
        return thoughts.begun(self._text_before_turn)

    @property
    def sampled_ids(self) -> list[int]:
        """The tokens that the model sampled."""
        return [token for token, is_sampled in zip(self.token_ids, self.loss_mask, strict=True) if is_sampled]

    @property
    def text(self) -> str:
        """The completion, with what its prompt has begun of it; or the conversation, with a line `[role]` before each
        message."""
        if self.agent:
            return agent_text(self.agent)
        if self.session is None:
            return str(self.messages[-1]["content"])
        return transcript(self.messages)

    def take(
        self,
        token_ids: list[int],
        text: str,
        logprobs: list[float] | None,
        truncated: bool,
        asked_next_question: bool = False,
    ) -> None:
        """Add a turn of the model, let the environment answer, and add its messages or end the episode.

        Args:
            token_ids: the sampled tokens, at most `remaining_tokens`.
            text: the turn without special tokens. `opened_text` is put before it.
            logprobs: of the sampled tokens, in nats.
            truncated: whether the turn was cut before it ended.
            asked_next_question: whether its tokens end with the next `Question:` of a plain prompt.
        """
        text = self.opened_text + text
        message: dict[str, Any] = {"role": "assistant", "content": text}
        self._extend(token_ids, logprobs, is_sampled=True)
        self.turns += 1
        self.truncated = truncated
        self.asked_next_question = asked_next_question

        # Without an environment, the turn is the whole completion, and a task's `check` grades it later.
        if self.session is None:
            self.messages = [message]
            self.ended_by = "budget" if truncated else "reply"
            return

        # A turn that was cut gets no answer: it may end within a tool call.
        if truncated:
            self.messages.append(message)
            self.end("budget")
            return

        try:
            # A thought that is not closed calls no tool.
            if self.tool_call_format and thoughts.answer_of(text) is not None:
                turn_text = self.tokenizer.decode(token_ids)  # with the special tokens that mark calls
                tools = self.row["tools"] or ()
                message = turns.parse_turn(turn_text, self.tool_call_format, self._text_before_turn, tools)
        except turns.MalformedCall as problem:
            # `message` is still the whole text, without calls.
            answers = [self.session.refuse(str(problem))]
        else:
            answers = self.session.answer(message, text)
        self.messages.append(message)

        if not answers:
            self.end("reply")
        elif self.turns == self.session.max_turns:
            self.end("limit")
        else:
            self._add_answers(answers, last_token=token_ids[-1])

    def _add_answers(self, answers: list[dict[str, str]], last_token: int) -> None:
        """Add the environment's messages, or end the episode if no turn could follow them.

        Args:
            last_token: the one that ended the model's turn.
        """
        characters = sum(len(answer["content"]) for answer in answers)
        if characters > _MAX_CHARACTERS_PER_TOKEN * self.budget:
            self.end("budget")
            return

        # Only the new text is tokenized. The ids of earlier turns stay those that were sampled.
        following = turns.following_text(self.tokenizer, answers)
        # An environment's text may have half a character (a lone surrogate), which tokenizers refuse. It becomes "?".
        following = following.encode(errors="replace").decode()
        if self.asked_next_question:
            following = following.partition("Question:")[2]  # the model has written it
        following_ids = self.tokenizer([following], add_special_tokens=False)["input_ids"][0]

        # The template's text begins with the token that ends the model's turn. The model has already sampled that
        # token, or another one that ends turns.
        following_ids = turns.without_end_of_turn(following_ids, last_token, self.eos_token_ids)

        if len(following_ids) >= self.remaining_tokens:
            self.end("budget")
            return
        self.messages += answers
        self._extend(following_ids, [0.0] * len(following_ids), is_sampled=False)
        self._text_before_turn = following

    def _extend(self, token_ids: list[int], logprobs: list[float] | None, *, is_sampled: bool) -> None:
        """Append tokens that the model sampled, or that the environment and the chat template added."""
        self.token_ids = self.token_ids + token_ids
        self.loss_mask = self.loss_mask + [int(is_sampled)] * len(token_ids)
        if self.logprobs is None or logprobs is None:
            self.logprobs = None
        else:
            self.logprobs = self.logprobs + logprobs

    def end(self, ended_by: str) -> None:
        """End the conversation and grade it."""
        assert self.session is not None
        self.ended_by = ended_by
        self.verdict = self.session.verdict(ended_by)


def has_environment(row: Row) -> bool:
    """Return whether a row's task has an environment, whose `reset` gave the row its first message."""
    return "reset_text" in row


def has_agent(row: Row) -> bool:
    """Return whether an agent plays the episodes of a row, whose prompts are then not known before."""
    return "prompt_tokens" in row


def transcript(messages: Sequence[dict[str, Any]]) -> str:
    """Return messages as text, each below a line with its role. Tool calls are lines of their own."""
    lines = []
    for message in messages:
        lines.append(f"[{message['role']}]")
        for name in turns.THOUGHT_FIELDS:
            if message.get(name):
                lines.append(f"<think>{message[name]}</think>")
        if message.get("content"):
            lines.append(message["content"])
        for call in message.get("tool_calls", ()):
            function = call.get("function") or {}
            lines.append(f"call {function.get('name')}({function.get('arguments')})")
    return "\n".join(lines)


def conversations_of(calls: Sequence[Call]) -> list[list[dict[str, Any]]]:
    """Return the messages of each conversation of an episode: those that no other call continues."""
    continued = {call.parent for call in calls}
    return [call.messages for call in calls if call not in continued]


def agent_text(played: Played) -> str:
    """Return all conversations of an episode as text, and why its agent failed if it did."""
    texts = [transcript(messages) for messages in conversations_of(played.calls)]
    if len(texts) > 1:
        texts = [f"[conversation {number}]\n{text}" for number, text in enumerate(texts, start=1)]
    if played.failure:
        texts.append(f"[agent failed] {played.failure}")
    return "\n".join(texts)


def grade(task: str, episodes: Sequence[Episode]) -> list[Verdict]:
    """Return the verdicts of episodes of one task, from their environments or from the task's `check`."""
    verdicts = [episode.verdict for episode in episodes if episode.verdict is not None]
    if len(verdicts) == len(episodes):  # the task has an environment or an agent
        return verdicts
    return grade_all(task, [episode.text for episode in episodes], [episode.row for episode in episodes])
