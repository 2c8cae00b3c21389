"""The isolation tiers that the sandbox's tests run in."""

import pytest

from lora_grpo.sandbox.isolation import unavailable_reason

if unavailable_reason("landlock"):
    USED_TIER = "bubblewrap"
    _OTHER_TIER = "landlock"
else:
    USED_TIER = "landlock"
    _OTHER_TIER = "bubblewrap"
TIERS = [USED_TIER, pytest.param(_OTHER_TIER, marks=pytest.mark.slow)]
"""The default suite tests the tier that this machine uses. The slow tests repeat everything in the other one."""


def skip_unless_available(tier: str) -> None:
    """Skip the test if this machine cannot use the tier."""
    reason = unavailable_reason(tier)
    if reason:
        pytest.skip(reason)
