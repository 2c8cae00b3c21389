"""What a command changes for its whole process."""

import warnings

from lora_grpo import process_state


def test_deprecations_of_libraries_are_hidden_and_those_of_other_code_are_not():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        process_state.hide_deprecations()
        for module in ("peft", "torch.nn.modules.module", "my_task", "torchdata"):
            warnings.warn_explicit(module, FutureWarning, "file.py", 1, module=module)
        warnings.warn_explicit("not deprecated", UserWarning, "file.py", 1, module="torch")
    assert [str(warning.message) for warning in caught] == ["my_task", "torchdata", "not deprecated"]
