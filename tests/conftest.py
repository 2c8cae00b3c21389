"""What tests share: threads that wait without spinning, and the folder of real data."""

import os
from pathlib import Path

import pytest

# Before any test imports torch; see lora_grpo.policy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Nothing here may reach a hub: what a test needs, it makes or ships.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return folder
