"""Adapters of the stacked experts of a mixture: one tensor in the model, one tensor for each expert on disk.

Transformers (5.17) stacks the experts of Qwen-MoE, OLMoE, and Mixtral into `experts.gate_up_proj` and
`experts.down_proj`, and saves them one by one. PEFT (0.21) adapts the stacks through `target_parameters`, also for
`all-linear`, and wraps a module once for each of them: the wrapper of the last one is `experts`, that of the one before
it `experts.base_layer`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from typing import Any

from lora_grpo.errors import UserError

_STORED = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
"""The names on disk of the parts of a stack, in the order of its rows: Qwen's and Mixtral's."""


@dataclass(frozen=True)
class Stack:
    """The stacked experts of one layer, (E, out, in)."""

    name: str
    """The parameter's name in the model."""
    tensors: list[list[str]]
    """For each expert, the tensors on disk that its rows are stored in."""


def stored_module(name: str, stored: Collection[str]) -> str:
    """Return a module's name on disk, where Mixtral's `mlp` is `block_sparse_moe`."""
    other = name.replace(".mlp.", ".block_sparse_moe.")
    return other if f"{other}.weight" in stored else name


def find_stacks(model: Any, stored: Collection[str], targets: Collection[str]) -> dict[str, Stack]:
    """Return the adapted stacks by the name of their wrapper in PEFT's model.

    Args:
        model: the result of `empty_model`.
        stored: the names of the base's tensors.
        targets: the adapter's `target_parameters`.

    Raises:
        UserError: experts are adapted and not stored one by one.
    """
    stacks = {}
    for name, module in model.named_modules():
        shapes = {part: parameter.shape for part, parameter in module.named_parameters(recurse=False)}
        adapted = [part for part in shapes if any(f".{name}.{part}".endswith(f".{target}") for target in targets)]
        for depth, part in enumerate(reversed(adapted)):
            if len(shapes[part]) != 3:
                continue
            tensors = _tensors(name, part, len(module.get_parameter(part)), stored)
            if not tensors:
                raise UserError(
                    f"the adapter trains {name}.{part} (target_parameters), and the base stores its experts as one "
                    "tensor, which cannot be merged here; merge it with PEFT"
                )
            stacks[name + ".base_layer" * depth] = Stack(f"{name}.{part}", tensors)
    return stacks


def _tensors(name: str, part: str, count: int, stored: Collection[str]) -> list[list[str]]:
    """Return the tensors on disk of each expert; none if the experts are not stored one by one."""
    folders = (name, name.replace(".mlp.", ".block_sparse_moe."))
    for folder, parts in product(folders, _STORED.get(part, ())):
        if f"{folder}.0.{parts[0]}.weight" in stored:
            return [[f"{folder}.{expert}.{each}.weight" for each in parts] for expert in range(count)]
    return []
