"""The lengths of the rows of a run, which memory depends on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Longest:
    """The longest of a run's rows, in tokens."""

    rows: int
    """Number of rows, for training and evaluation."""
    prompt: int
    answered: int = 0
    """In SFT, a training prompt with its reference answer."""
    conversations: bool = False
    """Whether any row has several turns."""
    largest_token: int = 0
    """The largest token id of the prompts, of the reference answers in SFT, and of padding."""
