"""uv runs a recipe or a script from its header, and the whole package as a tool."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from helpers.script_metadata import script_metadata

uv = pytest.importorskip("uv", reason="uv is not installed: make install")

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("recipes", "scripts") for path in (ROOT / folder).glob("*.py"))


def run_uv(*arguments, cwd):
    """Run uv. Skip the test if a registry cannot be reached."""
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    command = [uv.find_uv_bin(), *arguments]
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if "error sending request" in ended.stderr or "Failed to fetch" in ended.stderr:
        pytest.skip(f"the registry cannot be reached: {ended.stderr.splitlines()[0]}")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_names_this_checkout_as_the_source_of_its_package(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    header = script_metadata(path)
    assert header["requires-python"] == project["requires-python"]
    assert header["dependencies"] == [project["name"]]
    source = header["tool"]["uv"]["sources"][project["name"]]
    assert source["editable"] and (path.parent / source["path"]).resolve() == ROOT


@pytest.mark.registry
def test_uv_resolves_the_header_of_a_recipe(tmp_path):
    output = run_uv("lock", "--dry-run", "--script", ROOT / "recipes" / "gsm8k_lora.py", cwd=tmp_path)
    assert "Add lora-grpo " in output and "Add torch v" in output


@pytest.mark.registry
@pytest.mark.exhaustive  # with PyTorch's CUDA build, 3 GB
def test_uv_runs_a_recipe_and_the_command_in_an_empty_folder(tmp_path):
    output = run_uv("run", ROOT / "recipes" / "gsm8k_lora.py", "--preset", "starter", "--dry-run", cwd=tmp_path)
    assert "reward" in output
    output = run_uv(
        "tool", "run", "--from", ROOT, "lora-grpo", "train", "gsm8k", "--preset", "starter", "--plan", cwd=tmp_path
    )
    assert "micro-batch" in output
