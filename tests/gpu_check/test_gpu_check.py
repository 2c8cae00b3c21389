"""The GPU check on a CPU: real rows of the real recipe at tiny size, and scheduling with stand-ins for the recipe."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import pytest
from helpers.model_configs import TINY_QWEN2 as TINY

from lora_grpo.config import replace
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.errors import RunError
from lora_grpo.gpu_check import measure
from lora_grpo.gpu_check.measure import CASES, SHORT_CASES, EngineCase, Options, check_gpu, conclude
from lora_grpo.hardware import save_measured_engine
from lora_grpo.memory import make_plan, show_plan, summary
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


PEFT, UNSLOTH = EngineCase("peft", "transformers"), EngineCase("unsloth", "transformers")


WITHOUT_WEIGHTS = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir()
(folder / "config.json").write_text(sys.argv[2])
(folder / "model.safetensors").touch()
"""


def built_without_weights(folder, config):
    return [sys.executable, "-c", WITHOUT_WEIGHTS, str(folder), json.dumps(config)]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Return a function that writes a script in place of the recipe. No model is built and no package is missing."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("lora_grpo.gpu_check.measure.build_command", built_without_weights)

    def make(script):
        path = tmp_path / "recipe.py"
        path.write_text("import json, os, sys, time\nfrom pathlib import Path\n" + script)
        return path

    return make


FINISHES = """
def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]

resumes, bits = "--resume" in sys.argv, value("--model.bits")
folder = Path(value("--output-dir"))
folder.mkdir(exist_ok=resumes)
memory = {"micro_batch_size": 16, "planned_phases_gib": {"sampling": 3.5, "training": 4.25}}
check = {"difference": 0.0123, "tolerance": 0.05, "moved": 0.3}
record = {"config": {"train": {"micro_batch_size": None}}, "memory": memory, "logprob_check": check}
(folder / "run.json").write_text(json.dumps({**record, "peak_gpu_memory_gib": 3.0 if bits == "4" else 3.6}))
print("[Unsloth] GRPO seq-packing (grad) verify: T=132 maxseg=66 packed-vs-perrow max|d|=0.0312", flush=True)
with (folder / "metrics.jsonl").open("a") as file:
    for number, seconds in [(5, 40.0)] if resumes else enumerate((50.0, 10.0, 12.0, 11.0), start=1):
        seconds *= SPEED.get((value("--model.engine"), bits), 1)
        step = {"step": number, "step_time": seconds, "time/rollouts": seconds / 2, "time/rewards": 0.5,
                "time/training": 4.0, "rollouts/tokens_per_second": 66000 / seconds, "grad_norm": GRAD,
                "completions/mean_length": 512.0, "sampling/sampling_logp_difference/mean": 0.02}
        file.write(json.dumps(step) + "\\n")
"""


def finishes(gradient="0.25", speed=()):
    return f"GRAD, SPEED = {gradient}, {dict(speed)}\n{FINISHES}"


def read(output):
    return json.loads((output / "results.json").read_text()), (output / "results.md").read_text()


def table_of(output):
    """The rows of results.md: their cells by heading."""
    lines = [line for line in read(output)[1].splitlines() if line.startswith("|")]
    heads, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [dict(zip(heads, row, strict=True)) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "statuses"), [(SHORT_CASES, "s s s r r"), (CASES, "r s s r r")])
def test_every_row_really_runs_with_the_engine_of_a_cpu(tmp_path, monkeypatch, rows, statuses):
    find_spec = importlib.util.find_spec
    missing = ("unsloth", "vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else find_spec(name))
    results = run_cases(rows, RECIPE, tmp_path / "out", 600, ON_CPU, short=rows is SHORT_CASES)
    logs = [Path(result["log"]).read_text() for result in results if "log" in result]
    assert " ".join(result["status"][0] for result in results) == statuses, logs
    by_name = {result["name"]: result for result in results if result["status"] == "ran"}
    result, resumed = by_name["peft + transformers"], by_name["peft + transformers, resumed"]
    assert result["steps"] == 4 and resumed["steps"] == 1
    assert result["completion_tokens"] == 8 and result["compilation"] is not None
    phases = result["time/rollouts"] + result["time/rewards"] + result["time/training"]
    assert phases == pytest.approx(result["step_time"], rel=0.2)  # medians of different steps
    assert result["logprob_check"]["difference"] <= result["logprob_check"]["tolerance"]
    assert "left" not in [line.split()[0] for log in logs for line in log.splitlines() if line]  # no row was too long
    written, _ = read(tmp_path / "out")
    assert written["rows"] == results and len(table_of(tmp_path / "out")) == 5
    assert not [*(tmp_path / "out").glob(".check-*")]


def test_what_is_read_of_a_run(stand_in, tmp_path):
    [result, resumed] = run_cases([PEFT, EngineCase(resumes=True)], stand_in(finishes()), tmp_path / "out")
    assert result["status"] == resumed["status"] == "ran" and result["reason"] is None
    assert result["step_time"] == 11 and result["time/rollouts"] == 5.5  # without the first step
    assert result["compilation"] == 39 and resumed["compilation"] is None
    assert result["time/rewards"] == 0.5 and result["time/training"] == 4
    assert result["rollouts/tokens_per_second"] == 6000
    assert result["micro_batch_size"] == 16 and result["planned_gib"] == 4.25 and result["torch_peak_gib"] == 3
    assert resumed["step_time"] == 40 and resumed["engine"] == "peft"
    first, second = table_of(tmp_path / "out")
    assert [first[name] for name in ("compilation, s", "step, s", "tokens/s", "planned, GiB", "torch peak")] == [
        *("39", "11.00", "6,000", "4.25", "3.00")
    ]
    assert "0.012 of 0.05" in first["notes"] and "verify: T=132 maxseg=66" in first["notes"]
    assert "includes compilation" in second["notes"]


def test_a_row_that_fails_is_quoted_and_the_next_one_runs(stand_in, tmp_path):
    script = """
if "unsloth" not in sys.argv:
    print("Traceback", file=sys.stderr); print("error: the GPU's memory did not suffice"); print("bye"); sys.exit(1)
"""
    out = tmp_path / "out"
    results = run_cases([PEFT, UNSLOTH], stand_in(script + finishes()), out)
    assert [result["status"] for result in results] == ["failed", "ran"]
    assert results[0]["reason"].startswith("error: the GPU's memory did not suffice (")
    assert results[0]["log"] in results[0]["reason"] and "bye" in Path(results[0]["log"]).read_text()
    assert table_of(out)[0]["notes"].startswith("error: the GPU's memory did not suffice")
    [untrained] = run_cases([PEFT], stand_in(finishes(gradient="0.0")), out)
    assert untrained["status"] == "failed" and untrained["reason"].startswith("no step had a gradient")


@pytest.mark.parametrize(
    ("begins", "status", "reason"),
    [
        ("print('waiting', flush=True)\n", "not finished", r"no step within \d s \(.*--minutes\); last: waiting"),
        (finishes(), "ran", r"stopped after \d s"),
    ],
)
def test_a_row_out_of_time_keeps_its_steps_and_without_any_is_not_finished(stand_in, tmp_path, begins, status, reason):
    [result] = run_cases([PEFT], stand_in(begins + "time.sleep(600)"), tmp_path / "out", 6.0)
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
    for name, value in (("CUDA_VISIBLE_DEVICES", "0"), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")):
        monkeypatch.setenv(name, value)  # which the check sets, and a test puts back


INTERRUPTED = f"""
import importlib.util, pathlib, signal, sys
from lora_grpo.cli import run_command
from lora_grpo.gpu_check import measure
from lora_grpo.gpu_check.measure import Options, EngineCase
build = "import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir()"
measure.build_command = lambda folder, config: [sys.executable, "-c", build, str(folder)]
measure._TRY_TORCH, measure.SHORT_CASES = "", [{PEFT}, {UNSLOTH}, EngineCase()]
importlib.util.find_spec = lambda name: name
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it as ignored
options = Options(1.0, pathlib.Path(sys.argv[2]), short=True)
sys.exit(run_command(lambda: measure.check_gpu(options, pathlib.Path(sys.argv[1]))))
"""


def test_an_interrupted_check_prints_its_table_and_leaves_no_process(card, tmp_path):
    recipe, out, begun = tmp_path / "recipe.py", tmp_path / "out", tmp_path / "begun"
    hangs = f"if 'unsloth' in sys.argv:\n    Path({str(begun)!r}).write_text(str(os.getpid()))\n    time.sleep(600)\n"
    recipe.write_text(f"import json, os, sys, time\nfrom pathlib import Path\n{finishes()}\n{hangs}")
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, recipe, out], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not begun.exists() or not begun.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in stderr
    rows = table_of(out)
    assert [row["status"] for row in rows] == ["ran", "not finished", "not run"]
    assert [row["step, s"] for row in rows] == ["11.00", "11.00", "–"]  # the steps before the interruption
    assert rows[1]["notes"].startswith("interrupted") and rows[2]["notes"] == "–"
    assert stdout == (out / "results.md").read_text() + "\n"
    row_process = Path("/proc") / begun.read_text() / "stat"
    assert not row_process.exists() or row_process.read_text().split()[2] == "Z"


def script(*arguments, path=None):
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def test_without_a_gpu_one_line_says_so(tmp_path):
    done = script("--output", str(tmp_path / "out"), path=str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: no NVIDIA GPU found (nvidia-smi is not on the PATH; ")
    assert not (tmp_path / "out").exists()


def planned(tmp_path, *, resume=False, **changes):
    """The engine and backend that a run gets for `auto` on the card, and what --plan says of the engine."""
    model = tmp_path / "planned"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(TINY))
    config = replace(RunConfig(output_dir="out"), {"model": {"name": str(model)}})
    config, plan = make_plan(replace(config, changes), Invocation(resume=resume))
    return config.model.engine, config.sampling.backend, next(summary(plan))


def test_from_the_card_to_the_table_and_the_choice_of_auto(card, stand_in, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    before = planned(tmp_path)
    speed = {("unsloth", "4"): 0.5, ("unsloth", "16"): 0.4}
    check_gpu(Options(output=out), stand_in(finishes(speed=speed)))
    printed, stages = capsys.readouterr()
    assert stages.splitlines()[0] == "Card with 16 GiB"
    assert re.fullmatch(r"peft \+ transformers \(at most \d+ s\): ran, 11\.00 s per step", stages.splitlines()[1])
    assert printed.startswith("Card with 16 GiB; driver 580.65.06, ")
    assert [row["run"] for row in table_of(out)][2:] == [
        *("unsloth + vllm", "unsloth + vllm, 16 bits", "unsloth + vllm, resumed")
    ]
    fastest, bits = printed.splitlines()[-2:]
    assert "unsloth + vllm, 5.50 s per step" in fastest
    assert bits == "16 bits: 1.2x the tokens per second, 1.2x the steps for 0.6 GiB more; pass --model.bits 16"
    written, _ = read(out)
    assert written["versions"]["torch"] and written["rows"][0]["status"] == "ran"
    assert before[:2] == ("auto", "auto") and before[2].startswith("micro-batch")
    engine, backend, line = planned(tmp_path)
    assert (engine, backend) == ("unsloth", "vllm") and line.startswith("engine      unsloth") and "check-gpu" in line
    # What the user chose, what the engine does not support, and a run that has begun without it, stay as they are.
    assert planned(tmp_path, resume=True) == before
    for changes in ({"sampling": {"backend": "transformers"}}, {"model": {"engine": "peft"}}, {"lora": {"dora": True}}):
        asked = replace(RunConfig(), changes)
        assert planned(tmp_path, **changes)[:2] == (asked.model.engine, asked.sampling.backend)
    # A preset for the CPU beside a GPU whose driver is too old.
    monkeypatch.setattr("lora_grpo.hardware.machine.driver_problem", lambda gpu: "too old")
    assert planned(tmp_path, preset="starter")[:2] == ("auto", "auto")


@pytest.mark.parametrize("model_type", ["qwen2", "olmo"])  # whose memory is planned, and is not
def test_a_plan_and_a_run_name_the_measured_choice_with_its_date_and_file(card, tmp_path, capsys, model_type):
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
    ("script", "seconds", "message"),
    [
        ("sys.exit(1)", 300, "peft + transformers failed, the log is empty"),
        ("if 'vllm' in sys.argv:\n    sys.exit(1)\n", 300, "unsloth + vllm failed, the log is empty"),
        ("time.sleep(600)", 1, "unsloth + vllm not finished, no step within 1 s"),
    ],
)
def test_a_check_with_an_open_or_failed_row_is_no_success(
    card, stand_in, tmp_path, monkeypatch, script, seconds, message
):
    monkeypatch.setattr("lora_grpo.gpu_check.measure._SHORT_SECONDS", seconds)
    with pytest.raises(RunError, match=re.escape(message)):
        check_gpu(Options(output=tmp_path / "out", short=True), stand_in(script + "\n" + finishes()))
    statuses = [row["status"] for row in table_of(tmp_path / "out")]
    assert ("ran" in statuses) == ("vllm" in script) and not (tmp_path / "cache").exists()


def test_auto_changes_only_if_every_engine_was_measured(card, stand_in, tmp_path):
    results = run_cases(CASES, stand_in(finishes(speed={("peft", "16"): 1.5})), tmp_path / "out")
    assert "stay with 4 bits" in conclude(results, "Card")[-1]
    path = tmp_path / "cache" / "lora_grpo" / "check-gpu.json"
    assert json.loads(path.read_text())["engine"] == "peft"
    path.unlink()
    for change in ({"status": "not finished", "steps": 0}, {"status": "failed"}, {"steps": 1}):
        conclude([*results[:2], {**results[2], **change}, *results[3:]], "Card")
        assert not path.exists()
    path.parent.rmdir()
    path.parent.touch()  # not a folder, so the choice cannot be saved, which does not fail the check
    assert "peft + transformers, 11.00 s per step" in conclude(results, "Card")[1]
    path.parent.unlink()
    skipped = {"status": "skipped", "steps": 0}
    conclude([{**result, **skipped} if "vllm" in result["name"] else result for result in results], "Card")
    assert path.exists()


@pytest.mark.parametrize(
    ("condition", "statuses"),
    [
        ("value('--sampling.backend') == 'vllm' and 'peft' in sys.argv", "ran skipped ran ran ran"),
        ("bits == '16'", "ran ran ran skipped ran"),
        ("resumes", "ran ran ran ran failed"),
        ("'unsloth' in sys.argv", "ran ran failed ran ran"),
        ("True", "failed skipped failed skipped skipped"),
    ],
)
def test_only_vllm_with_peft_and_16_bits_may_be_refused(card, stand_in, tmp_path, condition, statuses):
    refusing = finishes().replace("folder = ", f"if {condition}:\n    sys.exit(2)\nfolder = ", 1)
    results = run_cases(CASES, stand_in(refusing), tmp_path / "out")
    assert [result["status"] for result in results] == statuses.split()


def test_a_killed_check_leaves_no_run_and_the_next_one_removes_its_model(card, stand_in, tmp_path):
    out, begun = tmp_path / "out", tmp_path / "begun"
    recipe = stand_in(f"Path({str(begun)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n")
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, recipe, out], stderr=subprocess.DEVNULL)
    while not begun.exists() or not begun.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    row_process, deadline = Path("/proc") / begun.read_text() / "stat", time.monotonic() + 60
    while row_process.exists() and row_process.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [*out.glob(".check-*")]
    check_gpu(Options(output=out), stand_in(finishes()))
    assert not [*out.glob(".check-*")]


def test_sixteen_bits_that_do_not_fit_are_no_failure(card, stand_in, tmp_path, capsys):
    refuses = "if '16' in sys.argv:\n    print('error: it does not fit'); sys.exit(2)\n"
    check_gpu(Options(output=tmp_path / "out"), stand_in(refuses + finishes()))
    assert table_of(tmp_path / "out")[3]["status"] == "skipped" and "x the tokens" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "lines"),
    [
        (lambda text: text.replace("Card", "Card 2"), 0),
        (lambda text: re.sub(r'"trl": "[^"]*"', '"trl": "0.1"', text), 0),
        (lambda text: text[:-9], 1),
        (lambda text: text.replace("unsloth", "jax"), 1),
        (lambda text: "[" * 100_000, 1),
        (lambda text: "[]", 1),
        (lambda text: "\udcff", 1),
    ],
)
def test_a_measurement_of_another_machine_or_a_damaged_file_is_ignored(card, tmp_path, capsys, damage, lines):
    before = planned(tmp_path)
    path = save_measured_engine("unsloth", "vllm", "Card")
    assert planned(tmp_path) != before
    path.write_text(damage(path.read_text()), errors="surrogateescape")
    capsys.readouterr()
    assert planned(tmp_path) == before
    assert len(capsys.readouterr().err.splitlines()) == lines
    path.unlink()
    path.mkdir()
    assert planned(tmp_path) == before


@pytest.mark.engines
def test_a_row_of_another_engine_and_backend_really_runs(tmp_path):
    for package in ("unsloth", "vllm"):
        pytest.importorskip(package, reason=f"{package} is not installed: make engines")
    heads = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    wide = {**TINY, **heads}  # which vLLM's CPU build takes
    # The one combination that no other test trains by.
    [result] = measure.run_cases([EngineCase()], wide, Options(15, tmp_path / "out"), RECIPE, MACHINE, ON_CPU)
    assert (result["status"], result["reason"]) == ("ran", None)
    assert result["logprob_check"]["difference"] < result["logprob_check"]["tolerance"]
