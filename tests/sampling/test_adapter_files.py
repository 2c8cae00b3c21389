"""How the trained adapter reaches vLLM: the file is PEFT's, in the engine's dtype, and in memory if there is room."""

import json
from pathlib import Path

import pytest
import torch
from helpers.adapters import live, make_adapter, make_base
from safetensors.torch import load_file

from lora_grpo.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from lora_grpo.sampling import vllm_sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_file_is_what_peft_writes_in_the_dtype_of_the_engine(tmp_path, dtype):
    base = make_base(tmp_path / "base")
    model = live(base, make_adapter(base, tmp_path / "trained"))
    model.save_pretrained(tmp_path / "by_peft")
    folder = tmp_path / "written"
    folder.mkdir()
    vllm_sampler.write_adapter(model, vllm_sampler.adapter_weights(model, dtype), folder)

    expected = load_file(tmp_path / "by_peft" / ADAPTER_WEIGHTS)
    weights = load_file(folder / ADAPTER_WEIGHTS)
    assert weights.keys() == expected.keys()
    assert {weight.dtype for weight in weights.values()} == {dtype}
    assert all(torch.equal(weights[name], expected[name].to(dtype)) for name in expected)
    settings = json.loads((folder / ADAPTER_CONFIG).read_text())
    settings_of_peft = json.loads((tmp_path / "by_peft" / ADAPTER_CONFIG).read_text())
    for name in ("r", "lora_alpha", "use_rslora", "peft_type"):
        assert settings[name] == settings_of_peft[name]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory")
def test_an_adapter_is_written_to_memory_only_if_it_has_room():
    assert vllm_sampler._folder_in_memory(1000) == Path("/dev/shm")
    assert vllm_sampler._folder_in_memory(1 << 60) is None
