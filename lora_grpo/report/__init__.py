"""Shows a run as one self-contained page: what it learned, why it did not, and everything the model wrote.

    write_report(Path("outputs/gsm8k_lora"))        # report/report.html, report.md and a PNG of each plot
    write_diff(Path("outputs/a"), Path("outputs/b"))

    run's folder ──┬─ facts ─────────── sentences and tables ──┬─► html ──────► report.html
                   ├─ plots ── charts ─ SVG and PNG ───────────┤
                   └─ sampled_texts ─── completions as JSON ───┴─► markdown ──► report.md

The page is one file that requests nothing from a network, and shows whatever a model wrote as text.

writing.py         the command and the files that it writes
facts.py           a run in sentences and tables
plots.py           which curves are plotted, of one run or of two
charts.py          a plot as SVG and PNG
sampled_texts.py   completions, for the page's browser of completions
html.py            the page, from page/
markdown.py        the same for a pull request
visible.py         characters that would not show, written out
"""

from lora_grpo.report.writing import ReportOptions, report, report_line, write_diff, write_report

__all__ = ["ReportOptions", "report", "report_line", "write_diff", "write_report"]
