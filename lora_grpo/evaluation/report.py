"""An evaluation as people read it: what was measured of each model, in a report, a terminal and a pull request."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.evaluation.comparison import counts_by_task, estimate, p_value, verdict
from lora_grpo.evaluation.results import Result

UNPARSED = ("empty", "no_answer", "unclosed_answer", "unreadable_answer", "no_code")
"""Statuses of completions that no answer could be read from."""
_RULES = ("strict", "flexible", "robust")
_LISTED = 20
"""Tasks that a report for people names of those fixed or regressed; report.json has all."""


def measure(results: Sequence[Result], ks: Iterable[int], seed: int) -> dict[str, Any]:
    """Return what one model's graded samples come to.

    Args:
        results: its samples.
        ks: the k of pass@k that are reported; `curve` has more.
        seed: of the resampling behind intervals.

    Returns:
        `pass@k` of each k and `greedy` where there are such samples, their 95 % `intervals`, the `curve` over k, counts
        of `tasks`, `samples`, `statuses` and of samples that pass each of the `rules`, and the `health` of completions.

    Raises:
        UserError: a k exceeds the samples of a task.
    """
    found: dict[str, Any] = {}
    intervals: dict[str, list[float]] = {}
    curve = []
    drawn, greedy = counts_by_task(results, greedy=False), counts_by_task(results, greedy=True)
    if drawn:
        fewest = min(total for total, _ in drawn.values())
        ks = sorted(set(ks))
        for k in sorted({*ks, *_curve_ks(fewest)}):
            values, interval = estimate(drawn, k, seed)
            curve.append({"k": k, "pass": float(values.mean()), "interval": list(interval)})
            if k in ks:
                found[f"pass@{k}"], intervals[f"pass@{k}"] = float(values.mean()), list(interval)
    if greedy:
        values, interval = estimate(greedy, 1, seed)
        found["greedy"], intervals["greedy"] = float(values.mean()), list(interval)
    statuses = Counter(str(result["status"]) for result in results)
    health: dict[str, float] = {"unparsed": sum(statuses[status] for status in UNPARSED)}
    if "strict" not in results[0]:  # programs
        health |= {"timeouts": statuses["timeout"], "crashes": statuses["crashed"] + statuses["memory"]}
    # Samples made elsewhere may have keys of these names that mean anything.
    lengths = [result["num_tokens"] for result in results if isinstance(result.get("num_tokens"), int)]
    if lengths:
        health["truncated"] = sum(bool(result.get("truncated")) for result in results)
        health["mean_tokens"] = sum(lengths) / len(lengths)
    return found | {
        "intervals": intervals,
        "curve": curve,
        "tasks": len({**drawn, **greedy}),
        "samples": len(results),
        "statuses": dict(sorted(statuses.items())),
        "rules": {rule: sum(result[rule] for result in results) for rule in _RULES if rule in results[0]},
        "health": health,
    }


@dataclass(frozen=True)
class Page:
    """An evaluation of one model, or of two on the same tasks, ready to be shown."""

    title: str
    sides: Mapping[str, Mapping[str, Any]]
    """What `measure` found, by the model's name; the one before comes first."""
    protocol: Mapping[str, Any]
    table: Sequence[Mapping[str, Any]] = ()
    """Rows of `comparison.compare` where there are two sides."""
    moved: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    """What `comparison.task_changes` found."""

    def markdown(self) -> str:
        """Return the page for a pull request."""
        lines = [self.title, ""]
        for headings, rows in (self.main(), self.details()):
            lines += ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
            lines += ["| " + " | ".join(cells) + " |" for cells in rows] + [""]
        lines += [f"- {said}" for said in self._said()]
        lines = [printable(line) for line in lines]
        return "\n".join([*lines, "", "Protocol: `" + json.dumps(self.protocol) + "`", ""])

    def show(self) -> None:
        """Print the page; wide enough for a plain log as well as a terminal."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        wide = Console(width=max(Console().width, 100))
        print(printable(self.title))
        for headings, rows in (self.main(), self.details()):
            shown = Table()
            for heading in headings:
                shown.add_column(Text(printable(heading)), justify="right" if heading else "left", no_wrap=True)
            for cells in rows:
                shown.add_row(*(Text(printable(cell)) for cell in cells))
            wide.print(shown)
        for said in (*self._said(), *_protocol_lines(self.protocol)):
            print(printable(said))

    def main(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Return headings and rows of the figures with their intervals."""
        if self.table:
            before, after = self.sides
            return ["", before, after, "difference", "p"], [_cells(row) for row in self.table]
        (found,) = self.sides.values()
        rows: list[tuple[str, ...]] = [
            (metric, f"{100 * found[metric]:.1f}", f"{100 * low:.1f} to {100 * high:.1f}")
            for metric, (low, high) in found["intervals"].items()
        ]
        return ["", "%", "95 % interval"], rows

    def details(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Return rules, statuses and health, a column for each side."""
        sides = list(self.sides.values())
        rows: list[tuple[str, ...]] = []
        for group, name_of in (("rules", "{} rule"), ("statuses", "{}")):
            for name in dict.fromkeys(name for side in sides for name in side[group]):
                cells = (_share(side[group].get(name, 0), side["samples"]) for side in sides)
                rows.append((name_of.format(name), *cells))
        for name in dict.fromkeys(name for side in sides for name in side["health"]):
            if name == "mean_tokens":
                rows.append(("tokens, mean", *(f"{side['health'].get(name, 0):.1f}" for side in sides)))
            else:
                rows.append((name, *(_share(side["health"].get(name, 0), side["samples"]) for side in sides)))
        return ["", *([*self.sides] if len(sides) > 1 else ["% of samples"])], rows

    def _said(self) -> list[str]:
        """Return the sentences under the tables."""
        said = [verdict(dict(row)) for row in self.table]
        for name, side in self.sides.items():
            if len(side["curve"]) > 1:
                points = ", ".join(f"{point['k']}: {100 * point['pass']:.1f}" for point in side["curve"])
                said.append(f"pass@k over k{f', {name}' if len(self.sides) > 1 else ''}: {points}")
        for word, entries in (self.moved or {}).items():
            if entries:
                listed = ", ".join(
                    "{} ({}/{} to {}/{})".format(entry["task_id"], *entry["before"], *entry["after"])
                    for entry in entries[:_LISTED]
                )
                more = f" and {len(entries) - _LISTED} more" if len(entries) > _LISTED else ""
                said.append(f"{len(entries)} {word}: {listed}{more}")
        return said


def run_title(protocol: Mapping[str, Any]) -> str:
    """Return the first line of a run's own evaluation."""
    lost = protocol.get("left_out_as_trained_on")
    return (
        f"{protocol['task']}, {protocol['rows']} held-out problems, {protocol['num_samples']} samples each at "
        f"temperature {protocol['temperature']:g}, 95 % intervals"
        + (f"; {lost} problems of this benchmark were trained on and left out: not comparable" if lost else "")
    )


def _protocol_lines(told: Mapping[str, Any]) -> list[str]:
    """Return what a number needs to be compared with another one, shortened for a terminal."""
    if "models" not in told:  # a run's own evaluation: its record has it all
        return []
    lines = [f"read      {told['extraction']}"]
    for label, model in told["models"].items():
        if "model" not in model:
            lines.append(f"{label:9} file {model['samples_sha256'][:8]}, data {model['data_sha256'][:8]}")
            continue
        where = f"@{model['revision'][:8]}" if model["revision"] else f", weights {model['weights_sha256'][:8]}"
        adapter = f" with adapter {model['adapter_sha256'][:8]}" if model["adapter_sha256"] else ""
        how = f"{model['quantisation']}, {model['served']}, {model['engine']}, {model['dtype']} on {model['device']}"
        precision = how.replace("none, ", f"{model['bits']} bits, ", 1)
        lines.append(f"{label:9} {model['model']}{where}{adapter}, {precision}, prompts {model['prompts_sha256'][:8]}")
    if "rows" in told:
        asked = f"{told['rows']} rows of data {told['data_sha256'][:8]}, {told['max_completion_tokens']} tokens at most"
        lines.append(f"asked     {asked}, seed {told['seed']}")
    return lines


def printable(text: str) -> str:
    """Write out what would move a terminal's cursor or cannot be encoded: names come from files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _curve_ks(fewest: int) -> list[int]:
    """Return the k of a curve: every one up to 10, then powers of two, and the last."""
    return sorted({k for k in (*range(1, 11), *(2**power for power in range(4, 20)), fewest) if k <= fewest})


def _share(count: float, total: int) -> str:
    return f"{100 * count / total:.1f} ({count:g})"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    def share(value: float, interval: Sequence[float]) -> str:
        return f"{100 * value:.1f} [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"

    low, high = row["difference_interval"]
    return (
        row["metric"],
        share(row["before"], row["before_interval"]),
        share(row["after"], row["after_interval"]),
        f"{100 * row['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]",
        p_value(row["p_value"]),
    )
