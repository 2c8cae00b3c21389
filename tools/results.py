"""Repeat measurements of the documentation: run commands, write docs/results.json, and the tables of docs/ from it.

    python tools/results.py                    # all parts, hours on two cores
    python tools/results.py gsm8k rounding     # some parts
    python tools/results.py --list             # the parts and their commands

A part is a recipe, trained with each of its seeds, or a benchmark that prints a table. Its table stands between
`<!-- results: NAME -->` and `<!-- end -->` on a page, with the commands, the commit and the processor. A recipe also
has a plot, docs/curve-NAME.png: the validation accuracy, or the reward of the steps if there is no validation, as the
mean over the seeds with a band from the lowest to the highest. `<!-- results: summary -->` is a table of all recipes.

Runs are kept in outputs/results, and a part that was stopped goes on with the runs that are not finished. Files are
written at the end, because changed files would change the commit of a run. A test compares them with docs/results.json.
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.cli import run_command
from lora_grpo.errors import UserError
from lora_grpo.evaluation import percent
from lora_grpo.files import atomic, json_files
from lora_grpo.report.charts import draw
from lora_grpo.report.plots import Curve, Plot, plots_of
from lora_grpo.runs import git_revision, read_record, read_run

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "results.json"
ARCHIVE = "results-archive.md"  # the page with all tables, beside the summary
RUNS = ROOT / "outputs" / "results"
HEADINGS = ["seed", "", "before", "after", "difference", "p", "minutes"]


@dataclass(frozen=True)
class Recipe:
    """Commands that train with a seed; the last one is evaluated before and after. Each needs the one before it."""

    commands: tuple[str, ...]
    """`{seed}` is the seed, and `{before}` the folder of the command before. Without a seed, it runs once for all."""
    seeds: tuple[int, ...] = (0, 1, 2)

    def measure(self, name: str) -> dict[str, Any]:
        """Train all seeds, and return the table with its minutes and commits."""
        rows, curves, commits = [], [], set()
        minutes: dict[Path, float] = {}
        for seed in self.seeds:
            before, spent = "", 0.0
            for number, command in enumerate(self.commands):
                folder = RUNS / (f"{name}-{number}-{seed}" if "{seed}" in command else f"{name}-{number}")
                minutes[folder] = run_once(command.format(seed=seed, before=before), folder)
                spent += minutes[folder]
                before = str(folder)
            report = json.loads((Path(before) / "evaluation" / "report.json").read_text(encoding="utf-8"))
            commits.add(json.loads((Path(before) / "run.json").read_text(encoding="utf-8"))["git_revision"])
            for index, row in enumerate(report["table"]):
                before_after = (percent(row[each], row[f"{each}_interval"]) for each in ("before", "after"))
                cells = [*before_after, percent(row["difference"], row["difference_interval"], "+")]
                p = "<0.001" if row["p_value"] < 0.001 else f"{row['p_value']:.3f}"
                first = ["", ""] if index else [str(seed), f"{spent:.0f}"]
                rows.append([first[0], row["metric"], *cells, p, first[1]])
            plots = {plot.key: plot for plot in plots_of(read_run(Path(before)), None)}
            curves.append(plots.get("validation-accuracy") or plots["reward"])
        table = [" | ".join(row) for row in (HEADINGS, *rows)]
        total = sum(minutes.values())
        return {"commits": sorted(commits), "minutes": total, "table": table, "curve": mean_curve(curves)}


def mean_curve(plots: list[Plot]) -> dict[str, Any]:
    """Return the mean, lowest and highest value over runs for each step that all of them have."""
    curves = [dict(zip(plot.curves[0].x, plot.curves[0].y, strict=True)) for plot in plots]
    points = [(step, [curve[step] for curve in curves]) for step in curves[0] if all(step in each for each in curves)]
    return {
        **{"title": plots[0].title, "unit": plots[0].unit, "x": [step for step, _ in points]},
        **{"y": [round(statistics.fmean(values), 4) for _, values in points]},
        **{"low": [round(min(values), 4) for _, values in points]},
        **{"high": [round(max(values), 4) for _, values in points]},
    }


@dataclass(frozen=True)
class Benchmark:
    """A command that prints a table."""

    commands: tuple[str, ...]

    def measure(self, name: str) -> dict[str, Any]:
        """Run the command, and return the last table that it prints."""
        started = time.monotonic()
        [command] = self.commands
        printed = subprocess.run(words(command), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        tables = re.findall(r"(?:^\|.*\|\n)+", f"{printed}\n", re.M)
        if not tables:
            raise UserError(f"{name}: `{command}` printed no table")
        headings, _, *rows = (line[2:-2] for line in tables[-1].splitlines())
        minutes = (time.monotonic() - started) / 60
        return {"commits": [git_revision()], "minutes": minutes, "table": [headings, *rows]}


_SQL = "--task recipes/sql_lora.py --train.prompts-per-step 4 --train.max-steps 32 --train.learning-rate 5e-4"
_GUESS = "--task recipes/guess_lora.py --sampling.max-completion-tokens 160 --train.max-steps 100"
_FROM_SFT = "--start outputs/results/order-0-0 --goal 0.75 --every 2"
_TEN_STEPS = "--start outputs/results/sql-0 --goal 0 --every 10 --seeds 2"
_STARTER = "--preset starter --monitor.every-steps 5 --seed {seed}"
_MONITOR = "--monitor.rows 64 --monitor.every-steps 2"
PARTS: dict[str, Recipe | Benchmark] = {
    # First, because it fails without HumanEval.jsonl.gz, and tables are written at the end.
    "sandbox": Benchmark(("tools/benchmark_sandbox.py --rounds 5",)),
    "gsm8k": Recipe((f"recipes/gsm8k_lora.py {_STARTER}",)),
    "code": Recipe((f"recipes/code_lora.py {_STARTER}",)),
    "length": Recipe((f"recipes/length_lora.py {_STARTER}",)),
    "your_task": Recipe((f"recipes/your_task.py {_STARTER}",)),
    "guess": Recipe(
        (
            f"recipes/sft_lora.py --preset starter {_GUESS} --seed {{seed}}",
            f"recipes/guess_lora.py --lora.from {{before}} {_STARTER}",
        )
    ),
    "order": Recipe(
        (
            "recipes/sft_lora.py --preset laptop --task recipes/laptop_lora.py --seed {seed}",
            f"recipes/laptop_lora.py --preset laptop {_MONITOR} --lora.from {{before}} --seed {{seed}}",
        )
    ),
    "sql": Recipe(
        (
            f"recipes/sft_lora.py --preset laptop {_SQL}",
            "recipes/sql_lora.py --preset laptop --lora.from {before} --seed {seed}",
        ),
        seeds=(1, 2, 3),
    ),
    "rounding": Benchmark(("tools/merge_rounding.py",)),
    "steps": Benchmark(("tools/benchmark_step.py --workloads starter --sides plain unsloth now --steps 4 --rounds 3",)),
    "accuracy": Benchmark(("tools/benchmark_accuracy.py --sides plain unsloth now",)),
    "tools_accuracy": Benchmark((f"tools/benchmark_accuracy.py --workload tools {_TEN_STEPS}",)),  # an hour and a half
    "laptop_accuracy": Benchmark((f"tools/benchmark_accuracy.py --workload laptop {_FROM_SFT}",)),
    "merge": Benchmark(("tools/benchmark_merge.py --rounds 3",)),
    "turns": Benchmark(("tools/benchmark_turns.py --turns 4 --steps 2 --rounds 2",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--list", action="store_true", help="print the parts and their commands")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        raise UserError(f"no part {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    names = options.parts or list(PARTS)
    if options.list:
        for name in names:
            print(f"{name}\n" + "\n".join(f"    python {command}" for command in PARTS[name].commands))
        return
    found = {
        name: {"commands": PARTS[name].commands, "processor": processor(), **PARTS[name].measure(name)}
        for name in names
    }
    known = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    atomic.write_json(RECORD, {**known, **found})
    for name in names:
        if "curve" in found[name]:
            image(name).write_bytes(drawn(name, found[name]["curve"]))
    for page in sorted(RECORD.parent.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := with_tables(text)) != text:
            atomic.write_text(page, new)


def run_once(command: str, folder: Path) -> float:
    """Run a recipe unless its run is finished, and return the minutes that its processes worked."""
    has_begun = (folder / "run.json").exists()
    if not has_begun or read_record(folder)["status"] != "complete":
        mode = ["--resume"] if has_begun else []
        subprocess.run([*words(command), "--output-dir", str(folder), *mode], cwd=ROOT, check=True)
    return float(read_record(folder)["seconds_worked"] / 60)


def evaluate_once(model: Path, flags: Sequence[str], folder: Path) -> list[Any]:
    """Evaluate a model unless the evaluation in a folder is finished, and return its graded samples."""
    if not (folder / "report.json").exists():
        command = shlex.join(["scripts/evaluate.py", str(model), *flags, "--output-dir", str(folder)])
        print(command, file=sys.stderr, flush=True)
        subprocess.run(words(command), cwd=ROOT, check=True)
    return json_files.read_finished_lines(folder / "results.jsonl")


def words(command: str) -> list[str]:
    return [sys.executable, *shlex.split(command)]


def processor() -> str:
    models = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return f"{len(models)} x {models[0]}" if models else "unknown"


def image(name: str) -> Path:
    return RECORD.parent / f"curve-{name}.png"


def plotted(name: str, curve: dict[str, Any]) -> Plot:
    x, y, low, high = (curve[each] for each in ("x", "y", "low", "high"))
    mean = Curve(name, x, y, low, high, "the range over the seeds")
    return Plot(name, "", f"{name}: {curve['title'].lower()}", curve["unit"], "", curves=[mean])


def drawn(name: str, curve: dict[str, Any]) -> bytes:
    """Return the PNG image of a part's curve. The same curve always gives the same bytes."""
    return draw(plotted(name, curve)).png


def with_tables(page: str) -> str:
    """Return the page with the tables of docs/results.json in their places."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))

    def block(match: re.Match[str]) -> str:
        if match[1] == "summary":
            return f"<!-- results: summary -->\n{summary(record)}<!-- end -->"
        if (found := record.get(match[1])) is None:
            return match[0]
        return f"<!-- results: {match[1]} -->\n{rendered(match[1], found)}<!-- end -->"

    return re.sub(r"<!-- results: (\w+) -->\n(?:.*?\n)??<!-- end -->", block, page, flags=re.S)


def summary(record: dict[str, Any]) -> str:
    """Return a Markdown table with a row for each recipe: pass@1 of all seeds, without intervals, and the largest p."""
    lines = [
        "| recipe | seeds | pass@1 before, % | after, % | p, at most | minutes a seed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in PARTS:
        if "curve" not in (found := record.get(name, {})):
            continue
        rows = [dict(zip(HEADINGS, row.split(" | "), strict=True)) for row in found["table"][1:]]
        first = [row for row in rows if row[""] == "pass@1"]
        before, after = (", ".join(row[each].split()[0] for row in first) for each in ("before", "after"))
        p = max((row["p"] for row in first), key=lambda value: float(value.strip("<")))
        minutes = found["minutes"] / len(first)
        lines.append(f"| [`{name}`]({ARCHIVE}#{name}) | {len(first)} | {before} | {after} | {p} | {minutes:.0f} |")
    return "\n".join([*lines, ""])


def rendered(name: str, found: dict[str, Any]) -> str:
    """Return the commands of a part, its table and its plot as Markdown."""
    commits = ", ".join(each[:8] + "+changes" * each.endswith("+changes") for each in found["commits"])
    commands = [each.format(before="outputs/sft_lora", seed="SEED") for each in found["commands"]]
    lines = ["```", *(f"python {command}" for command in commands), "```", ""]
    lines += [f"At {commits}, {found['minutes']:.1f} min on {found['processor']}:", ""]
    headings, *rows = found["table"]
    rule = " | ".join(["---", *["---:"] * headings.count("|")])
    lines += [f"| {row} |" for row in (headings, rule, *rows)]
    if "curve" in found:
        plot = plotted(name, found["curve"])
        lines += ["", f"![{plot.alt}]({image(name).name})"]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(run_command(main))
