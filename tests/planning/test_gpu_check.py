"""The GPU check on a CPU: real rows of the real recipe at tiny size, and scheduling with stand-ins for the recipe."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.model_configs import TINY_QWEN2 as TINY

from lora_grpo.errors import RunError
from lora_grpo.planning import gpu_check
from lora_grpo.planning.gpu_check import Options, check_gpu

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


def run_rows(rows, recipe, output, seconds=60.0, arguments=()):
    return gpu_check.run_rows(rows, TINY, Options(seconds / 60, output), recipe, MACHINE, arguments)


ROW, OTHER = ("peft", "transformers"), ("unsloth", "transformers")


WITHOUT_WEIGHTS = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir()
(folder / "config.json").write_text(sys.argv[2])
(folder / "model.safetensors").touch()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Return a function that writes a script in place of the recipe. No model is built and no package is missing."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("lora_grpo.planning.gpu_check._BUILD", WITHOUT_WEIGHTS)

    def make(script):
        path = tmp_path / "recipe.py"
        path.write_text("import json, os, sys, time\nfrom pathlib import Path\n" + script)
        return path

    return make


FINISHES = """
folder = Path(sys.argv[sys.argv.index("--output-dir") + 1])
folder.mkdir()
config = {"preset": "16gb", "model": {"bits": 4}, "lora": {"rank": 32},
          "train": {"prompts_per_step": 8, "micro_batch_size": None, "gradient_checkpointing": True},
          "sampling": {"num_generations": 8}}
memory = {"micro_batch_size": 16, "planned_phases_gib": {"sampling": 3.5, "training": 4.25}}
(folder / "run.json").write_text(json.dumps({"config": config, "memory": memory, "peak_gpu_memory_gib": 3.0}))
with (folder / "metrics.jsonl").open("w") as file:
    for number, seconds in enumerate((50.0, 10.0, 12.0), start=1):
        step = {"step": number, "step_time": seconds, "time/rollouts": seconds / 2, "time/rewards": 0.5,
                "time/training": 4.0, "rollouts/tokens_per_second": 6000.0, "grad_norm": GRAD,
                "completions/mean_length": 512.0, "completions/clipped_ratio": 1.0,
                "num_tokens": number * 64 * 912.0}
        file.write(json.dumps(step) + "\\n")
"""


def finishes(gradient="0.25"):
    return f"GRAD = {gradient}\n{FINISHES}"


def read(output):
    return json.loads((output / "results.json").read_text()), (output / "results.md").read_text()


@pytest.mark.slow
def test_the_recipe_really_runs_and_leaves_its_figures(tmp_path):
    [result] = run_rows([ROW], RECIPE, tmp_path / "out", 300, ON_CPU)
    log = Path(result["log"]).read_text()
    assert result["status"] == "ran", log
    assert result["steps"] == 2 and result["bits"] == 4
    assert result["completion_tokens"] == 8
    assert result["time/rollouts"] > 0 and result["time/rewards"] > 0 and result["time/training"] > 0
    phases = result["time/rollouts"] + result["time/rewards"] + result["time/training"]
    assert phases == pytest.approx(result["step_time"], abs=0.01)
    assert result["rollouts/tokens_per_second"] == pytest.approx(64 / result["time/rollouts"], rel=0.05)
    assert "left" not in [line.split()[0] for line in log.splitlines() if line]  # no row was too long
    written, table = read(tmp_path / "out")
    assert written["rows"] == [result]
    assert f"| peft | transformers | 4 | {result['step_time']:.2f} |" in table


def test_what_is_read_of_a_run(stand_in, tmp_path):
    [result] = run_rows([ROW], stand_in(finishes()), tmp_path / "out")
    assert result["status"] == "ran" and result["reason"] is None
    assert result["step_time"] == 11 and result["time/rollouts"] == 5.5  # the first step is for warming up
    assert result["time/rewards"] == 0.5 and result["time/training"] == 4
    assert result["rollouts/tokens_per_second"] == 6000
    assert result["micro_batch_size"] == 16 and result["planned_gib"] == 4.25 and result["torch_peak_gib"] == 3
    _, table = read(tmp_path / "out")
    cells = [cell.strip() for cell in table.splitlines()[-1].split("|")[1:-1]]
    assert cells[3:8] == ["11.00", "5.50", "0.50", "4.00", "6,000"] and cells[-3:] == ["4.25", "3.00", "–"]


def test_a_row_that_fails_is_quoted_and_the_next_one_runs(stand_in, tmp_path):
    script = """
if "unsloth" not in sys.argv:
    print("Traceback", file=sys.stderr); print("error: the GPU's memory did not suffice"); print("bye"); sys.exit(1)
"""
    out = tmp_path / "out"
    results = run_rows([ROW, OTHER], stand_in(script + finishes()), out)
    assert [result["status"] for result in results] == ["failed", "ran"]
    assert results[0]["reason"].startswith("error: the GPU's memory did not suffice (")
    assert results[0]["log"] in results[0]["reason"] and "bye" in Path(results[0]["log"]).read_text()
    assert "- peft + transformers: failed, error: the GPU's memory did not suffice" in read(out)[1]
    [untrained] = run_rows([ROW], stand_in(finishes(gradient="0.0")), out)
    assert untrained["status"] == "failed" and untrained["reason"].startswith("no step had a gradient")


@pytest.mark.parametrize(
    ("begins", "status", "reason"),
    [
        ("print('waiting', flush=True)\n", "failed", r"no step within \d s; last: waiting"),
        (finishes(), "ran", r"stopped after \d s"),
    ],
)
def test_a_row_out_of_time_keeps_its_steps_and_without_any_has_failed(stand_in, tmp_path, begins, status, reason):
    [result] = run_rows([ROW], stand_in(begins + "time.sleep(600)"), tmp_path / "out", 6.0)
    assert result["status"] == status and re.fullmatch(reason, result["reason"])


INTERRUPTED = f"""
import signal, sys
from pathlib import Path
from lora_grpo.cli import run_command
import importlib.util
from lora_grpo.planning import gpu_check
from lora_grpo.planning.gpu_check import Options
gpu_check._BUILD = "import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir()"
importlib.util.find_spec = lambda name: name
options = Options(1.0, Path(sys.argv[2]))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it as ignored
rows = [{ROW}, {OTHER}]
sys.exit(run_command(lambda: print(gpu_check.run_rows(rows, {TINY}, options, Path(sys.argv[1]), {MACHINE}))))
"""


def test_an_interrupted_check_leaves_its_table_and_no_process(tmp_path):
    recipe, out, begun = tmp_path / "recipe.py", tmp_path / "out", tmp_path / "begun"
    hangs = f"if 'unsloth' in sys.argv:\n    Path({str(begun)!r}).write_text(str(os.getpid()))\n    time.sleep(600)\n"
    recipe.write_text(f"import json, os, sys, time\nfrom pathlib import Path\n{finishes()}\n{hangs}")
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, recipe, out], stderr=subprocess.PIPE, text=True)
    while not begun.exists() or not begun.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in stderr
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [each["status"] for each in rows] == ["ran", "not run"] and rows[1]["reason"] == "interrupted"
    assert "- unsloth + transformers: not run, interrupted" in (out / "results.md").read_text()
    row_process = Path("/proc") / begun.read_text() / "stat"
    assert not row_process.exists() or row_process.read_text().split()[2] == "Z"


# The whole command


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


@pytest.fixture
def card(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '0, GPU-1, Card, 16376, 16000'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    for name, value in (("CUDA_VISIBLE_DEVICES", "0"), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")):
        monkeypatch.setenv(name, value)  # which the check sets, and a test puts back


def test_from_the_card_to_the_table_and_the_exit_code(card, stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lora_grpo.planning.gpu_check._TRY_TORCH", "")
    monkeypatch.setattr("lora_grpo.planning.gpu_check.ROWS", [ROW])
    check_gpu(Options(output=tmp_path / "out"), stand_in(finishes()))
    table, stages = capsys.readouterr()
    assert stages.splitlines()[0] == "Card with 16 GiB"
    assert re.fullmatch(r"peft \+ transformers \(at most \d+ s\): ran, 11\.00 s per step", stages.splitlines()[1])
    assert table.startswith("Card with 16 GiB; ") and "| peft | transformers | 4 |" in table
    assert table.splitlines()[-1] == "this GPU works with peft + transformers"
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["versions"]["torch"] and written["rows"][0]["status"] == "ran"
    with pytest.raises(RunError, match=r"no engine and backend: peft \+ transformers failed, the log is empty"):
        check_gpu(Options(output=tmp_path / "out"), stand_in("sys.exit(1)"))


@pytest.mark.engines
def test_a_row_of_another_engine_and_backend_really_runs(tmp_path):
    for package in ("unsloth", "vllm"):
        pytest.importorskip(package, reason=f"{package} is not installed: make engines")
    heads = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    wide = {**TINY, **heads}  # which vLLM's CPU build takes
    # The one combination that no other test trains by.
    [result] = gpu_check.run_rows([("unsloth", "vllm")], wide, Options(15, tmp_path / "out"), RECIPE, MACHINE, ON_CPU)
    assert (result["status"], result["reason"]) == ("ran", None)
    assert result["logprob_check"]["difference"] < result["logprob_check"]["tolerance"]
