"""What a command changes for its whole process."""

import os
import subprocess
import sys
import warnings

import pytest

from lora_grpo import process_state

COMMAND_WITH_A_BAR = """
from lora_grpo.cli import run_command

def main():
    from tqdm.auto import tqdm
    for _ in tqdm(range(3)):
        pass
    from huggingface_hub.utils import are_progress_bars_disabled
    print(are_progress_bars_disabled())

run_command(main)
"""


@pytest.mark.parametrize("of_user", [{}, {"TQDM_DISABLE": "", "HF_HUB_DISABLE_PROGRESS_BARS": "0"}])
def test_bars_of_libraries_are_hidden_in_a_log_unless_the_user_wants_them(of_user):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS")
    }
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND_WITH_A_BAR],
        env={**environment, **of_user},
        capture_output=True,
        text=True,
        check=True,
    )
    if of_user:
        assert "3/3" in ended.stderr and ended.stdout == "False\n"
    else:
        assert ended.stderr == "" and ended.stdout == "True\n"


def test_deprecations_of_libraries_are_hidden_and_those_of_other_code_are_not():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        process_state.hide_deprecations()
        for module in ("peft", "torch.nn.modules.module", "my_task", "torchdata"):
            warnings.warn_explicit(module, FutureWarning, "file.py", 1, module=module)
        warnings.warn_explicit("not deprecated", UserWarning, "file.py", 1, module="torch")
    assert [str(warning.message) for warning in caught] == ["my_task", "torchdata", "not deprecated"]
