"""An episode: the prompt of a row and everything that follows it, one completion or a conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_grpo.grading import CheckError, Row, Verdict
from lora_grpo.prompts import chat, thoughts, turns
from lora_grpo.tasks import Session, get_task, grade_all


@dataclass
class Episode:
    """A row's prompt, the model's turns, and what its environment adds between them.

    The model's first turn follows the prompt. After each, the environment answers with messages, or the episode ends:

    - `reply`: the environment has nothing to add. An episode without an environment ends after its only turn.
    - `limit`: the model has had its maximum number of turns.
    - `budget`: a turn was cut at its limit, or the next messages leave no room for a turn.

    The environment answers the last turn too, unless it was cut.
    """

    row: Row
    prompt: str
    """The rendered prompt."""
    prompt_ids: list[int]
    tokenizer: Any
    eos_token_ids: Sequence[int]
    budget: int
    """Maximum number of tokens after the prompt."""
    format: Mapping[str, Any] | None = None
    """How tool calls are parsed, see `turns.response_format`; None without tools."""
    token_ids: list[int] = field(default_factory=list)
    """The T tokens after the prompt: the model's, and those of the environment and the chat template."""
    loss_mask: list[int] = field(default_factory=list)
    """(T,) 1 for each token that the model sampled, 0 for others. Only the former are trained on and counted."""
    logprobs: list[float] | None = field(default_factory=list)
    """(T,) logprob of each sampled token in nats, 0 for others; None if the sampler returns none."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation after the prompt."""
    turns: int = 0
    ended_by: str | None = None
    """`reply`, `limit` or `budget`; None until the episode is over."""
    truncated: bool = False
    """Whether the last turn was cut."""
    asked_next_question: bool = False
    """Whether the last turn ended at the next `Question:` of a plain prompt; see `chat.before_next_question`."""
    verdict: Verdict | None = None
    """The environment's grade, when the episode is over. See `grade`."""
    session: Session | None = None
    """None without an environment."""

    def __post_init__(self) -> None:
        self._before = self.prompt
        environment = getattr(get_task(self.row["task"]), "environment", None)
        if environment is None:
            return
        self.session = Session(environment, self.row["loaded_row"])
        if self.session.opening != self.row["reset_text"]:
            raise CheckError(
                f"{environment.path}: reset returned another text for the same row {self.row['id']}; it must not draw "
                "at random, because the conversations of a group start from the same prompt"
            )

    @property
    def is_over(self) -> bool:
        return self.ended_by is not None

    @property
    def remaining_tokens(self) -> int:
        """The number of tokens that are left."""
        return self.budget - len(self.token_ids)

    @property
    def begun(self) -> str:
        """What the text before the model's next turn has begun of it, such as an opened thought; see `thoughts`."""
        return thoughts.begun(self._before) if self.turns else chat.begun_in(self.prompt, self.row)

    @property
    def sampled_ids(self) -> list[int]:
        """The tokens that the model sampled."""
        return [token for token, own in zip(self.token_ids, self.loss_mask, strict=True) if own]

    @property
    def text(self) -> str:
        """The completion, with what the prompt has begun of it, or the conversation with a line `[role]` before each
        message."""
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
            text: the turn without special tokens. What the text before it has begun is put before it.
            truncated: whether the turn was cut before it ended.
            asked_next_question: whether its tokens end with the next `Question:` of a plain prompt.
        """
        self.asked_next_question = asked_next_question
        text = self.begun + text
        self._add(token_ids, logprobs, loss_mask=1)
        self.turns, self.truncated = self.turns + 1, truncated
        if self.session is None:
            self.messages = [{"role": "assistant", "content": text}]
            self.ended_by = "budget" if truncated else "reply"
            return
        if truncated:
            self.messages.append({"role": "assistant", "content": text})
            return self.end("budget")
        message = {"role": "assistant", "content": text}
        try:
            if self.format and thoughts.answer_of(text) is not None:  # a thought that is not closed calls no tool
                message = turns.parse_turn(self.tokenizer.decode(token_ids), self.format, self._before)
            answers = self.session.answer(message)
        except turns.MalformedCall as problem:
            answers = [self.session.refuse(str(problem))]
        self.messages.append(message)
        if not answers:
            return self.end("reply")
        if self.turns == self.session.max_turns:
            return self.end("limit")
        if sum(len(each["content"]) for each in answers) > 200 * self.budget:  # tokenizing it would take minutes
            return self.end("budget")
        following = turns.following_text(self.tokenizer, answers).encode(errors="replace").decode()
        if asked_next_question:
            following = following.partition("Question:")[2]  # the model has written it
        ids = self.tokenizer([following], add_special_tokens=False)["input_ids"][0]
        # The model has ended its turn itself, perhaps with another of its tokens for that than the template's.
        if ids[0] == token_ids[-1] or {ids[0], token_ids[-1]} <= {*self.eos_token_ids}:
            ids = ids[1:]
        if len(ids) >= self.remaining_tokens:
            return self.end("budget")
        self.messages += answers
        self._add(ids, None if logprobs is None else [0.0] * len(ids), loss_mask=0)
        self._before = following

    def _add(self, ids: list[int], logprobs: list[float] | None, loss_mask: int) -> None:
        self.token_ids = self.token_ids + ids
        self.loss_mask = self.loss_mask + [loss_mask] * len(ids)
        self.logprobs = None if self.logprobs is None or logprobs is None else self.logprobs + logprobs

    def end(self, ended_by: str) -> None:
        """End the conversation and grade it."""
        assert self.session is not None
        self.ended_by, self.verdict = ended_by, self.session.verdict(ended_by)


def transcript(messages: Sequence[dict[str, Any]]) -> str:
    """Return messages as text, each below a line with its role. Tool calls are lines of their own."""
    lines = []
    for message in messages:
        lines.append(f"[{message['role']}]")
        lines += [f"<think>{message[name]}</think>" for name in turns.THOUGHT_FIELDS if message.get(name)]
        lines += [message["content"]] if message.get("content") else []
        for call in message.get("tool_calls", ()):
            function = call.get("function") or {}
            lines.append(f"call {function.get('name')}({function.get('arguments')})")
    return "\n".join(lines)


def grade(task: str, episodes: Sequence[Episode]) -> list[Verdict]:
    """Return the verdicts of episodes of one task: those of their environments, or of the task's `check`."""
    if all(episode.verdict for episode in episodes):
        return [episode.verdict for episode in episodes if episode.verdict]
    return grade_all(task, [episode.text for episode in episodes], [episode.row for episode in episodes])
