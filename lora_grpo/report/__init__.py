"""Write a self-contained HTML page about a run: results, training curves, and all sampled completions.

    write_report(Path("outputs/gsm8k_lora"))        # report/report.html, and a PNG of each plot

    run folder ────┬─ facts ─────────── sentences and tables ──┬─► html ────► report.html
                   └─ plots ── charts ─ images ────────────────┘

The page is a single file that makes no network requests. Model output is always shown as plain text.

writing.py  the command and its output files
facts.py    summarizes a run in sentences and tables
plots.py    selects the curves to plot
charts.py   draws a plot as a PNG image
html.py     renders the HTML page from the templates in page/, with all completions for its browser
"""

from lora_grpo.report.writing import ReportOptions, report, report_line, write_report
