"""The dimensions of a transformer, to count its parameters and those of an adapter; those of the presets' models."""

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from lora_grpo.errors import UserError, suggestion


class UnknownFamily(UserError):
    """The model family is not supported."""


class LinearSize(NamedTuple):
    """The size of a linear layer."""

    inputs: int
    outputs: int

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta net that layers of Qwen3.5 have in place of attention."""

    key_heads: int
    value_heads: int
    key_width: int
    """Width of one key head."""
    value_width: int
    """Width of one value head."""
    kernel: int
    """Tokens that the convolution before the delta net reads."""

    @property
    def convolved(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    def linears(self, hidden: int) -> dict[str, LinearSize]:
        """Return the linear layers of the delta net, for inputs of a width."""
        values = self.value_heads * self.value_width
        return {
            "linear_attn.in_proj_qkv": LinearSize(hidden, self.convolved),
            "linear_attn.in_proj_z": LinearSize(hidden, values),
            "linear_attn.in_proj_b": LinearSize(hidden, self.value_heads),
            "linear_attn.in_proj_a": LinearSize(hidden, self.value_heads),
            "linear_attn.out_proj": LinearSize(values, hidden),
        }


@dataclass(frozen=True)
class Layer:
    """The dimensions of a layer: attention or a delta net, a gated feed-forward block, and RMS norms."""

    hidden: int
    total_query_width: int
    """Total width of all query heads."""
    total_key_width: int
    """Total width of all key heads, which equals that of all value heads."""
    head_width: int
    """Width of one head."""
    inner: int
    """Width of the feed-forward block."""
    biases: tuple[str, ...] = ()
    """Names of the linear layers that have a bias."""
    head_norms: bool = False
    """Whether query and key heads have norms."""
    norms: int = 2
    """Norms of the hidden size."""
    joint_projections: bool = False
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
    def linears(self) -> dict[str, LinearSize]:
        """The linear layers by name."""
        if self.delta:
            return self.delta.linears(self.hidden) | self._feed_forward()
        linears = self._attention() | self._feed_forward()
        if self.layer_input:
            linears["per_layer_input_gate"] = LinearSize(self.hidden, self.layer_input)
            linears["per_layer_projection"] = LinearSize(self.layer_input, self.hidden)
        return linears

    @property
    def other_parameters(self) -> int:
        """Number of parameters that are not quantized: norms, biases and convolutions."""
        norms = self.norms * self.hidden
        if delta := self.delta:
            convolution = delta.kernel * delta.convolved
            decay = 2 * delta.value_heads
            norm_of_head = delta.value_width
            return norms + convolution + decay + norm_of_head
        if self.head_norms:
            norms += self.head_width  # of the queries
            if not self.shares_keys:
                norms += self.head_width
        biases = 0
        for name, size in self.linears.items():
            if name.split(".")[-1] in self.biases:
                biases += size.outputs
        return norms + biases

    def _attention(self) -> dict[str, LinearSize]:
        output = {"self_attn.o_proj": LinearSize(self.total_query_width, self.hidden)}
        if self.joint_projections:
            return {
                "self_attn.qkv_proj": LinearSize(self.hidden, self.total_query_width + 2 * self.total_key_width),
                **output,
            }
        query_outputs = 2 * self.total_query_width if self.gated else self.total_query_width
        linears = {"self_attn.q_proj": LinearSize(self.hidden, query_outputs)}
        if not self.shares_keys:
            linears["self_attn.k_proj"] = LinearSize(self.hidden, self.total_key_width)
            linears["self_attn.v_proj"] = LinearSize(self.hidden, self.total_key_width)
        return linears | output

    def _feed_forward(self) -> dict[str, LinearSize]:
        down = {"mlp.down_proj": LinearSize(self.inner, self.hidden)}
        if self.joint_projections:
            return {"mlp.gate_up_proj": LinearSize(self.hidden, 2 * self.inner), **down}
        return {
            "mlp.gate_proj": LinearSize(self.hidden, self.inner),
            "mlp.up_proj": LinearSize(self.hidden, self.inner),
            **down,
        }


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
        config = _Config.of(values)
        layers = _read_layers(config)
        layer_vocabulary = 0
        if layers[0].layer_input:
            layer_vocabulary = config.size("vocab_size_per_layer_input", 262_144)
        ties_by_default = config.family.startswith(("gemma", "smollm3"))
        return cls(
            hidden=config.size("hidden_size"),
            vocabulary=config.size("vocab_size"),
            tied=bool(config.values.get("tie_word_embeddings", ties_by_default)),
            layers=tuple(layers),
            layer_vocabulary=layer_vocabulary,
            context=config.values.get("max_position_embeddings"),
            window=_read_window(config),
        )

    @functools.cached_property
    def kinds(self) -> dict[Layer, int]:
        """The number of layers of each kind."""
        return dict(Counter(self.layers))

    @functools.cached_property
    def linears(self) -> dict[str, LinearSize]:
        """All linear layers except the output head, by name."""
        linears = {}
        for index, layer in enumerate(self.layers):
            for name, size in layer.linears.items():
                linears[f"model.layers.{index}.{name}"] = size
        layer_inputs = sum(layer.layer_input for layer in self.layers)
        if layer_inputs:
            linears["model.per_layer_model_projection"] = LinearSize(self.hidden, layer_inputs)
        return linears

    @functools.cached_property
    def matrix_counts(self) -> dict[int, int]:
        """How many linear layers have a number of weights, by this number."""
        return dict(Counter(size.weights for size in self.linears.values()))

    @property
    def largest_matrix(self) -> int:
        """Number of weights of the largest linear layer, except the output head."""
        return max(self.matrix_counts)

    @property
    def linear_parameters(self) -> int:
        """Number of weights that are stored in 4 bits."""
        return sum(weights * count for weights, count in self.matrix_counts.items())

    @property
    def other_parameters(self) -> int:
        """Number of parameters that are not quantized: embedding, untied head, norms and biases."""
        embedding = self.vocabulary * self.hidden
        head = 0 if self.tied else embedding
        last_norm = self.hidden
        layer_inputs = sum(layer.layer_input for layer in self.layers)
        layer_embeddings = self.layer_vocabulary * layer_inputs
        norm_of_layer_embeddings = self.layers[0].layer_input  # all layers share it
        in_layers = sum(layer.other_parameters for layer in self.layers)
        return embedding + head + layer_embeddings + norm_of_layer_embeddings + in_layers + last_norm

    @property
    def parameters(self) -> int:
        return self.linear_parameters + self.other_parameters

    @functools.lru_cache(maxsize=256)  # noqa: B019 (few shapes, and many calls for the same adapter)
    def adapter_tensors(
        self, rank: int, targets: tuple[str, ...] = ("all-linear",), *, dora: bool = False
    ) -> tuple[int, ...]:
        """Return the number of parameters of every tensor of an adapter. `targets` are PEFT's `target_modules`."""
        tensors: list[int] = []
        for size in self._adapted(targets):
            tensors.append(rank * size.inputs)  # A
            tensors.append(rank * size.outputs)  # B
            if dora:
                tensors.append(size.outputs)  # magnitudes
        return tuple(tensors)

    def adapted_parameters(self, targets: Sequence[str] = ("all-linear",)) -> int:
        """Return the number of weights of the modules that get an adapter."""
        return sum(size.weights for size in self._adapted(targets))

    def check_targets(self, targets: Sequence[str]) -> None:
        """Raise a UserError for a target that names no linear layer."""
        for target in targets:
            if not self._adapted((target,)):
                known = sorted({name.split(".")[-1] for name in self.linears})
                hint = suggestion(target, known)
                raise UserError(f"--lora.targets {target} names no linear layer of this model; {hint}")

    def _adapted(self, targets: Sequence[str]) -> list[LinearSize]:
        """Return the sizes of the modules that get an adapter, by names, suffixes or `all-linear`."""
        if tuple(targets) == ("all-linear",):
            return list(self.linears.values())
        modules = {
            **self.linears,
            "lm_head": LinearSize(self.hidden, self.vocabulary),
            "model.embed_tokens": LinearSize(self.vocabulary, self.hidden),
        }
        suffixes = tuple(f".{target}" for target in targets)
        return [size for name, size in modules.items() if f".{name}".endswith(suffixes)]


# Reading a config.json


_FAMILIES = (
    *("gemma2", "gemma3_text", "gemma4_text", "granite", "llama", "ministral3", "mistral", "phi3", "qwen2", "qwen3"),
    *("qwen3_5_text", "smollm3"),
)
"""Supported values of `model_type`; of a model that reads images, that of its text part."""
_HEAD_WIDTHS = {
    "gemma2": 256,
    "gemma3_text": 256,
    "gemma4_text": 256,
    "ministral3": 128,
    "qwen3": 128,
    "qwen3_5_text": 256,
}
"""Defaults of `head_dim`. Otherwise it is the hidden size divided by the number of heads."""
_SIZES: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4},
    "gemma4_text": {"vocab_size": 262_144, "num_attention_heads": 8, "num_key_value_heads": 4},
}
"""Sizes that published configurations leave out."""
_WINDOWS = {"gemma2": 4096, "gemma3_text": 4096, "gemma4_text": 512, "mistral": 4096}
"""Defaults of `sliding_window`."""


@dataclass(frozen=True)
class _Config:
    """The config.json of a supported model, or of its text part."""

    family: str
    """One of _FAMILIES."""
    values: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the values of the text part, or raise UnknownFamily."""
        text = values.get("text_config")
        if isinstance(text, Mapping):
            values = {**values, **text}
        family = str(values.get("model_type"))
        if f"{family}_text" in _FAMILIES:
            family = f"{family}_text"
        problem = ""
        if family not in _FAMILIES:
            problem = f"a model of type {family}"
        elif values.get("enable_moe_block") or values.get("attention_k_eq_v"):
            problem = f"a model of type {family} with experts or shared values"
        if problem:
            planned = ", ".join(_FAMILIES)
            raise UnknownFamily(f"the memory of {problem} cannot be planned; planned types are {planned}")
        return cls(family, {**_SIZES.get(family, {}), **values})

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return a size, or raise UnknownFamily if it is missing or wrong."""
        value = self.values.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            expected = f"expected a whole number of at least {least}"
            raise UnknownFamily(f"the model's config.json has {name} {value!r}; {expected}")
        return value


def _read_layers(config: _Config) -> list[Layer]:
    """Return all layers, in order."""
    layer = _read_layer(config)
    number = config.size("num_hidden_layers")
    if config.family == "gemma4_text":
        full_attention = _with_wider_heads(layer, config)
        layers = _alternating(config, full_attention, layer, default_interval=6)
        layers[-1] = full_attention  # whatever `layer_types` says, as in transformers
    elif config.family == "qwen3_5_text":
        with_delta_net = dataclasses.replace(layer, delta=_read_delta_net(config))
        layers = _alternating(config, layer, with_delta_net, default_interval=4)
    else:
        layers = [layer] * number

    # The last layers of Gemma 4 may read the keys and values of an earlier one, and be wider in return.
    sharing = config.size("num_kv_shared_layers", default=0, least=0)
    inner = layer.inner
    if config.values.get("use_double_wide_mlp"):
        inner = 2 * layer.inner
    for index in range(max(0, number - sharing), number):
        layers[index] = dataclasses.replace(layers[index], inner=inner, shares_keys=True)
    return layers


def _read_layer(config: _Config) -> Layer:
    """Return a layer with the dimensions that most layers of the model have."""
    family = config.family
    hidden = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    head_width = config.size("head_dim", _HEAD_WIDTHS.get(family, max(1, hidden // heads)))
    layer_input = 0
    if family == "gemma4_text":
        layer_input = config.size("hidden_size_per_layer_input", default=256, least=0)
    norms = 2
    if layer_input:
        norms = 5
    elif family.startswith("gemma"):
        norms = 4
    return Layer(
        hidden=hidden,
        total_query_width=heads * head_width,
        total_key_width=config.size("num_key_value_heads", heads) * head_width,
        head_width=head_width,
        inner=config.size("intermediate_size"),
        biases=_read_biases(config),
        head_norms=family in ("gemma3_text", "gemma4_text", "qwen3", "qwen3_5_text"),
        norms=norms,
        joint_projections=family == "phi3",
        gated=family == "qwen3_5_text",
        capped=family == "gemma2" and config.values.get("attn_logit_softcapping", 50.0) is not None,
        layer_input=layer_input,
    )


def _read_biases(config: _Config) -> tuple[str, ...]:
    """Return the names of the linear layers that have a bias."""
    biases: list[str] = []
    if config.family == "qwen2":
        biases += ["q_proj", "k_proj", "v_proj"]
    elif config.family not in ("ministral3", "mistral") and config.values.get("attention_bias", False):
        biases += ["q_proj", "k_proj", "v_proj", "o_proj"]
    if config.family in ("granite", "llama", "smollm3") and config.values.get("mlp_bias", False):
        biases += ["gate_proj", "up_proj", "down_proj"]
    return tuple(biases)


def _with_wider_heads(layer: Layer, config: _Config) -> Layer:
    """Return a layer of Gemma 4 with full attention."""
    # Published configurations have `global_head_dim`. transformers saves `per_layer_config` in its place, with an entry
    # for each layer that differs from the others: {"5": {"head_dim": 512}, "11": ...}.
    changes_of_layers = config.values.get("per_layer_config")
    if isinstance(changes_of_layers, Mapping):
        head_width = _first_head_width(changes_of_layers, default=layer.head_width)
    else:
        head_width = config.size("global_head_dim", 512)
    heads = layer.total_query_width // layer.head_width
    key_heads = layer.total_key_width // layer.head_width
    return dataclasses.replace(
        layer,
        total_query_width=heads * head_width,
        total_key_width=key_heads * head_width,
        head_width=head_width,
    )


def _first_head_width(changes_of_layers: Mapping[str, Any], default: int) -> int:
    for changes in changes_of_layers.values():
        if isinstance(changes, Mapping) and isinstance(changes.get("head_dim"), int):
            return int(changes["head_dim"])
    return default


def _read_delta_net(config: _Config) -> DeltaNet:
    return DeltaNet(
        key_heads=config.size("linear_num_key_heads", 16),
        value_heads=config.size("linear_num_value_heads", 32),
        key_width=config.size("linear_key_head_dim", 128),
        value_width=config.size("linear_value_head_dim", 128),
        kernel=config.size("linear_conv_kernel_dim", 4),
    )


def _alternating(config: _Config, full_attention: Layer, other: Layer, default_interval: int) -> list[Layer]:
    """Return the layers of a model with two kinds: those with full attention, and the others.

    `layer_types` lists the kinds. Without it, every `full_attention_interval`-th layer has full attention.
    """
    number = config.size("num_hidden_layers")
    interval = config.size("full_attention_interval", default_interval)
    types = config.values.get("layer_types")
    if not types:
        types = ["full_attention" if index % interval == 0 else "" for index in range(1, number + 1)]
    if not isinstance(types, list) or len(types) != number:
        raise UnknownFamily(f"the model's config.json has layer_types {types!r:.60}; expected a list of {number}")
    return [full_attention if layer_type == "full_attention" else other for layer_type in types]


def _read_window(config: _Config) -> int | None:
    """Return the tokens that attention reaches back to, None if it reaches all."""
    uses_by_default = not config.family.startswith(("qwen", "smollm"))
    if not config.values.get("use_sliding_window", uses_by_default):
        return None
    window = config.values.get("sliding_window", _WINDOWS.get(config.family))
    return window if isinstance(window, int) else None


KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("known_models.json").read_text(encoding="utf-8")
)
"""The config.json values of the models of the presets and of docs/gpu.md, by Hub id, and the size of their weights on
the Hub in bytes. With it, a run is planned without a network. `tools/check_known_models.py` compares it with the Hub.
"""
