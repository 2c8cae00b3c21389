"""`make install` with a stand-in for pip: only a killed installation starts again, and a GPU gets the lock."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python_script(pip, ensurepip="exit 0"):
    """Return a stand-in for a Python of the system. Its venv contains only a stand-in for pip."""
    return f"""#!/bin/sh
case "$*" in
*nvidia.py*) exec {sys.executable} "$@";;
"-c import ensurepip") {ensurepip};;
"-m venv"*) for folder; do :; done; case "$*" in *--clear*) rm -rf "$folder"/*;; esac
    mkdir -p "$folder/bin"; ln -sf {pip} "$folder/bin/python";;
"-m pip"*) exec {pip} "$@";;
esac
"""


def pip_script(log, requirements, killed, fails):
    """Return a stand-in for pip, which installs one file a call.

    Args:
        log: file to which its arguments are appended.
        requirements: file to which the requirements are copied.
        killed: if this file exists, it is run as soon as half a file is installed, and kills the installation.
        fails: if this file exists, it is printed, and nothing is installed.
    """
    return f"""#!/bin/sh
folder=$(dirname "$(dirname "$0")")
echo "$*" >> {log}
for file; do case "$file" in /dev/fd/*) cat "$file" > {requirements};; esac; done
if [ -e {killed} ]; then echo half > "$folder/package"; . {killed}; exit 1; fi
if [ -e {fails} ]; then cat {fails} >&2; exit 1; fi
[ ! -e "$folder/package" ] || [ "$(cat "$folder/package")" = whole ] || exit 0  # pip skips what it finds
echo whole > "$folder/package"
"""


class Machine:
    """A folder with a Python, a pip and a venv, for `make`."""

    def __init__(self, folder):
        self.venv = folder / "venv"
        self.tools = folder / "tools"
        self.log = folder / "log"
        self.requirements = folder / "requirements"
        self.killed = folder / "killed"
        self.fails = folder / "fails"
        self.python = folder / "python"
        self.uv = None
        """The uv that installs, if it is not pip."""
        pip = folder / "pip"
        write_script(pip, pip_script(self.log, self.requirements, self.killed, self.fails))
        write_script(self.python, python_script(pip))

    def make(self, target, extra="", *flags):
        """Run `make`. Without `extra`, None, it chooses between the CPU and a GPU."""
        command = ["make", target, f"PYTHON={self.python}", f"VENV={self.venv}", f"UV={self.uv or ''}"]
        if extra is not None:
            command.append(f"EXTRA={extra}")
        return subprocess.run(
            [*command, *flags],
            cwd=ROOT,
            env={**os.environ, "PATH": f"{self.tools}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
            # A background job of a script ignores SIGINT, and so would make.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )

    def add_uv(self, code_of_build=0, code_of_index=0, flags="--clear --allow-existing"):
        """Add a stand-in for uv.

        Args:
            code_of_build: its exit code when it is asked for the CPU build by its version.
            code_of_index: its exit code when it is asked for PyTorch's own index.
            flags: the flags of `uv venv`.
        """
        self.uv = self.python.with_name("uv")
        script = UV_SCRIPT.format(
            log=self.log,
            requirements=self.requirements,
            pip=self.python.with_name("pip"),
            code_of_build=code_of_build,
            code_of_index=code_of_index,
            flags=flags,
        )
        write_script(self.uv, script)

    def nvidia_smi(self, commands):
        self.tools.mkdir(exist_ok=True)
        write_script(self.tools / "nvidia-smi", f"#!/bin/sh\n{commands}\n")

    def outdate(self):
        subprocess.run(["touch", "-d", "2000-01-01", self.venv / "installed"], check=True)


UV_SCRIPT = """#!/bin/sh
if [ "$*" = "venv --help" ]; then echo "{flags}"; exit; fi
echo "$*" >> {log}
for file; do case "$file" in /dev/fd/*) cat "$file" > {requirements};; esac; done
case "$*" in
"venv "*) for folder; do :; done; mkdir -p "$folder/bin"; ln -sf {pip} "$folder/bin/python";;
*+cpu) exit {code_of_build};;
*--torch-backend*) exit {code_of_index};;
esac
"""


def write_script(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize("is_update", [False, True])
@pytest.mark.parametrize("kill", ["kill -9 $PPID", "kill -9 $$", "kill -INT 0"])
def test_an_installation_that_was_killed_starts_again(machine, is_update, kill):
    if is_update:
        assert machine.make("install").returncode == 0
        machine.outdate()
    machine.killed.write_text(kill)
    assert machine.make("install").returncode != 0
    machine.killed.unlink()
    second = machine.make("install")
    assert second.returncode == 0, second.stderr
    assert "the last installation" in second.stderr
    assert (machine.venv / "package").read_text() == "whole\n"
    assert (machine.venv / "installed").exists() and not (machine.venv / "installing").exists()
    log = machine.log.read_text()
    assert machine.make("install").returncode == 0
    assert machine.log.read_text() == log, "nothing is left to do"


@pytest.mark.parametrize("extra", ["", ",gpu"])
def test_an_update_that_fails_keeps_the_environment(machine, extra):
    assert machine.make("install", extra=extra).returncode == 0
    machine.outdate()
    machine.fails.write_text("ERROR: unreachable")
    for _ in range(2):
        failed = machine.make("install", extra=extra)
        assert failed.returncode != 0 and "ERROR: unreachable" in failed.stderr
        assert (machine.venv / "package").exists() and (machine.venv / "installed").exists()
    machine.fails.unlink()
    log = machine.log.read_text()
    assert machine.make("install", extra=extra).returncode == 0
    assert machine.log.read_text() != log


def test_uv_installs_in_place_of_pip(machine):
    machine.add_uv()
    assert machine.make("install").returncode == 0
    environment, torch, project = machine.log.read_text().splitlines()
    assert environment == f"venv --quiet --seed --python {machine.python} --allow-existing {machine.venv}"
    installs = f"pip install --quiet --python {machine.venv}/bin/python"
    assert re.fullmatch(rf"{installs} torch==[\d.]+\+cpu", torch)
    assert project.startswith(installs) and project.endswith(" -e .[dev]")
    assert machine.requirements.read_text().splitlines() == locked("cpu")

    machine.log.unlink()
    assert machine.make("install", ",gpu").returncode == 0
    _, lock, project = machine.log.read_text().splitlines()
    assert re.search(r"--no-deps -r /dev/fd/\d+ torch==[\d.]+,!=[\d.]+\+cpu$", lock)
    assert machine.requirements.read_text().splitlines() == locked("gpu")
    assert project.endswith("--no-deps -e .")


@pytest.mark.parametrize("code_of_index", [0, 1])
def test_uv_takes_the_cpu_build_from_the_index_of_pytorch(machine, code_of_index):
    machine.add_uv(code_of_build=1, code_of_index=code_of_index)
    ended = machine.make("install")
    assert ended.returncode == 0
    _, by_version, by_index, _ = machine.log.read_text().splitlines()
    assert re.search(r"torch==[\d.]+\+cpu$", by_version) and re.search(r"--torch-backend cpu torch==[\d.]+$", by_index)
    assert ("found no CPU build" in ended.stderr) is bool(code_of_index)


def test_a_uv_that_is_too_old_leaves_the_installation_to_pip(machine):
    machine.add_uv(flags="--allow-existing")
    ended = machine.make("install")
    assert ended.returncode == 0
    assert f"{machine.uv} is no uv of version 0.8 or newer; installing with pip" in ended.stderr
    assert all(line.startswith("-m pip ") for line in machine.log.read_text().splitlines())
    assert (machine.venv / "package").read_text() == "whole\n"


def test_a_uv_that_is_killed_ends_the_installation(machine):
    machine.add_uv(code_of_build=137)
    assert machine.make("install").returncode != 0
    assert len(machine.log.read_text().splitlines()) == 2
    assert (machine.venv / "installing").exists()


def test_an_environment_that_somebody_else_made_is_kept(machine):
    machine.venv.mkdir()
    (machine.venv / "mine").touch()
    machine.killed.write_text("kill -9 $PPID")
    assert machine.make("install").returncode != 0
    machine.killed.unlink()
    machine.make("install")
    assert (machine.venv / "mine").exists()


def test_only_a_gpu_gets_the_lock(machine):
    assert machine.make("install").returncode == 0
    assert "--no-deps" not in machine.log.read_text() and "+cpu" in machine.log.read_text()
    assert machine.requirements.read_text().splitlines() == locked("cpu")
    machine.log.unlink()
    assert machine.make("install", extra=",gpu").returncode == 0
    lock, project = machine.log.read_text().splitlines()
    assert re.search(r"install --no-compile --no-deps -r /dev/fd/\d+ torch==[\d.]+,!=[\d.]+\+cpu$", lock)
    assert machine.requirements.read_text().splitlines() == locked("gpu")
    assert project.endswith("install --no-compile --no-deps -e .")
    assert machine.make("install", extra=",gpu").returncode == 0
    machine.outdate()
    assert machine.make("install", extra=None).returncode == 0  # nvidia-smi finds no GPU this time
    log = re.sub(r"fd/\d+", "", machine.log.read_text()).splitlines()
    assert log == [re.sub(r"fd/\d+", "", line) for line in (lock, project, lock, project)]


def test_vllm_without_unsloth_has_a_lock_of_its_own_and_is_kept(machine):
    machine.nvidia_smi(card("580.65.06"))
    assert machine.make("install", extra="vllm").returncode == 0
    lock, project = machine.log.read_text().splitlines()
    version = next(line for line in locked("vllm") if line.startswith("torch==")).partition("==")[2]
    assert re.search(rf"--no-deps -r /dev/fd/\d+ torch=={version},!={version}\+cpu$", lock)
    assert machine.requirements.read_text().splitlines() == locked("vllm")
    assert project.endswith("install --no-compile --no-deps -e .")
    machine.outdate()
    assert machine.make("install", extra=None).returncode == 0
    assert machine.requirements.read_text().splitlines() == locked("vllm")
    assert (machine.venv / "installed").read_text() == "vllm\n"


def test_the_newest_packages_are_installed_without_a_lock(machine):
    environment = {**os.environ, "PYTHON": str(machine.python), "VENV": str(machine.venv), "EXTRA": "newest", "UV": ""}
    subprocess.run(["bash", "scripts/install.sh"], cwd=ROOT, env=environment, check=True)
    [call] = machine.log.read_text().splitlines()
    assert call.endswith("install --no-compile --upgrade --upgrade-strategy eager -e .[dev]")
    assert (machine.venv / "installed").read_text() == "newest\n"


def test_the_lowest_versions_are_installed_from_their_lock(machine):
    assert machine.make("install", extra="floor").returncode == 0
    torch, project = machine.log.read_text().splitlines()
    assert re.search(r"install --no-compile torch==[\d.]+\+cpu$", torch)
    assert project.endswith("-e .[dev]")
    assert machine.requirements.read_text().splitlines() == locked("floor")


def locked(kind):
    lines = (ROOT / f"requirements-{kind}.lock").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def card(driver, capability="8.9"):
    return f"echo '0, GPU-1, Card, 24564, 24000, {driver}, {capability}'"


@pytest.mark.parametrize("driver", ["550.54.14", "570.211.01"])
@pytest.mark.parametrize("extra", [None, "vllm"])
def test_an_old_driver_stops_the_download_and_can_be_overridden(machine, driver, extra):
    machine.nvidia_smi(card(driver))
    stopped = machine.make("install", extra)
    errors = [line for line in stopped.stderr.splitlines() if line.startswith("error: ")]
    assert stopped.returncode == 2 and not machine.log.exists() and not machine.venv.exists()
    assert len(errors) == 1
    for word in (driver, "580", "EXTRA=cuda12", "ANY_DRIVER=1"):
        assert word in errors[0]
    assert machine.make("install", extra, "ANY_DRIVER=1").returncode == 0
    assert machine.requirements.read_text().splitlines() == locked(extra or "gpu")


def test_cuda_12_runs_on_an_old_driver_and_is_kept(machine):
    machine.nvidia_smi(card("550.54.14"))
    assert machine.make("install", "cuda12").returncode == 0
    torch, project = machine.log.read_text().splitlines()
    assert re.search(r" torch==[\d.]+\+cu126$", torch) and project.endswith("-e .[dev]")
    packages = [line.partition("==")[0] for line in machine.requirements.read_text().splitlines()]
    assert "torch" in packages
    assert not [package for package in packages if package.startswith(("nvidia", "cuda"))]
    machine.outdate()
    assert machine.make("install", None).returncode == 0
    assert (machine.venv / "installed").read_text() == "cuda12\n"


@pytest.mark.parametrize(
    ("nvidia_smi", "extra", "words"),
    [
        (card("580.65.06"), ",gpu", []),
        ('echo "couldn\'t communicate with the NVIDIA driver"; exit 9', "", ["couldn't communicate", "580"]),
        ("exit 127", "", ["nvidia-smi failed", "580"]),
    ],
    ids=["it works", "it fails", "it is missing"],
)
def test_a_driver_that_fails_is_named_and_the_cpu_takes_its_place(machine, nvidia_smi, extra, words):
    machine.nvidia_smi(nvidia_smi)
    ended = machine.make("install", None)
    assert ended.returncode == 0
    assert (machine.venv / "installed").read_text() == f"{extra}\n"
    notes = [line for line in ended.stderr.splitlines() if "NVIDIA" in line]
    if not words:
        assert notes == []
    else:
        [note] = notes
        assert all(word in note for word in words)


@pytest.fixture
def first_cell(machine, tmp_path, monkeypatch):
    """Return a function that runs the notebook's first cell in a copy of the repository, and returns what it installed.

    Its Python is the machine's, which has not got lora_grpo.
    """
    shells = pytest.importorskip("IPython.core.interactiveshell")
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    (copy / "lora_grpo" / "hardware").mkdir(parents=True)
    for name in ("lora_grpo/hardware/nvidia.py", *(path.name for path in ROOT.glob("requirements-*.lock"))):
        shutil.copy(ROOT / name, copy / name)
    for folder in ("recipes", "notebooks"):
        (copy / folder).mkdir()
    monkeypatch.setenv("PATH", f"{machine.tools}:{os.environ['PATH']}")
    monkeypatch.setenv("RUN", "")  # the cell sets it
    monkeypatch.setenv("UV", "")
    monkeypatch.setenv("MAX_STEPS", "1")
    monkeypatch.chdir(copy / "notebooks")
    monkeypatch.setattr(sys, "executable", str(machine.python))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cells = json.loads((ROOT / "notebooks" / "first_run.ipynb").read_text())["cells"]
    source = "".join(next(cell for cell in cells if cell["cell_type"] == "code")["source"])

    def run():
        result = shells.InteractiveShell().run_cell(source)
        return (copy / ".venv" / "installed").read_text().strip() if result.success else None

    return run


@pytest.mark.parametrize(
    ("nvidia_smi", "extra", "words"),
    [
        (card("580.65.06"), ",gpu", "CUDA 13, Unsloth and vLLM: Card, driver 580.65.06"),
        (card("550.54.15"), "cuda12", "CUDA 12.6, PEFT without Unsloth and vLLM: Card, driver 550.54.15"),
        (card("570.211.01", "12.0"), "", "570.211.01 cannot run CUDA 13"),  # PyTorch's cu126 build has no RTX 50
        (card("580.95.05", "6.0"), "cuda12", "CUDA 12.6"),  # Kaggle's P100
        (card("470.256.02"), "", "470.256.02 cannot run CUDA 13"),
        ("exit 9", "", "nvidia-smi failed"),
    ],
)
def test_the_notebook_takes_the_packages_that_the_driver_runs_and_says_which(
    machine, first_cell, capfd, nvidia_smi, extra, words
):
    machine.nvidia_smi(nvidia_smi)
    assert first_cell() == extra
    lines = "".join(capfd.readouterr()).splitlines()
    assert len([line for line in lines if line.startswith("installing ") and words in line]) == 1
    if extra == ",gpu":
        assert machine.requirements.read_text().splitlines() == locked("gpu")


def test_the_notebook_stops_after_an_installation_that_fails(machine, first_cell):
    machine.nvidia_smi(card("550.54.15"))
    machine.fails.write_text("ERROR: no torch for CUDA 12")
    assert first_cell() is None


def test_a_python_without_ensurepip_gives_the_environment_its_own_pip(machine):
    write_script(machine.python, python_script(machine.python.with_name("pip"), ensurepip="exit 1"))
    assert machine.make("install").returncode == 0
    bring_pip, *installations = machine.log.read_text().splitlines()
    assert bring_pip.endswith(f"--python {machine.venv}/bin/python install pip")
    assert len(installations) == 2
