"""The tables of docs/ that `tools/results.py` writes are those of docs/results.json."""

import importlib.util
import json
import re
import sys
from importlib.metadata import version

import pytest
from helpers.fresh_imports import ROOT

PLACE = re.compile(r"<!-- results: (\w+) -->\n(.*?)<!-- end -->", re.S)
ARCHIVE = (ROOT / "docs" / "results-archive.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def results():
    spec = importlib.util.spec_from_file_location("results", ROOT / "tools" / "results.py")
    module = sys.modules["results"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_record(results):
    record = json.loads(results.RECORD.read_text())
    # Another version of matplotlib draws other pixels.
    has_locked_matplotlib = f"\nmatplotlib=={version('matplotlib')}\n" in (ROOT / "requirements-cpu.lock").read_text()
    places = [place for page in PAGES for place in PLACE.findall(page.read_text())]
    assert sorted(name for name, _ in places) == sorted(["summary", *record])
    for name, text in places:
        if name == "summary":
            assert text == results.summary(record)
            anchors = re.findall(r"\(results-archive.md#(\w+)\)", text)
            assert anchors
            assert all(f"\n### {anchor}\n" in ARCHIVE for anchor in anchors)
            continue
        assert text == results.rendered(name, record[name])
        if "curve" in record[name] and has_locked_matplotlib:
            assert results.image(name).read_bytes() == results.drawn(name, record[name]["curve"])
        assert record[name]["commands"] == list(results.PARTS[name].commands)
        assert len(record[name]["table"]) > 1 and record[name]["commits"]


def test_a_part_is_measured_written_and_shown(results, tmp_path, monkeypatch, capfd):
    tool, runs = tmp_path / "tool.py", tmp_path / "runs"
    tool.write_text("print('text\\n| a | `b` |\\n|---|---:|\\n| 1 | 2 |')")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "import json, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--output-dir') + 1])\n"
        "(folder / 'evaluation').mkdir(parents=True)\n"
        "row = dict(metric='pass@1', before=0.25, after=0.5, difference=0.25, p_value=0.02)\n"
        "row |= {name + '_interval': [0.0, 1.0] for name in ('before', 'after', 'difference')}\n"
        "(folder / 'evaluation' / 'report.json').write_text(json.dumps({'table': [row]}))\n"
        "record = dict(lora_grpo_run=1, git_revision='abcdefgh12+changes', config=dict(method='grpo'))\n"
        "record |= dict(data={}, policy={}, versions={}, status='complete', seconds_worked=600.0)\n"
        "(folder / 'run.json').write_text(json.dumps(record))\n"
        "seed = int(sys.argv[sys.argv.index('--seed') + 1]) if '--seed' in sys.argv else 0\n"
        "lines = [dict(step=step, reward=step * 0.1 + seed) for step in (1, 2, 3)]\n"
        "(folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\\n' for line in lines))\n"
        "print(*sys.argv[1:])\n"
    )
    (tmp_path / "page.md").write_text(
        "<!-- results: summary -->\n<!-- end -->\n"
        "<!-- results: tool -->\n<!-- end -->\n<!-- results: run -->\nold\n<!-- end -->\n"
    )
    for name, value in (("RECORD", tmp_path / "results.json"), ("RUNS", runs)):
        monkeypatch.setattr(results, name, value)
    commands = (f"{recipe} --first", f"{recipe} --from {{before}} --seed {{seed}}")
    parts = {"tool": results.Benchmark((str(tool),)), "run": results.Recipe(commands, seeds=(4, 5))}
    monkeypatch.setattr(results, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["results.py"])
    results.main()
    printed = capfd.readouterr().out.splitlines()
    assert printed == [
        f"--first --output-dir {runs}/run-0",
        *(f"--from {runs}/run-0 --seed {seed} --output-dir {runs}/run-1-{seed}" for seed in (4, 5)),
    ]
    page = (tmp_path / "page.md").read_text()
    assert "| a | `b` |\n| --- | ---: |\n| 1 | 2 |\n" in page and "old" not in page
    assert "| 4 | pass@1 | 25.0 [0.0, 100.0] | 50.0 [0.0, 100.0] | +25.0 [+0.0, +100.0] | 0.020 | 20 |" in page
    assert "At abcdefgh+changes, 30.0 min on" in page
    assert (
        "| [`run`](results-archive.md#run) | 2 | 25.0, 25.0 | 50.0, 50.0 | 0.020 | 15 |" in page
        and "[`tool`]" not in page
    )
    curve = json.loads((tmp_path / "results.json").read_text())["run"]["curve"]
    assert (curve["x"], curve["y"]) == ([1, 2, 3], [4.6, 4.7, 4.8])
    assert (curve["low"], curve["high"]) == ([4.1, 4.2, 4.3], [5.1, 5.2, 5.3])
    assert "(curve-run.png)" in page and (tmp_path / "curve-run.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(sys, "argv", ["results.py", "run"])
    results.main()
    assert not capfd.readouterr().out  # finished runs are not repeated
    assert (tmp_path / "page.md").read_text() == page
