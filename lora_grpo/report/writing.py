"""`lora-grpo report`: write the report to the `report` folder of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lora_grpo import console
from lora_grpo.commands import command
from lora_grpo.errors import UserError, first_line
from lora_grpo.evaluation import read_also, read_report
from lora_grpo.files import atomic
from lora_grpo.flags import Flag
from lora_grpo.gguf import gguf_sections
from lora_grpo.report.charts import Chart, draw
from lora_grpo.report.html import report_html
from lora_grpo.report.plots import plots_of
from lora_grpo.runs import read_run


@dataclass(frozen=True)
class ReportOptions:
    run: Annotated[Path, Flag("RUN")]
    """Folder of a run: finished, stopped or still running."""


def report(options: ReportOptions) -> None:
    """Write the report of a run, and print its path."""
    page = write_report(options.run)
    console.result(f"report    {page}\nplots     {page.parent}/*.png\n")
    console.result(f"share     {command('push', options.run, 'YOU/NAME', '--dry-run')}")


def write_report(folder: Path) -> Path:
    """Write `report.html` and a PNG of each plot, and return the path of the page.

    The report folder is replaced atomically. The same run always produces the same bytes.

    Raises:
        UserError: the folder is not a run, one of its files cannot be read, or the report cannot be written.
    """
    page, charts = _draw_report(folder)
    output = folder / "report"
    try:
        with atomic.new_folder(output) as staging:
            (staging / "report.html").write_text(page, encoding="utf-8")
            for chart in charts:
                (staging / f"{chart.plot.key}.png").write_bytes(chart.png)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from None
    return output / "report.html"


def live_report(folder: Path) -> str:
    """Return the page of a run that updates itself from the server that it comes from. Nothing is written.

    Raises:
        UserError: the folder is not a run, or one of its files cannot be read.
    """
    page, _ = _draw_report(folder, is_live=True)
    return page


def _draw_report(folder: Path, *, is_live: bool = False) -> tuple[str, list[Chart]]:
    """Return the page of a run, and its plots."""
    run = read_run(folder)
    evaluation = read_report(folder / "evaluation")
    also = read_also(folder / "evaluation")
    charts = [draw(plot) for plot in plots_of(run, evaluation)]
    page = report_html(run, evaluation, also, charts, gguf_sections(folder), is_live=is_live)
    return page, charts


def report_line(folder: Path) -> str:
    """Write the report at the end of a run. Return a line with its path or the reason that it was not written."""
    try:
        return f"report    {write_report(folder)}"
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - must not hide how the run itself ended
        return f"report    not written: {first_line(error)}"
