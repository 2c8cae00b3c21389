"""The locks fit pyproject.toml for every Python, and the registry still has what they name."""

import shlex
import shutil
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {kind: ROOT / f"requirements-{kind}.lock" for kind in ("cpu", "gpu", "vllm")}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GPU = {"sys_platform": "linux", "implementation_name": "cpython"}
MACHINES = ("x86_64", "aarch64")
WITHOUT_WHEELS = ("chess",)


def pins(lock, python, machine="x86_64"):
    """Return the versions that a lock installs for a Python version on Linux."""
    environment = {**GPU, "platform_machine": machine, "python_full_version": f"{python}.0", "python_version": python}
    versions = {}
    for line in lock.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            versions[requirement.name] = str(requirement.specifier).removeprefix("==")
    return versions


def moved(before, after):
    """Return one line for each package whose version differs."""
    changes = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            changes.append(f"{name}: {before.get(name, 'absent')} -> {after.get(name, 'absent')}")
    return changes


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("kind", LOCKS)
def test_every_requirement_is_locked_and_xformers_is_not(kind, python, machine):
    locked = pins(LOCKS[kind], python, machine)
    extras = PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *extras["dev"], *extras.get(kind, [])]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(locked[wanted.name.lower()]), f"{line}; run `make lock`"
    assert "xformers" not in locked  # its published builds need CUDA 12
    assert not [line for line in LOCKS[kind].read_text().splitlines() if "//" in line]


def test_the_default_tests_run_with_the_versions_of_the_gpu_lock():
    """Unsloth allows older versions than the CPU lock has: those of the floor."""
    cpu, gpu = (pins(LOCKS[kind], "3.11") for kind in ("cpu", "gpu"))
    floor = pins(ROOT / "requirements-floor.lock", "3.11")
    for name in ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets"):
        assert gpu[name] in (cpu[name], floor[name])


def test_the_floor_lock_has_the_lowest_versions_that_are_allowed():
    floor = pins(ROOT / "requirements-floor.lock", PYTHONS[0])
    for line in PROJECT["dependencies"]:
        wanted = Requirement(line)
        lowest = [bound.version for bound in wanted.specifier if bound.operator in (">=", "==")]
        assert [Version(version) for version in lowest] == [Version(floor[wanted.name])], f"{line}; run `make lock`"


def resolve(arguments, folder):
    """Run `uv pip compile` on pyproject.toml in a folder. Skip the test if the registry cannot be reached."""
    if find_spec("uv") is None:
        pytest.skip("uv is not installed: make install")
    import uv

    shutil.copy(ROOT / "pyproject.toml", folder)
    command = [uv.find_uv_bin(), "pip", "compile", *arguments, "--quiet"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if "error sending request" in ended.stderr or "Failed to fetch" in ended.stderr:
        pytest.skip(f"the registry cannot be reached: {ended.stderr.splitlines()[0]}")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.registry
@pytest.mark.parametrize("python", PYTHONS)
def test_pip_can_install_the_project_and_its_extras_without_a_lock(python, tmp_path):
    """All but the extra gpu, whose versions are pinned."""
    arguments = ["--python-version", python, "--output-file", "resolved.txt", "pyproject.toml"]
    for extra in PROJECT["optional-dependencies"].keys() - {"gpu"}:
        arguments += ["--extra", extra]
    resolve(arguments, tmp_path)
    lines = (tmp_path / "resolved.txt").read_text().splitlines()
    resolved = {canonicalize_name(Requirement(line).name) for line in lines if line.lstrip()[0] != "#"}
    assert resolved >= {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}


@pytest.mark.registry
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", ["gpu", "vllm"])
def test_what_a_gpu_needs_is_published_for_its_machine(kind, machine, tmp_path):
    """As wheels, because nothing else is built there. A DGX Spark is an aarch64."""
    lines = LOCKS[kind].read_text().splitlines()
    wheels = [line for line in lines if line.partition("==")[0] not in WITHOUT_WHEELS]
    (tmp_path / "wheels.txt").write_text("\n".join(wheels))
    platform = ["--python-version", "3.12", "--python-platform", f"{machine}-manylinux_2_39"]
    resolve(["--no-deps", "--no-build", *platform, "wheels.txt", "--output-file", "resolved.txt"], tmp_path)
    resolved = (tmp_path / "resolved.txt").read_text()
    assert all(f"\n{name}==" in resolved for name in ("torch", "vllm", "bitsandbytes", "triton"))


@pytest.mark.registry
@pytest.mark.parametrize("kind", LOCKS)
def test_the_project_still_resolves_to_the_lock(kind, tmp_path):
    """uv keeps a locked version as long as it is published and fits everything else."""
    lock = LOCKS[kind]
    shutil.copy(lock, tmp_path)
    command = lock.read_text().splitlines()[1].lstrip("# ")
    assert command.startswith("uv pip compile ")
    resolve(shlex.split(command)[3:], tmp_path)
    for python in PYTHONS:
        changes = moved(pins(lock, python), pins(tmp_path / lock.name, python))
        assert not changes, f"Python {python}; run `make lock`: {', '.join(changes)}"
