"""The order of the prompts in training, and the training rows that are set aside for validation."""

from collections.abc import Sequence

from lora_grpo import console
from lora_grpo.config import MIN_VALIDATION_ROWS, RunConfig
from lora_grpo.errors import UserError
from lora_grpo.grading import Row


def prompt_order(num_rows: int, num_prompts: int, seed: int) -> list[int]:
    """Return the row index of each prompt in training: one seeded shuffle of all rows per epoch.

    A longer order starts with the shorter one, so a run can resume or be extended in the middle of an epoch.
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < num_prompts:
        order += generator.permutation(num_rows).tolist()
    return order[:num_prompts]


def longest_first_in_steps(order: Sequence[int], lengths: Sequence[int], prompts_per_step: int) -> list[int]:
    """Return the order with the rows of each step sorted by length, so that micro-batches have little padding.

    Args:
        order: row indices, step after step.
        lengths: number of tokens of each row.
        prompts_per_step: number of rows of a step.
    """
    sorted_order: list[int] = []
    for start in range(0, len(order), prompts_per_step):
        step = order[start : start + prompts_per_step]
        sorted_order += sorted(step, key=lambda row: lengths[row], reverse=True)
    return sorted_order


def split_validation(rows: Sequence[Row], config: RunConfig) -> tuple[list[Row], list[Row]]:
    """Split training rows into training and validation rows. Sampling uses the run's seed and preserves the order.

    The validation set has `monitor.rows` rows, but at most a tenth of all rows. It is empty if that is less than 16.
    """
    import numpy as np

    num_validation = min(config.monitor.rows, len(rows) // 10)
    if num_validation < MIN_VALIDATION_ROWS:
        message = f"no validation set: --monitor.rows or a tenth of {len(rows)} is less than {MIN_VALIDATION_ROWS}"
        if config.monitor.early_stopping:
            raise UserError(f"{message}; --monitor.early-stopping needs one: add rows or drop the flag")
        if config.monitor.rows:
            console.note(f"{message}; no best adapter is kept")
        return list(rows), []

    generator = np.random.default_rng(config.seed)
    validation_indices = set(generator.choice(len(rows), size=num_validation, replace=False).tolist())
    train = [row for index, row in enumerate(rows) if index not in validation_indices]
    validation = [row for index, row in enumerate(rows) if index in validation_indices]
    return train, validation
