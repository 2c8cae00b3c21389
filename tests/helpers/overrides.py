"""Which methods of a trainer and hooks this package overrides, whether calls fit, and which overrides a run calls."""

import inspect
from collections import Counter

from lora_grpo.runs import AtomicCheckpoints
from lora_grpo.training import ChunkedLogProbs, ScoredRollouts, SharedPrompts, SkipZeroAdvantage, StepMetrics, TrlHooks

MIXINS = (AtomicCheckpoints, SkipZeroAdvantage, StepMetrics, ScoredRollouts, SharedPrompts, ChunkedLogProbs, TrlHooks)


def overrides(trainer_class):
    """Return the pairs (mixin, method name) that override a method of the trainer, or are a hook or override one."""
    return [
        (mixin, name)
        for mixin in MIXINS
        for name, method in vars(mixin).items()
        if inspect.isfunction(method) and _replaced(trainer_class, name) and name != "__init__"
    ]


def _replaced(trainer_class, name):
    return getattr(trainer_class, name, None) or getattr(TrlHooks, name, None)


def rejected_calls(mixin, name, trainer_class):
    """Return how the trainer's method can be called but the override cannot: by position or by name."""
    parameters = inspect.signature(_replaced(trainer_class, name)).parameters.values()
    named = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
    only_named = {each.name: None for each in parameters if each.kind == each.KEYWORD_ONLY}
    ours, rejected = inspect.signature(getattr(mixin, name)), []
    for how, count in (("by position", len(named)), ("by name", 1)):
        try:
            ours.bind(*named[:count], **dict.fromkeys(named[count:]), **only_named)
        except TypeError as error:
            rejected.append(f"{how}: {error}")
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

    for mixin, name in overrides(GRPOTrainer):
        replace(mixin, name, counted(f"{mixin.__name__}.{name}", getattr(mixin, name)))
    return calls
