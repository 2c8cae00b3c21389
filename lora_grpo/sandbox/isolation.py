"""Which isolation works on this machine: the tiers, what each of them needs, and a self-test that tries to escape."""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lora_grpo.sandbox import lockdown
from lora_grpo.sandbox.verdict import Program, Verdict

TIERS = ("landlock", "bubblewrap")
"""Safe isolation tiers, in order of preference. A third tier, `none`, isolates nothing."""

_TEST = "assert f() == 'open'"
CORRECT = Program("def f(): return 'open'", _TEST, ("f",), name="the sandbox's self-test")
"""A program that passes in every tier."""


def unavailable_reason(tier: str) -> str | None:
    """Return why a tier is unavailable, or None if it may work."""
    if not lockdown.has_seccomp():
        return "no seccomp for this system"
    if tier == "landlock" and not lockdown.landlock_version():
        return "no Landlock in this kernel (it needs Linux 5.13; the boot option lsm= may disable it)"
    if tier == "bubblewrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    return None


def self_test_failure(run: Callable[[Sequence[Program]], list[Verdict]]) -> str | None:
    """Return how a program escaped or why a correct one failed, or None if the isolation works.

    Args:
        run: runs programs in the tier that is tested.
    """
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text("open", encoding="utf-8")
        written = Path(folder, "written")
        escapes = {
            "reading a file": f"def f(): return open({str(secret)!r}).read()",
            "looking up a file": f"import os\ndef f():\n os.stat({str(secret)!r})\n return 'open'",
            "writing a file": f"def f():\n open({str(written)!r}, 'w').write('x')\n return 'open'",
            "a socket": "import socket\ndef f():\n socket.socket()\n return 'open'",
            "a new process": "import os\ndef f():\n if not os.fork(): os._exit(0)\n return 'open'",
            "a signal to this process": f"import os\ndef f():\n os.kill({os.getpid()}, 0)\n return 'open'",
            "the environment": "import os\ndef f(): return 'open' if os.environ else 'shut'",
        }
        programs = [Program(source, _TEST, ("f",)) for source in escapes.values()]
        # The second correct program shows that the attempts left the worker intact.
        first, *verdicts, last = run([CORRECT, *programs, CORRECT])
        escaped = [name for name, verdict in zip(escapes, verdicts, strict=True) if verdict.passed]
        if written.exists():
            escaped.append("writing a file")

    for verdict in (first, last):
        if not verdict.passed:
            return f"a correct program does not pass ({verdict.status}: {verdict.message})"
    if escaped:
        return f"{escaped[0]} is possible"
    return None


def describe_tier(tier: str) -> str:
    """Return the words for a tier in the sandbox's line, for the terminal and for reports."""
    if tier == "landlock":
        return f"Landlock (ABI {lockdown.landlock_version()}) + seccomp"
    if tier == "bubblewrap":
        return "bubblewrap + seccomp"
    return "NONE - programs run as you, with your files and your network, and may leave processes behind"
