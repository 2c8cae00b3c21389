"""Measure what only a GPU can tell, in runs of a few minutes, each with its own time limit.

    python tools/card.py                            # all parts, in order of value
    python tools/card.py peaks small_cards:12gb     # a part, and one side of a part
    python tools/card.py --before d20c1c3 steps     # a commit, or the folder of an exported one
    python tools/card.py --tiny                     # every part to its end on a CPU: four short completions a step
    python tools/card.py --tables                   # print the tables of what was measured on a GPU
    python tools/card.py --write                    # write docs/card.json, and the tables into docs/

| part | what it measures | sides |
|---|---|---|
| `peaks` | the peak of each phase of a step, and which code held the memory | Unsloth + vLLM, 4 bits |
| `small_cards` | whether a preset fits the smallest card of its name, and its peak against the plan | one a preset |
| `steps` | seconds of a step, of sampling and of training, of this tree and of an older one | 2 engines, 2 trees |
| `side_by_side` | the same training with TRL's own vLLM mode and with Unsloth's notebook loop | 4 |
| `loss` | PEFT's loss pass with FlexAttention and with compiled layers | 1 |
| `conversation` | games of several turns with PEFT and vLLM | 1 |
| `teacher` | seconds and memory of a step with a teacher, against one without | 4 |
| `resume` | a run that is killed after two steps and resumed | 1 |
| `gsm8k` | SmolLM2-135M on GSM8K: SFT, then GRPO, evaluated on the whole test set | 1 |

Each part writes OUTPUT/PART.json after each of its sides: outputs/card, or outputs/card_tiny with --tiny. A side is a
process of its own and ends alone. One that ran, or was refused, or had too little memory, is finished: the next call
skips it, unless --again. A file names the versions, the card, its driver, the commit, the command, and what was not
measured. Logs are in OUTPUT/logs, models and runs in OUTPUT/work.

Time. These are estimates for an H200 from its earlier figures: vLLM starts in 66 to 81 s, half of which is compilation
that later processes read from a cache; imports and loading take about 25 s, a step 7 to 8 s, and the first one 7 to 28.

| call | parts | estimated seconds |
|---|---|---:|
| 1 | `peaks small_cards:12gb,8gb,24gb` | 110 + 75 + 80 + 110 = 375 |
| 2 | `steps:unsloth side_by_side:trl,ours` | 2 x 75 + 3 x 70 = 360 |
| if time is left | the rest | 75 a side; `loss` 110, `resume` 150, `gsm8k` as long as --minutes allows |

Both calls together are about 12 minutes. A side's limit is about twice its estimate; --minutes ends a call in time.
A name after the colon selects all sides that contain it.

A machine without a network. Its own packages must be those of requirements-gpu.lock, or come along as wheels:
tools/wheels_in_pieces.py cuts a folder of wheels into pieces of a given size and joins them there. Bring outputs/card
as well, so that what is finished is skipped, `make laptop-model`'s folder and GSM8K's files for `gsm8k`, and for
--before a folder: `git archive COMMIT | tar -x -C FOLDER`.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_step import checked_out
from on_card import sides
from on_card.sides import PARTS, Result, Session

from lora_grpo.cli import run_command
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.files import atomic, markdown_table
from lora_grpo.hardware import nvidia_gpus
from lora_grpo.runs import git_revision, now, versions
from lora_grpo.sandbox import die_with_parent

ROOT = sides.ROOT
DOCS = ROOT / "docs"
RECORD = DOCS / "card.json"
PROGRAM = __file__
"""What the process of a part runs."""
FINISHED = ("ran", "refused", "out of memory", "skipped")
"""States of a side that the next call does not repeat."""
_MARGIN_SECONDS = 20
"""A part may take this much longer than its sides together."""
Record = dict[str, Any]
"""A part's JSON file."""


@dataclass(frozen=True)
class Choice:
    """A part, and the sides of it that were asked for."""

    part: str
    words: tuple[str, ...] = ()
    """Each selects the sides whose names contain it. Without words, all."""

    @property
    def sides(self) -> list[sides.Side]:
        chosen = []
        for side in PARTS[self.part]:
            if not self.words or any(word.lower() in side.name.lower() for word in self.words):
                chosen.append(side)
        return chosen

    def __str__(self) -> str:
        return f"{self.part}:{','.join(self.words)}" if self.words else self.part


def main() -> None:
    options = read_options()
    if options.inside:
        measure_part(options.choices[0], session_of(options, options.before and Path(options.before)), options)
        return
    output = options.output_dir
    if options.tables or options.write:
        records = finished_records(read_records(output))
        if options.write:
            write_docs(records)
        if not records:
            print(f"nothing in {output} was measured on a GPU")
        for part, record in records.items():
            print(f"## {part}\n\n{rendered(record)}\n")
        return
    measure(options)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART[:SIDE,...]")
    parser.add_argument("--tiny", action="store_true", help="run on a CPU, as small as possible")
    parser.add_argument("--again", action="store_true", help="repeat what is finished")
    parser.add_argument("--minutes", type=float, default=600.0, help="time limit of this call")
    parser.add_argument("--output-dir", type=Path, help="folder of the JSON files")
    parser.add_argument("--before", help="commit or folder of an older tree, for `steps`")
    parser.add_argument("--commit", help="commit of this tree, for a copy without its Git history")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct, for `gsm8k`")
    parser.add_argument("--data", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl, for `gsm8k`")
    parser.add_argument("--tables", action="store_true", help="print the tables, measure nothing")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/, measure nothing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the process of one part
    options = parser.parse_args()
    options.choices = [choice_of(text) for text in options.parts or PARTS]
    if options.output_dir is None:
        options.output_dir = ROOT / "outputs" / ("card_tiny" if options.tiny else "card")
    options.output_dir = options.output_dir.resolve()
    return options


def choice_of(text: str) -> Choice:
    part, _, words = text.partition(":")
    if part not in PARTS:
        raise UserError(f"no part {part}; expected {', '.join(PARTS)}")
    choice = Choice(part, tuple(word for word in words.split(",") if word))
    if not choice.sides:
        names = "; ".join(side.name for side in PARTS[part])
        raise UserError(f"no side of {part} contains {words}; its sides: {names}")
    return choice


def session_of(options: argparse.Namespace, before: Path | None) -> Session:
    absolute = {name: path and path.resolve() for name, path in (("model", options.model), ("data", options.data))}
    return Session(options.output_dir, options.tiny, before, **absolute)


# Measuring


def measure(options: argparse.Namespace) -> None:
    """Measure each part in a process of its own, so that nothing that a part does ends another one.

    Raises:
        RunError: a side has failed, after all parts.
    """
    gpus, why_none = nvidia_gpus()
    if not gpus and not options.tiny:
        raise UserError(f"no NVIDIA GPU found ({why_none}); pass --tiny to run every part on the CPU")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    failed = []
    with older_tree(options.before) as before:
        for choice in options.choices:
            unfinished = unfinished_sides(choice, options)
            if not unfinished:
                print(f"{choice}: finished before", flush=True)
                continue
            left = deadline - time.monotonic()
            limit = min(left, sum(side.seconds for side in unfinished) + _MARGIN_SECONDS)
            if limit <= 0:
                print(f"{choice}: no time left", flush=True)
                continue
            end = "interrupted"
            try:
                end = run_part(choice, limit, before, options)
            finally:
                record = read_record(options.output_dir, choice.part)
                close_record(record, end, choice, options)
            for side in record["sides"]:
                print(f"{choice.part}, {side['name']}: {outcome(side)}", flush=True)
            measured_now = [side.name for side in unfinished]
            for side in record["sides"]:
                if side["name"] in measured_now and side["status"] == "failed":
                    failed.append(f"{choice.part}, {side['name']}")
    if failed:
        raise RunError(f"failed: {'; '.join(failed)}; logs are in {options.output_dir / 'logs'}")


@contextlib.contextmanager
def older_tree(before: str | None) -> Iterator[Path | None]:
    """Yield the folder of the older tree: a given one, or a commit's."""
    if before and Path(before).is_dir():
        yield Path(before).resolve()
        return
    if before and not is_commit(before):
        raise UserError(f"--before {before} is neither a folder nor a commit of this repository")
    with checked_out(before) as tree:
        yield tree


def is_commit(name: str) -> bool:
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


def unfinished_sides(choice: Choice, options: argparse.Namespace) -> list[sides.Side]:
    if options.again:
        return choice.sides
    record = read_record(options.output_dir, choice.part)
    finished = {side["name"] for side in record.get("sides", ()) if side["status"] in FINISHED}
    return [side for side in choice.sides if side.name not in finished]


def run_part(choice: Choice, seconds: float, before: Path | None, options: argparse.Namespace) -> str:
    """Run a part in a process, kill it at its limit, and return what went wrong, empty if nothing did."""
    command = [sys.executable, PROGRAM, str(choice), "--inside", "--output-dir", str(options.output_dir)]
    command += ["--minutes", str(seconds / 60)]
    for name in ("tiny", "again"):
        command += [f"--{name}"] * getattr(options, name)
    given = {"before": before, "commit": options.commit, "model": options.model, "data": options.data}
    for name, value in given.items():
        if value:
            command += [f"--{name}", str(value)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    try:
        exit_code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started dies with it
        process.wait()
    return f"the part ended with exit code {exit_code}" if exit_code else ""


def measure_part(choice: Choice, session: Session, options: argparse.Namespace) -> None:
    """Measure the unfinished sides of a part, and write its JSON file before and after each."""
    deadline = time.monotonic() + 60 * options.minutes - _MARGIN_SECONDS
    record = read_record(session.output, choice.part)
    record |= described(choice.part, options)
    record.setdefault("sides", [])
    for side in unfinished_sides(choice, options):
        entry: Result = {"name": side.name, "started": now(), "commit": record["commit"]}
        replace_side(record, {**entry, "status": "running", "reason": None})
        write_record(session.output, record)
        started = time.monotonic()
        limit = min(side.seconds, max(1.0, deadline - started))
        missing = side.missing()
        try:
            if missing:
                entry |= {"status": "skipped", "reason": missing}
            else:
                entry |= side.measure(session, limit)
        except (RunError, UserError, OSError, subprocess.SubprocessError) as error:
            entry |= {"status": "failed", "reason": first_line(error)}
        entry.setdefault("seconds", round(time.monotonic() - started, 1))
        replace_side(record, entry)
        write_record(session.output, record)


def described(part: str, options: argparse.Namespace) -> Record:
    """Return the entries of a JSON file that do not depend on what is measured."""
    gpus, _ = nvidia_gpus()
    card = None
    if gpus and not options.tiny:
        gpu = gpus[0]
        card = {"name": gpu.name, "memory_gib": round(gpu.memory_gib, 1), "driver": gpu.driver}
    return {
        "card_part": 1,  # the version of this schema
        "part": part,
        "status": "running",
        "reason": None,
        "tiny": options.tiny,
        "command": "",  # by the process that was asked for the part
        "card": card,
        "versions": versions(),
        "commit": options.commit or git_revision(),
        "started": now(),
    }


def replace_side(record: Record, entry: Result) -> None:
    """Put the entry of a side in the place of an older one, in the order of the part."""
    entries = {side["name"]: side for side in record["sides"]} | {entry["name"]: entry}
    order = [side.name for side in PARTS[record["part"]]]
    record["sides"] = sorted(entries.values(), key=lambda side: order.index(side["name"]))


def close_record(record: Record, end: str, choice: Choice, options: argparse.Namespace) -> None:
    """Write the status of a part whose process has ended, and what it did not measure."""
    if "part" not in record:  # its process ended before it wrote anything
        record |= {**described(choice.part, options), "sides": []}
    for side in record["sides"]:
        if side["status"] == "running":
            side |= {"status": "out of time" if end.startswith("stopped") else "failed", "reason": end}
    measured = {side["name"]: side for side in record["sides"]}
    not_measured = []
    for side in PARTS[choice.part]:
        entry = measured.get(side.name, {"status": "not run", "reason": None})
        if entry["status"] != "ran":
            not_measured.append(f"{side.name}: {outcome(entry)}")
        elif "instead" in entry:
            not_measured.append(f"{side.name}: {entry['instead']}")
    if record["tiny"]:
        not_measured.append("speed and memory of a GPU: this was a tiny run on a CPU")
    statuses = [side["status"] for side in record["sides"]]
    is_finished = len(statuses) == len(PARTS[choice.part]) and all(status in FINISHED for status in statuses)
    record |= {"status": "finished" if is_finished else "unfinished", "reason": end or None}
    record["command"] = shlex.join(["python", "tools/card.py", *sys.argv[1:]])
    record["not_measured"] = not_measured
    write_record(options.output_dir, record)


def outcome(side: Result) -> str:
    if side["status"] == "ran" and "step_time" in side:
        return f"ran, {side['step_time']:.2f} s per step"
    return f"{side['status']}, {side['reason']}" if side.get("reason") else side["status"]


def read_record(output: Path, part: str) -> Record:
    path = output / f"{part}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_records(output: Path) -> dict[str, Record]:
    records = {part: read_record(output, part) for part in PARTS}
    return {part: record for part, record in records.items() if record}


def write_record(output: Path, record: Record) -> None:
    atomic.write_json(output / f"{record['part']}.json", record)


# Tables

Column = tuple[str, str, str]
"""Heading, key of a side, and format."""
_STATUS: list[Column] = [("", "name", "{}"), ("result", "status", "{}")]
_TIMES: list[Column] = [
    ("step, s", "step_time", "{:.2f}"),
    ("sampling, s", "time/rollouts", "{:.2f}"),
    ("training, s", "time/training", "{:.2f}"),
    ("tokens/s", "rollouts/tokens_per_second", "{:,.0f}"),
    ("first step, s", "first_step_time", "{:.1f}"),
]
_PEAKS: list[Column] = [
    ("planned, GiB", "planned_gib", "{:.2f}"),
    ("torch's peak", "torch_peak_gib", "{:.2f}"),
    ("the GPU's peak", "gpu_peak_gib", "{:.2f}"),
]
_COLUMNS: dict[str, list[Column]] = {
    "peaks": [*_STATUS, *_TIMES, *_PEAKS],
    "small_cards": [*_STATUS, ("card", "card", "{}"), ("usable, GiB", "usable_gib", "{:.2f}"), *_PEAKS],
    "steps": [*_STATUS, *_TIMES, ("hand-over, s", "time/adapter_sync", "{:.2f}"), *_PEAKS],
    "side_by_side": [*_STATUS, *_TIMES, *_PEAKS[1:]],
    "loss": [*_STATUS, ("the GPU's peak, GiB", "gpu_peak_gib", "{:.2f}")],
    "conversation": [*_STATUS, ("turns", "turns", "{:.1f}"), *_TIMES, *_PEAKS],
    "teacher": [*_STATUS, *_TIMES, ("teacher, s", "time/teacher", "{:.2f}"), *_PEAKS],
    "resume": [*_STATUS, ("steps before the kill", "steps_before_kill", "{}"), ("after", "steps_after_resume", "{}")],
    "gsm8k": [*_STATUS, ("SFT, s", "sft_seconds", "{:.0f}"), ("steps of GRPO", "steps", "{}"), *_TIMES],
}
_RATIO_KEYS = ("step_time", "time/rollouts", "time/training", "rollouts/tokens_per_second", "torch_peak_gib")


def finished_records(records: dict[str, Record]) -> dict[str, Record]:
    """Return the records from a GPU. Tiny runs prove nothing about one."""
    return {part: record for part, record in records.items() if record["card"] and not record["tiny"]}


def rendered(record: Record) -> str:
    """Return a part as Markdown: its command and machine, its tables, and what was not measured."""
    card, installed = record["card"], record["versions"]
    commits = ", ".join(sorted({short_commit(side.get("commit") or "unknown") for side in record["sides"]}))
    packages = ", ".join(
        f"{name} {installed[name]}" for name in ("torch", "trl", "unsloth", "vllm") if name in installed
    )
    lines = ["```", f"python tools/card.py {record['part']}", "```", ""]
    lines += [f"On {card['name']} (driver {card['driver']}), {packages}, at {commits}, {record['started'][:10]}:", ""]
    columns = _COLUMNS[record["part"]]
    rows = [[cell(side.get(key), form) for _, key, form in columns] for side in record["sides"]]
    rows += ratio_rows(record, columns)
    lines += markdown_table([heading for heading, _, _ in columns], rows, left=2)
    for side in record["sides"]:
        lines += phase_tables(side)
        lines += way_table(side)
        for model in ("sft", "grpo"):
            lines += accuracy_table(model, side.get(f"accuracy_of_{model}", ()))
    if record["not_measured"]:
        lines += ["Not measured:", "", *(f"- {sentence}" for sentence in record["not_measured"]), ""]
    return "\n".join(lines)


def short_commit(commit: str) -> str:
    return commit[:8] + "+changes" * commit.endswith("+changes")


def cell(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)


def ratio_rows(record: Record, columns: Sequence[Column]) -> list[list[str]]:
    """Return a row for each pair of sides that are compared: ratios of times, tokens per second and torch's peaks."""
    by_name = {side["name"]: side for side in record["sides"] if side["status"] == "ran"}
    rows = []
    for ours, theirs in pairs(by_name):
        cells = []
        for _, key, _ in columns:
            above, below = by_name[ours].get(key), by_name[theirs].get(key)
            is_shown = key in _RATIO_KEYS and above is not None and below
            cells.append(f"{above / below:.2f}" if is_shown else "")
        rows.append([f"{ours} / {theirs}", *cells[1:]])
    return rows


def pairs(names: Any) -> list[tuple[str, str]]:
    """Return the names of sides to compare: this tree and the older one, ours and the rival of the same bits, a teacher
    and none.
    """
    found = []
    for name in names:
        if name.endswith(", now"):
            found.append((name, name.replace(", now", ", before")))
        elif name.startswith("ours"):
            bits = name.rpartition(", ")[2]
            found += [(name, other) for other in names if other.endswith(bits) and not other.startswith("ours")]
        elif name != sides.NO_TEACHER:
            found.append((name, sides.NO_TEACHER))
    return [(ours, theirs) for ours, theirs in found if theirs in names]


def phase_tables(side: Result) -> list[str]:
    """Return the phases of a side: the trainer's own peaks beside the plan, and what torch's record says."""
    planned = side.get("planned_phases_gib") or {}
    peaks = {phase: side[f"memory/{phase}"] for phase in planned if f"memory/{phase}" in side}
    lines = []
    if peaks:
        rows = []
        for phase, peak in peaks.items():
            rows.append([phase, f"{planned[phase]:.2f}", f"{peak:.2f}", f"{peak / planned[phase]:.2f}"])
        lines += markdown_table([f"{side['name']}: phase", "planned, GiB", "peak", "peak / plan"], rows)

    phases = [phase for phase in side.get("memory", {}).get("phases", ()) if "peak_gib" in phase]
    rows = []
    for phase in phases:
        holders = [f"{holder['where']} {holder['gib']:.2f}" for holder in phase["holders"][:3]]
        rows.append([phase["phase"], f"{phase['begin_gib']:.2f}", f"{phase['peak_gib']:.2f}", "; ".join(holders)])
    if rows:
        headings = ["phase in torch's record", "at its start, GiB", "peak", "largest holders at the peak"]
        lines += markdown_table(headings, rows)
    return lines


def way_table(side: Result) -> list[str]:
    """Return the ways of the loss pass, each with its time in relation to the first, the default."""
    ways = side.get("ways", ())
    rows = []
    for way in ways:
        peak = cell(way["peak_gib"], "{:.2f}")
        ratio = f"{way['seconds'] / ways[0]['seconds']:.2f}"
        compiled = "yes" if way["compiled_layers"] else "no"
        cells = [f"{way['seconds']:.3f}", ratio, peak, f"{way['loss']:.6f}", way["padded_rows"] or "no", compiled]
        rows.append([way["way"], *cells])
    headings = ["loss and backward pass", "s", "/ the first", "torch's peak, GiB", "loss", "padded rows", "compiled"]
    return markdown_table(headings, rows) if rows else []


def accuracy_table(model: str, table: Sequence[Result]) -> list[str]:
    rows = []
    for row in table:
        cells = [f"{100 * row[key]:.1f}" for key in ("before", "after")]
        rows.append([row["metric"], *cells, f"{100 * row['difference']:+.1f}", f"{row['p_value']:.3g}"])
    return markdown_table([f"{model}, %", "before", "after", "difference", "p"], rows) if rows else []


def write_docs(records: dict[str, Record]) -> None:
    """Add the records to docs/card.json, and write the tables into the places of the pages."""
    known = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    known |= records
    if not known:
        raise UserError("nothing was measured on a GPU; run tools/card.py where there is one")
    atomic.write_json(RECORD, known)
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = with_tables(text, known)
        if new != text:
            atomic.write_text(page, new)


def with_tables(page: str, records: dict[str, Record]) -> str:
    """Return a page with the tables in their places: `<!-- card: PART -->`, a line, `<!-- end -->`."""

    def block(match: re.Match[str]) -> str:
        record = records.get(match[1])
        return match[0] if record is None else f"<!-- card: {match[1]} -->\n{rendered(record)}<!-- end -->"

    return re.sub(r"<!-- card: (\w+) -->\n(?:.*?\n)??<!-- end -->", block, page, flags=re.S)


if __name__ == "__main__":
    sys.exit(run_command(main))
