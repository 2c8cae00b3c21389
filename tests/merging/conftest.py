"""What tests of merges share."""

import pytest

from lora_grpo.merging import merge_model
from lora_grpo.merging.report import Divergences


@pytest.fixture
def no_divergence(monkeypatch):
    """Skip the divergence, because its three forward passes take longer than the rest of a merge."""
    monkeypatch.setattr(merge_model, "measure_divergences", lambda *arguments: Divergences(not_measured="in a test"))
