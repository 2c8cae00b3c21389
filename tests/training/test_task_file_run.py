"""One task file through every command: preview, filter, training, a kill, resume, evaluate, merge, dry-run push."""

import json
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


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_task_file_goes_through_every_command(warm, tmp_path):
    task_file = tmp_path / "my_task.py"
    source = (ROOT / "recipes" / "your_task.py").read_text()
    source += "\nREWARDS = ('correct_answer=1.0', 'xml_tag_count=0.5')\n"
    task_file.write_text(source)

    def start(script, *arguments):
        return warm.start(ROOT / script, *arguments, cwd=tmp_path)

    # A preview, and a run that is killed.
    recipe = ("recipes/gsm8k_lora.py", "--task", "my_task.py", "--output-dir", "run", *TINY)
    preview = finish(start(*recipe, "--preview")).stdout
    assert "correct_answer" in preview
    assert "xml_tag_count" in preview
    assert "problems solved" in preview

    process = start(*recipe, "--data.filter-by-difficulty")
    wait_for(process, (tmp_path / "run" / "checkpoints" / "checkpoint-4").exists)
    process.kill()

    # It goes on with the task file as it was, and only if the command names it.
    resume = ("recipes/gsm8k_lora.py", "--output-dir", "run", "--resume")
    refused = start(*resume).end()
    assert refused.returncode == 2
    assert "pass --task my_task.py to run it" in refused.stderr

    task_file.write_text(source + "# changed\n")
    refused = start(*resume, "--task", "my_task.py").end()
    assert refused.returncode == 2
    assert "my_task.py has changed since the run in run began" in refused.stderr

    task_file.write_text(source)
    done = finish(start(*resume, "--task", "my_task.py"))
    assert "my_task: 40 samples of 20 tasks, temperature 1, top-p 1, and 20 greedy ones, 0-shot" in done.stdout
    assert "mean score" in done.stdout

    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["filter"]["kept"]
    assert list(record["user_files"]) == ["my_task.py"]
    assert record["data"]["task"] == "my_task"
    steps = sorted(path.name for path in (tmp_path / "run" / "validation").iterdir())
    assert steps == ["step-00000.jsonl", "step-00003.jsonl", "step-00006.jsonl"]

    # A second evaluation of the adapter answers and scores as the run's own did.
    refused = start("scripts/evaluate.py", "run").end()
    assert refused.returncode == 2
    assert "pass --task my_task.py" in refused.stderr
    evaluate = ("scripts/evaluate.py", "run", "--task", "my_task.py", "--compare", "base", "--output-dir", "scores")
    assert "mean score" in finish(start(*evaluate)).stdout
    samples_of_run = read_lines(tmp_path / "run" / "evaluation" / "trained.samples.jsonl")
    greedy_of_run = [sample for sample in samples_of_run if sample["sample_index"] == "greedy"]
    results = {result["task_id"]: result for result in read_lines(tmp_path / "scores" / "results.jsonl")}
    for sample in greedy_of_run:
        result = results[sample["task_id"]]
        assert (result["passed"], result["score"]) == (sample["passed"], sample["score"])

    # Completions of another program are graded by the same check.
    completions = [{"task_id": sample["task_id"], "completion": sample["completion"]} for sample in greedy_of_run]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in completions))
    graded = finish(start("scripts/evaluate.py", "samples.jsonl", "--task", "my_task.py", "--output-dir", "graded"))
    assert "mean score" in graded.stdout
    results = read_lines(tmp_path / "graded" / "results.jsonl")
    assert [result["passed"] for result in results] == [sample["passed"] for sample in greedy_of_run]

    # The adapter is merged, and its card names the task but no path of this machine.
    finish(start("scripts/merge.py", "run"))
    card = finish(start("scripts/push.py", "run", "me/spelling", "--dry-run")).stdout
    assert "my_task" in card
    assert str(tmp_path) not in card
