"""tools/card.py: sides and parts that end badly, resume, the small card, the record of memory, and the tables."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import card
import pytest
import torch
import wheels_in_pieces
from on_card import memory_trace, sides, small_card
from on_card.memory_trace import Phase

from lora_grpo.errors import RunError, UserError
from lora_grpo.hardware import nvidia_gpus

ROOT = Path(card.__file__).resolve().parents[1]
STAND_IN = ROOT / "tests" / "helpers" / "stand_in_card.py"
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def run_card(program, output, *arguments, exit_code=0):
    command = [sys.executable, str(program), *arguments, "--tiny", "--output-dir", str(output)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == exit_code, done.stderr
    return done.stdout + done.stderr


def read(output, part):
    record = json.loads((output / f"{part}.json").read_text())
    return record, {side["name"]: side for side in record["sides"]}


def check_schema(record, part):
    assert record["card_part"] == 1
    assert record["part"] == part
    assert record["status"] in ("finished", "unfinished")
    assert record["tiny"] and record["card"] is None
    assert record["versions"]["torch"] == torch.__version__
    assert record["command"].startswith("python tools/card.py ") or "stand_in_card" in record["command"]
    assert record["not_measured"][-1].startswith("speed and memory of a GPU")
    for side in record["sides"]:
        assert {"name", "status", "reason", "seconds", "started", "commit"} <= side.keys() or side["reason"]


# Parts and sides


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The output of all parts of the stand-in, measured twice."""
    output = tmp_path_factory.mktemp("card")
    told = run_card(STAND_IN, output, exit_code=1)
    assert "error: failed: peaks, crash; logs are in " in told.splitlines()[-1]
    first = {part: read(output, part) for part in ("peaks", "small_cards", "steps")}
    run_card(STAND_IN, output, "peaks:quick,after", "steps")
    return SimpleNamespace(output=output, first=first, second={part: read(output, part) for part in first})


def test_a_crash_ends_its_part_and_no_other(parts):
    record, sides = parts.first["peaks"]
    check_schema(record, "peaks")
    assert record["status"] == "unfinished"
    assert sides["quick"]["status"] == "ran"
    assert sides["crash"]["status"] == "failed"
    assert "exit code 7" in sides["crash"]["reason"]
    assert parts.first["steps"][0]["status"]  # the last part


def test_a_part_that_hangs_is_ended_and_recorded(parts):
    assert (parts.output / "hanging").exists()
    record, sides = parts.first["small_cards"]
    check_schema(record, "small_cards")
    assert record["reason"].startswith("stopped after")
    assert sides["hang"]["status"] == "out of time"


def test_a_side_ends_at_its_limit_and_an_error_has_its_reason(parts):
    record, sides = parts.first["steps"]
    check_schema(record, "steps")
    assert sides["slow command"]["status"] == "out of time"
    assert sides["failed command"]["status"] == "out of memory"
    assert sides["absent"]["status"] == "skipped"
    assert "a_package_that_nobody_has" in sides["absent"]["reason"]
    assert len(record["not_measured"]) == 4


def test_only_what_is_not_finished_is_measured_again(parts):
    measured = (parts.output / "measured").read_text().splitlines()
    assert len(measured) == 2  # `quick` in the first call, `after` in the second
    assert parts.second["peaks"][1]["quick"] == parts.first["peaks"][1]["quick"]
    assert [side["name"] for side in parts.second["peaks"][0]["sides"]] == ["quick", "crash", "after"]
    assert parts.second["steps"][1]["failed command"] == parts.first["steps"][1]["failed command"]
    assert len((parts.output / "slow").read_text().splitlines()) == 2  # it was out of time


def test_again_repeats_what_is_finished(parts, tmp_path):
    shutil.copytree(parts.output, tmp_path / "card")
    assert "finished before" in run_card(STAND_IN, tmp_path / "card", "peaks:quick")
    run_card(STAND_IN, tmp_path / "card", "peaks:quick", "--again")
    assert len((tmp_path / "card" / "measured").read_text().splitlines()) == 3


def test_an_interrupted_part_is_recorded_and_measured_again(tmp_path):
    command = [sys.executable, str(STAND_IN), "small_cards", "--tiny", "--output-dir", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    while not (tmp_path / "hanging").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    record, by_name = read(tmp_path, "small_cards")
    check_schema(record, "small_cards")
    assert (by_name["hang"]["status"], by_name["hang"]["reason"]) == ("failed", "interrupted")
    assert by_name["hang"]["status"] not in card.FINISHED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "no part speed; expected peaks, small_cards, "),
        (["steps:tpu"], "no side of steps contains tpu; its sides: unsloth + vllm, before; unsloth + vllm, now; "),
        (["steps", "--before", "no_such_commit"], "--before no_such_commit is neither a folder nor a commit"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, message, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["card.py", "--tiny", "--output-dir", str(tmp_path), *arguments])
    with pytest.raises(UserError, match=re.escape(message)):
        card.main()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_tiny_parts_run_to_their_end(tmp_path):
    """The recipe inside a small card's stubs, the ways of the loss pass, and a run that is killed and resumed."""
    run_card(card.__file__, tmp_path, "small_cards:12gb", "loss", "resume")
    record, sides = read(tmp_path, "small_cards")
    check_schema(record, "small_cards")
    assert sides["12gb"]["status"] == "ran", sides["12gb"]["reason"]
    assert sides["12gb"]["planned_gib"] > 0  # planned for the card that the stub lists
    assert "balloon" in sides["12gb"]["instead"]
    record, sides = read(tmp_path, "loss")
    check_schema(record, "loss")
    sdpa, flex, compiled = sides["peft, 4 bits"]["ways"]
    assert (sdpa["padded_rows"], compiled["padded_rows"]) == ("", "")
    assert flex["padded_rows"]
    assert flex["loss"] == pytest.approx(sdpa["loss"], rel=1e-4)
    assert compiled["loss"] == pytest.approx(sdpa["loss"], rel=1e-4)
    record, sides = read(tmp_path, "resume")
    check_schema(record, "resume")
    assert record["status"] == "finished"
    side = sides["killed and resumed"]
    assert side["steps_after_resume"] == [1, 2, 3, 4, 5]
    assert 2 <= len(side["steps_before_kill"]) < 5


@pytest.mark.engines
@pytest.mark.exhaustive
def test_teachers_read_what_vllm_sampled(tmp_path):
    run_card(card.__file__, tmp_path, "teacher")
    record, sides = read(tmp_path, "teacher")
    check_schema(record, "teacher")
    without, *with_teachers = sides.values()
    assert "time/teacher" not in without
    for side in sides.values():
        assert side["status"] == "ran", side["reason"]
        assert side["steps"] == 3
    for side in with_teachers:
        assert 0 < side["time/teacher"] < side["time/training"]


# The small card


def test_programs_see_the_small_card_through_nvidia_smi(tmp_path, monkeypatch):
    real = tmp_path / "real"
    real.mkdir()
    tool = real / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-1, NVIDIA H200, 143771, 11900, 580.159.04, 9.0'\n")
    tool.chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{real}{os.pathsep}{path}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(small_card, "_balloon", lambda left_bytes: small_card.contextlib.nullcontext())
    with small_card.inside(small_card.CARDS["12gb"], tmp_path, tiny=False) as variables:
        monkeypatch.setenv("PATH", variables["PATH"])
        [gpu], _ = nvidia_gpus(refresh=True)
    monkeypatch.setenv("PATH", path)
    nvidia_gpus(refresh=True)
    assert gpu.name == "NVIDIA H200"
    assert gpu.memory_gib == 12
    assert gpu.free_gib == pytest.approx(11900 / 1024)
    assert gpu.compute_capability == (9, 0)


@needs_gcc
def test_compiled_code_sees_the_small_card(tmp_path):
    """As torch: a library that Python loads, which brings CUDA's runtime."""
    runtime = tmp_path / "runtime.c"
    runtime.write_text(
        "#include <stddef.h>\n"
        "int cudaMemGetInfo(size_t *f, size_t *t) { *f = 3000000000; *t = 140000000000; return 0; }\n"
    )
    caller = tmp_path / "caller.c"
    caller.write_text(
        "#include <stddef.h>\nint cudaMemGetInfo(size_t *, size_t *);\n"
        "int ask(size_t *f, size_t *t) { return cudaMemGetInfo(f, t); }\n"
    )
    compiled = ["gcc", "-shared", "-fPIC", "-o"]
    soname = "libcudart.so.13"
    subprocess.run([*compiled, tmp_path / soname, runtime, f"-Wl,-soname,{soname}"], check=True)
    subprocess.run([*compiled, tmp_path / "caller.so", caller, tmp_path / soname, f"-Wl,-rpath,{tmp_path}"], check=True)
    program = (
        "import ctypes, sys; f, t = ctypes.c_size_t(), ctypes.c_size_t()\n"
        "assert ctypes.CDLL(sys.argv[1]).ask(ctypes.byref(f), ctypes.byref(t)) == 0\n"
        "print(f.value, t.value)\n"
    )

    def printed(**variables):
        command = [sys.executable, "-c", program, str(tmp_path / "caller.so")]
        environment = {**os.environ, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return [int(number) for number in done.stdout.split()]

    assert printed() == [3 * 10**9, 140 * 10**9]
    shim = str(small_card.compile_shim(tmp_path))
    assert printed(LD_PRELOAD=shim, SMALL_CARD_BYTES="8000000000") == [3 * 10**9, 8 * 10**9]
    assert printed(LD_PRELOAD=shim, SMALL_CARD_BYTES="2000000000") == [2 * 10**9, 2 * 10**9]


def test_torch_reports_the_small_card(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30, multi_processor_count=132)
    monkeypatch.setenv("SMALL_CARD_BYTES", str(8 << 30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (5 << 30, 140 << 30))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device=None: (5 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    small_card.tell_python()
    assert torch.cuda.mem_get_info() == torch.accelerator.get_memory_info() == (5 << 30, 8 << 30)
    told = torch.cuda.get_device_properties(0)
    assert (told.total_memory, told.multi_processor_count) == (8 << 30, 132)


def test_vllm_reads_the_small_card_from_nvml(tmp_path, monkeypatch):
    bindings = tmp_path / "vllm" / "third_party" / "pynvml.py"
    bindings.parent.mkdir(parents=True)
    for package in (bindings.parent, bindings.parents[1]):  # before a vLLM that is installed
        (package / "__init__.py").touch()
    bindings.write_text(
        "from types import SimpleNamespace\n"
        "def nvmlDeviceGetMemoryInfo(handle):\n"
        "    return SimpleNamespace(total=140 << 30, free=5 << 30, used=135 << 30)\n"
    )
    program = (
        "from on_card import small_card; small_card.tell_python()\n"
        "import vllm.third_party.pynvml as nvml\n"
        "info = nvml.nvmlDeviceGetMemoryInfo(0); print(info.total >> 30, info.free >> 30)\n"
    )
    folders = os.pathsep.join(map(str, (tmp_path, ROOT / "tools", ROOT)))
    environment = {**os.environ, "PYTHONPATH": folders, "SMALL_CARD_BYTES": str(8 << 30)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["8", "5"]


# The record of memory


def frame(path, name):
    return {"filename": f"/home/lora_grpo/.venv/site-packages/{path}", "line": 7, "name": name}


def event(action, address, gib, time_us, *frames):
    return {"action": action, "addr": address, "size": int(gib * 2**30), "time_us": time_us, "frames": list(frames)}


def test_the_peak_of_each_phase_and_what_held_it():
    in_torch = frame("torch/nn/functional.py", "linear")
    scoring = frame("trl/trainer/grpo_trainer.py", "_get_per_token_logps")
    loss = {**frame("", "forward"), "filename": "/home/lora_grpo/lora_grpo/loss/tiles.py"}  # a checkout
    snapshot = {
        "device_traces": [
            [
                event("alloc", 1, 2, 10, in_torch, loss),  # held to the end
                event("alloc", 2, 4, 20, scoring),
                event("free_requested", 2, 4, 30),
                event("free_completed", 2, 4, 30),
                event("free_completed", 3, 1, 40),  # allocated before the record
                event("alloc", 2, 0.5, 50, in_torch),  # the address is used again
                {"action": "oom", "size": 80 << 30, "time_us": 55, "frames": []},
            ]
        ],
        "segments": [
            {
                "device": 0,
                "address": 100,
                "blocks": [
                    {"address": 1, "size": 2 << 30, "state": "active_allocated"},
                    {"address": 2, "size": 1 << 29, "state": "active_allocated"},
                    {"address": 9, "size": 3 << 30, "state": "active_allocated"},  # before the record
                    {"address": 8, "size": 5 << 30, "state": "inactive"},
                ],
            }
        ],
    }
    phases = [Phase("scoring", 15, 35), Phase("loss", 45, 60), Phase("scoring", 61, 70)]
    scored, lost = memory_trace.peaks(snapshot, phases)
    assert (scored["phase"], scored["times"], scored["begin_gib"], scored["peak_gib"]) == ("scoring", 2, 6, 10)
    assert (lost["phase"], lost["times"], lost["begin_gib"], lost["peak_gib"]) == ("loss", 1, 5, 5.5)
    held = {holder["where"]: (holder["gib"], holder["blocks"]) for holder in scored["holders"]}
    assert held == {
        "before the record": (4, 2),
        "trl/trainer/grpo_trainer.py:7 _get_per_token_logps": (4, 1),
        "lora_grpo/loss/tiles.py:7 forward": (2, 1),
    }
    assert {holder["where"] for holder in lost["holders"]} == {
        "before the record",
        "lora_grpo/loss/tiles.py:7 forward",
        "no Python code: backward pass or compiled",
    }


# Tables


def test_times_are_medians_after_the_first_step_and_memory_is_the_highest_peak():
    def step(seconds, gib):
        return {"step_time": seconds, "time/adapter": seconds / 10, "memory/loss": gib, "reward": None}

    assert sides.step_medians([step(30, 4), step(10, 2), step(20, 3), step(12, 2)]) == {
        "steps": 4,
        "first_step_time": 30,
        "step_time": 12,
        "time/adapter": 1.2,
        "memory/loss": 4,
    }
    assert sides.step_medians([]) == {"steps": 0}


def card_record(part, **changes):
    gpu = {"name": "NVIDIA H200", "memory_gib": 140.4, "driver": "580.159.04"}
    return {
        "part": part,
        "tiny": False,
        "card": gpu,
        "versions": {"torch": "2.13.0", "vllm": "0.27.1"},
        "started": "2026-11-29T10:00:00+00:00",
        "not_measured": [],
        "sides": [],
        **changes,
    }


def test_times_are_compared_with_the_older_tree():
    def side(name, step, tokens):
        rate = "rollouts/tokens_per_second"
        return {"name": name, "status": "ran", "commit": "abcdefghij", "step_time": step, rate: tokens}

    sides = [side("peft + vllm, before", 8.0, 6000), side("peft + vllm, now", 6.0, 9000)]
    text = card.rendered(card_record("steps", sides=sides, not_measured=["peft + vllm, 16 bits: not run"]))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    headings, _, before, _, ratios = rows
    columns = [headings.index(name) for name in ("step, s", "tokens/s")]
    assert [before[column] for column in columns] == ["8.00", "6,000"]
    assert ratios[0] == "peft + vllm, now / peft + vllm, before"
    assert [ratios[column] for column in columns] == ["0.75", "1.50"]
    assert "On NVIDIA H200 (driver 580.159.04), torch 2.13.0, vllm 0.27.1, at abcdefgh, 2026-11-29:" in text
    assert "- peft + vllm, 16 bits: not run" in text


def test_ours_is_compared_with_rivals_of_the_same_bits():
    names = [side.name for side in card.PARTS["side_by_side"]]
    assert card.pairs(names) == [
        ("ours, peft + vllm, 16 bits", "TRL's colocate mode, 16 bits"),
        ("ours, unsloth + vllm, 4 bits", "Unsloth's notebook loop, 4 bits"),
    ]


def test_each_teacher_is_compared_with_none():
    without, adapter, *_ = names = [side.name for side in card.PARTS["teacher"]]
    assert card.pairs(names) == [(name, without) for name in names[1:]]

    measured = [{"name": without, "step_time": 8.0, "torch_peak_gib": 10.0}]
    measured.append({"name": adapter, "step_time": 10.0, "torch_peak_gib": 10.4})
    sides = [{**side, "status": "ran", "commit": "abcdefghij"} for side in measured]
    rows = [line.split("|") for line in card.rendered(card_record("teacher", sides=sides)).splitlines() if "|" in line]
    headings, *_, ratios = [[cell.strip() for cell in row[1:-1]] for row in rows]
    assert ratios[0] == f"{adapter} / {without}"
    assert [ratios[headings.index(name)] for name in ("step, s", "torch's peak")] == ["1.25", "1.04"]


def test_peaks_stand_beside_the_plan():
    holder = {"where": "trl/x.py:1 f", "gib": 4.0, "blocks": 1}
    phase = {"phase": "rollouts", "times": 2, "begin_gib": 1.5, "peak_gib": 6.25, "holders": [holder]}
    side = {
        "name": "unsloth + vllm",
        "status": "ran",
        "planned_phases_gib": {"sampling": 5.0},
        "memory": {"phases": [phase], "events": 9},
        "memory/sampling": 5.5,
    }
    text = card.rendered(card_record("peaks", sides=[side]))
    assert "| sampling | 5.00 | 5.50 | 1.10 |" in text
    assert "| rollouts | 1.50 | 6.25 | trl/x.py:1 f 4.00 |" in text


def test_ways_of_the_loss_pass_are_compared_with_the_default():
    default = {"way": "sdpa", "peak_gib": 3.25, "loss": 0.5, "padded_rows": "", "compiled_layers": False}
    padded = {**default, "way": "flex", "seconds": 0.5, "padded_rows": "refused"}
    ways = [
        {**default, "seconds": 0.4},
        padded,
        {**default, "way": "compiled", "seconds": 0.3, "compiled_layers": True},
    ]
    text = card.rendered(card_record("loss", sides=[{"name": "peft, 4 bits", "status": "ran", "ways": ways}]))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[-3:] == [
        ["sdpa", "0.400", "1.00", "3.25", "0.500000", "no", "no"],
        ["flex", "0.500", "1.25", "3.25", "0.500000", "refused", "no"],
        ["compiled", "0.300", "0.75", "3.25", "0.500000", "no", "yes"],
    ]


def test_nothing_is_claimed_without_a_card(parts):
    assert card.finished_records({part: record for part, (record, _) in parts.second.items()}) == {}
    page = "<!-- card: steps -->\n<!-- end -->\n"
    assert card.with_tables(page, {}) == page


def test_the_pages_have_a_place_for_each_part_and_the_tables_of_the_record():
    pages = {path: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    places = [place for text in pages.values() for place in card.re.findall(r"<!-- card: (\w+) -->", text)]
    assert sorted(places) == sorted(card.PARTS)
    records = json.loads(card.RECORD.read_text()) if card.RECORD.exists() else {}
    for path, text in pages.items():
        assert card.with_tables(text, records) == text, path.name


# Wheels


def test_files_travel_in_pieces(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    contents = {"a.whl": os.urandom(2500), "b.whl": os.urandom(700), "c.whl": b""}
    for name, content in contents.items():
        (wheels / name).write_bytes(content)
    folders = wheels_in_pieces.cut(wheels, tmp_path / "pieces", max_bytes=1000)
    for folder in folders:
        assert sum(path.stat().st_size for path in folder.glob("*.part*")) <= 1000

    # One folder arrives later than the others.
    *_, late = folders
    aside = late.rename(tmp_path / "late")
    assert wheels_in_pieces.join(tmp_path / "pieces", tmp_path / "joined") == ["b.whl"]
    aside.rename(late)
    assert wheels_in_pieces.join(tmp_path / "pieces", tmp_path / "joined") == []
    assert {path.name: path.read_bytes() for path in (tmp_path / "joined").iterdir()} == contents


def test_a_damaged_piece_is_refused(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "a.whl").write_bytes(b"abc")
    [folder] = wheels_in_pieces.cut(wheels, tmp_path / "pieces", max_bytes=1000)
    (folder / "a.whl.part000").write_bytes(b"abd")
    with pytest.raises(RunError, match=r"a\.whl is damaged"):
        wheels_in_pieces.join(tmp_path / "pieces", tmp_path / "joined")
    assert not (tmp_path / "joined" / "a.whl").exists()
