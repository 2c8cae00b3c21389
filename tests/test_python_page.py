"""docs/python.md and notebooks/first_run.ipynb, run from top to bottom."""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEEDS_A_RUN = "## Load the trained adapter"
# The flags of a short run, which the notebook takes from the environment.
ARGS = "--train.max-steps 2 --data.eval-limit 8 --monitor.rows 0"


def snippets(text):
    return [(found[1], found.start()) for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]


def run_snippets(text, names):
    for source, start in snippets(text):
        exec(compile(source, f"docs/python.md, character {start}", "exec"), names)
    return names


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_needs_no_run_works_as_on_the_page(in_folder, capsys):
    before, after = (ROOT / "docs" / "python.md").read_text(encoding="utf-8").split(NEEDS_A_RUN)
    assert (len(snippets(before)), len(snippets(after))) == (5, 3)
    names = run_snippets(before, {})
    assert [verdict.reason for verdict in names["verdicts"]] == ["correct", "no_answer", "conflicting_answers"]
    assert names["values"].shape == (4,) and names["interval"].low < names["values"].mean() < names["interval"].high
    assert [names[name].status for name in ("correct", "wrong", "endless")] == ["passed", "failed", "timeout"]
    assert "\nTrue False\n" in capsys.readouterr().out
    assert names["trainer"].sampler and Path("trl/adapter/adapter_model.safetensors").exists()


@pytest.mark.slow
def test_the_notebook_and_the_page_run_from_top_to_bottom(in_folder, monkeypatch):
    pytest.importorskip("nbclient")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("ARGS", ARGS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "notebooks" / "first_run.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    printed = str([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    assert "starter" in printed and "| greedy |" in printed and "image/png" in printed and "KL(adapter" in printed

    shutil.move(in_folder / "outputs" / "first_run", in_folder / "outputs" / "gsm8k_lora")
    names = run_snippets((ROOT / "docs" / "python.md").read_text(encoding="utf-8"), {})
    assert len(names["answers"]) == 3 and names["report"].evaluated.tasks == 8
