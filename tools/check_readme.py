"""Check the outputs that README.md and docs/ quote against a run of `make demo` from the same commit.

    make demo
    python tools/check_readme.py [RUN]                 # default: outputs/gsm8k_lora

A comment above a table or a fenced block names the command that prints it:

    <!-- printed by python scripts/merge.py outputs/gsm8k_lora -->

The block must be in the command's output, line by line, apart from spaces, times and the run's folder. All other
figures are reproducible, but only on the same family of processors with the same number of cores, because matrix
libraries choose their kernels by both. On any other machine, nothing is compared.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUOTED_RUN = "outputs/gsm8k_lora"
MEASURED_ON = [("AuthenticAMD family 25", "AVX2", 2), ("AuthenticAMD family 25", "AVX512", 2)]
"""Processors, PyTorch's CPU capability and numbers of cores on which a run printed the quoted figures."""
_MARK = re.compile(r"<!-- printed by (.+) -->")


def main() -> int:
    if (here := machine()) not in MEASURED_ON:
        print(f"not compared: this machine has {here}, and the figures were measured with one of {MEASURED_ON}")
        return 0
    run = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / QUOTED_RUN).resolve()
    return check([ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], run)


def machine() -> tuple[str, str, int]:
    import torch

    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    processor = f"{fields.get('vendor_id')} family {fields.get('cpu family')}"
    return processor, torch.backends.cpu.get_cpu_capability(), len(os.sched_getaffinity(0))


def check(documents: list[Path], run: Path) -> int:
    """Compare every marked block with the output of its command. Return 1 if one differs, or if there is none."""
    found = wrong = 0
    for document in documents:
        for line, command, quoted in blocks(document.read_text(encoding="utf-8")):
            found += 1
            printed = [comparable(text, run) for text in output(command, run).splitlines()]
            expected = [comparable(text, run) for text in quoted]
            if not expected or not any(printed[at : at + len(expected)] == expected for at in range(len(printed))):
                wrong += 1
                print(f"{document.name}:{line} differs from what `{command}` prints; + is the new output:")
                print("\n".join(difflib.ndiff(expected, printed)))
    print(f"{found - wrong} of {found} quoted outputs are as printed")
    return 1 if wrong or not found else 0


def blocks(text: str) -> list[tuple[int, str, list[str]]]:
    """Return line number, command and lines of each marked block: a table, or the inside of a fenced block."""
    lines, found = text.splitlines(), []
    for number, line in enumerate(lines, start=1):
        if mark := _MARK.fullmatch(line.strip()):
            fenced = lines[number : number + 1] == ["```"]
            start, end = (number + 1, "```") if fenced else (number, "")
            stop = next((at for at in range(start, len(lines)) if lines[at] == end), len(lines))
            found.append((number, mark[1], lines[start:stop]))
    return found


def output(command: str, run: Path) -> str:
    words = [word.replace(QUOTED_RUN, str(run)) for word in shlex.split(command)]
    words[0] = sys.executable if words[0] == "python" else words[0]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"error: `{shlex.join(words)}` failed: {ended.stderr.strip()[-300:]}")
    return ended.stdout


def comparable(line: str, run: Path) -> str:
    line = re.sub(r"\d+(\.\d+)?(?= ?(s|min|h)\b)", "#", line.replace(str(run), QUOTED_RUN))
    return " ".join(line.split())


if __name__ == "__main__":
    sys.exit(main())
