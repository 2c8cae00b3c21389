"""Code that depends on the trainer that Unsloth (2026.10.9) generates: the first file to check when it is updated.

Its tests are tests/training/test_unsloth_compat.py, and tests/gpu_rig, which runs Unsloth's own code.
"""

import functools
import inspect
from typing import Any

from lora_grpo.errors import RunError

_FIRST_ARGUMENTS = ["ref", "new", "old", "sampling_per_token_logps"]
"""Logprobs: of the reference, of the loss, of the policy that sampled, and of the sampler."""


def use_logprobs_of_loss_as_old(trainer_class: type) -> bool:
    """Have Unsloth's loss take its own logprobs as the old ones if TRL has not computed any.

    Unsloth computes the importance weights in the loss, but from old logprobs, and fails without them.
    `no_importance_weights` in `trl_compat.py` says when there are none.

    Args:
        trainer_class: the GRPOTrainer that Unsloth has generated, whose module has the function of the loss.

    Returns:
        False if the trainer is TRL's, as with Unsloth's CPU backend.

    Raises:
        RunError: the function is not the one of the tested version.
    """
    if trainer_class.__name__ != "UnslothGRPOTrainer":
        return False
    module = inspect.unwrap(trainer_class.compute_loss).__globals__  # type: ignore[attr-defined]
    compute_loss = module.get("grpo_compute_loss")
    arguments = list(inspect.signature(compute_loss).parameters) if compute_loss else []
    if arguments[: len(_FIRST_ARGUMENTS)] != _FIRST_ARGUMENTS:
        raise RunError(
            f"Unsloth's grpo_compute_loss has the arguments {', '.join(arguments) or 'none'}; expected first "
            f"{', '.join(_FIRST_ARGUMENTS)}; install the versions of requirements-gpu.lock, or pass --model.engine peft"
        )

    @functools.wraps(compute_loss)  # Unsloth reads its source
    def compute_loss_without_old(ref: Any, new: Any, old: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        if old is None and sampled is not None:
            old = new.detach()
        return compute_loss(ref, new, old, sampled, *args, **kwargs)

    module["grpo_compute_loss"] = compute_loss_without_old
    return True
