"""Find an isolation that works on this machine by trying to escape from it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lora_grpo.sandbox import lockdown
from lora_grpo.sandbox.verdict import Program, Settings, Verdict

TIERS = ("landlock", "bubblewrap")
"""Safe isolation tiers, in order of preference."""


def missing(tier: str) -> str | None:
    """Return why a tier is unavailable, or None if it may work."""
    if not lockdown.has_seccomp():
        return "no seccomp for this system"
    if tier == "landlock" and not lockdown.landlock_version():
        return "no Landlock in this kernel (it needs Linux 5.13; the boot option lsm= may disable it)"
    if tier == "bubblewrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    return None


def describe(tier: str, workers: int, settings: Settings) -> str:
    how = {
        "landlock": f"Landlock (ABI {lockdown.landlock_version()}) + seccomp",
        "bubblewrap": "bubblewrap + seccomp",
        "none": "NONE - programs run as you, with your files and your network, and may leave processes behind",
    }[tier]
    return f"isolation {how}; {workers} workers, {settings.timeout_seconds:g} s and {settings.memory_mb} MiB a program"


def escapes(run: Callable[[Sequence[Program]], list[Verdict]]) -> str | None:
    """Return how a program escaped or why a correct one failed, or None if the isolation works."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text("open", encoding="utf-8")
        written = Path(folder, "written")
        attempts = {
            "reading a file": f"def f(): return open({str(secret)!r}).read()",
            "looking up a file": f"import os\ndef f():\n os.stat({str(secret)!r})\n return 'open'",
            "writing a file": f"def f():\n open({str(written)!r}, 'w').write('x')\n return 'open'",
            "a socket": "import socket\ndef f():\n socket.socket()\n return 'open'",
            "a new process": "import os\ndef f():\n if not os.fork(): os._exit(0)\n return 'open'",
            "a signal to this process": f"import os\ndef f():\n os.kill({os.getpid()}, 0)\n return 'open'",
            "the environment": "import os\ndef f(): return 'open' if os.environ else 'shut'",
        }
        test = "assert f() == 'open'"
        right = Program("def f(): return 'open'", test, ("f",))
        verdicts = run([right, *(Program(source, test, ("f",)) for source in attempts.values()), right])
        for verdict in (verdicts[0], verdicts[-1]):
            if not verdict.passed:
                return f"a correct program does not pass ({verdict.status}: {verdict.message})"
        passed = [name for name, verdict in zip(attempts, verdicts[1:-1], strict=True) if verdict.passed]
        if written.exists():
            passed.append("writing a file")
    return f"{passed[0]} is possible" if passed else None
