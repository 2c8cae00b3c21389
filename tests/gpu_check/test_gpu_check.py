"""The GPU check on a CPU: real rows of the real recipe at tiny size, and scheduling with stand-ins for the recipe."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import stand_in_model
from helpers.model_configs import TINY_QWEN2 as TINY

from lora_grpo.config import replace
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.errors import RunError
from lora_grpo.gpu_check import measure
from lora_grpo.gpu_check.measure import CASES, SHORT_CASES, EngineCase, Options, check_gpu, conclude
from lora_grpo.hardware import save_measured_engine
from lora_grpo.hardware.measured_engine import measured_engine_file
from lora_grpo.memory import make_plan, show_plan, summary
from lora_grpo.models import unsloth_policy
from lora_grpo.pipeline import preview_run

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "gsm8k_lora.py"
ON_CPU = (
    *("--preset", "starter", "--sampling.max-completion-tokens", "8", "--sampling.num-generations", "4"),
    *("--train.prompts-per-step", "2", "--train.micro-batch-size", "4"),
    *("--rewards", "correct_answer=2.0", "pattern:x1[0-3][0-9][0-9]=1.0"),  # one of 400 words of 4096, in 8
)
MACHINE = {
    "gpu": "Card with 16 GiB",
    "versions": {"python": "3.12"},
    "started": "now",
}


def run_cases(cases, recipe, output, seconds=60.0, arguments=(), short=False):
    options = Options(seconds / 60, output, short)
    return measure.run_cases(cases, TINY, options, recipe, MACHINE, arguments)


PEFT = EngineCase("peft", "transformers")
UNSLOTH = EngineCase("unsloth", "transformers")


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Return a function that writes a program in place of the recipe. No model is built and no package is missing.

    Programs have the functions of helpers/stand_in_recipe.py.
    """
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("lora_grpo.gpu_check.measure.build_command", stand_in_model.build_command)
    return lambda program: write_stand_in(tmp_path / "recipe.py", program)


def write_stand_in(path, program):
    header = f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    header += "from helpers.stand_in_recipe import finish, flags, hang\n"
    path.write_text(header + textwrap.dedent(program))
    return path


def wait_until_written(path, process):
    """Wait until a file has a text, which a child of a process writes, and return the text."""
    while not path.exists() or not path.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    return path.read_text()


def is_running(pid):
    """Return whether a process runs. One that has ended and was not waited for does not."""
    stat = Path("/proc") / pid / "stat"
    return stat.exists() and stat.read_text().split()[2] != "Z"


def results_of(output):
    return json.loads((output / "results.json").read_text())


def table_of(output):
    """Return the rows of results.md: their cells by heading."""
    lines = (output / "results.md").read_text().splitlines()
    cells = []
    for line in lines:
        if line.startswith("|"):
            cells.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    headings, _, *rows = cells
    return [dict(zip(headings, row, strict=True)) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "statuses"),
    [
        pytest.param(SHORT_CASES, ["skipped", "skipped", "skipped", "ran", "ran"], id="short"),
        pytest.param(CASES, ["ran", "skipped", "skipped", "ran", "ran"], id="long", marks=pytest.mark.exhaustive),
    ],
)
def test_every_row_really_runs_with_the_engine_of_a_cpu(tmp_path, monkeypatch, cases, statuses):
    find_spec = importlib.util.find_spec
    missing = ("unsloth", "vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else find_spec(name))
    output = tmp_path / "out"
    results = run_cases(cases, RECIPE, output, 600, ON_CPU, short=cases is SHORT_CASES)
    logs = [Path(result["log"]).read_text() for result in results if "log" in result]
    assert [result["status"] for result in results] == statuses, logs

    results_by_name = {result["name"]: result for result in results if result["status"] == "ran"}
    result = results_by_name["peft + transformers"]
    resumed = results_by_name["peft + transformers, resumed"]
    assert result["steps"] == 4 and resumed["steps"] == 1
    assert result["completion_tokens"] == 8 and result["compilation"] is not None
    phases = result["time/rollouts"] + result["time/rewards"] + result["time/training"]
    assert phases == pytest.approx(result["step_time"], rel=0.5)  # medians of different steps, some without a pass
    assert result["logprob_check"]["difference"] <= result["logprob_check"]["tolerance"]

    # A row that was too long would have been left out, with a line that begins with "left".
    assert not re.search(r"^\s*left\b", "\n".join(logs), re.MULTILINE)
    assert results_of(output)["rows"] == results and len(table_of(output)) == 5
    assert not list(output.glob(".check-*"))


def test_what_is_read_of_a_run(stand_in, tmp_path):
    output = tmp_path / "out"
    [result, resumed] = run_cases([PEFT, EngineCase(resumes=True)], stand_in("finish()"), output)
    expected = {
        "status": "ran",
        "reason": None,
        "step_time": 11,  # the median without the first step
        "compilation": 39,  # the first step's seconds above the median
        "time/rollouts": 5.5,
        "time/rewards": 0.5,
        "time/training": 4,
        "rollouts/tokens_per_second": 6000,
        "micro_batch_size": 16,
        "planned_gib": 4.25,
        "torch_peak_gib": 3,
    }
    assert {name: result[name] for name in expected} == expected
    expected_of_resumed = {"status": "ran", "engine": "peft", "step_time": 40, "compilation": None}
    assert {name: resumed[name] for name in expected_of_resumed} == expected_of_resumed

    row, row_of_resumed = table_of(output)
    cells = {
        "compilation, s": "39",
        "step, s": "11.00",
        "tokens/s": "6,000",
        "planned, GiB": "4.25",
        "torch peak": "3.00",
    }
    assert {heading: row[heading] for heading in cells} == cells
    assert "0.012 of 0.05" in row["notes"] and "verify: T=132 maxseg=66" in row["notes"]
    assert "includes compilation" in row_of_resumed["notes"]


def test_a_row_that_fails_is_quoted_and_the_next_one_runs(stand_in, tmp_path):
    program = """
        if flags.engine == "peft":
            print("Traceback", file=sys.stderr)
            print("error: the GPU's memory did not suffice")
            print("bye")
            sys.exit(1)
        finish()
    """
    output = tmp_path / "out"
    failed, ran = run_cases([PEFT, UNSLOTH], stand_in(program), output)
    assert (failed["status"], ran["status"]) == ("failed", "ran")
    assert failed["reason"].startswith("error: the GPU's memory did not suffice (")
    assert failed["log"] in failed["reason"] and "bye" in Path(failed["log"]).read_text()
    assert table_of(output)[0]["notes"].startswith("error: the GPU's memory did not suffice")


def test_a_row_that_learns_nothing_has_failed(stand_in, tmp_path):
    [result] = run_cases([PEFT], stand_in("finish(gradient=0.0)"), tmp_path / "out")
    assert result["status"] == "failed" and result["reason"].startswith("no step had a gradient")


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        (
            "print('waiting', flush=True)\nhang()",
            "not finished",
            r"no step within \d s \(.*--minutes\); last: waiting",
        ),
        ("finish()\nhang()", "ran", r"stopped after \d s"),
    ],
    ids=["without a step", "with steps"],
)
def test_a_row_out_of_time_keeps_its_steps_and_without_any_is_not_finished(stand_in, tmp_path, program, status, reason):
    [result] = run_cases([PEFT], stand_in(program), tmp_path / "out", 6.0)
    assert result["status"] == status and re.fullmatch(reason, result["reason"])


# The whole command


@pytest.fixture
def card(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '0, GPU-1, Card, 16376, 16000, 580.65.06, 8.9'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lora_grpo.gpu_check.measure._TRY_TORCH", "")
    # The check sets these, and the test puts them back.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


SHORT_CHECK = [sys.executable, str(ROOT / "tests" / "helpers" / "short_gpu_check.py")]


def test_an_interrupted_check_prints_its_table_and_leaves_no_process(card, tmp_path):
    output = tmp_path / "out"
    pid_file = tmp_path / "pid"
    program = f"""
        finish()
        if flags.engine == "unsloth":
            hang({str(pid_file)!r})
    """
    recipe = write_stand_in(tmp_path / "recipe.py", program)
    process = subprocess.Popen(
        [*SHORT_CHECK, recipe, output], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    recipe_pid = wait_until_written(pid_file, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in stderr

    rows = table_of(output)
    assert [row["status"] for row in rows] == ["ran", "not finished", "not run"]
    assert [row["step, s"] for row in rows] == ["11.00", "11.00", "–"]  # the steps before the interruption
    assert rows[1]["notes"].startswith("interrupted") and rows[2]["notes"] == "–"
    assert stdout == (output / "results.md").read_text() + "\n"
    assert not is_running(recipe_pid)


def test_without_a_gpu_one_line_says_so(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), "--output", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 2 and ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert line.startswith("error: no NVIDIA GPU found (nvidia-smi is not on the PATH; ")
    assert not (tmp_path / "out").exists()


class Planned(NamedTuple):
    """What a run on the card gets for `auto`."""

    engine: str
    backend: str
    first_line: str
    """Of what --plan says."""


def planned(tmp_path, *, resume=False, **changes):
    model = tmp_path / "planned"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(TINY))
    folder = tmp_path / ("begun" if resume else "new")
    config = replace(RunConfig(output_dir=str(folder)), {"model": {"name": str(model)}})
    if resume:
        folder.mkdir()
        record = {"lora_grpo_run": 1, "config": config.to_dict(), "versions": {}, "data": {}, "policy": {}}
        (folder / "run.json").write_text(json.dumps(record))
    config, plan = make_plan(replace(config, changes), Invocation(resume=resume))
    return Planned(config.model.engine, config.sampling.backend, next(summary(plan)))


UNSLOTH_IS_FASTER = """
    if flags.engine == "peft":
        finish()
    elif flags.bits == "4":
        finish(slowness=0.5)
    else:
        finish(slowness=0.4)
"""


@pytest.mark.parametrize("minutes", [4, 30])
def test_the_search_for_launch_settings_ends_before_it_is_killed(card, stand_in, tmp_path, monkeypatch, minutes):
    started = []

    def run(arguments, log, seconds):
        started.append((arguments, seconds))
        return measure.Measured(0, "", None)

    monkeypatch.setattr(measure, "run_measured", run)
    monkeypatch.setattr(measure, "run_cases", lambda *arguments: [])
    check_gpu(Options(minutes=minutes, output=tmp_path / "out"), stand_in(""))
    [(arguments, limit)] = [entry for entry in started if "lora_grpo.gpu_check.tune_kernels" in entry[0]]
    assert 0 < float(arguments[-1]) < limit <= 15 * minutes


def test_from_the_card_to_the_table(card, stand_in, tmp_path, capsys):
    output = tmp_path / "out"
    check_gpu(Options(output=output), stand_in(UNSLOTH_IS_FASTER))
    printed, progress = capsys.readouterr()
    progress_lines = progress.splitlines()
    assert progress_lines[0] == "Card with 16 GiB"
    assert progress_lines[1].startswith("LoRA kernels: not tuned, ")  # this machine has no GPU; the check goes on
    assert (output / "kernels.log").exists()
    assert re.fullmatch(r"peft \+ transformers \(at most \d+ s\): ran, 11\.00 s per step", progress_lines[2])

    assert printed.startswith("Card with 16 GiB; driver 580.65.06, ")
    assert [row["run"] for row in table_of(output)] == [
        "peft + transformers",
        "peft + vllm",
        "unsloth + vllm",
        "unsloth + vllm, 16 bits",
        "unsloth + vllm, resumed",
    ]
    fastest, bits = printed.splitlines()[-2:]
    assert "unsloth + vllm, 5.50 s per step" in fastest
    assert bits == "16 bits: 1.2x the tokens per second, 1.2x the steps for 0.6 GiB more; pass --model.bits 16"
    results = results_of(output)
    assert results["versions"]["torch"] and results["rows"][0]["status"] == "ran"


def test_from_the_card_to_the_choice_of_auto(card, gpu_packages, stand_in, tmp_path, monkeypatch):
    before = planned(tmp_path)
    assert (before.engine, before.backend) == ("auto", "auto") and before.first_line.startswith("base ")
    check_gpu(Options(output=tmp_path / "out"), stand_in(UNSLOTH_IS_FASTER))
    after = planned(tmp_path)
    assert (after.engine, after.backend) == ("unsloth", "vllm")
    assert after.first_line.startswith("engine      unsloth") and "check-gpu" in after.first_line

    # What the user chose, what the engine does not support, and a run that has begun without it, stay as they are.
    assert planned(tmp_path, resume=True) == before
    for changes in ({"sampling": {"backend": "transformers"}}, {"model": {"engine": "peft"}}, {"lora": {"dora": True}}):
        config = replace(RunConfig(), changes)
        unchanged = planned(tmp_path, **changes)
        assert (unchanged.engine, unchanged.backend) == (config.model.engine, config.sampling.backend)

    # A preset for the CPU beside a GPU whose driver is too old.
    monkeypatch.setattr("lora_grpo.hardware.machine.driver_problem", lambda gpu: "too old")
    on_cpu = planned(tmp_path, preset="starter")
    assert (on_cpu.engine, on_cpu.backend) == ("auto", "auto")


@pytest.mark.parametrize("model_type", ["qwen2", "olmo"])  # whose memory is planned, and is not
def test_a_plan_and_a_run_name_the_measured_choice_with_its_date_and_file(
    card, gpu_packages, tmp_path, capsys, model_type
):
    path = save_measured_engine("unsloth", "vllm", "Card")
    line = f"engine      unsloth, with vllm the fastest in check-gpu on {date.today().isoformat()} ({path})"
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": model_type}))
    config = RunConfig(output_dir="out")
    batches = {"train": {"micro_batch_size": 1}, "model": {"name": str(tmp_path), "gpu_memory_share": 0.5}}
    _, plan = make_plan(replace(config, batches), Invocation())
    assert [*summary(plan)].count(line) == 1
    show_plan(plan)
    assert capsys.readouterr().out.splitlines().count(line) == 1


def test_a_preview_names_the_measured_choice_too(card, monkeypatch, capsys):
    # Unsloth may be installed. Once imported, it changes TRL for the tests that follow.
    monkeypatch.setattr(unsloth_policy, "import_unsloth", lambda: None)
    monkeypatch.setattr("lora_grpo.pipeline.preview", lambda config, data: config)
    config = replace(RunConfig(), {"monitor": {"rows": 0}})
    preview_run(config, Invocation(preview=True))
    assert "check-gpu" not in capsys.readouterr().err
    path = save_measured_engine("peft", "transformers", "Card")
    previewed = preview_run(config, Invocation(preview=True))
    assert (previewed.model.engine, previewed.sampling.backend) == ("peft", "transformers")
    line = f"engine      peft, with transformers the fastest in check-gpu on {date.today().isoformat()} ({path})"
    assert capsys.readouterr().err.splitlines().count(line) == 1


@pytest.mark.parametrize(
    ("program", "seconds", "message", "some_ran"),
    [
        ("sys.exit(1)", 300, "peft + transformers failed, the log is empty", False),
        (
            "if flags.backend == 'vllm':\n    sys.exit(1)\nfinish()",
            300,
            "unsloth + vllm failed, the log is empty",
            True,
        ),
        ("hang()", 1, "unsloth + vllm not finished, no step within 1 s", False),
    ],
    ids=["all fail", "vLLM fails", "out of time"],
)
def test_a_check_with_an_open_or_failed_row_is_no_success(
    card, stand_in, tmp_path, monkeypatch, program, seconds, message, some_ran
):
    monkeypatch.setattr("lora_grpo.gpu_check.measure._SHORT_SECONDS", seconds)
    with pytest.raises(RunError, match=re.escape(message)):
        check_gpu(Options(output=tmp_path / "out", short=True), stand_in(program))
    statuses = [row["status"] for row in table_of(tmp_path / "out")]
    assert ("ran" in statuses) == some_ran
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def results(card, stand_in, tmp_path):
    """The results of a check in which PEFT with 16 bits is slower than with 4."""
    program = "finish(slowness=1.5 if (flags.engine, flags.bits) == ('peft', '16') else 1.0)"
    return run_cases(CASES, stand_in(program), tmp_path / "out")


def test_the_fastest_engine_is_saved(results):
    assert "pass --model.bits 4" in conclude(results, "Card")[-1]
    assert json.loads(measured_engine_file().read_text())["engine"] == "peft"


@pytest.mark.parametrize("change", [{"status": "not finished", "steps": 0}, {"status": "failed"}, {"steps": 1}])
def test_auto_does_not_change_unless_every_engine_was_measured(results, change):
    assert results[2]["name"] == "unsloth + vllm"
    results[2].update(change)
    conclude(results, "Card")
    assert not measured_engine_file().exists()


def test_an_engine_that_is_not_installed_need_not_be_measured(results):
    for result in results:
        if "vllm" in result["name"]:
            result.update(status="skipped", steps=0)
    conclude(results, "Card")
    assert measured_engine_file().exists()


def test_a_choice_that_cannot_be_saved_does_not_fail_the_check(results):
    measured_engine_file().parent.parent.mkdir()
    measured_engine_file().parent.touch()  # not a folder
    assert "peft + transformers, 11.00 s per step" in conclude(results, "Card")[1]


RAN, SKIPPED, FAILED = "ran", "skipped", "failed"


@pytest.mark.parametrize(
    ("condition", "statuses"),
    [
        ("flags.engine == 'peft' and flags.backend == 'vllm'", [RAN, SKIPPED, RAN, RAN, RAN]),
        ("flags.bits == '16'", [RAN, RAN, RAN, SKIPPED, RAN]),
        ("flags.resumes", [RAN, RAN, RAN, RAN, FAILED]),
        ("flags.engine == 'unsloth'", [RAN, RAN, FAILED, RAN, RAN]),
        ("True", [FAILED, SKIPPED, FAILED, SKIPPED, SKIPPED]),
    ],
)
def test_only_vllm_with_peft_and_16_bits_may_be_refused(card, stand_in, tmp_path, condition, statuses):
    program = f"""
        if {condition}:
            sys.exit(2)
        finish()
    """
    results = run_cases(CASES, stand_in(program), tmp_path / "out")
    assert [result["status"] for result in results] == statuses


def test_a_killed_check_leaves_no_run_and_the_next_one_removes_its_model(card, stand_in, tmp_path):
    output = tmp_path / "out"
    pid_file = tmp_path / "pid"
    recipe = stand_in(f"hang({str(pid_file)!r})")
    process = subprocess.Popen([*SHORT_CHECK, recipe, output], stderr=subprocess.DEVNULL)
    recipe_pid = wait_until_written(pid_file, process)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while is_running(recipe_pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(output.glob(".check-*"))
    check_gpu(Options(output=output), stand_in("finish()"))
    assert not list(output.glob(".check-*"))


def test_sixteen_bits_that_do_not_fit_are_no_failure(card, stand_in, tmp_path, capsys):
    program = """
        if flags.bits == "16":
            print("error: it does not fit")
            sys.exit(2)
        finish()
    """
    check_gpu(Options(output=tmp_path / "out"), stand_in(program))
    assert table_of(tmp_path / "out")[3]["status"] == "skipped"
    assert "x the tokens" not in capsys.readouterr().out


def measured_on(**machine):
    """Return a function that changes the machine of a measurement."""

    def change(text):
        measurement = json.loads(text)
        return json.dumps({**measurement, "machine": {**measurement["machine"], **machine}})

    return change


UNUSABLE_FILES = {
    "another GPU": (measured_on(gpu="Card 2"), 0),
    "another version": (measured_on(trl="0.1"), 0),
    "truncated": (lambda text: text[:-9], 1),
    "an unknown engine": (lambda text: json.dumps({**json.loads(text), "engine": "jax"}), 1),
    "deep nesting": (lambda text: "[" * 100_000, 1),
    "a list": (lambda text: "[]", 1),
    "not UTF-8": (lambda text: "\udcff", 1),
}
"""For each, how the text of the file changes, and the number of lines about it on stderr."""


@pytest.mark.parametrize(("change", "lines"), UNUSABLE_FILES.values(), ids=UNUSABLE_FILES)
def test_a_measurement_of_another_machine_or_a_damaged_file_is_ignored(
    card, gpu_packages, tmp_path, capsys, change, lines
):
    before = planned(tmp_path)
    path = save_measured_engine("unsloth", "vllm", "Card")
    assert planned(tmp_path) != before
    path.write_text(change(path.read_text()), errors="surrogateescape")
    capsys.readouterr()
    assert planned(tmp_path) == before
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_a_folder_in_place_of_the_measurement_is_ignored(card, tmp_path):
    before = planned(tmp_path)
    measured_engine_file().mkdir(parents=True)
    assert planned(tmp_path) == before


@pytest.mark.engines
def test_a_row_of_another_engine_and_backend_really_runs(tmp_path):
    for package in ("unsloth", "vllm"):
        pytest.importorskip(package, reason=f"{package} is not installed: make engines")
    larger_heads = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = {**TINY, **larger_heads}  # which vLLM's CPU build takes
    # The one combination that no other test trains by.
    [result] = measure.run_cases([EngineCase()], model, Options(15, tmp_path / "out"), RECIPE, MACHINE, ON_CPU)
    assert (result["status"], result["reason"]) == ("ran", None)
    assert result["logprob_check"]["difference"] < result["logprob_check"]["tolerance"]
