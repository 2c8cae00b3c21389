"""Import optional packages, with an error message that suggests how to install them."""

from __future__ import annotations

import importlib
from types import ModuleType

from lora_grpo.errors import UserError


def require(name: str, *, extra: str, feature: str) -> ModuleType:
    """Import an optional package.

    Args:
        name: name of the module.
        extra: extra of this project that installs the package.
        feature: the feature that needs the package, as the user wrote it.

    Raises:
        UserError: the package is missing or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise UserError(f"{feature} needs {name}, which needs the missing package {error.name}") from error
        raise UserError(f"{feature} needs the package {name}; run `pip install -e .[{extra}]`") from None
    except (ImportError, NotImplementedError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{feature} needs {name}, which cannot be imported here: {reason}") from error
