"""`lora-grpo report`: write the report to the `report` folder of a run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lora_grpo.commands import command
from lora_grpo.errors import UserError, first_line
from lora_grpo.evaluation import read_report
from lora_grpo.files import atomic
from lora_grpo.gguf import gguf_sections
from lora_grpo.report.charts import draw
from lora_grpo.report.html import diff_html, report_html
from lora_grpo.report.markdown import report_markdown
from lora_grpo.report.plots import common_plots, plots_of
from lora_grpo.runs import read_run


@dataclass(frozen=True)
class ReportOptions:
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run: finished, stopped or still running."""
    other: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="OTHER")] = None
    """Folder of a second run to compare with the first."""


def report(options: ReportOptions) -> None:
    """Write the report of one run or the comparison of two runs, and print its path."""
    if options.other:
        print(f"report    {write_diff(options.run, options.other)}")
        return
    page = write_report(options.run)
    print(f"report    {page}\nMarkdown  {page.with_suffix('.md')}\nplots     {page.parent}/*.png\n")
    print(f"compare   {command('report', options.run, 'OTHER_RUN')}")
    print(f"share     {command('push', options.run, 'YOU/NAME', '--dry-run')}")


def write_report(folder: Path) -> Path:
    """Write `report.html`, `report.md`, and a PNG of each plot, and return the path of the page.

    The report folder is replaced atomically. The same run always produces the same bytes.

    Raises:
        UserError: the folder is not a run, one of its files cannot be read, or the report cannot be written.
    """
    run, evaluation = read_run(folder), read_report(folder / "evaluation")
    charts, ggufs = [draw(plot) for plot in plots_of(run, evaluation)], gguf_sections(folder)
    output = folder / "report"
    with _writing(output), atomic.new_folder(output) as staging:
        (staging / "report.html").write_text(report_html(run, evaluation, charts, ggufs), encoding="utf-8")
        (staging / "report.md").write_text(report_markdown(run, evaluation, ggufs), encoding="utf-8")
        for chart in charts:
            (staging / f"{chart.plot.key}.png").write_bytes(chart.png)
        for diff in output.glob("diff-*"):
            shutil.copyfile(diff, staging / diff.name)
    return output / "report.html"


def write_diff(folder: Path, other: Path) -> Path:
    """Write `diff-<other's name>.html` to the first run's report folder, and return its path.

    Raises:
        UserError: a folder is not a run, a file cannot be read or written, or both folders are the same run.
    """
    runs = [read_run(folder), read_run(other)]
    if folder.resolve() == other.resolve():
        raise UserError(f"{folder} and {other} are the same run; pass two different runs")
    names = [run.name for run in runs]
    if names[0] == names[1]:
        names = [f"{name} ({number})" for number, name in enumerate(names, start=1)]
    evaluations = [read_report(run.folder / "evaluation") for run in runs]
    plots = common_plots([plots_of(*of_run) for of_run in zip(runs, evaluations, strict=True)], names)
    output = folder / "report" / f"diff-{runs[1].name}.html"
    with _writing(output):
        output.parent.mkdir(exist_ok=True)
        atomic.write_text(output, diff_html(runs, evaluations, names, [draw(plot) for plot in plots]))
    return output


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from None


def report_line(folder: Path) -> str:
    """Write the report at the end of a run. Return a line with its path or the reason that it was not written."""
    try:
        return f"report    {write_report(folder)}"
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - must not hide how the run itself ended
        return f"report    not written: {first_line(error)}"
