"""Write a self-contained HTML page about a run: results, training curves, and all sampled completions.

    write_report(Path("outputs/gsm8k_lora"))        # report/report.html, report.md and a PNG of each plot
    write_diff(Path("outputs/a"), Path("outputs/b"))

    run folder ────┬─ facts ─────────── sentences and tables ──┬─► html ──────► report.html
                   ├─ plots ── charts ─ SVG and PNG ───────────┤
                   └─ sampled_texts ─── completions as JSON ───┴─► markdown ──► report.md

The page is a single file that makes no network requests. Model output is always shown as plain text.

writing.py         the command and its output files
facts.py           summarizes a run in sentences and tables
plots.py           selects the curves to plot, for one run or two
charts.py          draws a plot as SVG and PNG
sampled_texts.py   data for the page's completion browser
html.py            renders the HTML page from the templates in page/
markdown.py        renders the Markdown report for a pull request
"""

from lora_grpo.report.writing import (
    ReportOptions,
    report,
    report_line,
    write_diff,
    write_report,
)
