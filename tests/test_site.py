"""The site: it is built from the docs without a broken link, and a broken link ends the build."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="mkdocs-material is not installed: make site")
pytest.importorskip("material", reason="mkdocs-material is not installed: make site")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def build(tmp_path):
    """Return a function that builds the site of a copy of the docs, after a line was added to a page."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    config = f"""
INHERIT: {ROOT / "mkdocs.yml"}
docs_dir: {tmp_path / "docs"}
site_dir: {tmp_path / "site"}
hooks: [{ROOT / "tools" / "site_hooks.py"}]
"""
    (tmp_path / "mkdocs.yml").write_text(config)

    def run(added_line=""):
        page = tmp_path / "docs" / "serve.md"
        page.write_text(f"{page.read_text()}\n{added_line}\n")
        command = [sys.executable, "-m", "mkdocs", "build", "--config-file", tmp_path / "mkdocs.yml"]
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def test_the_site_is_built_with_the_pages_of_the_root_and_their_search(build, tmp_path):
    ended = build("[one](../recipes/your_task.py), [two](../CONTRIBUTING.md#to-add-something), `[three](../code.md)`")
    assert ended.returncode == 0, ended.stderr
    site = tmp_path / "site"
    page = (site / "serve" / "index.html").read_text()
    assert 'href="https://github.com/YOU/lora_grpo/blob/main/recipes/your_task.py"' in page
    assert 'href="../contributing/#to-add-something"' in page
    assert "[three](../code.md)" in page
    assert 'href="gpu/"' in (site / "index.html").read_text()
    assert "check-gpu" in (site / "search" / "search_index.json").read_text()
    assert "fonts.g" not in page  # nothing is asked of another server


def test_broken_links_are_named(build):
    """Those that MkDocs finds, all at once."""
    targets = ("missing.md", "gpu.md#no-such-heading", "missing.png", "/gpu.md")
    ended = build(" ".join(f"[a]({target})" for target in targets))
    assert ended.returncode == 1
    for target in targets:
        assert f"link '{target}'" in ended.stderr, ended.stderr
    assert "Aborted with 4 warnings in strict mode" in ended.stderr + ended.stdout


def test_a_link_to_a_missing_file_of_the_repository_ends_the_build(build):
    ended = build("[a](../recipes/missing.py)")
    assert ended.returncode == 1
    assert "recipes/missing.py, which does not exist" in ended.stderr
