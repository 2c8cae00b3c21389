"""Render the page: a single HTML file that makes no network requests, with all completions for its browser."""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lora_grpo.commands import command
from lora_grpo.evaluation import Joint, Report
from lora_grpo.files import printable
from lora_grpo.gguf import GgufSection
from lora_grpo.report import facts
from lora_grpo.report.charts import Chart
from lora_grpo.runs import Line, RunFiles

_FILES = Path(__file__).parent / "page"
MAX_SHOWN = 20_000
"""Maximum number of completions on one page."""

_COLUMNS = (
    *("source", "step", "sample_index", "problem", "completion", "extracted"),
    *("passed", "status", "tokens", "truncated", "rewards", "reward"),
)


def report_html(
    run: RunFiles, evaluation: Report | None, also: Joint | None, charts: Sequence[Chart], ggufs: Sequence[GgufSection]
) -> str:
    """Return the page of a run."""
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
    environment.filters["base64"] = lambda image: base64.b64encode(image).decode()
    texts = sampled_texts(run)
    script = (_FILES / "page.js").read_text(encoding="utf-8")
    # No character of the JSON can end its <script> element. ASCII keeps lone surrogates and JavaScript line separators.
    data = json.dumps(texts, separators=(",", ":"), allow_nan=False)
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html.jinja").render(
        run=run,
        page=evaluation,
        also=also,
        groups=[(group, [*charts]) for group, charts in groupby(charts, lambda chart: chart[0].group)],
        ggufs=ggufs,
        shown=len(texts["rows"]),
        total=texts["total"],
        data=Markup(data),
        style=Markup((_FILES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        # Only the page's own script can run. Model output cannot, even if it were parsed as markup.
        policy="default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'",
        facts=facts,
        update=command("report", run.folder),
    )


def sampled_texts(run: RunFiles, max_shown: int = MAX_SHOWN) -> dict[str, Any]:
    """Return about `max_shown` completions of a run: evenly spaced, and equally many of each step and evaluation.

    Returns:
        `columns` and `rows` of completions, `problems` as [id, question, answer], the names of `rewards`, and the
        `total` number of completions in the run.
    """
    groups: dict[tuple[str, Any], list[Line]] = {}
    for source, lines in (("training", run.completions), ("validation", run.validation)):
        for line in lines:
            groups.setdefault((source, line["step"]), []).append(line)
    for model, samples in run.samples.items():
        groups[(model, None)] = samples
    total = sum(map(len, groups.values()))
    rewards = list(dict.fromkeys(name for line in run.completions for name in line["rewards"]))
    problems: dict[tuple[Any, ...], int] = {}
    rows = []
    for (source, _), lines in groups.items():
        kept = len(lines) if total <= max_shown else math.ceil(len(lines) * max_shown / total)
        for index in range(kept):
            line = lines[index * len(lines) // kept]
            row = line if "step" in line else {"id": line["task_id"], **run.rows.get(line["task_id"], {})}
            problem = (_text(row.get("id")), _text(row.get("question")), _text(row.get("answer")))
            completion, extracted = line["completion"], line.get("extracted")
            if line.get("response") is not None:  # for code tasks, `completion` is the part of it that was run
                completion, extracted = line["response"], completion
            values = {
                **line,
                "source": source,
                "problem": problems.setdefault(problem, len(problems)),
                "completion": completion,
                "extracted": _text(extracted),
                "tokens": line.get("num_tokens"),
                "rewards": [_finite(line["rewards"].get(name)) for name in rewards] if "rewards" in line else None,
            }
            rows.append([_finite(values.get(name)) for name in _COLUMNS])
    return {"columns": _COLUMNS, "rows": rows, "problems": list(problems), "rewards": rewards, "total": total}


def _finite(value: Any) -> Any:
    """Replace NaN and infinity with None, because JSON does not support them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
