"""Render the page: a single HTML file that makes no network requests, with all completions for its browser."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_grpo.commands import command
from lora_grpo.evaluation import FORMAT_NOTE, Joint, Report
from lora_grpo.files import printable
from lora_grpo.gguf import GgufSection
from lora_grpo.report import facts
from lora_grpo.report.charts import Chart
from lora_grpo.report.completions import CompletionTable, completion_table
from lora_grpo.runs import RunFiles

if TYPE_CHECKING:
    from jinja2 import Environment

_FILES = Path(__file__).parent / "page"


def report_html(
    run: RunFiles,
    evaluation: Report | None,
    also: Joint | None,
    charts: Sequence[Chart],
    gguf_sections: Sequence[GgufSection],
    *,
    is_live: bool = False,
) -> str:
    """Return the page of a run.

    Args:
        run: the files of the run.
        evaluation: the evaluation before and after training, if there is one.
        also: the evaluation on the tasks of `eval.also`, if there is one.
        charts: the curves of the run, by section.
        gguf_sections: what the GGUF files of the run cost.
        is_live: whether the page updates itself from the server that it comes from.
    """
    from markupsafe import Markup

    style = (_FILES / "page.css").read_text(encoding="utf-8")
    scripts = [(_FILES / "page.js").read_text(encoding="utf-8")]
    if is_live:
        scripts.append((_FILES / "live.js").read_text(encoding="utf-8"))
    completions = completion_table(run)

    # Text is escaped, except Markup: the page's own files, and the completions as escaped JSON.
    return (
        _environment()
        .get_template("report.html.jinja")
        .render(
            run=run,
            facts=facts,
            evaluation=evaluation,
            also=also,
            format_note=FORMAT_NOTE,
            ggufs=gguf_sections,
            charts=_by_section(charts),
            num_shown=len(completions.rows),
            num_completions=completions.total,
            update_command=command("report", run.folder),
            policy=_security_policy(scripts, is_live=is_live),
            style=Markup(style),
            scripts=[Markup(script) for script in scripts],
            is_live=is_live,
            data=Markup(_script_data(completions)),
        )
    )


def _environment() -> "Environment":
    """Return the settings of the templates: all text is escaped, and a missing value is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FILES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable_value,
    )
    environment.filters["base64"] = _base64
    return environment


def _printable_value(value: Any) -> Any:
    """Return what a template inserts for a value: text without control characters, anything else as it is."""
    from markupsafe import Markup

    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _by_section(charts: Sequence[Chart]) -> dict[str, list[Chart]]:
    sections: dict[str, list[Chart]] = {}
    for chart in charts:
        sections.setdefault(chart.plot.group, []).append(chart)
    return sections


def _script_data(completions: CompletionTable) -> str:
    """Return the completions as JSON of which no character can end its <script> element.

    The JSON is ASCII, so it also contains no lone surrogates and no line separators of JavaScript.
    """
    data = completions.to_json()
    return data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _security_policy(scripts: Sequence[str], *, is_live: bool) -> str:
    """Return a policy with which only these scripts can run. Model output cannot, even if it were parsed as markup.

    A live page may also request itself.
    """
    digests = [_base64(hashlib.sha256(script.encode()).digest()) for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src {sources}"
    )
    if is_live:
        policy += "; connect-src 'self'"
    return policy
