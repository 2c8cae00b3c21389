"""The isolation tiers that the sandbox's tests run in."""

import pytest

from lora_grpo.sandbox.pool import missing

_USED, _OTHER = ("bubblewrap", "landlock") if missing("landlock") else ("landlock", "bubblewrap")
TIERS = [_USED, pytest.param(_OTHER, marks=pytest.mark.slow)]
"""The default suite tests the tier that this machine uses. The slow tests repeat everything in the other one."""
