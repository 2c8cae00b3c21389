"""What of a process a library can leave changed: processes, threads, files, variables, handlers and settings."""

import logging
import os
import signal
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def traces():
    """Return everything that must be the same before and after a call of the API."""
    import torch
    import transformers
    from accelerate.state import PartialState
    from torch.utils import deterministic

    loggers = [entry for entry in logging.root.manager.loggerDict.values() if isinstance(entry, logging.Logger)]
    return {
        "processes": [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "temporary files": sorted(path.name for path in Path(tempfile.gettempdir()).iterdir()),
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
        "handlers": [str(signal.getsignal(number)) for number in SIGNALS],
        "path": list(sys.path),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fills memory": deterministic.fill_uninitialized_memory,
        "dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "threads of torch": torch.get_num_threads(),
        "accelerate": dict(PartialState._shared_state),
        "progress bars": transformers.utils.logging.is_progress_bar_enabled(),
        "silenced": sorted(logger.name for logger in loggers if logger.level >= logging.ERROR),
        "logging": logging.root.manager.disable,
        "warnings": len(warnings.filters),
    }
