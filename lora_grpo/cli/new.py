"""`lora-grpo new`: a task file that is also a recipe, its tests and a README, in a new folder."""

import importlib.util
import json
import keyword
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit
from urllib.request import url2pathname

from lora_grpo import console
from lora_grpo.errors import UserError
from lora_grpo.files import atomic
from lora_grpo.flags import Flag

_TEMPLATES = Path(__file__).with_name("new_task")
_DISTRIBUTION = "lora-grpo"


@dataclass(frozen=True)
class NewOptions:
    """Flags of `lora-grpo new`."""

    name: Annotated[str, Flag("NAME")]
    """Name of the task: of the new folder, of the module in it, and of the run."""


def run_new(options: NewOptions) -> None:
    """Write the folder NAME, and print the next commands.

    Raises:
        UserError: the name cannot be that of a module, the folder exists, or it cannot be written.
    """
    name = options.name
    folder = Path(name)
    _check_name(name)
    if folder.exists():
        raise UserError(f"{folder} exists, and `new` overwrites nothing; pass another name")

    source = _source_of_installation()
    values: dict[str, str | bool] = {
        "name": name,
        "header": _script_header(source),
        "is_path": bool(source and "path" in source),
    }
    content_of_file = {
        f"{name}.py": _rendered("task.py.jinja", values),
        f"test_{name}.py": _rendered("test_task.py.jinja", values),
        "README.md": _rendered("README.md.jinja", values),
    }
    try:
        with atomic.staging_folder(folder) as staging:
            for file_name, content in content_of_file.items():
                (staging / file_name).write_text(content, encoding="utf-8")
            staging.rename(folder)
    except OSError as error:
        raise UserError(f"{folder.absolute()} cannot be written: {error.strerror or error}") from None

    console.result(f"task      {folder}/{name}.py, which is also a recipe")
    console.result(f"tests     {folder}/test_{name}.py")
    console.result(f"next      cd {name}, then the commands in README.md, from the tests to the training")


def _check_name(name: str) -> None:
    """Raise a UserError unless a module can have this name and hides no other one."""
    if not name.isascii() or not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(f"{name!r} cannot be the name of a Python module; use letters, digits and _, such as my_task")
    # Its folder comes first on Python's path when the task runs.
    if not Path(name).exists() and importlib.util.find_spec(name):
        raise UserError(f"{name} is the name of an installed module, which the task would hide; pass another name")


def _source_of_installation() -> dict[str, str | bool] | None:
    """Return where lora_grpo was installed from, as an entry of `tool.uv.sources`; None for a package registry.

    Source: the specification of direct_url.json, which installers write.
    """
    # In a checkout, setuptools' folder beside the package is a distribution, too, but not an installed one.
    found = metadata.distributions(name=_DISTRIBUTION)
    installed = next((each for each in found if each.read_text("METADATA")), None)
    content = installed and installed.read_text("direct_url.json")
    if not content:
        return None
    origin = json.loads(content)
    if "vcs_info" in origin:
        return {"git": origin["url"], "rev": origin["vcs_info"]["commit_id"]}
    url = urlsplit(origin["url"])
    if url.scheme != "file":
        return {"url": origin["url"]}
    path = url2pathname(url.path)
    if "dir_info" in origin:
        return {"path": path, "editable": True}
    return {"path": path}  # of a wheel


def _script_header(source: dict[str, str | bool] | None) -> str:
    """Return the metadata with which `uv run FILE` installs what a file needs (PEP 723)."""
    lines = ['requires-python = ">=3.11"', f'dependencies = ["{_DISTRIBUTION}"]']
    if source:
        entries = ", ".join(f"{key} = {json.dumps(value)}" for key, value in source.items())
        lines += ["", "[tool.uv.sources]", f"{_DISTRIBUTION} = {{ {entries} }}"]
    commented = [f"# {line}".rstrip() for line in lines]
    return "\n".join(["# /// script", *commented, "# ///"])


def _rendered(template: str, values: dict[str, str | bool]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # none of the files is HTML
    )
    return environment.get_template(template).render(values)
