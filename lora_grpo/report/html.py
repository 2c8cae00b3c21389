"""Render the page: a single HTML file that makes no network requests."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lora_grpo.evaluation import Report
from lora_grpo.files import printable
from lora_grpo.gguf import GgufSection
from lora_grpo.report import facts
from lora_grpo.report.charts import Chart
from lora_grpo.report.sampled_texts import embedded, sampled_texts
from lora_grpo.runs import RunFiles

_FILES = Path(__file__).parent / "page"


def report_html(run: RunFiles, evaluation: Report | None, charts: Sequence[Chart], ggufs: Sequence[GgufSection]) -> str:
    """Return the page of one run."""
    texts = sampled_texts(run)
    return _rendered(
        "report.html.jinja",
        title=run.name,
        run=run,
        page=evaluation,
        charts=charts,
        ggufs=ggufs,
        shown=len(texts["rows"]),
        total=texts["total"],
        data=embedded(texts),
    )


def diff_html(
    runs: Sequence[RunFiles], evaluations: Sequence[Report | None], names: Sequence[str], charts: Sequence[Chart]
) -> str:
    """Return the page of two runs."""
    return _rendered(
        "diff.html.jinja",
        title=" and ".join(names),
        runs=[*zip(names, runs, evaluations, strict=True)],
        names=names,
        charts=charts,
        settings=facts.different([*map(facts.settings, runs)]),
        versions=facts.different([*map(facts.versions_and_machine, runs)]),
    )


def _rendered(template: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=FileSystemLoader(_FILES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=shown,
    )
    script = (_FILES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    groups = [(group, list(charts)) for group, charts in groupby(values.pop("charts"), lambda chart: chart.plot.group)]
    return environment.get_template(template).render(
        groups=[(group, [(chart, Markup(chart.svg)) for chart in charts]) for group, charts in groups],
        style=Markup((_FILES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        # Only the page's own script can run. Model output cannot, even if it were parsed as markup.
        policy="default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'",
        facts=facts,
        **{name: Markup(value) if name == "data" else value for name, value in values.items()},
    )
