"""Candidates import the standard library without a file system."""

import importlib.util
import sys
from pathlib import Path

import pytest
from helpers.tiers import TIERS, USED_TIER, skip_unless_available

from lora_grpo.sandbox import Program, Settings, library
from lora_grpo.sandbox.pool import Pool

TRUE = """
hashlib.md5(b"").hexdigest()[:4] == "d41d" and hashlib.sha256(b"").hexdigest()[:4] == "e3b0"
decimal.Decimal("0.1") + 1 == decimal.Decimal("1.1") and fractions.Fraction(1, 2) * 2 == 1
lzma.decompress(lzma.compress(b"a")) == bz2.decompress(bz2.compress(b"a")) == zlib.decompress(zlib.compress(b"a"))
unicodedata.name("a") == "LATIN SMALL LETTER A" and codecs.lookup("latin2").name == "iso8859-2"
xml.etree.ElementTree.fromstring("<a>b</a>").text == "b"
not pathlib.Path("a/../b").exists() and not os.path.exists("/") and not os.access("/", os.R_OK)
os.getcwd() == "/" and os.path.abspath("a") == "/a" and str(pathlib.Path("a").resolve()) == "/a"
"ZeroDivisionError" in traceback.format_exc()
linecache.getline(os.__file__, 1) == "" and os.__file__.endswith("os.py")
"self" in inspect.signature(fractions.Fraction.limit_denominator).parameters
doctest.testmod().failed == 0 and logging.warning("a") is None
statistics.mean([1, 2]) == 1.5 and pickle.loads(pickle.dumps([1])) == [1]
unittest.mock.Mock(return_value=1)() == 1 and len(uuid.uuid4().hex) == len(secrets.token_hex(16))
next(csv.reader(["a,b"])) == ["a", "b"] and asyncio.iscoroutinefunction(len) is False
time.localtime().tm_year > 2000 and platform.system() == "Linux" and locale.localeconv()
"""
MODULES = """
asyncio bz2 codecs csv decimal doctest email.message fractions hashlib inspect linecache locale logging lzma
multiprocessing os pathlib pickle platform secrets statistics subprocess tempfile time traceback unicodedata
unittest.mock urllib.request uuid xml.etree.ElementTree zipfile zlib
"""


MISSING = """
antigravity crypt curses distutils ensurepip idlelib lib2to3 nis ossaudiodev pty pydoc_data readline spwd syslog termios
this tkinter tty turtle turtledemo venv
"""
"""Modules that need a terminal, a display, a server, or files; docs/sandbox.md names them. Some print when imported."""


@pytest.fixture(scope="module", params=TIERS)
def pool(request):
    skip_unless_available(request.param)
    pool = Pool(Settings(workers=1), request.param)
    yield pool
    pool.close()


def test_the_standard_library_works_without_files(pool):
    source = f"import {', '.join(MODULES.split())}\nlines = {TRUE.strip().splitlines()}\n"
    source += "def wrong():\n try: 1 / 0\n except ZeroDivisionError: return [line for line in lines if not eval(line)]"
    verdict = pool.run([Program(source, "found = wrong()\nassert found == [], found", ("wrong",))])[0]
    assert verdict.passed, verdict


def test_every_other_module_can_be_imported(pool):
    names = sorted(set(sys.stdlib_module_names) - set(MISSING.split()))
    names = [name for name in names if not name.startswith("_") and importlib.util.find_spec(name)]
    verdicts = pool.run([Program(f"import {name}\ndef f(): return 1", "assert f() == 1", ("f",)) for name in names])
    failed = {name: verdict for name, verdict in zip(names, verdicts, strict=True) if not verdict.passed}
    assert failed == {} and len(names) > 150


@pytest.mark.parametrize(
    ("call", "status", "error"),
    [
        ("open('/etc/passwd')", "blocked", "PermissionError"),
        ("open('new', 'w')", "blocked", "PermissionError"),
        ("os.listdir('/')", "blocked", "PermissionError"),
        ("os.stat('/')", "failed", "FileNotFoundError"),
        ("os.stat(os.__file__)", "failed", "FileNotFoundError"),
        ("os.readlink('/proc/self')", "failed", "FileNotFoundError"),
        ("inspect.getsource(os.path.join)", "failed", "OSError"),
        ("__import__('numpy')", "failed", "ModuleNotFoundError"),
        ("__import__('curses')", "failed", "ModuleNotFoundError"),
        ("__import__('sqlite3').connect('new.db')", "failed", "OperationalError"),
        ("__import__('tempfile').NamedTemporaryFile()", "failed", "FileNotFoundError"),
        ("__import__('tempfile').TemporaryFile().fileno()", "failed", "UnsupportedOperation"),
        ("__import__('threading').Thread(target=int).start()", "failed", "RuntimeError"),
    ],
)
def test_files_fail_as_on_an_empty_machine(pool, call, status, error):
    verdict = pool.run([Program(f"import inspect, os\ndef f(): {call}", "assert f() is None", ("f",))])[0]
    assert (verdict.status, verdict.message.partition(":")[0]) == (status, error), verdict


def test_every_process_is_killed_before_the_training_run_if_memory_runs_out(pool):
    assert pool.run([Program("def f(): return 1", "assert f() == 1", ("f",))])[0].passed
    pids = [zygote.process.pid for worker in pool.workers for zygote in worker.zygotes.values()]
    for pid in pids:  # grows
        pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    assert {Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in pids} == {"1000\n"}


def test_modules_without_compiled_code_are_compiled_in_the_sandbox(monkeypatch):
    monkeypatch.setattr(
        library, "read_code", lambda name, path: library.ModuleCode(Path(path).read_bytes(), is_source=True)
    )
    library.collect.cache_clear()
    pool = Pool(Settings(workers=1), USED_TIER)
    try:
        source = "import fractions\ndef f(): return fractions.Fraction(1, 2) * 2"
        assert pool.run([Program(source, "assert f() == 1", ("f",))])[0].passed
    finally:
        pool.close()
        library.collect.cache_clear()
