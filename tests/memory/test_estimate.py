"""Compare the planned memory of a step with the tensors that transformers, PEFT, bitsandbytes and torch allocate."""

import contextlib
import dataclasses
import gc
import json

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import QuantState
from helpers.model_configs import LLAMA_ONE, QWEN25_HALF
from helpers.tensor_memory import TensorMemory
from peft import LoraConfig, get_peft_model
from torch._subclasses import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from lora_grpo import starter
from lora_grpo.config import RunConfig, replace
from lora_grpo.loss.attention import ATTENTION, register_attention
from lora_grpo.loss.packing import Packing, pack
from lora_grpo.memory.activations import divergence_bytes, logit_bytes, pass_bytes
from lora_grpo.memory.estimate import memory_by_part
from lora_grpo.memory.lengths import RowLengths
from lora_grpo.memory.parameters import optimizer_bytes, weight_bytes
from lora_grpo.memory.shape import Shape
from lora_grpo.memory.step import Step
from lora_grpo.models.base_model import attention_implementation
from lora_grpo.training import trl_compat

QWEN3_HALF = {
    **{"model_type": "qwen3", "hidden_size": 1024, "head_dim": 128, "num_attention_heads": 16},
    **{"num_key_value_heads": 8, "num_hidden_layers": 28, "intermediate_size": 3072},
    **{"vocab_size": 151936, "tie_word_embeddings": True},
}
STARTER = json.loads((starter.model_path() / "config.json").read_text())
del STARTER["layer_types"]  # one entry per layer, but tests use fewer layers
TINY_LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 2, "intermediate_size": 160, "vocab_size": 500, "tie_word_embeddings": False},
}
TINY_QWEN3 = {**TINY_LLAMA, "model_type": "qwen3", "head_dim": 32}
QWEN35 = {
    **{"model_type": "qwen3_5_text", "hidden_size": 1024, "head_dim": 256, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "intermediate_size": 3584, "linear_num_value_heads": 16, "vocab_size": 1000},
    "layer_types": ["linear_attention", "full_attention"],
}
GEMMA4 = {
    **{"model_type": "gemma4_text", "hidden_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 1},
    **{"intermediate_size": 6144, "vocab_size": 1000, "vocab_size_per_layer_input": 1000},
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA2 = {
    **{"model_type": "gemma2", "hidden_size": 2304, "head_dim": 256, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "intermediate_size": 9216, "vocab_size": 1000, "sliding_window": 4096},
    "layer_types": ["sliding_attention", "full_attention"],
}
TINY = {"starter": STARTER, "tiny llama": TINY_LLAMA, "tiny qwen3": TINY_QWEN3}


def a_step(micro_batch_size, prompt, completion, *, rank=16, checkpointing=True, **others):
    settings = {
        "model": {"max_sequence_tokens": prompt + completion},
        "sampling": {"max_completion_tokens": completion},
        "lora": {"rank": rank},
        "train": {"optimizer": "adamw_8bit", "gradient_checkpointing": checkpointing},
    }
    return Step(replace(RunConfig(), settings), micro_batch_size, **{"sequences": 1, **others})


def on_meta(config, **changes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**config, **changes}), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("targets", "dora"),
    [
        (("all-linear",), False),
        (("all-linear",), True),
        (("q_proj", "v_proj"), False),
        (("down_proj", "lm_head", "embed_tokens"), False),
        (("model.layers.1.self_attn.q_proj",), False),
    ],
)
@pytest.mark.parametrize("config", [QWEN25_HALF, QWEN3_HALF], ids=["qwen2", "qwen3"])
def test_an_adapter_has_the_parameters_that_peft_makes(config, targets, dora):
    config = {**config, "num_hidden_layers": 2, "tie_word_embeddings": False}
    settings = LoraConfig(
        r=8,
        task_type="CAUSAL_LM",
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        use_dora=dora,
        init_lora_weights=False,
    )
    model = get_peft_model(on_meta(config), settings)
    made = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(Shape.of(config).adapter_tensors(8, targets, dora=dora)) == sorted(made)


@pytest.mark.parametrize("config", [QWEN25_HALF, *TINY.values()], ids=["qwen2.5-0.5b", *TINY])
def test_nf4_takes_what_bitsandbytes_stores(config):
    shape = Shape.of({**config, "num_hidden_layers": 1, "vocab_size": 1})
    for nested in (True, False):
        stored = 0
        for inputs, outputs in shape.layers[0].linears.values():
            weight = bitsandbytes.nn.Params4bit(
                torch.randn(outputs, inputs), quant_type="nf4", compress_statistics=nested, requires_grad=False
            ).to("cpu")
            state = weight.quant_state
            tensors = [weight.data, state.absmax, state.code]
            tensors += [state.offset, state.state2.absmax, state.state2.code] if nested else []
            stored += sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert weight_bytes(shape, 4, double_quantized=nested) - 2 * shape.other_parameters == stored


@pytest.mark.parametrize("size", [4095, 4096, 100_001])
def test_the_optimizer_state_is_that_of_the_library(size):
    for name, kind in (("adamw_torch", torch.optim.AdamW), ("adamw_8bit", bitsandbytes.optim.AdamW8bit)):
        parameter = torch.nn.Parameter(torch.zeros(size))
        parameter.grad = torch.ones(size)
        optimizer = kind([parameter], lr=1e-3)
        optimizer.step()
        state = {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, torch.Tensor)}
        # All tensors share the tables of the 8-bit states.
        held = sum(value.nbytes for key, value in state.items() if "qmap" not in key and key != "step")
        assert optimizer_bytes(size, name) == held, name


class FakeLinear4bit(bitsandbytes.nn.Linear4bit):
    """A 4-bit layer with fake tensors, which bitsandbytes' own parameter class does not support."""

    def __init__(self, linear, dtype):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        blocks = linear.weight.numel() // 64
        self.weight = torch.nn.Parameter(torch.empty(blocks * 32, 1, dtype=torch.uint8), requires_grad=False)
        self.weight.compress_statistics, self.weight.quant_type = True, "nf4"
        self.compute_dtype = dtype
        self.quant_state = QuantState(
            torch.empty(blocks, dtype=torch.uint8),
            shape=linear.weight.shape,
            code=torch.empty(16),
            blocksize=64,
            quant_type="nf4",
            dtype=dtype,
            offset=torch.empty(()),
            state2=QuantState(torch.empty(blocks // 256 + 1), code=torch.empty(256), blocksize=256, dtype=torch.float),
        )

    def forward(self, x):
        return bitsandbytes.matmul_4bit(x, self.weight, bias=self.bias, quant_state=self.quant_state)


def fake_policy(config, step, monkeypatch):
    """Return a 4-bit base and a float32 adapter with gradients, made of fake tensors."""
    dtype = torch.float32 if step.on_cpu else torch.bfloat16
    settings = AutoConfig.for_model(**config)
    attention = attention_implementation(settings)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attention)
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and name != "lm_head":
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, FakeLinear4bit(module, dtype))
    model.is_loaded_in_4bit = True
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *args, **kwargs: self)  # fake tensors cannot be swapped
    adapter = LoraConfig(
        r=step.config.lora.rank, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False
    )
    model = get_peft_model(model, adapter)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.empty(parameter.shape)  # in float32, see training.prepare_training
            parameter.grad = torch.empty(parameter.shape)
    if step.config.train.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    return model.train()


def packed_inputs(step):
    """Return what the layers of a packed micro-batch get, made of fake tensors of the right shapes."""
    rows, completion = step.micro_batch_size, step.config.sampling.max_completion_tokens
    ids = torch.ones(rows, step.length, dtype=torch.long)
    ids[:, 0] += torch.arange(rows) // step.config.sampling.num_generations
    real = pack(ids, torch.ones_like(ids), completion)
    tensors = {name: value for name, value in vars(real).items() if isinstance(value, torch.Tensor)}
    with FakeTensorMode() as mode:
        packing = Packing(**{name: mode.from_tensor(tensor) for name, tensor in tensors.items()})
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    arguments = {"position_ids": packing.positions, "attention_mask": mask, "packing": packing}
    return mode, packing.ids, arguments


def padded_inputs(step):
    rows, length = step.micro_batch_size, step.length
    with FakeTensorMode() as mode:
        ids = torch.zeros(rows, length, dtype=torch.long)
        return mode, ids, {"attention_mask": torch.ones(rows, 1, length, length, dtype=torch.bool)}


def most_held(config, step, monkeypatch, *, trains=True):
    """Return the peak memory of a pass through the layers, and back if it trains, excluding weights and gradients."""
    precision = contextlib.nullcontext() if step.on_cpu else torch.autocast("cpu", dtype=torch.bfloat16)
    mode, ids, arguments = packed_inputs(step) if step.packed else padded_inputs(step)
    with mode:
        model = fake_policy(config, step, monkeypatch)
        if step.packed:
            register_attention()
            model.base_model.model.set_attn_implementation(ATTENTION)
        gc.collect()
        with TensorMemory() as held, torch.set_grad_enabled(trains):
            if not step.packed:
                arguments["attention_mask"] = arguments["attention_mask"].clone()  # counted
            with precision:
                hidden = model.base_model.model.base_model(ids, **arguments, use_cache=False).last_hidden_state
            if trains:
                hidden.backward(torch.empty_like(hidden))
    return held.peak


@pytest.mark.parametrize(
    ("config", "on_cpu", "checkpointing", "rows", "lengths", "group"),
    [
        (QWEN25_HALF, False, True, 16, (256, 256), None),
        (QWEN25_HALF, False, False, 16, (256, 256), None),
        (QWEN3_HALF, False, True, 16, (256, 256), None),
        (LLAMA_ONE, False, False, 16, (256, 256), None),
        (QWEN35, False, True, 4, (256, 256), None),
        (QWEN35, False, False, 4, (128, 256), None),
        ({**QWEN35, "linear_num_value_heads": 32, "hidden_size": 2560}, False, True, 2, (64, 256), None),
        (QWEN35, True, False, 4, (64, 64), None),
        (GEMMA4, False, True, 4, (128, 256), None),
        (GEMMA4, False, False, 4, (128, 128), None),
        (GEMMA4, True, False, 2, (128, 128), None),
        (GEMMA2, False, True, 4, (256, 768), None),
        (GEMMA2, True, False, 2, (128, 384), None),
        (STARTER, True, True, 8, (64, 64), None),
        (STARTER, True, False, 8, (64, 64), None),
        (TINY_QWEN3, True, True, 8, (64, 64), None),
        (QWEN25_HALF, False, True, 16, (256, 256), 8),
        (QWEN25_HALF, False, False, 16, (512, 64), 16),
        (LLAMA_ONE, False, False, 16, (64, 512), 4),
        (STARTER, True, True, 16, (128, 16), 8),
        (TINY_QWEN3, True, False, 16, (32, 32), 3),
    ],
)
def test_activations_are_those_that_torch_saves(config, on_cpu, checkpointing, rows, lengths, group, monkeypatch):
    """Padded, and packed by groups."""
    config = {**config, "num_hidden_layers": 2, "vocab_size": min(1000, config["vocab_size"])}
    step = a_step(rows, *lengths, checkpointing=checkpointing, on_cpu=on_cpu, packed=group is not None)
    if group:
        step = dataclasses.replace(step, config=replace(step.config, {"sampling": {"num_generations": group}}))
    planned = memory_by_part(Shape.of(config), step)
    low, high = (0.99, 1.09) if group else (1.0, 1.2) if "layer_types" in config else (1.0, 1.05)
    assert low <= (planned["activations"] + planned["one_layer"]) / most_held(config, step, monkeypatch) <= high


# A teacher


@pytest.mark.parametrize(
    ("config", "on_cpu", "lengths", "group"),
    [
        (QWEN25_HALF, False, (256, 256), 8),
        (LLAMA_ONE, False, (64, 256), None),
        (STARTER, True, (128, 16), 8),
    ],
)
def test_a_teacher_reads_in_at_most_the_planned_memory(config, on_cpu, lengths, group, monkeypatch):
    config = {**config, "num_hidden_layers": 2, "vocab_size": 1000}
    step = a_step(16, *lengths, checkpointing=False, on_cpu=on_cpu, packed=group is not None)
    if group:
        step = dataclasses.replace(step, config=replace(step.config, {"sampling": {"num_generations": group}}))
    shape = Shape.of(config)
    planned = pass_bytes(shape, step) - logit_bytes(shape, step)
    assert 1.0 <= planned / most_held(config, step, monkeypatch, trains=False) <= 1.8


@pytest.mark.parametrize("packed", [False, True])
def test_the_prompts_of_a_teacher_decide_what_its_pass_takes(packed):
    """It needs what a teacher would need that reads the model's prompts, if those were as long."""
    shape = Shape.of(QWEN25_HALF)
    step = a_step(8, 512, 128, packed=packed)

    def planned(**lengths):
        return pass_bytes(shape, dataclasses.replace(step, row_lengths=RowLengths(rows=8, **lengths)))

    assert planned(longest_prompt=64, longest_teacher_prompt=384) == planned(longest_prompt=384)
    assert planned(longest_prompt=384, longest_teacher_prompt=64) == planned(longest_prompt=64)
    assert planned(longest_prompt=64) < planned(longest_prompt=384)


@pytest.mark.skipif(not trl_compat.has_divergence_kernel(), reason="TRL 1.14 has no divergence in tiles")
@pytest.mark.parametrize("loss", trl_compat.DIVERGENCES)
@pytest.mark.parametrize(
    ("tokens", "hidden", "hidden_of_teacher", "vocabulary"), [(512, 192, 512, 768), (1500, 96, 96, 9000)]
)
def test_a_divergence_takes_the_planned_memory_on_a_cpu(loss, tokens, hidden, hidden_of_teacher, vocabulary):
    trl_compat.fit_fused_head_to_cpu()
    step = a_step(1, 1, tokens, on_cpu=True)
    step = dataclasses.replace(step, config=replace(step.config, {"teacher": {"loss": loss}}))
    sizes = [hidden, hidden_of_teacher]
    shapes = [Shape.of({**QWEN25_HALF, "hidden_size": size, "vocab_size": vocabulary}) for size in sizes]
    weights = [torch.randn(vocabulary, size) for size in sizes]
    states = torch.randn(tokens, hidden, requires_grad=True)
    states_of_teacher = torch.randn(1, tokens, hidden_of_teacher)
    gc.collect()
    with TensorMemory() as held:
        kept = states_of_teacher.clone()[0]  # as the pass of the teacher leaves it
        student = trl_compat.Logits(states * 1, weights[0], None, 1.0, None)
        teacher = trl_compat.Logits(kept * 1, weights[1], None, 1.0, None)
        trl_compat.token_divergences(student, teacher, trl_compat.DIVERGENCES[loss], 1.0).sum().backward()
    assert 0.98 <= divergence_bytes(*shapes, step) / held.peak <= 1.05


# Logits

SIZES_OF_LOGITS = [(512, 896, 151_936), (4096, 3584, 40_000), (2048, 192, 768)]
"""Tokens, hidden size and vocabulary."""
WITH_FUSED_HEAD = trl_compat.has_fused_head()


def held_by_trls_logprobs(tokens, hidden, vocabulary, dtype):
    """Return the memory of TRL's logprobs of a whole micro-batch, forward and backward."""
    from trl.trainer import utils

    arguments = (1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE if WITH_FUSED_HEAD else 8192, None, 1.0)
    outputs = [("log_probs", "entropy")] if WITH_FUSED_HEAD else []
    with FakeTensorMode():
        head = torch.empty(vocabulary, hidden, dtype=dtype)
        layers_output = torch.empty(tokens, hidden, dtype=dtype, requires_grad=True)
        labels = torch.zeros(tokens, dtype=torch.long)
        with TensorMemory() as held:
            states = layers_output.clone() if WITH_FUSED_HEAD else layers_output  # those of completions
            logprobs = utils._ChunkedLogProbFunction.apply(states, head, None, labels, *arguments, *outputs)[0]
            logprobs.backward(torch.ones_like(logprobs))
    return held


def planned_for_logits(tokens, hidden, vocabulary, *, on_cpu):
    shape = Shape.of({**QWEN25_HALF, "hidden_size": hidden, "num_hidden_layers": 1, "vocab_size": vocabulary})
    step = a_step(1, 0, tokens, on_cpu=on_cpu)
    last_norm = (12 if on_cpu else 10) * tokens * hidden
    return memory_by_part(shape, step)["logits"] - last_norm


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("sizes", SIZES_OF_LOGITS)
@pytest.mark.skipif(WITH_FUSED_HEAD, reason="TRL 1.14 has tiles without a fused head")
def test_chunked_logits_take_what_trls_tiles_take(sizes, on_cpu):
    held = held_by_trls_logprobs(*sizes, torch.float32 if on_cpu else torch.bfloat16)
    assert held.peak == pytest.approx(planned_for_logits(*sizes, on_cpu=on_cpu), rel=0.04)
    tokens, _, vocabulary = sizes
    if vocabulary > 8192:
        assert held.largest < tokens * vocabulary


@pytest.mark.parametrize("sizes", SIZES_OF_LOGITS)
@pytest.mark.skipif(not WITH_FUSED_HEAD, reason="TRL 1.16 has a fused head")
def test_a_fused_head_on_a_cpu_takes_what_is_planned(sizes, monkeypatch):
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 4096)
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32_768)
    monkeypatch.setattr(utils, "_use_triton", chunked_logprob._use_triton)
    trl_compat.fit_fused_head_to_cpu()
    held = held_by_trls_logprobs(*sizes, torch.float32)
    assert held.peak == pytest.approx(planned_for_logits(*sizes, on_cpu=True), rel=0.04)


@pytest.mark.parametrize("sizes", SIZES_OF_LOGITS)
@pytest.mark.skipif(not WITH_FUSED_HEAD, reason="TRL 1.16 has a fused head")
def test_a_fused_head_on_a_gpu_takes_what_is_planned(sizes, monkeypatch):
    """Functions that do nothing stand for kernels, which allocate nothing, and for products added in place."""
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    class Triton:
        @staticmethod
        def cdiv(a, b):
            return -(-a // b)

    monkeypatch.setattr(chunked_logprob, "triton", Triton, raising=False)
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 4096)
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32_768)
    monkeypatch.setattr(chunked_logprob, "_use_triton", lambda device: True)
    for name in ("_forward_kernel", "_backward_kernel"):
        monkeypatch.setattr(chunked_logprob, name, Kernel())
    monkeypatch.setattr(chunked_logprob, "_addmm_fp32", lambda acc, a, b: None)
    held = held_by_trls_logprobs(*sizes, torch.bfloat16)
    assert held.peak == pytest.approx(planned_for_logits(*sizes, on_cpu=False), rel=0.04)
