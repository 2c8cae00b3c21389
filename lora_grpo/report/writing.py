"""The files of a report: `report/` in the run's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import atomic
from lora_grpo.report.charts import draw
from lora_grpo.report.diff import common_plots, names_of
from lora_grpo.report.html import diff_html, report_html
from lora_grpo.report.markdown import diff_markdown, report_markdown
from lora_grpo.report.plots import plots_of
from lora_grpo.runs import read_run


def write_report(folder: Path) -> Path:
    """Write `report.html`, `report.md` and a PNG of each plot, all or nothing; the same run gives the same bytes.

    Args:
        folder: the run's.

    Returns:
        The page.

    Raises:
        UserError: it is not a run's folder, a file of it cannot be read, or it cannot be written to.
    """
    run = read_run(folder)
    charts = [draw(plot) for plot in plots_of(run)]
    output = folder / "report"
    try:
        with atomic.new_folder(output) as staging:
            (staging / "report.html").write_text(report_html(run, charts), encoding="utf-8")
            (staging / "report.md").write_text(report_markdown(run), encoding="utf-8")
            for chart in charts:
                (staging / f"{chart.plot.key}.png").write_bytes(chart.png)
            for diff in sorted(output.glob("diff-*")):
                shutil.copyfile(diff, staging / diff.name)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from None
    return output / "report.html"


def write_diff(folder: Path, other: Path) -> Path:
    """Write `diff-<other's name>.html` and `.md` into the first run's report.

    Raises:
        UserError: as `write_report`, of either run; or both are one.
    """
    runs = [read_run(folder), read_run(other)]
    if folder.resolve() == other.resolve():
        raise UserError(f"{folder} and {other} are the same run; give two, or one for its own report")
    names = names_of(runs)
    charts = [draw(plot) for plot in common_plots(runs, names)]
    output = folder / "report" / f"diff-{runs[1].name}.html"
    try:
        output.parent.mkdir(exist_ok=True)
        atomic.write_text(output.with_suffix(".md"), diff_markdown(runs, names))
        atomic.write_text(output, diff_html(runs, names, charts))
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from None
    return output


def report_line(folder: Path) -> str:
    """Write the report at the end of a run, whose own end it must not hide, and return the line that says where."""
    try:
        return f"report    {write_report(folder)}"
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it is said, and the run is what it is without
        reason = first_line(error)
        return f"report    not written: {reason}"
