"""What a command or a call of the Python API changes in its process, and what a call puts back at its end.

    with restored():
        do_not_track()
        ...          # environment variables, logging, torch's settings, workers, event loops, the sandbox

A command changes its own process, which ends with it. A notebook goes on.
"""

import contextlib
import gc
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import asynchronous, console, sandbox, workers
from lora_grpo.files import lock, python_file

_LIBRARY_PREFIXES = ("UNSLOTH_", "VLLM_")
"""Variables that these libraries set when they are imported, and read again in every run."""

_library_variables: dict[str, str] = {}
"""Their values in earlier calls. They are set during calls only."""


def do_not_track() -> None:
    """Keep huggingface_hub, TRL and vLLM from sending usage statistics.

    huggingface_hub (1.33) also requests a list of agents before anything else, for 3 s if there is no answer.
    """
    os.environ.setdefault("DO_NOT_TRACK", "1")


def limit_spinning() -> None:
    """Let waiting OpenMP threads spin for a few microseconds before they sleep. Call this before torch is imported.

    With the default of GCC's OpenMP library, which PyTorch's wheels include, a training step takes 1.8 times as long on
    busy cores, and 1.4 times as long on idle ones if threads sleep at once (docs/results.md). Settings of the user
    are kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def hide_library_bars() -> None:
    """Hide the progress bars of libraries where they cannot be overwritten, and each update would be a line of a log.

    Settings of the user are kept.
    """
    if not console.overwrites_lines():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")


_LIBRARIES = ("accelerate", "datasets", "huggingface_hub", "peft", "torch", "transformers", "trl", "lora_grpo")


def hide_deprecations() -> None:
    """Hide what libraries say of their future versions, unless Python is asked for warnings (`python -W`).

    No user can act on it, and much of it is about calls of one library by another. `make newest` shows what is about
    this package.
    """
    if not sys.warnoptions:
        modules = "|".join(_LIBRARIES)
        warnings.filterwarnings("ignore", category=FutureWarning, module=rf"({modules})(\.|$)")


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Put back what the block changes, and end the processes and threads that it starts. Hide deprecations in it."""
    had_torch = "torch" in sys.modules
    had_sandbox = sandbox.describe() is not None
    with contextlib.ExitStack() as stack:
        stack.callback(_collect_garbage, unfreeze=not had_torch)
        stack.enter_context(_folder_of_torch())
        stack.enter_context(lock.released_at_end())
        stack.enter_context(_environment())
        stack.enter_context(_logging())
        stack.enter_context(warnings.catch_warnings())
        hide_deprecations()
        stack.enter_context(_torch_settings())
        stack.enter_context(_library_progress_bars())
        stack.enter_context(_accelerate_state())
        stack.callback(python_file.forget)
        stack.callback(asynchronous.close)
        stack.callback(workers.close_all)
        stack.callback(_close_agents)
        if not had_sandbox:
            stack.callback(sandbox.stop)
        yield


def _close_agents() -> None:
    """End the agents that the block has started."""
    if "lora_grpo.agents" in sys.modules:
        from lora_grpo import agents

        agents.close_all()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    for name, value in _library_variables.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name, value in os.environ.items():
            if name.startswith(_LIBRARY_PREFIXES) and name not in before:
                _library_variables[name] = value
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Put back the level and the filters of every logger."""
    disabled = logging.root.manager.disable
    before = {name: (logger.level, list(logger.filters)) for name, logger in _loggers().items()}
    try:
        yield
    finally:
        logging.disable(disabled)
        for name, logger in _loggers().items():
            if name in before:
                level, filters = before[name]
                logger.setLevel(level)
                logger.filters[:] = filters
            elif logger.level >= logging.ERROR:  # silenced before its library was imported
                logger.setLevel(logging.NOTSET)


def _loggers() -> dict[str, logging.Logger]:
    entries = logging.root.manager.loggerDict.items()  # some are placeholders
    return {name: entry for name, entry in entries if isinstance(entry, logging.Logger)}


@contextlib.contextmanager
def _folder_of_torch() -> Iterator[None]:
    """Remove the folder that torch makes for its compiler, if nothing was compiled."""
    folders = set(Path(tempfile.gettempdir()).glob("torchinductor_*"))
    try:
        yield
    finally:
        for folder in set(Path(tempfile.gettempdir()).glob("torchinductor_*")) - folders:
            with contextlib.suppress(OSError):  # it has files
                folder.rmdir()


@contextlib.contextmanager
def _torch_settings() -> Iterator[None]:
    settings: list[_TorchSetting] = []
    if "torch" in sys.modules:
        settings = _settings_of_torch()
    values = [setting.read() for setting in settings]
    try:
        yield
    finally:
        if "torch" in sys.modules:
            if not settings:  # it was imported in the block
                _reset_torch()
            for setting, value in zip(settings, values, strict=True):
                setting.write(value)


@dataclass(frozen=True)
class _TorchSetting:
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _settings_of_torch() -> list[_TorchSetting]:
    """Return the settings of torch that a run may change."""
    import torch
    from torch.utils import deterministic

    def set_fill(value: bool) -> None:
        deterministic.fill_uninitialized_memory = value

    def get_deterministic() -> tuple[bool, bool]:
        warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.are_deterministic_algorithms_enabled(), warns_only

    def set_deterministic(value: tuple[bool, bool]) -> None:
        is_enabled, warns_only = value
        torch.use_deterministic_algorithms(is_enabled, warn_only=warns_only)

    return [
        _TorchSetting(get_deterministic, set_deterministic),
        _TorchSetting(lambda: deterministic.fill_uninitialized_memory, set_fill),
        _TorchSetting(torch.get_default_dtype, torch.set_default_dtype),
        _TorchSetting(torch.is_grad_enabled, torch.set_grad_enabled),
        _TorchSetting(torch.get_num_threads, torch.set_num_threads),
        _TorchSetting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ]


def _reset_torch() -> None:
    """Give the settings of torch that a run changes their values after the import."""
    import torch
    from torch.utils import deterministic

    torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = True
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


@contextlib.contextmanager
def _library_progress_bars() -> Iterator[None]:
    """Switch transformers' and the Hub's progress bars on again if they were on before."""
    was_on = _transformers_shows_progress()
    was_disabled_on_hub = _hub_hides_progress()
    try:
        yield
    finally:
        if was_on and "transformers" in sys.modules:
            from transformers.utils import logging as transformers_logging

            transformers_logging.enable_progress_bar()
        if not was_disabled_on_hub and "huggingface_hub" in sys.modules:
            from huggingface_hub.utils import enable_progress_bars

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # HF_HUB_DISABLE_PROGRESS_BARS decides
                enable_progress_bars()


def _transformers_shows_progress() -> bool:
    if "transformers" not in sys.modules:
        return True
    from transformers.utils import logging as transformers_logging

    return transformers_logging.is_progress_bar_enabled()


def _hub_hides_progress() -> bool:
    if "huggingface_hub" not in sys.modules:
        return False
    from huggingface_hub.utils import are_progress_bars_disabled

    return are_progress_bars_disabled()


@contextlib.contextmanager
def _accelerate_state() -> Iterator[None]:
    """Forget the precision and the devices of a run, which accelerate keeps for the process."""
    was_in_use = _accelerate_is_in_use()
    try:
        yield
    finally:
        if not was_in_use and "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def _accelerate_is_in_use() -> bool:
    if "accelerate" not in sys.modules:
        return False
    from accelerate.state import PartialState

    return bool(PartialState._shared_state)


def _collect_garbage(*, unfreeze: bool) -> None:
    """Free the memory of models, which trainers and callbacks hold in circles."""
    if unfreeze:
        gc.unfreeze()
    gc.collect()
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
