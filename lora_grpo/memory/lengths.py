"""The lengths of the rows of a run, which memory depends on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowLengths:
    """How long the rows of a run are, in tokens."""

    rows: int
    """Number of rows, for training and evaluation."""
    longest_prompt: int
    longest_answered: int = 0
    """In SFT, the longest training prompt with its reference answer."""
    longest_teacher_prompt: int = 0
    """The longest prompt of a teacher that reads other prompts than the model."""
    has_conversations: bool = False
    """Whether any row has several turns."""
    largest_token_id: int = 0
    """The largest token id of the prompts, of the reference answers in SFT, and of padding."""
