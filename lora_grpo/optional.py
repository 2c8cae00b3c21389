"""Import optional packages, with an error message that suggests how to install them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from lora_grpo.errors import UserError


def require(name: str, *, extra: str, feature: str) -> ModuleType:
    """Import a package that an extra of this project installs, or raise UserError with the feature that needs it."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{feature} needs the package {package}; run `pip install -e .[{extra}]`")
    try:
        return importlib.import_module(name)
    except (ImportError, NotImplementedError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{feature} needs {name}, which cannot be imported here: {reason}") from error
