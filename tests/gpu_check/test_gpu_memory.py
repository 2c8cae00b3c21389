import time

import pytest

from lora_grpo.gpu_check.gpu_memory import MemoryWatch, used_gib


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return a function that puts a stand-in nvidia-smi before all else on the PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def build(script):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)

    return build


def test_memory_is_told_in_gib(smi):
    smi("echo 1536")
    assert used_gib() == 1.5


@pytest.mark.parametrize("script", ["echo '[N/A]'", "exit 9", "true", "echo 'No devices were found'; exit 6"])
def test_a_tool_that_does_not_tell(smi, script):
    smi(script)
    assert used_gib() is None
    with MemoryWatch() as watch:
        pass
    assert watch.peak_gib is None


def test_no_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert used_gib() is None


@pytest.mark.parametrize(
    ("visible", "asked"), [(None, "-i 0"), ("1", "-i 1"), ("2,1", "-i 2"), ("GPU-ab", "-i GPU-ab"), ("MIG-ab", "")]
)
def test_the_card_is_the_one_that_cuda_sees_first(smi, monkeypatch, tmp_path, visible, asked):
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    smi(f'echo "$@" > {tmp_path}/asked; echo 1024')
    assert used_gib() == 1
    expected = f"{asked} --query-gpu=memory.used --format=csv,noheader,nounits".strip()
    assert (tmp_path / "asked").read_text().strip() == expected


def test_the_peak_is_above_what_was_in_use_before(smi, tmp_path):
    level = tmp_path / "level"
    level.write_text("2048")
    smi(f"cat {level}")
    with MemoryWatch() as watch:
        level.write_text("7168")
        while watch.peak_gib != 5:
            time.sleep(0.01)
        level.write_text("3072")
        looked = tmp_path / "looked"
        smi(f"cat {level}; touch {looked}")
        while not looked.exists():
            time.sleep(0.01)
    assert watch.peak_gib == 5
