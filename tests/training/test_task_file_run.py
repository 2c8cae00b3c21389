"""One task file through every command: preview, filter, training, a kill, resume, evaluate, merge, dry-run push."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.warm_process import finish, wait_for

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    *("--train.max-steps", "6", "--train.checkpoint-steps", "2", "--eval.num-samples", "2", "--eval.k", "1"),
    *("--data.eval-limit", "20", "--data.train-limit", "200", "--monitor.rows", "16", "--monitor.every-steps", "3"),
    *("--sampling.num-generations", "8", "--model.engine", "peft"),
)

pytestmark = pytest.mark.slow


def results(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_task_file_goes_through_every_command(warm, tmp_path):
    shutil.copy(ROOT / "recipes" / "your_task.py", tmp_path / "my_task.py")
    (tmp_path / "my_task.py").write_text(
        (tmp_path / "my_task.py").read_text() + "\nREWARDS = ('correct_answer=1.0', 'xml_tag_count=0.5')\n"
    )

    def start(script, *arguments):
        return warm.start(ROOT / script, *arguments, cwd=tmp_path)

    recipe = ("recipes/gsm8k_lora.py", "--task", "my_task.py", "--output-dir", "run", *TINY)
    printed = finish(start(*recipe, "--preview")).stdout
    assert "correct_answer" in printed and "xml_tag_count" in printed and "problems solved" in printed

    process = start(*recipe, "--data.filter-by-difficulty")
    wait_for(process, (tmp_path / "run" / "checkpoints" / "checkpoint-4").exists)
    process.kill()
    text = (tmp_path / "my_task.py").read_text()
    (tmp_path / "my_task.py").write_text(text.replace("return 0.0", "return 0.1"))
    resume = ("recipes/gsm8k_lora.py", "--output-dir", "run", "--resume")
    for command, message in (
        (resume, "pass --task my_task.py to run it"),
        ((*resume, "--task", "my_task.py"), "my_task.py has changed since the run in run began"),
    ):
        refused = start(*command).end()
        assert refused.returncode == 2 and message in refused.stderr
    (tmp_path / "my_task.py").write_text(text)
    done = finish(start(*resume, "--task", "my_task.py"))
    assert "my_task: 60 samples of 20 tasks" in done.stdout and "mean score" in done.stdout
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["filter"]["kept"]
    steps = sorted(path.name for path in (tmp_path / "run" / "validation").iterdir())
    assert steps == ["step-00000.jsonl", "step-00003.jsonl", "step-00006.jsonl"]
    assert list(record["user_files"]) == ["my_task.py"] and record["data"]["task"] == "my_task"

    refused = start("scripts/evaluate.py", "run").end()
    assert refused.returncode == 2 and "pass --task my_task.py" in refused.stderr
    evaluate = ("scripts/evaluate.py", "run", "--task", "my_task.py", "--compare", "base", "--output-dir", "scores")
    assert "mean score" in finish(start(*evaluate)).stdout
    greedy = {line["task_id"]: line for line in results(tmp_path / "scores")}
    lines = (tmp_path / "run" / "evaluation" / "trained.samples.jsonl").read_text().splitlines()
    of_run = [line for line in map(json.loads, lines) if line["sample_index"] == "greedy"]
    assert [(greedy[line["task_id"]]["passed"], greedy[line["task_id"]]["score"]) for line in of_run] == [
        (line["passed"], line["score"]) for line in of_run
    ]
    samples = tmp_path / "samples.jsonl"
    lines = [{key: line[key] for key in ("task_id", "completion")} for line in of_run]
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    graded = finish(start("scripts/evaluate.py", samples, "--task", "my_task.py", "--output-dir", "graded"))
    assert "mean score" in graded.stdout
    assert [line["passed"] for line in results(tmp_path / "graded")] == [line["passed"] for line in of_run]

    finish(start("scripts/merge.py", "run"))
    card = finish(start("scripts/push.py", "run", "me/spelling", "--dry-run")).stdout
    assert "my_task" in card and str(tmp_path) not in card
