"""A run's report: what it shows, and that whatever a model wrote stays text."""

import collections
import json
import re
import shutil

import pytest
from helpers.gguf_files import write_header
from helpers.graded_samples import samples
from helpers.made_runs import make_adapter
from helpers.report_runs import HOSTILE, completion, metrics, write_lines, write_run

from lora_grpo.cli.main import run_command
from lora_grpo.config.schema import DataConfig, Invocation, RunConfig, TrainConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.evaluation import read_report
from lora_grpo.evaluation.protocol import Protocol, Sampling
from lora_grpo.evaluation.report import Graded, make_report
from lora_grpo.evaluation.report import write_report as write_evaluation
from lora_grpo.files import atomic, lock
from lora_grpo.flags import read_flags
from lora_grpo.models import adapter_sha256
from lora_grpo.report import html
from lora_grpo.report.completions import COLUMNS, completion_table
from lora_grpo.report.facts import memory_by_phase, time_left
from lora_grpo.report.plots import plots_of
from lora_grpo.report.writing import ReportOptions, report, write_report
from lora_grpo.runs import claim_run, open_run
from lora_grpo.runs.reader import read_run


def page_of(folder):
    return write_report(folder).read_text(encoding="utf-8")


def plots(run):
    return plots_of(read_run(run), read_report(run / "evaluation"))


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def text_of(page):
    """The page without its data, its script and its style."""
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)


def test_everything_of_a_run_is_on_its_page(tmp_path):
    alarms = [{"step": 2, "name": "entropy", "message": "it is near 0", "stopped": True}]
    best = {"step": 2, "reward": 1.25, "accuracy": 0.5}
    run = write_run(tmp_path / "mine", alarms=alarms, best=best, plan={"memory": {"weights_gib": 1.5}})
    page = text_of(page_of(run))
    for text in ("mine", "gsm8k_lora", "3 of 200", "Complete.", "37.5", "pass@2", "0.667", "8 min 31 s"):
        assert text in page, text
    assert "time between stop and resume" not in page
    assert "Step 2, entropy, stopped the run." in page and "it is near 0" in page
    assert "step 2, validation reward 1.25, 50.0% correct" in page
    assert "Fixed problems (1)" in page and "<td>0 of 2</td><td>1 of 2</td>" in page
    assert "memory.weights_gib" in page and "recipes/gsm8k_lora.py --output-dir" in page


def test_the_peak_of_each_phase_stands_beside_its_plan(tmp_path):
    memory = {"planned_phases_gib": {"sampling": 5.05, "loss": 3.46, "backward": 4.4}}
    run = write_run(tmp_path / "on-gpu", memory=memory, peak_start_gib=2.5)
    peaks = [{"memory/loss": 3.5, "memory/loss_reserved": 4.25}, {"memory/loss": 3.75, "memory/loss_reserved": 4.0}]
    lines = [{"step": step, **metrics} for step, metrics in enumerate(peaks, start=1)]
    lines.append({"step": 3, "memory/sampling": 6.0, "memory/sampling_reserved": 6.5, "memory/validation": 1.25})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert memory_by_phase(read_run(run)) == [
        ("start", "", "2.50", ""),
        ("sampling", "5.05", "6.00", "6.50"),
        ("loss", "3.46", "3.75", "4.25"),
        ("validation", "", "1.25", ""),
    ]
    assert "<td>3.46</td><td>3.75</td><td>4.25</td>" in text_of(page_of(run))
    on_cpu = write_run(tmp_path / "on-cpu", memory=memory)
    assert "GPU memory by phase" in page_of(run) and "GPU memory by phase" not in page_of(on_cpu)


def test_the_report_says_where_the_gain_comes_from(tmp_path):
    run = write_run(tmp_path / "mine")
    assert "Where the gain comes from" not in page_of(run)  # its samples have no `flexible` rule
    report = read_report(run / "evaluation")
    gain = [{"name": name, "value": 0.25, "interval": [0.1, 0.4]} for name in ("gain in pass@1", "from the format")]
    write_evaluation(run / "evaluation", report.model_validate({**report.model_dump(), "gain": gain}))
    page = text_of(page_of(run))
    assert "from the format" in page and "+25.0 [+10.0, +40.0]" in page


def test_the_report_says_how_many_samples_are_left_out(tmp_path):
    run = write_run(tmp_path / "mine")
    assert "left out" not in text_of(page_of(run))
    report = read_report(run / "evaluation")
    evaluated = report.evaluated.model_copy(update={"failed": 3})
    write_evaluation(run / "evaluation", report.model_copy(update={"evaluated": evaluated}))
    assert f"the agent failed: samples 3 of {evaluated.label}" in text_of(page_of(run))


PROTOCOL_OF_GGUF = Protocol(
    task="starter",
    rows=4,
    data_sha256="",
    grading="",
    seed=0,
    sampling=Sampling(
        prompt_style="xml", few_shot=0, num_samples=2, temperature=1.0, top_p=1.0, max_completion_tokens=64
    ),
)


def add_gguf(run, kind, folder="gguf", adapter="adapter", sampled=None):
    """Write a GGUF file of an adapter and what its export leaves.

    Args:
        sampled: the sampled results of the file, with which the report of an evaluation is written.
    """
    path = run / folder / f"mine.{kind.upper()}.gguf"
    path.parent.mkdir(exist_ok=True)
    write_header(path, lora_grpo__adapter_sha256=adapter_sha256(run / adapter), general__name=kind)
    if sampled:
        source = {"gguf_sha256": atomic.sha256(path), "quantization": kind}
        of_file = Graded(kind, samples("----", sampled), source, PROTOCOL_OF_GGUF)
        of_merged = Graded(
            "merged", samples("----", ["++", "+-", "--", "--"]), {"quantization": "none"}, PROTOCOL_OF_GGUF
        )
        evaluation = run / "evaluation" / f"{folder}-{kind}"
        evaluation.mkdir()
        write_evaluation(evaluation, make_report((1,), of_file, of_merged))
    return path


def test_the_report_says_what_each_type_of_gguf_costs(tmp_path):
    run = write_run(tmp_path / "mine")
    make_adapter(run / "adapter")
    make_adapter(run / "best", alpha=8)
    assert "GGUF" not in text_of(page_of(run))
    add_gguf(run, "f16", sampled=["++", "+-", "--", "--"])
    add_gguf(run, "q8_0")
    add_gguf(run, "q4_0", sampled=["++", "--", "--", "--"])
    add_gguf(run, "q5_0", folder="best-gguf", adapter="best", sampled=["++", "+-", "--", "--"])
    page = text_of(page_of(run))
    rows = re.findall(r'<tr><th scope="row">(mine[^<]*)</th><td>([^<]*)</td><td>([^<]*)</td></tr>', page)
    assert [(name, size, score.split(" [")[0]) for name, size, score in rows] == [
        ("mine.F16.gguf", "1.1 kB", "37.5"),
        ("mine.Q4_0.gguf", "1.1 kB", "25.0"),
        ("mine.Q8_0.gguf", "1.1 kB", "–"),
        ("mine.Q5_0.gguf", "1.1 kB", "37.5"),
    ]
    assert "<h3>GGUF files</h3>" in page and "<h3>GGUF files of the best adapter</h3>" in page
    for text in ("mine.Q8_0.gguf", "1.1 kB", "q4_0 costs 12.5 points of pass@1 ["):
        assert text in page, text


@pytest.mark.parametrize("change", ["trained on", "another file", "deleted"])
def test_the_report_has_no_figures_of_gguf_files_of_another_adapter(tmp_path, change):
    run = write_run(tmp_path / "mine", evaluated=False)
    make_adapter(run / "adapter")
    path = add_gguf(run, "q4_0", sampled=["++", "--", "--", "--"])
    assert "mine.Q4_0.gguf" in text_of(page_of(run))  # also if the run itself was not evaluated
    if change == "trained on":
        shutil.rmtree(run / "adapter")
        make_adapter(run / "adapter", alpha=16)
    elif change == "another file":
        path.write_bytes(b"another")
    else:
        path.unlink()
    assert "mine.Q4_0.gguf" not in text_of(page_of(run))


def test_each_plot_is_on_the_page_and_a_png_file(tmp_path):
    run = write_run(tmp_path / "run", every=True)
    page = page_of(run)
    keys = [plot.key for plot in plots(run)]
    assert {path.stem for path in (run / "report").glob("*.png")} == set(keys)
    assert page.count("<img ") == page.count("<figure ") == len(keys)
    assert {"reward", "entropy", "length", "step-time", "pass-at-k"} <= set(keys)
    assert "kl" not in keys  # it was not logged


def test_validation_completions_are_on_the_page_from_step_0_on(tmp_path):
    run = write_run(tmp_path / "run", steps=4, stopped_early={"step": 4, "passes": 2})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[3] |= {"validation/reward": 1.5, "validation/accuracy": 0.75}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "validation").mkdir()
    for step, passed in ((0, False), (4, True)):
        line = {
            "step": step,
            "id": "w",
            "question": "q",
            "completion": f"after {step}",
            "passed": passed,
            "rewards": {"correct": float(passed)},
            "reward": float(passed),
        }
        (run / "validation" / f"step-{step:05d}.jsonl").write_text(json.dumps(line) + "\n")
    curves = {plot.key: plot.curves[0] for plot in plots(run)}
    assert (curves["validation-reward"].x, curves["validation-reward"].y) == ([0, 4], [0.0, 1.5])
    assert curves["reward"].x[0] == 1
    page = page_of(run)
    data = data_of(page)
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]
    assert [row["completion"] for row in rows if row["source"] == "validation"] == ["after 0", "after 4"]
    assert "4 of 200, stopped early" in page


# A run in any state


def test_a_running_run_says_so_and_how_to_update_the_page(tmp_path):
    run = write_run(tmp_path / "run", status="running", evaluated=False)
    assert "was killed or the machine was shut down" in page_of(run) and "Still running" not in page_of(run)
    with lock.holding(run):
        page = text_of(page_of(run))
    assert "Still running." in page and f"lora-grpo report {run}" in page
    assert "Not evaluated yet" in page


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, "about 3 h 17 min left, with the evaluation"),
        ({"stopped_early": {"step": 3, "passes": 2}}, "training is finished; the evaluation follows"),
    ],
)
def test_a_running_run_says_what_is_left(tmp_path, record, expected):
    run = write_run(tmp_path / "run", status="running", evaluated=False, **record)
    write_lines(run / "metrics.jsonl", [{**line, "step_time": 60.0} for line in metrics(3)])
    with lock.holding(run):
        assert time_left(read_run(run)) == expected


def test_too_many_completions_are_sampled_evenly_and_the_page_says_so(tmp_path, monkeypatch):
    completions_by_step = {1: 2, 2: 40, 3: 40}
    lines = []
    for step, number in completions_by_step.items():
        lines += [completion(step, f"{step}.{index}", 0.0) for index in range(number)]
    run = write_run(tmp_path / "run", completions=lines, evaluated=False)
    table = completion_table(read_run(run), max_shown=20)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in table.rows]
    assert collections.Counter(row["step"] for row in rows) == {1: 1, 2: 10, 3: 10}
    assert table.total == 82
    assert [row["completion"] for row in rows[1:4]] == ["2.0", "2.4", "2.8"]
    monkeypatch.setattr(html, "completion_table", lambda run: completion_table(run, max_shown=20))
    assert "21 of 82 completions, sampled evenly" in page_of(run)


# What a model wrote is text


def test_nothing_a_model_wrote_is_markup_in_the_page(tmp_path):
    lines = [completion(1, text, 0.0, question=text, extracted=text, status=text) for text in HOSTILE]
    settings = RunConfig(output_dir=HOSTILE[0], grpo=HOSTILE, data=DataConfig(train=HOSTILE[2]))
    alarms = [{"step": 1, "name": HOSTILE[2], "message": HOSTILE[1], "stopped": False}]
    record = {"error": HOSTILE[1], "alarms": alarms, "recipe": HOSTILE[3], "status": "failed"}
    run = write_run(tmp_path / "run", completions=lines, config=settings, **record)
    metrics = [{"step": 1, "reward": 1.0, f"rewards/{HOSTILE[1]}$x$/mean": 1.0, f"rewards/{HOSTILE[3]}/mean": 1.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    page = page_of(run)
    assert page.count("<script") == 2 and page.count("</script") == 2 and "<!--" not in page
    assert page.count("<img") == page.count("<figure")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\ufeff]", page)
    data = data_of(page)
    column = data["columns"].index("completion")
    assert [row[column] for row in data["rows"][: len(HOSTILE)]] == list(HOSTILE)


def test_settings_are_compared_with_the_preset(tmp_path):
    config = RunConfig(output_dir="x", preset="12gb", train=TrainConfig(max_steps=7, warmup_steps=3))
    run = write_run(tmp_path / "run", config=config, changed_settings={"train.max_steps": 250})
    row = '<tr><th scope="row">train.max_steps</th><td>7</td><td class="quiet">250</td></tr>'
    page = page_of(run)
    assert '<th scope="col">preset 12gb</th>' in page and row in page and page.count('<td class="quiet">') == 1


# Wrong inputs, and the end of a run


def exit_code(*arguments):
    words = list(map(str, arguments))
    return run_command(lambda: report(read_flags(ReportOptions, words, "")))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "run.json").unlink(), "run.json does not exist; give the folder of a run"),
        (
            lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n'),
            "metrics.jsonl:2: expected",
        ),
        (lambda run: (run / "evaluation" / "report.json").write_text("{}"), "is not an evaluation report"),
    ],
)
def test_a_folder_that_cannot_be_read_is_a_one_line_error(tmp_path, capsys, damage, message):
    run = write_run(tmp_path / "run")
    damage(run)
    assert exit_code(run) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and message in printed.err and printed.err.count("\n") == 1
    assert printed.out == "" and not (run / "report").exists()


@pytest.mark.parametrize(
    ("error", "code", "state"),
    [
        (RunError("it broke"), 1, "Failed: it broke"),
        (UserError("give another"), 2, "Failed: give another"),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_a_run_that_ends_early_gets_its_report(tmp_path, capsys, error, code, state):
    folder = tmp_path / "run"

    def main():
        rows = {"train": {"sha256": "aa"}, "eval": {"sha256": "bb"}}
        config = RunConfig(output_dir=str(folder))
        claim_run(config, Invocation())
        run = open_run(config, Invocation(), "gsm8k_lora", rows)
        run.begin({"base_model": "starter"})
        raise error

    assert run_command(main) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"report    {folder / 'report' / 'report.html'}" and len(lines) == 2
    assert state in (folder / "report" / "report.html").read_text()
    lock.held.pop().release()


@pytest.mark.parametrize(
    ("kind", "description"),
    [
        ("base", "the base without an adapter"),
        ("adapter", "an adapter on the same base"),
        ("model", "owner/large in 4 bits"),
    ],
)
def test_the_page_names_the_teacher_and_plots_the_distance_to_it(tmp_path, kind, description):
    teacher = {"name": "grpo", "kind": kind, "base_model": "owner/large", "bits": 4, "has_own_prompt": True}
    lines = [{"step": step, "reward": 1.0, "teacher/kl": 1 / step, "teacher/disagreement": 0.1} for step in (1, 2, 3)]
    run = write_run(tmp_path / "mine", teacher=teacher)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = text_of(page_of(run))
    assert f"grpo: {description}, with prompts of its own; sampled, weight 1, rewards 1" in page
    assert "KL to the teacher" in page and "Disagreement with the teacher" in page
