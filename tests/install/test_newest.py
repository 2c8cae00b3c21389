"""`make newest`: results are attributed to packages, deprecated calls of this checkout are found, and red is red."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import newest
import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_tool(*options):
    command = [sys.executable, "tools/newest.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_listed_package_has_tests():
    assert list(newest.CONTRACTS) == [requirement.name for requirement in newest.dependencies()]
    for paths in newest.CONTRACTS.values():
        assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("options", [["--ends", "oldest"], ["--suites", "fast"], ["--workers", "two"], ["--quick"]])
def test_a_wrong_option_is_refused_in_one_line(options):
    ended = run_tool(*options)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert options[-1] in ended.stderr


@pytest.mark.parametrize(
    ("line", "floors"),
    [("trl>=1.14.2,!=1.15.*,<1.17", "trl>=1.14.2"), ("math-verify==0.9.0", "math-verify"), ("torch>=2", "torch>=2")],
)
def test_the_registry_has_no_ceiling(line, floors):
    assert newest.without_ceiling(newest.Requirement(line)) == floors


def test_the_registry_differs_where_a_ceiling_holds_a_package_back():
    versions = {"allowed": {"trl": "1.16.0", "peft": "0.21.2"}, "registry": {"trl": "1.17.0", "peft": "0.21.2"}}
    assert newest.newer_packages(versions) == ["trl==1.17.0"]


@pytest.fixture
def suite(tmp_path):
    """A suite with a file of every kind of outcome, run by pytest."""
    tests = tmp_path / "tests"
    files = {
        "loss/test_passes.py": "def test_a(): pass\ndef test_b(): pass\n",
        "loss/test_fails.py": "def test_a(): assert 1 == 2\n",
        "hub/test_skips.py": "import pytest\n@pytest.mark.skip(reason='no card')\ndef test_a(): pass\n",
        "hub/test_needs.py": "import pytest\npytest.importorskip('a_card')\ndef test_a(): pass\n",
        "hub/test_cannot_start.py": "import pytest\n@pytest.fixture\ndef f(): 1 / 0\ndef test_a(f): pass\n",
        "data/test_broken.py": "import a_module_that_nobody_has\n",
    }
    for name, source in files.items():
        (tests / name).parent.mkdir(parents=True, exist_ok=True)
        (tests / name).write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    command += ["-o", "junit_family=xunit1", "--junitxml=results.xml", "--continue-on-collection-errors", "tests"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    run = newest.SuiteRun()
    newest.read_results(tmp_path / "results.xml", run)
    return run


def test_results_are_counted_by_file(suite):
    assert suite.count() == Counter(passed=2, failed=3, skipped=2)
    assert suite.count(["tests/loss"]) == Counter(passed=2, failed=1)
    assert suite.count(["tests/loss/test_passes.py", "tests/hub"]) == Counter(passed=2, failed=1, skipped=2)
    assert suite.count(["tests/data"]) == Counter(failed=1)  # it cannot be imported
    assert suite.skipped == Counter({"no card": 1, "could not import 'a_card': No module named 'a_card'": 1})
    assert suite.failed["tests/loss/test_fails.py"] == ["test_a"]


def test_rows_name_what_failed(suite):
    run = newest.EndRun({"trl": "1.16.0"}, {"contract": suite})
    assert newest.package_result("trl", run) == "**1 failed**, 2 passed"
    assert newest.package_result("gguf", run) == "0 passed"
    rows = list(newest.package_table({end: {} for end in ("floor", "locked", "allowed", "alone")}, {"allowed": run}))
    assert "|trl|absent|absent|1.16.0|absent|**1 failed**, 2 passed|" in rows
    assert "- allowed, contract: failed: `tests/loss/test_fails.py::test_a`" in list(newest.details({"allowed": run}))


GREEN = newest.SuiteRun({"tests/loss/test_x.py": Counter(passed=1)})
FAILED = newest.SuiteRun(failed={"tests/loss/test_x.py": ["test_a"]})
DEPRECATED = newest.SuiteRun(deprecated=[{"library": "trl", "place": "lora_grpo/x.py:1", "text": "old"}])
NOT_HERE = newest.SuiteRun(reason=newest.NOT_HERE["floor", "gpu_rig"])


@pytest.mark.parametrize(
    ("run", "is_red"),
    [
        (newest.EndRun(suites={"contract": GREEN, "gpu_rig": NOT_HERE}), False),
        (newest.EndRun(same_as="allowed"), False),
        (newest.EndRun(suites={"contract": FAILED}), True),
        (newest.EndRun(suites={"contract": DEPRECATED}), True),
        (newest.EndRun(suites={"contract": newest.SuiteRun(reason="pytest ended with exit code 3")}), True),
        (newest.EndRun(reason="cannot be installed"), True),
    ],
)
def test_what_is_red(run, is_red):
    assert newest.is_red(run) == is_red


LIBRARY = """
import functools, logging, warnings
from typing_extensions import deprecated
logger = logging.getLogger(__name__)
logger.setLevel(logging.ERROR)
warnings.simplefilter("ignore")

def at_itself(): warnings.warn("old", FutureWarning)
def at_its_caller(): warnings.warn("old", DeprecationWarning, stacklevel=2)
def inside(): at_its_caller()
def by_logger(): logger.warning("%s is deprecated", "old")
@functools.lru_cache
def once(text): logger.warning(text)
def by_logger_once(): once("old will be removed in version 6")
@deprecated("old")
def decorated(): pass
def takes(old=None): warnings.warn("old", FutureWarning)
def not_about_it(): warnings.warn("a slow tokenizer", UserWarning); logger.warning("a slow tokenizer")
"""

ANOTHER_LIBRARY = """
import library
def call_it(): library.at_itself(); library.by_logger()
def call_decorated(): library.decorated()
class Arguments:
    def __init__(self, **arguments): library.takes(**arguments)
"""


@pytest.fixture
def deprecations(tmp_path):
    """Return a function that runs a line as one of this checkout, and returns what was noted."""
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "another.py").write_text(ANOTHER_LIBRARY)
    (tmp_path / "imports_it.py").write_text("import library\ndef at_import(): library.at_itself()\nat_import()\n")
    (tmp_path / "old_module.py").write_text("import warnings\nwarnings.warn('an old module', FutureWarning)\n")

    def run(line):
        noted = tmp_path / "noted"
        noted.write_text("")
        source = f"import library, another, warnings; warnings.simplefilter('ignore')\n{line}\n"
        script = (
            f"import watch_deprecations; exec(compile({source!r}, {str(ROOT / 'lora_grpo' / 'caller.py')!r}, 'exec'))"
        )
        path = os.pathsep.join([str(tmp_path), str(ROOT / "tools")])
        environment = {**os.environ, "PYTHONPATH": path, "DEPRECATIONS_FILE": str(noted)}
        subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True)
        return [json.loads(text) for text in noted.read_text().splitlines()]

    return run


@pytest.mark.parametrize(
    ("line", "library"),
    [
        ("library.at_itself()", "library"),
        ("library.at_its_caller()", "library"),
        ("library.inside()", "library"),
        ("library.by_logger()", "library"),
        ("library.by_logger_once()", "library"),
        ("library.decorated()", "a decorator"),
        ("another.Arguments(old=1)", "library"),
        ("import old_module", "old_module"),
    ],
)
def test_a_deprecated_call_of_this_checkout_is_noted(deprecations, line, library):
    [noted] = deprecations(line)
    assert (noted["library"], noted["place"]) == (library, "lora_grpo/caller.py:2")
    assert "old" in noted["text"]


@pytest.mark.parametrize(
    "line", ["library.not_about_it()", "another.call_it()", "another.call_decorated()", "import imports_it"]
)
def test_other_warnings_and_calls_of_other_libraries_are_not(deprecations, line):
    assert deprecations(line) == []
