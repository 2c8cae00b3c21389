"""`--eval.also`: other tasks before and after training, on the bundled model."""

import json
import shutil

import pytest
from helpers.tiny_runs import TINY

from lora_grpo.cli import parse
from lora_grpo.config import replace
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.data import fit_data, load_data, start_sandbox
from lora_grpo.errors import UserError
from lora_grpo.evaluation import Joint, read_also
from lora_grpo.hub.push import prepare
from lora_grpo.memory.show import work_text
from lora_grpo.memory.work import Work
from lora_grpo.models.base_model import load_tokenizer
from lora_grpo.pipeline import train_and_evaluate
from lora_grpo.runs import claim_run, open_run, read_record
from lora_grpo.settings import user_files
from lora_grpo.tasks import mathematics

ALSO = ("starter-code", "math500")


def write_sums(path, sign="+"):
    """Write rows in the form of MATH-500, with problems such as "2 + 1 ="."""
    rows = [
        {"problem": f"{number} {sign} 1 =", "answer": str(number + 1), "solution": "boxed"} for number in range(2, 8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder, how, also=ALSO):
    """Train as a recipe does, and return the run."""
    tiny = {
        **TINY,
        "eval": {"num_samples": 0, "also": also, "also_limit": 5},
        "train": {**TINY["train"], "max_steps": 2},
    }
    config = replace(RunConfig(output_dir=str(folder)), tiny)
    start_sandbox(config.data, config.sandbox, config.eval.also)
    data = load_data(config)
    claim_run(config, how)
    run = open_run(config, how, "test", data.record)
    train_and_evaluate(run, fit_data(data, load_tokenizer(config.model), config))
    return run


@pytest.fixture(scope="module")
def math_rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "math.jsonl"
    write_sums(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(mathematics._DATASETS["math500"], "eval", str(path))
        yield path


@pytest.fixture(scope="module")
def done(tmp_path_factory, math_rows):
    """The folder of a finished run."""
    return train(tmp_path_factory.mktemp("also") / "run", Invocation()).folder


def files(folder):
    return {path.name: path.read_bytes() for path in (folder / "evaluation" / "joint" / "also").iterdir()}


def test_the_tasks_are_in_the_record(done):
    joint = read_also(done / "evaluation")
    assert {row.task: (row.problems, row.metric) for row in joint.rows} == dict.fromkeys(ALSO, (5, "greedy"))
    record = read_record(done)
    assert record["data"]["also"].keys() == {*ALSO}
    results = record["results"]["also"]
    assert results["statement"] == joint.statement
    assert Joint(**{**results, "statement": None}) == joint


def test_the_tasks_are_on_the_page_and_in_the_card(done):
    page = (done / "report" / "report.html").read_text()
    assert "What else changed" in page and "math500" in page
    files, *_ = prepare(done / "adapter", "adapter", "you/x")
    [card] = [file.read().decode() for file in files if file.name == "README.md"]
    assert "What else changed" in card and "| math500 |" in card and "`math500` were measured" in card


def test_training_is_the_same_with_and_without_them(done, tmp_path):
    train(tmp_path / "plain", Invocation(), also=())

    def rewards(folder):
        return [json.loads(line)["reward"] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    assert rewards(done) == rewards(tmp_path / "plain")
    assert read_also(tmp_path / "plain" / "evaluation") is None
    assert not (tmp_path / "plain" / "evaluation" / "joint").exists()
    assert "What else changed" not in (tmp_path / "plain" / "report" / "report.html").read_text()


def test_a_killed_run_continues_with_the_same_samples(done, tmp_path, capsys):
    run = shutil.copytree(done, tmp_path / "run")
    complete_files = files(run)
    samples = run / "evaluation" / "joint" / "also" / "math500.trained.samples.jsonl"
    samples.write_text(samples.read_text()[:-40])
    for name in ("report.json", "report.md"):
        samples.with_name(name).unlink()
    train(run, Invocation(resume=True))
    assert files(run) == complete_files
    assert capsys.readouterr().out.splitlines()[-1] == read_also(run / "evaluation").statement


def test_a_run_whose_other_rows_changed_does_not_continue(done, tmp_path, math_rows, monkeypatch):
    run = shutil.copytree(done, tmp_path / "run")
    changed_rows = tmp_path / "changed.jsonl"
    write_sums(changed_rows, sign="-")
    monkeypatch.setitem(mathematics._DATASETS["math500"], "eval", str(changed_rows))
    with pytest.raises(UserError, match="math500"):
        train(run, Invocation(resume=True))


def options(*flags):
    return parse(["--preset", "starter", *flags], recipe="mine", description="", presets={"starter": TINY})[0]


TASK_FILE = "def load(split): ...\ndef check(completion, row): ...\n"
WRONG_NAMES = {
    "an unknown task": ["nowhere"],
    "the task that is evaluated anyway": ["starter"],
    "a task twice": ["mbpp", "mbpp"],
    "a missing file": ["missing.py"],
    "two files of one name": ["a/x.py", "b/x.py"],
}


@pytest.mark.parametrize("names", WRONG_NAMES.values(), ids=WRONG_NAMES)
def test_a_wrong_name_is_refused_in_one_line(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text(TASK_FILE)
    with pytest.raises(UserError) as error:
        options("--eval.also", *names)
    assert "\n" not in str(error.value)


def test_a_task_file_runs_only_if_the_command_names_it(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(TASK_FILE)
    assert [*user_files(options("--eval.also", str(mine)))] == [str(mine)]
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"eval": {"also": [str(mine)]}}))
    with pytest.raises(UserError, match=r"--eval\.also"):
        options("--config", str(settings))
    assert options("--config", str(settings), "--eval.also", str(mine)).eval.also == (str(mine),)


def test_the_plan_counts_their_completions():
    config = options("--eval.also", "math500", "mbpp", "--eval.also-limit", "40")
    assert "80 more" in work_text(Work.of(config), config, 64)
