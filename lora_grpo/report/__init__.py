"""Write a self-contained HTML page about a run: results, training curves, and all sampled completions.

    write_report(Path("outputs/gsm8k_lora"))        # report/report.html, and a PNG of each plot

    run folder ────┬─ facts ──────────── sentences and tables ──┬─► html ────► report.html
                   ├─ plots ─► charts ── images ────────────────┤
                   └─ completions ────── a table for a script ──┘

The page is a single file that makes no network requests. Model output is always shown as plain text.

writing.py      the command and its output files
facts.py        summarizes a run in sentences and tables
metrics.py      what a run's metrics hold: method, rewards, numbers
plots.py        selects the curves to plot
charts.py       draws a plot as a PNG image
completions.py  selects the completions to show
html.py         renders the page from the templates in page/
page/           templates, style and scripts of the page, and the table of plots
"""

from lora_grpo.report.writing import ReportOptions, live_report, report, report_line, write_report
