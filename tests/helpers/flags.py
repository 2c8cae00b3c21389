"""Every flag of a recipe."""

import dataclasses

from lora_grpo.config import Invocation, RunConfig
from lora_grpo.flags import flag


def flag_names(settings=None, prefix=""):
    settings = settings or {**RunConfig().to_dict(), **dataclasses.asdict(Invocation()), "config": None}
    settings.pop("method", None)  # the recipe's own
    names = []
    for name, value in settings.items():
        names += flag_names(value, f"{prefix}{name}.") if isinstance(value, dict) else [flag(prefix + name)]
    return names
