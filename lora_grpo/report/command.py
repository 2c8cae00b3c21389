"""`scripts/report.py`: a report of one run, or of two beside each other."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lora_grpo.report.writing import write_diff, write_report


@dataclass(frozen=True)
class Options:
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run: finished, stopped, or still going."""
    other: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="OTHER")] = None
    """Folder of a second run, to be compared with the first."""
    open: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Open the page in the web browser."""


def report(options: Options) -> None:
    """Write the report, say where it is, and what can be done next."""
    if options.other is None:
        page = write_report(options.run)
        run = shlex.quote(str(options.run))
        print(f"report    {page}\nto paste  {page.with_suffix('.md')}\nplots     {page.parent}/*.png\n")
        print(f"compare   python scripts/report.py {run} ANOTHER_RUN")
        print(f"share     python scripts/push.py {run} YOU/NAME --dry-run")
    else:
        page = write_diff(options.run, options.other)
        print(f"report    {page}\nto paste  {page.with_suffix('.md')}")
    if options.open:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            print(f"no web browser here; open {page} on a machine that has one")
