"""The dimensions of a transformer, used to count its parameters and those of an adapter."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.errors import UserError, suggestion

_FAMILIES = (*("gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"),)
"""Supported values of `model_type`."""
_HEAD_WIDTHS = {"gemma2": 256, "gemma3_text": 256, "qwen3": 128}
"""Defaults of `head_dim`. Otherwise it is the hidden size divided by the number of heads."""
_HEAD_NORMS = ("gemma3_text", "qwen3")
_WINDOWS = {"gemma2": 4096, "gemma3_text": 4096, "mistral": 4096}
"""Defaults of `sliding_window`."""
_TIED = ("gemma2", "gemma3_text", "smollm3")
"""Families that tie the output head to the embedding by default."""


class UnknownFamily(UserError):
    """The model family is not supported."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Llama-like transformer: gated feed-forward block, RMS norms, grouped-query attention."""

    hidden: int
    layers: int
    queries: int
    """Total width of all query heads."""
    keys: int
    """Total width of all key heads, which equals that of all value heads."""
    head: int
    """Width of one head."""
    inner: int
    """Width of the feed-forward block."""
    vocabulary: int
    tied: bool
    """Whether the output head shares the weights of the embedding."""
    biases: tuple[str, ...] = ()
    """Names of the linear layers that have a bias."""
    head_norms: bool = False
    """Whether query and key heads have norms."""
    norms: int = 2
    """Norms of the hidden size in each layer."""
    fused: bool = False
    """Whether queries, keys and values are one linear layer, and gate and up projection another."""
    context: int | None = None
    """The declared maximum length of a sequence, in tokens."""
    window: int | None = None
    """Tokens that attention reaches back to in some layers, if it does not reach all."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Shape:
        """Read the shape from a model's config.json.

        Raises:
            UnknownFamily: the model family is not supported.
            UserError: a size is missing or not a positive integer.
        """
        family = values.get("model_type")
        if family not in _FAMILIES:
            raise UnknownFamily(
                f"the memory of a model of type {family} cannot be planned; expected one of {', '.join(_FAMILIES)}"
            )
        hidden, heads = _positive_int(values, "hidden_size"), _positive_int(values, "num_attention_heads")
        width = _optional_int(values, "head_dim") or _HEAD_WIDTHS.get(family, max(1, hidden // heads))
        biases: list[str] = []
        if family == "qwen2":
            biases += ["q_proj", "k_proj", "v_proj"]
        elif family != "mistral" and values.get("attention_bias", False):
            biases += ["q_proj", "k_proj", "v_proj", "o_proj"]
        if family in ("granite", "llama", "smollm3") and values.get("mlp_bias", False):
            biases += ["gate_proj", "up_proj", "down_proj"]
        return cls(
            hidden=hidden,
            layers=_positive_int(values, "num_hidden_layers"),
            queries=heads * width,
            keys=(_optional_int(values, "num_key_value_heads") or heads) * width,
            head=width,
            inner=_positive_int(values, "intermediate_size"),
            vocabulary=_positive_int(values, "vocab_size"),
            tied=bool(values.get("tie_word_embeddings", family in _TIED)),
            biases=tuple(biases),
            head_norms=family in _HEAD_NORMS,
            norms=4 if family in ("gemma2", "gemma3_text") else 2,
            fused=family == "phi3",
            context=_optional_int(values, "max_position_embeddings"),
            window=_window(family, values),
        )

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of each linear layer of one transformer layer."""
        if self.fused:
            attention = {"self_attn.qkv_proj": (self.hidden, self.queries + 2 * self.keys)}
            feed_forward = {"mlp.gate_up_proj": (self.hidden, 2 * self.inner)}
        else:
            attention = {
                "self_attn.q_proj": (self.hidden, self.queries),
                "self_attn.k_proj": (self.hidden, self.keys),
                "self_attn.v_proj": (self.hidden, self.keys),
            }
            feed_forward = {"mlp.gate_proj": (self.hidden, self.inner), "mlp.up_proj": (self.hidden, self.inner)}
        attention["self_attn.o_proj"] = self.queries, self.hidden
        feed_forward["mlp.down_proj"] = self.inner, self.hidden
        return attention | feed_forward

    @property
    def linear_parameters(self) -> int:
        """Number of weights that are stored in 4 bits: all linear layers except the output head."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears().values())

    @property
    def other_parameters(self) -> int:
        """Number of parameters that are not quantized: embedding, untied head, norms and biases."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        biases = sum(outputs for name, (_, outputs) in self.linears().items() if name.split(".")[1] in self.biases)
        norms = self.norms * self.hidden + (2 * self.head if self.head_norms else 0)
        return embeddings + self.layers * (norms + biases) + self.hidden

    @property
    def parameters(self) -> int:
        return self.linear_parameters + self.other_parameters

    @functools.lru_cache(maxsize=256)  # noqa: B019 (few shapes, and many calls for the same adapter)
    def adapter_tensors(
        self, rank: int, targets: tuple[str, ...] = ("all-linear",), *, dora: bool = False
    ) -> tuple[int, ...]:
        """Return the number of parameters of every tensor of an adapter. `targets` are PEFT's `target_modules`."""
        sizes: list[int] = []
        for inputs, outputs in self._adapted(targets):
            sizes += [rank * inputs, rank * outputs] + ([outputs] if dora else [])
        return tuple(sizes)

    def adapted_parameters(self, targets: Sequence[str] = ("all-linear",)) -> int:
        """Return the number of weights of the modules that get an adapter."""
        return sum(inputs * outputs for inputs, outputs in self._adapted(targets))

    def check_targets(self, targets: Sequence[str]) -> None:
        """Raise a UserError for a target that names no linear layer."""
        for target in targets:
            if not self._adapted((target,)):
                raise unknown_target(target, {name.split(".")[-1] for name in self.linears()})

    def _adapted(self, targets: Sequence[str]) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of the modules that get an adapter, by names, suffixes or `all-linear`."""
        sizes = {
            f"model.layers.{layer}.{name}": size
            for layer in range(self.layers)
            for name, size in self.linears().items()
        }
        if tuple(targets) == ("all-linear",):
            return list(sizes.values())
        sizes["lm_head"] = self.hidden, self.vocabulary
        sizes["model.embed_tokens"] = self.vocabulary, self.hidden
        return [size for name, size in sizes.items() if any(f".{name}".endswith(f".{end}") for end in targets)]


def unknown_target(target: str, names: Collection[str]) -> UserError:
    """Return the error for a target that names no linear layer of a model, which has those `names`."""
    hint = suggestion(target, sorted(names))
    return UserError(f"--lora.targets {target} names no linear layer of this model; {hint}")


def _window(family: str, values: Mapping[str, Any]) -> int | None:
    if not values.get("use_sliding_window", not family.startswith(("qwen", "smollm"))):
        return None
    return _optional_int(values, "sliding_window") if "sliding_window" in values else _WINDOWS.get(family)


def _optional_int(values: Mapping[str, Any], name: str) -> int | None:
    """Return a positive integer, or None if it is missing or null."""
    return None if values.get(name) is None else _positive_int(values, name)


def _positive_int(values: Mapping[str, Any], name: str) -> int:
    """Return a positive integer, or raise a UserError."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        got = f"has {name} {value!r}" if name in values else f"lacks {name}"
        raise UserError(f"the model's config.json {got}; expected a whole number of at least 1")
    return value
