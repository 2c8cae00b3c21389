"""vLLM generates the tokens of transformers with an adapter and from a merged model, for each row in docs/models.md."""

import gc
import re

import pytest
import torch
from helpers.fresh_imports import ROOT
from helpers.tiny_models import CONFIGS, make_model
from helpers.tiny_runs import run_tiny
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from lora_grpo.config import ModelConfig
from lora_grpo.errors import UserError
from lora_grpo.merging import MergeOptions, merge
from lora_grpo.models import base_model, in_vllm
from lora_grpo.sampling.sampler import SamplingParams
from lora_grpo.sampling.vllm_engine import VllmEngine, start_engine
from lora_grpo.sampling.vllm_sampler import request_options

pytestmark = pytest.mark.engines
pytest.importorskip("vllm")
IN_16_BITS = {"gpt_oss": 0.2, "qwen3_5": 0.05, "qwen3_5 text": 0.05}
"""vLLM computes experts and delta nets on a CPU in bfloat16 alone. A rate changes more than rounding does."""
OTHER_LOGITS = ("lfm2",) if in_vllm("ministral3") else ("lfm2", "ministral3")
FEW = ("qwen3", "gemma3", "granite hybrid")
"""Those that differ most."""
LFM2 = {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128, "block_ff_dim": 96, "block_multiple_of": 16}
LFM2 |= {"block_ffn_dim_multiplier": 1.0, "conv_use_xavier_init": True}
"""Values that published LFM2 models have and transformers does not need."""


@pytest.fixture(autouse=True)
def kernels_of_every_processor(monkeypatch):
    """vLLM's kernels for Intel's AMX do not take float32, a convolution over 3 tokens, and experts of these sizes."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.fixture(autouse=True)
def default_dtype():
    """vLLM does not restore torch's default dtype if a model cannot be loaded."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def widened(config):
    """Return a configuration with heads that vLLM's kernels for a CPU support."""
    config = {name: widened(value) if isinstance(value, dict) else value for name, value in config.items()}
    if config.get("model_type") == "lfm2":
        config |= LFM2
    wide = {"head_dim": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "mamba_n_heads": 16}
    wide |= {"hidden_size": 128} if "num_key_value_heads" in config else {}
    return config | {name: size for name, size in wide.items() if name in config}


def next_logps(folder, tokens):
    """Return the logprobs of the token that follows, with transformers."""
    model = base_model.auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].float(), -1)


def generated(folder, tokens):
    """Return eight tokens and their logprobs, without a cache."""
    new_tokens, new_logps = [], []
    for _ in range(8):
        logps = next_logps(folder, [*tokens, *new_tokens])
        new_tokens.append(logps.argmax().item())
        new_logps.append(logps.max().item())
    return new_tokens, new_logps


def started(folder, name, rank):
    """Return an engine. On a CPU, lora_grpo does not start one in bfloat16, or for a type that it refuses."""
    if name not in (*IN_16_BITS, *OTHER_LOGITS):
        return start_engine(ModelConfig(name=str(folder), bits=16), rank=rank, max_sequence_tokens=256, seed=0)
    from vllm.entrypoints import llm

    options = {"enable_lora": True, "max_lora_rank": rank} if rank else {}
    options |= {"language_model_only": True, "logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True}
    options |= {"enable_chunked_prefill": False, "enable_prefix_caching": False, "enforce_eager": True}
    options |= {"mamba_ssm_cache_dtype": "float32"} if "qwen3_5" in name else {}
    dtype = "bfloat16" if name in IN_16_BITS else "float32"
    engine = llm.LLM(str(folder), dtype=dtype, max_model_len=256, seed=0, **options)
    return VllmEngine(engine.llm_engine, sleeps=False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.exhaustive) for name in CONFIGS]
)
def test_vllm_generates_what_transformers_does(name, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    config = widened(CONFIGS[name])
    if "vision_config" in config or name == "qwen3_5 text":  # vLLM's module of Qwen3.5 imports its image processor
        pytest.importorskip("torchvision", reason="published builds of torchvision need CUDA", exc_type=Exception)
    if not in_vllm(name) and name not in OTHER_LOGITS:
        pytest.skip("this version of vLLM imports PixtralRotaryEmbedding, which transformers 5.17 does not have")
    base = make_model(tmp_path / "base", config)
    if "gemma4" in name:  # published models have norms of keys, which are not used, in layers that share keys too
        weights = load_file(base / "model.safetensors")
        norms = [key for key in weights if re.search(r"layers\.[01]\.self_attn\.k_norm", key)]
        copies = {re.sub(r"layers\.([01])", lambda m: f"layers.{int(m[1]) + 2}", key): weights[key] for key in norms}
        weights |= {key: tensor.clone() for key, tensor in copies.items()}
        save_file(weights, base / "model.safetensors", {"format": "pt"})
    run, _ = run_tiny(
        tmp_path / "run",
        model={"engine": "peft", "name": str(base), "bits": 16, "max_sequence_tokens": 256},
        sampling={"max_completion_tokens": 16, "backend": "transformers"},
        train={"max_steps": 1, "learning_rate": IN_16_BITS.get(name, 1e-2)},
    )
    merged = merge(MergeOptions(str(run.folder), dtype="fp32"))
    if name in OTHER_LOGITS:
        with pytest.raises(UserError, match=r"select the transformers backend$"):
            start_engine(ModelConfig(name=str(merged)), rank=None, max_sequence_tokens=256, seed=0)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4] * 3
    expected, logps = generated(merged, tokens)
    tolerance = 0.1 if name in IN_16_BITS else 2e-5
    # An adapter that is ignored would be found.
    assert (next_logps(merged, tokens) - next_logps(base, tokens))[expected[0]].abs() > 3 * tolerance
    options = request_options(SamplingParams(1, 0.0, 1.0, max_tokens=8), [0], [], logprobs=True)
    served = [(merged, None)]
    if name not in ("gpt_oss", "qwen3 moe", "mixtral"):  # on a CPU, vLLM has no adapters for experts
        served.append((base, run.adapter))
    for folder, adapter in served:
        engine = started(folder, name, 8 if adapter else None)
        try:
            request = engine.load_adapter(adapter) if adapter else None
            [(_, completion)] = engine.stream([tokens], options, request)
        finally:
            engine.close()
            gc.collect()
        sampled = completion.token_ids
        differences = [abs(mine - theirs) for mine, theirs in zip(completion.logprobs, logps, strict=True)]
        if name in OTHER_LOGITS:
            assert max(differences) > 1e-3
            continue
        num_same = 0
        while num_same < 8 and sampled[num_same] == expected[num_same]:
            num_same += 1
        assert num_same == 8 or (name in IN_16_BITS and num_same > 0)  # rounding may change a choice
        assert max(differences[:num_same]) < tolerance


def test_the_documentation_names_the_families_that_vllm_does_not_serve():
    table, _, _ = (ROOT / "docs" / "models.md").read_text().partition("<!-- results")
    lines = [line for line in table.splitlines() if re.match(r"\| `\w+`", line)]
    served = {line.split("`")[1]: line.strip("| ").split(" | ")[-1] for line in lines if line.count(" | ") == 5}
    not_everywhere = {name for name, cell in served.items() if cell not in ("yes", "vLLM")}
    assert not_everywhere == {"lfm2", "ministral3", "mistral3"}
