"""What the tests on a GPU share: a GPU, a random model of a real size, and short runs of it."""

import subprocess

import pytest
from gpu_runs import COIN

from lora_grpo.gpu_check.measure import PROBLEMS, QWEN, build_command
from lora_grpo.hardware import nvidia_gpus


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """The GPU of these tests."""
    gpus, why_none = nvidia_gpus()
    if not gpus:
        pytest.skip(f"no NVIDIA GPU: {why_none}")
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU")
    return gpus[0]


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """A folder with a random model of Qwen2.5-0.5B's shape."""
    folder = tmp_path_factory.mktemp("random")
    subprocess.run(build_command(folder / "model", QWEN), check=True)
    return folder / "model"


@pytest.fixture(scope="session")
def short(random_model):
    """Arguments of a run of two steps with 64 completions of 64 tokens, of the random model."""
    return [
        *("--model.name", str(random_model), "--train.max-steps", "2", "--eval.num-samples", "0", *PROBLEMS),
        *("--sampling.max-completion-tokens", "64", "--model.max-sequence-tokens", "576"),
        *("--rewards", "correct_answer=2.0", COIN),
    ]
