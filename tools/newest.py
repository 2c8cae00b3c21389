"""Test this checkout with the oldest and the newest packages, and print which of them still work, in Markdown.

    make newest                           # tests of what leans on packages, with the oldest and the newest of them
    make newest ARGS="--ends allowed"     # only with the newest that pyproject.toml allows
    make newest ARGS="--ends floor locked allowed registry gpu --suites default engines real_model gpu_rig"

An end is an environment of its own: `floor` has the lowest versions that pyproject.toml allows, `locked` those of the
lock, `allowed` the newest that it allows, `registry` the newest that the registry has, and `gpu` the gpu extra. A row
is red if a test of that package fails or if this package calls something that the row's calls deprecated. The exit
code is 1 if a row or a suite is red. The page goes to standard output and to the file GITHUB_STEP_SUMMARY; logs of
pytest go to outputs/newest. CONTRIBUTING.md says what to do with a red row.
"""

import argparse
import ast
import contextlib
import functools
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "outputs" / "newest"
UV = Path(sys.executable).with_name("uv")
ENDS = {  # with the folders of their environments
    "floor": ".venv-floor",
    "locked": ".venv",
    "allowed": ".venv-newest",
    "registry": ".venv-registry",
    "gpu": ".venv-gpu",
}
SUITES = ("contract", "default", "engines", "real_model", "gpu_rig")

TRAINING = tuple(f"tests/training/test_{name}.py" for name in ("drop_in", "fast_trainer", "run", "sft", "trl_compat"))
# The tests that call a package most directly, for every package that pyproject.toml lists.
CONTRACTS = {
    "torch": ("tests/loss", "tests/models", "tests/sampling", "tests/test_grpo_from_scratch.py"),
    "transformers": ("tests/models", "tests/prompts", "tests/sampling", "tests/config/test_trl_fields.py", *TRAINING),
    "trl": ("tests/loss", "tests/config/test_trl_fields.py", "tests/tasks/test_trl_environments.py", *TRAINING),
    "peft": ("tests/merging", "tests/models", "tests/training/test_drop_in.py"),
    "bitsandbytes": ("tests/merging", "tests/models", "tests/sampling"),
    "datasets": ("tests/data", "tests/tasks/test_sources.py", "tests/training/test_sft.py"),
    "accelerate": ("tests/training/test_several_processes.py", "tests/training/test_run.py"),
    "docstring-parser": ("tests/config",),
    "filelock": ("tests/files",),
    "gguf": ("tests/gguf",),
    "httpx2": ("tests/sampling",),
    "huggingface-hub": ("tests/hub", "tests/models"),
    "jinja2": ("tests/hub", "tests/report"),
    "markupsafe": ("tests/hub", "tests/report"),
    "math-verify": ("tests/grading",),
    "matplotlib": ("tests/report",),
    "numpy": ("tests/data", "tests/evaluation", "tests/gguf"),
    "packaging": ("tests/install", "tests/models/test_engine_failures.py"),
    "psutil": ("tests/hardware", "tests/memory"),
    "pyarrow": ("tests/data", "tests/tasks/test_sources.py"),
    "pydantic": ("tests/config", "tests/runs", "tests/tasks/test_tool_arguments.py"),
    "pyyaml": ("tests/config", "tests/settings"),
    "rich": ("tests/test_progress.py", "tests/cli/test_front_door.py"),
    "rich-argparse": ("tests/cli/test_front_door.py",),
    "safetensors": ("tests/merging", "tests/models", "tests/files"),
    "starlette": ("tests/agents", "tests/endpoint"),
    "uvicorn": ("tests/agents", "tests/endpoint"),
}

# The tests that an environment cannot run, and why.
NOT_HERE = {
    **{(end, "gpu_rig"): "needs the gpu extra: see gpu" for end in ENDS if end != "gpu"},
    **{("gpu", suite): "only gpu_rig runs here" for suite in SUITES if suite != "gpu_rig"},
}
# Errors in code that warns and names its caller, which C code does correctly; watch_deprecations.py finds the others.
WARNING_FILTERS = "\n".join(
    f"error::{name}:lora_grpo" for name in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")
)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage."""
        self.exit(2, f"error: {message}; see tools/newest.py --help\n")


class Unavailable(Exception):
    """An environment cannot be made, for this reason."""


@dataclass
class SuiteRun:
    """What one suite did in one environment."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """Numbers of tests that passed, failed and were skipped, by file."""
    failed: dict[str, list[str]] = field(default_factory=dict)
    """The names of tests that failed, by file."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many tests were skipped, by reason."""
    deprecated: list[dict[str, str]] = field(default_factory=list)
    """The lines of watch_deprecations.py, each place once."""
    reason: str = ""
    """Why the suite did not run or did not end."""

    def count(self, paths: Iterable[str] = ("tests",)) -> Counter[str]:
        """Return the numbers of outcomes of the tests in these folders and files."""
        total: Counter[str] = Counter()
        for file, outcomes in self.outcomes.items():
            if is_below(file, paths):
                total += outcomes
        return total


@dataclass
class EndRun:
    """One environment, what is in it, and what was run there."""

    versions: dict[str, str] = field(default_factory=dict)
    suites: dict[str, SuiteRun] = field(default_factory=dict)
    reason: str = ""
    """Why there is no environment."""
    same_as: str = ""
    """The end that has the same packages, so that nothing was run here."""


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ends", nargs="+", choices=ENDS, default=["floor", "allowed", "registry"])
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=["contract"])
    parser.add_argument("--workers", type=int, default=3, help="processes of pytest")
    arguments = parser.parse_args()

    versions = known_versions()
    runs: dict[str, EndRun] = {}
    for end in ENDS:
        if end in arguments.ends:
            runs[end] = run_end(end, arguments.suites, arguments.workers, versions)
    page = "\n".join([*package_table(versions, runs), "", *suite_table(runs, arguments.suites), "", *details(runs)])
    print(page)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(page + "\n")
    sys.exit(any(is_red(run) for run in runs.values()))


# Versions


def dependencies() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(line) for line in project["dependencies"]]


def known_versions() -> dict[str, dict[str, str]]:
    """Return the versions of all packages for each end, and of the listed packages in the registry (`alone`)."""
    listed = dependencies()
    names = "\n".join(requirement.name for requirement in listed)
    floors = "\n".join(without_ceiling(requirement) for requirement in listed)
    return {
        "floor": read_lock((ROOT / "requirements-floor.lock").read_text(encoding="utf-8")),
        "locked": read_lock((ROOT / "requirements-cpu.lock").read_text(encoding="utf-8")),
        "allowed": read_lock(resolve("pyproject.toml")),
        "registry": read_lock(resolve("-", floors)),
        "alone": read_lock(resolve("-", names, "--no-deps")),
        "gpu": read_lock((ROOT / "requirements-gpu.lock").read_text(encoding="utf-8")),
    }


def without_ceiling(requirement: Requirement) -> str:
    """Return the requirement with its lowest version alone; an exact version may be any."""
    floors = [str(bound) for bound in requirement.specifier if bound.operator == ">="]
    return requirement.name + ",".join(floors)


def resolve(source: str, text: str = "", *options: str) -> str:
    """Return the versions that uv chooses today, as the lines of a lock."""
    command = [UV, "pip", "compile", "--quiet", "--no-annotate", "--no-header", *options, source]
    ended = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(f"error: uv cannot resolve the packages: {' '.join(ended.stderr.split())}", file=sys.stderr)
        sys.exit(1)
    return ended.stdout


def read_lock(text: str) -> dict[str, str]:
    """Return the versions that a lock has for this Python."""
    versions = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                versions[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return versions


# Environments


def run_end(end: str, suites: list[str], workers: int, versions: dict[str, dict[str, str]]) -> EndRun:
    """Make the environment of an end, and run the suites in it."""
    run = EndRun()
    try:
        if end == "registry":
            changes = newer_packages(versions)
            if not changes:
                run.same_as = "allowed"
                return run
            make_registry(changes)
        else:
            make_environment(end)
    except Unavailable as error:
        run.reason = str(error)
        return run
    run.versions = installed_versions(end)
    for suite in suites:
        progress(f"{end}: {suite}")
        if (end, suite) in NOT_HERE:
            run.suites[suite] = SuiteRun(reason=NOT_HERE[end, suite])
        else:
            run.suites[suite] = run_suite(end, suite, workers)
    return run


@functools.cache
def make_environment(end: str) -> None:
    """Install or update an environment, once in a run."""
    folder = ENDS[end]
    if end == "allowed":  # it has what was the newest when it was made
        (ROOT / folder / "installed").unlink(missing_ok=True)
    call(["make", f"{folder}/installed"], f"{end}: installing {folder}")


def newer_packages(versions: dict[str, dict[str, str]]) -> list[str]:
    """Return what the registry has newer than pyproject.toml allows, as lines for pip."""
    allowed = versions["allowed"]
    return [f"{name}=={version}" for name, version in versions["registry"].items() if allowed.get(name) != version]


def make_registry(changes: list[str]) -> None:
    """Make an environment of these packages that takes all others from that of the newest allowed ones."""
    make_environment("allowed")
    folder = ROOT / ENDS["registry"]
    base = python_of("allowed")
    call([base, "-m", "venv", "--clear", "--without-pip", folder], f"registry: making {folder.name}")
    # `addsitedir` also reads the links there, such as that of this checkout.
    (site_packages("registry") / "others.pth").write_text(
        f"import site; site.addsitedir({str(site_packages('allowed'))!r})\n"
    )
    install = [base, "-m", "pip", "--quiet", "--python", python_of("registry"), "install", "--no-deps", "--no-compile"]
    call([*install, "--ignore-installed", *changes], f"registry: installing {' '.join(changes)}")


def python_of(end: str) -> Path:
    return ROOT / ENDS[end] / "bin" / "python"


def site_packages(end: str) -> Path:
    [folder] = (ROOT / ENDS[end] / "lib").glob("python3*/site-packages")
    return folder


def call(command: list[str | Path], about: str) -> None:
    """Run an installation, and give its last line as the reason if it fails."""
    progress(about)
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line and not line.startswith(("WARNING", "make"))]
        raise Unavailable(f"cannot be installed: {lines[-1] if lines else ended.returncode}")


def installed_versions(end: str) -> dict[str, str]:
    """Return the versions that an import finds in an environment."""
    script = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in %r}))"
    names = [requirement.name for requirement in dependencies()]
    ended = subprocess.run([python_of(end), "-c", script % names], capture_output=True, text=True, check=True)
    return {canonicalize_name(name): version for name, version in json.loads(ended.stdout).items()}


# Tests


def run_suite(end: str, suite: str, workers: int) -> SuiteRun:
    """Run a suite in an environment, with its deprecated calls noted."""
    if reason := what_is_missing(end, suite):
        return SuiteRun(reason=reason)
    LOGS.mkdir(parents=True, exist_ok=True)
    log, results, deprecations = (LOGS / f"{end}-{suite}.{kind}" for kind in ("log", "xml", "jsonl"))
    results.unlink(missing_ok=True)
    deprecations.write_text("")

    python = python_of(end)
    if suite == "contract":
        selection = sorted({path for paths in CONTRACTS.values() for path in paths})
    elif suite == "default":
        selection = []
    else:
        selection = ["-m", suite]
    if suite == "gpu_rig":
        python = Path(sys.executable)  # its tests start that of the gpu extra themselves
        workers = min(workers, 2)  # several GB each
    command = [python, "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder", *selection]
    command += [f"--junitxml={results}", "-o", "junit_family=xunit1", "-o", f"filterwarnings={WARNING_FILTERS}"]

    with deprecations_watched(end), log.open("w") as file:
        environment = {**os.environ, "DEPRECATIONS_FILE": str(deprecations)}
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False)

    run = SuiteRun()
    if ended.returncode not in (0, 1) or not results.is_file():
        lines = log.read_text(errors="replace").split("\n")
        run.reason = f"pytest ended with exit code {ended.returncode}: {next(filter(None, reversed(lines)), '')}"
    if results.is_file():
        read_results(results, run)
    read_deprecations(deprecations, run)
    return run


@contextlib.contextmanager
def deprecations_watched(end: str) -> Iterator[None]:
    """Let every Python of an environment import watch_deprecations.py, whatever its arguments and variables are."""
    link = site_packages(end) / "watch_deprecations.pth"
    link.write_text(f"{ROOT / 'tools'}\nimport watch_deprecations\n")
    try:
        yield
    finally:
        link.unlink()


def what_is_missing(end: str, suite: str) -> str:
    """Provide the optional packages or the model that a suite needs. Return why they cannot be had, or nothing."""
    try:
        if suite == "engines":
            venv = ENDS["allowed" if end == "registry" else end]  # the registry's takes them from there
            extra = (ROOT / venv / "installed").read_text().strip()
            call(["make", "engines", f"VENV={venv}", f"EXTRA={extra}"], f"{end}: installing the optional packages")
        elif suite == "real_model":
            call([python_of(end), "tools/laptop_model.py"], f"{end}: writing SmolLM2-135M-Instruct")
    except Unavailable as error:
        return str(error)
    return ""


def read_results(path: Path, run: SuiteRun) -> None:
    """Read pytest's XML into the run."""
    for case in ElementTree.parse(path).iter("testcase"):
        # A file that cannot be imported is a case without a file, whose name is that of the module.
        file = case.get("file") or case.get("name", "").replace(".", "/") + ".py"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
            run.failed.setdefault(file, []).append(case.get("name", ""))
        elif skipped is not None:
            outcome = "skipped"
            reason = skipped.get("message", "")
            if reason == "collection skipped":  # a whole file; the text is a tuple of file, line and reason
                reason = ast.literal_eval(skipped.text or "")[2].removeprefix("Skipped: ")
            run.skipped[reason] += 1
        else:
            outcome = "passed"
        run.outcomes.setdefault(file, Counter())[outcome] += 1


def read_deprecations(path: Path, run: SuiteRun) -> None:
    places = set()
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if (line["place"], line["text"]) not in places:
            places.add((line["place"], line["text"]))
            run.deprecated.append(line)


def is_below(file: str, paths: Iterable[str]) -> bool:
    return any(file == path or file.startswith(f"{path}/") for path in paths)


# The page


def package_table(versions: dict[str, dict[str, str]], runs: dict[str, EndRun]) -> Iterator[str]:
    """Yield the table of packages: their versions, and what the tests say that call them most directly."""
    tested = {}
    for end, run in runs.items():
        if any(suite in run.suites for suite in ("contract", "default")) and end != "gpu":
            tested[end] = run
    columns = ["package", "floor", "locked", "newest allowed", "newest in the registry"]
    columns += [f"passes: {end}" for end in tested]
    yield f"|{'|'.join(columns)}|"
    yield f"|{'---|' * len(columns)}"
    for name in CONTRACTS:
        cells = [name]
        for end in ("floor", "locked", "allowed", "alone"):
            environment = runs[end].versions if end in runs else {}
            cells.append(environment.get(name) or versions[end].get(name, "absent"))
        cells += [package_result(name, run) for run in tested.values()]
        yield f"|{'|'.join(cells)}|"


def package_result(name: str, run: EndRun) -> str:
    """Return how the tests of a package ended, such as `142 passed` or `**3 failed**, 139 passed`."""
    suite = run.suites.get("default") or run.suites["contract"]
    parts = [counts(suite.count(CONTRACTS[name]))]
    deprecated = [line for line in suite.deprecated if distribution(line["library"]) == name]
    if deprecated:
        parts.append(f"**{len(deprecated)} deprecated**")
    return ", ".join(parts)


def distribution(library: str) -> str:
    """Return the name under which pyproject.toml lists a module's package."""
    return {"yaml": "pyyaml"}.get(library, canonicalize_name(library))


def suite_table(runs: dict[str, EndRun], suites: list[str]) -> Iterator[str]:
    """Yield the table of environments: their versions, and the counts of every suite."""
    named = ("torch", "transformers", "trl", "datasets")
    columns = ["environment", *named, *suites]
    yield f"|{'|'.join(columns)}|"
    yield f"|{'---|' * len(columns)}"
    for end, run in runs.items():
        cells = [f"{end} (`{ENDS[end]}`)", *(run.versions.get(name, "") for name in named)]
        for suite in suites:
            if run.same_as:
                cells.append(f"the same packages as {run.same_as}")
            elif run.reason:
                cells.append(f"**{run.reason}**")
            else:
                cells.append(suite_result(run.suites[suite]))
        yield f"|{'|'.join(cells)}|"


def suite_result(suite: SuiteRun) -> str:
    parts = []
    if suite.outcomes:
        parts.append(counts(suite.count()))
    if suite.reason:
        parts.append(suite.reason)
    if suite.deprecated:
        parts.append(f"**{len(suite.deprecated)} deprecated**")
    return ", ".join(parts)


def counts(outcomes: Counter[str]) -> str:
    parts = [f"**{outcomes['failed']} failed**"] if outcomes["failed"] else []
    parts.append(f"{outcomes['passed']} passed")
    if outcomes["skipped"]:
        parts.append(f"{outcomes['skipped']} skipped")
    return ", ".join(parts)


def details(runs: dict[str, EndRun]) -> Iterator[str]:
    """Yield lists of the tests that failed, of the deprecated calls, and of the reasons for skipped tests."""
    for end, run in runs.items():
        for suite, result in run.suites.items():
            for file, tests in result.failed.items():
                others = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
                yield f"- {end}, {suite}: failed: `{file}::{tests[0]}`{others}"
            for line in result.deprecated:
                at = f", in `{line['test']}`" if line["test"] else ""
                yield f"- {end}, {suite}: `{line['place']}` calls {line['library']}{at}: {line['kind']}: {line['text']}"
            for reason, number in result.skipped.most_common():
                yield f"- {end}, {suite}: {number} skipped: {reason}"


def is_red(run: EndRun) -> bool:
    """Whether an environment cannot be made, or a suite in it failed, did not end or called something deprecated."""
    if run.reason:
        return True
    for suite in run.suites.values():
        did_not_end = suite.reason and suite.reason not in NOT_HERE.values()
        if suite.failed or suite.deprecated or did_not_end:
            return True
    return False


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
