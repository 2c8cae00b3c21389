"""The dimensions of a transformer, to count its parameters and those of an adapter; those of the presets' models."""

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lora_grpo.errors import UserError, suggestion

_FAMILIES = (
    *("gemma2", "gemma3_text", "gemma4_text", "granite", "llama", "ministral3", "mistral", "phi3", "qwen2", "qwen3"),
    *("qwen3_5_text", "smollm3"),
)
"""Supported values of `model_type`; of a model that reads images, that of its text part."""
_HEAD_WIDTHS = {"gemma2": 256, "gemma3_text": 256, "gemma4_text": 256, "ministral3": 128, "qwen3": 128}
_HEAD_WIDTHS |= {"qwen3_5_text": 256}
"""Defaults of `head_dim`. Otherwise it is the hidden size divided by the number of heads."""
_SIZES: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4},
    "gemma4_text": {"vocab_size": 262_144, "num_attention_heads": 8, "num_key_value_heads": 4},
}
"""Sizes that published configurations leave out."""
_WINDOWS = {"gemma2": 4096, "gemma3_text": 4096, "gemma4_text": 512, "mistral": 4096}
"""Defaults of `sliding_window`."""


class UnknownFamily(UserError):
    """The model family is not supported."""


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta net that layers of Qwen3.5 have in place of attention. Widths are those of one head."""

    key_heads: int
    value_heads: int
    key: int
    value: int
    kernel: int
    """Tokens that the convolution before it reads."""

    @property
    def convolved(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        values, heads = self.value_heads * self.value, self.value_heads
        outputs = {"qkv": self.convolved, "z": values, "b": heads, "a": heads}
        linears = {f"linear_attn.in_proj_{name}": (hidden, size) for name, size in outputs.items()}
        return linears | {"linear_attn.out_proj": (values, hidden)}


@dataclass(frozen=True)
class Layer:
    """The dimensions of a layer: attention or a delta net, a gated feed-forward block, and RMS norms."""

    hidden: int
    queries: int
    """Total width of all query heads."""
    keys: int
    """Total width of all key heads, which equals that of all value heads."""
    head: int
    """Width of one head."""
    inner: int
    """Width of the feed-forward block."""
    biases: tuple[str, ...] = ()
    """Names of the linear layers that have a bias."""
    head_norms: bool = False
    """Whether query and key heads have norms."""
    norms: int = 2
    """Norms of the hidden size."""
    fused: bool = False
    """Whether queries, keys and values are one linear layer, and gate and up projection another."""
    gated: bool = False
    """Whether the queries' linear layer also computes a gate for the outputs of attention."""
    delta: DeltaNet | None = None
    """In place of attention."""
    shares_keys: bool = False
    """Whether attention reads the keys and values of another layer."""
    capped: bool = False
    """Whether attention caps its scores, so that it computes all of them instead of calling a fused kernel."""
    layer_input: int = 0
    """Width of the embedding that each layer of Gemma 4 adds for every token, 0 for none."""

    @functools.cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(Inputs, outputs) of each linear layer."""
        q, kv, i = self.queries, self.keys, self.inner
        parts = {"self_attn.q": q * (1 + self.gated), "self_attn.k": kv, "self_attn.v": kv, "mlp.gate": i, "mlp.up": i}
        if self.fused:
            parts = {"self_attn.qkv": q + 2 * kv, "mlp.gate_up": 2 * i}
        elif self.shares_keys:
            del parts["self_attn.k"], parts["self_attn.v"]
        linears = {f"{name}_proj": (self.hidden, outputs) for name, outputs in parts.items()}
        linears |= {"self_attn.o_proj": (q, self.hidden), "mlp.down_proj": (i, self.hidden)}
        if self.delta:
            feed_forward = {name: size for name, size in linears.items() if name.startswith("mlp")}
            return self.delta.linears(self.hidden) | feed_forward
        if self.layer_input:
            linears["per_layer_input_gate"] = self.hidden, self.layer_input
            linears["per_layer_projection"] = self.layer_input, self.hidden
        return linears

    @property
    def other_parameters(self) -> int:
        """Number of parameters that are not quantized: norms, biases and convolutions."""
        if delta := self.delta:
            return self.norms * self.hidden + delta.kernel * delta.convolved + 2 * delta.value_heads + delta.value
        biases = sum(outputs for name, (_, outputs) in self.linears.items() if name.split(".")[-1] in self.biases)
        return self.norms * self.hidden + self.head_norms * (2 - self.shares_keys) * self.head + biases


@dataclass(frozen=True)
class Shape:
    """The dimensions of a transformer with Llama-like layers."""

    hidden: int
    vocabulary: int
    tied: bool
    """Whether the output head shares the weights of the embedding."""
    layers: tuple[Layer, ...]
    layer_vocabulary: int = 0
    """Tokens with an embedding for each layer."""
    context: int | None = None
    """The declared maximum length of a sequence, in tokens."""
    window: int | None = None
    """Tokens that attention reaches back to in some layers, if it does not reach all."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Read the shape from a model's config.json, or raise UnknownFamily, also for a wrong or missing size."""
        text = values.get("text_config")
        values = {**values, **text} if isinstance(text, Mapping) else values
        family = values.get("model_type")
        family = f"{family}_text" if f"{family}_text" in _FAMILIES else family
        if family not in _FAMILIES or values.get("enable_moe_block") or values.get("attention_k_eq_v"):
            what = f"a model of type {family}" + (" with experts or shared values" if family in _FAMILIES else "")
            raise UnknownFamily(f"the memory of {what} cannot be planned; planned types are {', '.join(_FAMILIES)}")
        values = {**_SIZES.get(family, {}), **values}

        def size(name: str, default: int | None = None, least: int = 1) -> int:
            value = default if values.get(name) is None else values[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                expected = f"expected a whole number of at least {least}"
                raise UnknownFamily(f"the model's config.json has {name} {value!r}; {expected}")
            return value

        hidden, heads, number = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
        width = size("head_dim", _HEAD_WIDTHS.get(family, max(1, hidden // heads)))
        has_window = values.get("use_sliding_window", not family.startswith(("qwen", "smollm")))
        window = values.get("sliding_window", _WINDOWS.get(family))
        biases: list[str] = []
        if family == "qwen2":
            biases += ["q_proj", "k_proj", "v_proj"]
        elif family not in ("ministral3", "mistral") and values.get("attention_bias", False):
            biases += ["q_proj", "k_proj", "v_proj", "o_proj"]
        if family in ("granite", "llama", "smollm3") and values.get("mlp_bias", False):
            biases += ["gate_proj", "up_proj", "down_proj"]
        layer_input = size("hidden_size_per_layer_input", 256, 0) if family == "gemma4_text" else 0
        layer = Layer(
            hidden=hidden,
            queries=heads * width,
            keys=size("num_key_value_heads", heads) * width,
            head=width,
            inner=size("intermediate_size"),
            biases=tuple(biases),
            head_norms=family in ("gemma3_text", "gemma4_text", "qwen3", "qwen3_5_text"),
            norms=5 if layer_input else 4 if family.startswith("gemma") else 2,
            fused=family == "phi3",
            gated=family == "qwen3_5_text",
            capped=family == "gemma2" and values.get("attn_logit_softcapping", 50.0) is not None,
            layer_input=layer_input,
        )
        full = other = layer  # those whose type is full_attention, and those with another type
        if family == "gemma4_text":  # wider heads
            head = size("global_head_dim", 512)
            if isinstance(written := values.get("per_layer_config"), Mapping):  # as transformers writes it
                found = [each.get("head_dim") for each in written.values() if isinstance(each, Mapping)]
                head = next((each for each in found if isinstance(each, int)), width)
            full = dataclasses.replace(layer, queries=heads * head, keys=layer.keys // width * head, head=head)
        elif family == "qwen3_5_text":
            names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
            sizes = (size(f"linear_{name}", each) for name, each in zip(names, (16, 32, 128, 128, 4), strict=True))
            other = dataclasses.replace(layer, delta=DeltaNet(*sizes))
        interval = size("full_attention_interval", 6 if family == "gemma4_text" else 4)
        pattern = ([""] * (interval - 1) + ["full_attention"]) * number
        types = (values.get("layer_types") if full is not other else None) or pattern[:number]
        if not isinstance(types, list) or len(types) != number:
            raise UnknownFamily(f"the model's config.json has layer_types {types!r:.60}; expected a list of {number}")
        layers = [full if each == "full_attention" else other for each in types]
        if family == "gemma4_text":  # transformers changes the last one too
            layers[-1] = full
        for index in range(max(0, number - size("num_kv_shared_layers", 0, 0)), number):
            inner = layer.inner * (2 if values.get("use_double_wide_mlp") else 1)
            layers[index] = dataclasses.replace(layers[index], inner=inner, shares_keys=True)
        return cls(
            hidden=hidden,
            vocabulary=size("vocab_size"),
            tied=bool(values.get("tie_word_embeddings", family.startswith(("gemma", "smollm3")))),
            layers=tuple(layers),
            layer_vocabulary=size("vocab_size_per_layer_input", 262_144) if layer_input else 0,
            context=values.get("max_position_embeddings"),
            window=window if has_window and isinstance(window, int) else None,
        )

    @functools.cached_property
    def kinds(self) -> dict[Layer, int]:
        """The number of layers of each kind."""
        return dict(Counter(self.layers))

    @functools.cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(Inputs, outputs) of all linear layers except the output head."""
        linears = {
            f"model.layers.{index}.{name}": size
            for index, layer in enumerate(self.layers)
            for name, size in layer.linears.items()
        }
        if gates := sum(layer.layer_input for layer in self.layers):
            linears["model.per_layer_model_projection"] = self.hidden, gates
        return linears

    @functools.cached_property
    def matrices(self) -> dict[int, int]:
        """The number of linear layers with each number of weights."""
        return dict(Counter(inputs * outputs for inputs, outputs in self.linears.values()))

    @property
    def linear_parameters(self) -> int:
        """Number of weights that are stored in 4 bits."""
        return sum(size * count for size, count in self.matrices.items())

    @property
    def other_parameters(self) -> int:
        """Number of parameters that are not quantized: embedding, untied head, norms and biases."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        gates = self.layer_vocabulary * sum(layer.layer_input for layer in self.layers) + self.layers[0].layer_input
        return embeddings + gates + sum(layer.other_parameters for layer in self.layers) + self.hidden

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
                hint = suggestion(target, sorted({name.split(".")[-1] for name in self.linears}))
                raise UserError(f"--lora.targets {target} names no linear layer of this model; {hint}")

    def _adapted(self, targets: Sequence[str]) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of the modules that get an adapter, by names, suffixes or `all-linear`."""
        sizes = dict(self.linears)
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
