"""The dimensions of a transformer, to count its parameters and those of an adapter; those of the presets' models."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lora_grpo.errors import UserError, suggestion

_FAMILIES = ("gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
"""Supported values of `model_type`."""
_HEAD_WIDTHS = {"gemma2": 256, "gemma3_text": 256, "qwen3": 128}
"""Defaults of `head_dim`. Otherwise it is the hidden size divided by the number of heads."""
_WINDOWS = {"gemma2": 4096, "gemma3_text": 4096, "mistral": 4096}
"""Defaults of `sliding_window`."""


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
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Read the shape from a model's config.json, or raise UnknownFamily, or a UserError for a wrong size."""
        family = values.get("model_type")
        if family not in _FAMILIES:
            raise UnknownFamily(
                f"the memory of a model of type {family} cannot be planned; expected one of {', '.join(_FAMILIES)}"
            )

        def size(name: str, default: int | None = None) -> int:
            value = default if values.get(name) is None else values[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"the model's config.json has {name} {value!r}; expected a whole number of at least 1")
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        width = size("head_dim", _HEAD_WIDTHS.get(family, max(1, hidden // heads)))
        has_window = values.get("use_sliding_window", not family.startswith(("qwen", "smollm")))
        biases: list[str] = []
        if family == "qwen2":
            biases += ["q_proj", "k_proj", "v_proj"]
        elif family != "mistral" and values.get("attention_bias", False):
            biases += ["q_proj", "k_proj", "v_proj", "o_proj"]
        if family in ("granite", "llama", "smollm3") and values.get("mlp_bias", False):
            biases += ["gate_proj", "up_proj", "down_proj"]
        return cls(
            hidden=hidden,
            layers=size("num_hidden_layers"),
            queries=heads * width,
            keys=size("num_key_value_heads", heads) * width,
            head=width,
            inner=size("intermediate_size"),
            vocabulary=size("vocab_size"),
            tied=bool(values.get("tie_word_embeddings", family in ("gemma2", "gemma3_text", "smollm3"))),
            biases=tuple(biases),
            head_norms=family in ("gemma3_text", "qwen3"),
            norms=4 if family in ("gemma2", "gemma3_text") else 2,
            fused=family == "phi3",
            context=values.get("max_position_embeddings"),
            window=values.get("sliding_window", _WINDOWS.get(family)) if has_window else None,
        )

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of each linear layer of one transformer layer."""
        q, kv, i = self.queries, self.keys, self.inner
        parts = {"self_attn.q": q, "self_attn.k": kv, "self_attn.v": kv, "mlp.gate": i, "mlp.up": i}
        if self.fused:
            parts = {"self_attn.qkv": q + 2 * kv, "mlp.gate_up": 2 * i}
        linears = {f"{name}_proj": (self.hidden, outputs) for name, outputs in parts.items()}
        return linears | {"self_attn.o_proj": (q, self.hidden), "mlp.down_proj": (i, self.hidden)}

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
                hint = suggestion(target, sorted(name.split(".")[-1] for name in self.linears()))
                raise UserError(f"--lora.targets {target} names no linear layer of this model; {hint}")

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


KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("known_models.json").read_text(encoding="utf-8")
)
"""The config.json values of the models of the presets and of docs/gpu.md, by Hub id, and the size of their weights on
the Hub in bytes. With it, a run is planned without a network. `tools/check_known_models.py` compares it with the Hub.
"""
