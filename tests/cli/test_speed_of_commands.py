"""What makes a command start and end sooner."""

import gc
import subprocess
import sys

import pytest

from lora_grpo.models.base_model import without_garbage_collection


def test_a_command_does_not_look_for_garbage_when_it_exits():
    code = (
        "import atexit, gc, sys; from lora_grpo.cli import run_command\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"  # runs after those of the command
        "sys.exit(run_command(lambda: None))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_imports_leave_the_collector_as_it_was():
    with pytest.raises(ImportError), without_garbage_collection():
        assert not gc.isenabled()
        import no_such_module  # noqa: F401
    assert gc.isenabled()
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_first_import_of_torch_exempts_libraries_from_later_collections():
    code = (
        "import gc; from lora_grpo.models.base_model import without_garbage_collection\n"
        "with without_garbage_collection(): import torch\n"
        "count = gc.get_freeze_count()\n"
        "with without_garbage_collection(): import transformers\n"  # others may have left garbage by now
        "print(count > 10_000, gc.get_freeze_count() > count)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
