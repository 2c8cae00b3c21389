"""Which methods of a trainer this package overrides, whether calls fit, and which overrides a run calls.

TRL is imported inside functions, because a process of tests/gpu_rig must import Unsloth first.
"""

import inspect
from collections import Counter

from lora_grpo.runs import AtomicCheckpoints


def overriding_classes():
    from lora_grpo.training.fast_trainer import FastGRPOTrainer, RecipeTrainer

    return AtomicCheckpoints, FastGRPOTrainer, RecipeTrainer


def overrides(trainer_class):
    """Return the pairs (class, method name) that override a method of the trainer."""
    pairs = []
    for overriding_class in overriding_classes():
        for name, method in vars(overriding_class).items():
            if inspect.isfunction(method) and hasattr(trainer_class, name) and name != "__init__":
                pairs.append((overriding_class, name))
    return pairs


def rejected_calls(overriding_class, name, trainer_class):
    """Return how the trainer's method can be called but the override cannot: by position or by name."""
    parameters = inspect.signature(getattr(trainer_class, name)).parameters.values()
    arguments = [parameter.name for parameter in parameters if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    keyword_only = {parameter.name: None for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY}
    override = inspect.signature(getattr(overriding_class, name))
    rejected = []
    for form, num_positional in (("by position", len(arguments)), ("by name", 1)):
        by_name = dict.fromkeys(arguments[num_positional:])
        try:
            override.bind(*arguments[:num_positional], **by_name, **keyword_only)
        except TypeError as error:
            rejected.append(f"{form}: {error}")
    return rejected


def count_calls(replace):
    """Count the calls of every override from now on. `replace` is setattr, or monkeypatch.setattr in a test."""
    from trl import GRPOTrainer

    calls = Counter()

    def counted(key, method):
        def call(*arguments, **options):
            calls[key] += 1
            return method(*arguments, **options)

        return call

    for overriding_class, name in overrides(GRPOTrainer):
        method = getattr(overriding_class, name)
        replace(overriding_class, name, counted(f"{overriding_class.__name__}.{name}", method))
    return calls
