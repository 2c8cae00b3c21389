"""Tables of vLLM's LoRA kernels are read by vLLM's own rule: the nearest batch, width and rank."""

import json
import os
from pathlib import Path

import pytest
import torch

from lora_grpo.errors import RunError
from lora_grpo.gpu_check import tune_kernels
from lora_grpo.hardware import lora_kernels, vllm_available
from lora_grpo.hardware.lora_kernels import FOLDER_VARIABLE, ShrinkKernel, ShrinkShape

GPU = "NVIDIA H100-80GB HBM3"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    monkeypatch.delenv(FOLDER_VARIABLE)
    return tmp_path / "lora_grpo" / "lora-kernels"


def looked_up(path, slices, batch, width, rank):
    """The entry that vLLM takes for an engine with one adapter."""
    entry = json.loads(path.read_text())["2"][str(slices)]
    for size in (batch, width, rank):
        entry = entry[min(entry, key=lambda key, size=size: abs(int(key) - size))]
    return entry


def test_a_tuned_table_has_the_measured_settings_and_otherwise_vllms(cache):
    tuned = {
        ShrinkShape(3, 64, 1536, 16): ShrinkKernel(block_k=128, split_k=8),
        ShrinkShape(3, 64, 4864, 16): ShrinkKernel(block_k=64, split_k=4),
    }
    path = lora_kernels.save_tuned(GPU, tuned)
    assert path.name == "NVIDIA_H100_80GB_HBM3_SHRINK.json"
    assert looked_up(path, 3, 60, 1600, 32)["split_k"] == 8
    assert looked_up(path, 3, 64, 8960, 16)["split_k"] == 4
    assert looked_up(path, 3, 4096, 1536, 16) == lora_kernels.vllm_default(4096).entry()  # prompts
    for slices in (1, 2, 4, 8):
        assert looked_up(path, slices, 1, 1536, 16) == lora_kernels.vllm_default(1).entry()


def test_the_reproducible_table_adds_no_parts(cache):
    lora_kernels.use_tables(GPU, reproducible=True)
    [path] = [cache.parent / name for name in cache.parent.rglob("*_SHRINK.json")]
    assert os.environ[FOLDER_VARIABLE] == str(path.parent)
    entries = [looked_up(path, slices, batch, 1536, 16) for slices in range(1, 9) for batch in (1, 64, 4096)]
    assert {entry["split_k"] for entry in entries} == {1}


def test_a_table_is_used_on_the_gpu_that_was_measured_unless_the_user_has_another(cache, monkeypatch):
    lora_kernels.use_tables(GPU, reproducible=False)
    assert FOLDER_VARIABLE not in os.environ
    path = lora_kernels.save_tuned(GPU, {})
    lora_kernels.use_tables("Tesla T4", reproducible=False)
    assert FOLDER_VARIABLE not in os.environ
    lora_kernels.use_tables(GPU, reproducible=False)
    assert os.environ[FOLDER_VARIABLE] == str(path.parent)
    monkeypatch.setenv(FOLDER_VARIABLE, "mine")
    lora_kernels.use_tables(GPU, reproducible=False)
    assert os.environ[FOLDER_VARIABLE] == "mine"


def test_tuning_keeps_the_fastest_candidate_that_computes_the_product(monkeypatch):
    """The stand-in computes in parts. Four parts are the fastest right ones, two the fastest of all."""
    shape = ShrinkShape(2, 4, 512, 8)
    launched = []

    def prepare(inputs, matrices):
        def launch(kernel):
            launched.append(kernel)
            products = torch.zeros(len(matrices), shape.batch, shape.rank)
            for product, matrix in zip(products, matrices, strict=True):
                for start in range(0, shape.width, kernel.block_k):
                    part = slice(start, start + kernel.block_k)
                    product += inputs[:, part].float() @ matrix[:, part].float().T
            return products * 2 if kernel.split_k == 2 else products

        return launch

    seconds = {2: 1, 4: 2}
    monkeypatch.setattr(tune_kernels, "_microseconds", lambda call, device: seconds.get(call.args[0].split_k, 9))
    timings = tune_kernels.tune([shape], prepare, device="cpu")
    assert launched[0] == lora_kernels.vllm_default(4)
    assert {timing.kernel.split_k for timing in timings} == {1, 4, 8, 64}
    assert tune_kernels.fastest(timings)[shape].kernel.split_k == 4
    with pytest.raises(RunError, match=r"^-1 s were enough for 0 of 1 shapes, "):
        tune_kernels.tune([shape], prepare, device="cpu", seconds=-1)


def tune_on_a_card(monkeypatch, shapes, *, wrong_widths=(), seconds=60):
    """Run the program on a card, whose kernels compute with PyTorch; the default's product of some widths is wrong."""

    def prepare(inputs, matrices):
        products = torch.stack([inputs.float() @ matrix.float().T for matrix in matrices])
        is_wrong = inputs.shape[1] in wrong_widths
        return lambda kernel: products * 2 if is_wrong and kernel.split_k == 64 else products

    def tune(**options):
        return tune_kernels_on_cpu(shapes, prepare, device="cpu", **options)

    tune_kernels_on_cpu = tune_kernels.tune
    monkeypatch.setattr(tune_kernels, "tune", tune)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: GPU)
    monkeypatch.setattr("sys.argv", ["tune_kernels", str(seconds)])
    tune_kernels.main()


def test_a_shape_for_which_vllms_default_is_wrong_is_skipped(cache, monkeypatch, capsys):
    shapes = [ShrinkShape(1, 2, width, 4) for width in (64, 128)]
    tune_on_a_card(monkeypatch, shapes, wrong_widths=[64])
    skipped, measured, path = capsys.readouterr().out.splitlines()
    assert skipped == "1 x 64 -> 4: skipped, because the product of vLLM's default is wrong"
    assert measured.startswith("1 x 128 -> 4: ")
    assert list(json.loads(Path(path).read_text())["2"]["1"]["2"]) == ["128"]


def test_part_of_a_table_is_not_saved(cache, monkeypatch):
    with pytest.raises(SystemExit) as end:
        tune_on_a_card(monkeypatch, [ShrinkShape(1, 2, 64, 4)], seconds=-1)
    assert end.value.code.startswith("error: -1 s were enough for 0 of 1 shapes") and "--minutes" in end.value.code
    assert not cache.exists()


def test_tuning_takes_times():
    def prepare(inputs, matrices):
        return lambda kernel: (inputs.float() @ matrices[0].float().T)[None]

    timings = tune_kernels.tune([ShrinkShape(1, 2, 64, 4)], prepare, device="cpu")
    assert timings and all(timing.microseconds > 0 for timing in timings)


@pytest.mark.engines
@pytest.mark.skipif(not vllm_available(), reason="vllm is not installed: make engines")
def test_vllm_finds_the_entries_of_a_table(cache, monkeypatch):
    import torch
    from vllm.lora.ops.triton_ops import utils

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)
    for batch in (8, 64, 512):
        utils.get_lora_op_configs.cache_clear()
        utils.load_lora_op_config.cache_clear()
        sizes = {"max_loras": 2, "batch": batch, "hidden_size": 1536, "rank": 16, "num_slices": 3}
        monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
        assert utils.get_lora_op_configs("shrink", **sizes) == lora_kernels.vllm_default(batch).entry()

        utils.get_lora_op_configs.cache_clear()
        utils.load_lora_op_config.cache_clear()
        lora_kernels.use_tables(GPU, reproducible=True)
        assert utils.get_lora_op_configs("shrink", **sizes) == lora_kernels.in_one_part(batch).entry()
