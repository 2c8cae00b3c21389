"""docs/python.md and the notebooks, run from top to bottom."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def snippets(text):
    return [(found[1], found.start()) for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]


def run_snippets(text):
    names = {"__name__": "__main__"}
    for source, start in snippets(text):
        exec(compile(source, f"docs/python.md, character {start}", "exec"), names)
    return names


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def test_the_page_works_from_top_to_bottom(in_folder):
    names = run_snippets((ROOT / "docs" / "python.md").read_text(encoding="utf-8"))
    assert [row.metric for row in names["run"].table] == ["pass@1", "pass@4", "greedy"]
    assert names["spelling"].evaluation.protocol.task == "Spelling"
    assert names["sums"].record["data"]["train"]["rows"] == 40
    assert len(names["resumed"].metrics) == 2 and len(names["resumed"].record["resumed"]) == 1
    assert names["evaluation"].report.protocol.rows == 8 and names["other"].report.evaluated.tasks == 4
    assert names["gguf"].is_file() and names["page"].is_file()
    assert names["preview"].diagnosis.verdict in ("can learn", "can barely learn", "cannot learn")
    assert names["findings"]["Spelling"].problems == {}

    assert [verdict.reason for verdict in names["verdicts"]] == ["correct", "no_answer", "conflicting_answers"]
    assert names["values"].shape == (4,) and names["interval"].low < names["values"].mean() < names["interval"].high
    assert [names[name].status for name in ("correct", "wrong", "endless")] == ["passed", "failed", "timeout"]
    assert names["trainer"].sampler and Path("trl/adapter/adapter_model.safetensors").exists()
    assert len(names["answers"]) == 3


def run_notebook(name, monkeypatch, max_steps=2, flags=()):
    """Run a notebook with few steps, and return what its cells printed.

    Args:
        flags: pairs of a command of the notebook and the flags that shorten it.
    """
    pytest.importorskip("nbclient")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    setup = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert "MAX_STEPS = 0 " in setup.source
    setup.source = setup.source.replace("MAX_STEPS = 0 ", f"MAX_STEPS = {max_steps} ")
    for command, more in flags:
        [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and command in cell.source]
        cell.source = cell.source.replace(command, f"{command} {more}")
    client = NotebookClient(notebook, timeout=None, kernel_name="python3")
    client.config.KernelManager.transport = "ipc"  # a TCP port may be taken before the kernel listens
    client.execute()
    return str([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])


@pytest.mark.slow
def test_the_first_run_runs_from_top_to_bottom(in_folder, monkeypatch):
    printed = run_notebook("first_run", monkeypatch)
    assert "starter" in printed and "| greedy |" in printed and "image/png" in printed and "kept" in printed


@pytest.mark.slow
def test_your_task_runs_from_top_to_bottom(in_folder, monkeypatch):
    printed = run_notebook("your_task", monkeypatch)
    assert "OK" in printed and "audit of my_task: passed" in printed
    assert "can learn" in printed and "pass@1" in printed and "image/png" in printed
    assert (in_folder / "outputs" / "my_task" / "adapter").is_dir()


@pytest.mark.real_model
def test_the_laptop_notebook_runs_from_top_to_bottom(in_folder, monkeypatch):
    (in_folder / "models").symlink_to(ROOT / "models")
    flags = [
        ("train laptop --preview", "--sampling.max-completion-tokens 8"),
        ("train sft --preset laptop", "--train.prompts-per-step 8 --train.micro-batch-size 8"),
        ('train laptop --lora.from "{sft_run}"', "--train.prompts-per-step 2"),
    ]
    printed = run_notebook("laptop", monkeypatch, max_steps=1, flags=flags)
    assert "cannot learn" in printed and "models/SmolLM2-135M-Instruct" in printed
    record = json.loads((in_folder / "outputs" / "laptop_lora" / "run.json").read_text())
    assert record["status"] == "complete" and record["start"]["name"].endswith("sft_lora")


def test_the_notebooks_install_in_the_same_way():
    first_cells = set()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        source = "".join(next(cell for cell in cells if cell["cell_type"] == "code")["source"])
        first_cells.add(re.sub(r"outputs/\w+", "", source.partition("# The c")[0]))
    assert len(first_cells) == 1
