"""Check what the report says about a gain, on models that answer with a known mixture of styles.

A base is the starter model, trained further on word problems that are answered carefully (every step) or carelessly (a
guess), and inside or outside the requested format.

| base | careful | in the format |
|---|---|---|
| format | all | a third |
| carelessness | two fifths | all |
| both | half | half |
| nothing | all | all |

Each base is trained with GRPO for each seed: the run and its controls (`--control`). Then both models of the run answer
each evaluation problem another `--truth` times. The styles' own grammar reads these answers, and gives the truth that
the intervals of the run's report must hold. The truth of a format control is what the format is worth: the share of
right answers among those in the format, minus the base's pass@1. A random control should gain nothing; a
single one moves by chance, so the last line tests the mean of all of them (permutation test over runs).

    python tools/check_gain.py outputs/gain                                     # 36 runs; keeps complete ones
    python tools/check_gain.py outputs/gain --mixtures both --seeds 0 --table   # only the table of what is finished
"""

import argparse
import itertools
import json
import math
import random
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kept_runs import ROOT, execute, train

from lora_grpo.evaluation.gain import explain
from lora_grpo.evaluation.pass_at_k import paired_permutation
from lora_grpo.runs import read_run

MIXTURES = {"format": (1.0, 1 / 3), "carelessness": (0.4, 1.0), "both": (0.5, 0.5), "nothing": (1.0, 1.0)}
"""Share of careful answers, and share of answers in the format."""
ARMS = {"run": (), "format": ("--control", "format"), "random": ("--control", "random")}
_NUMBER = re.compile(r"(?:=|I (?:guess|think) )(-?\d+)$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mixtures", nargs="+", choices=MIXTURES, default=[*MIXTURES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a run (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=150, help="evaluation problems (default: %(default)s)")
    parser.add_argument("--truth", type=int, default=8, help="more answers to each problem (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="print the table of finished runs, and run nothing")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    for seed in () if asked.table else asked.seeds:
        for mixture in asked.mixtures:
            base = build(folder / mixture / "base", *MIXTURES[mixture])
            run = folder / mixture / f"seed-{seed}"
            for arm in asked.arms:
                folder_of_arm = Path(f"{run}-control-{arm}") if ARMS[arm] else run
                train(folder_of_arm, "gsm8k_lora", *ARMS[arm], *settings(base, seed, asked.steps, asked.rows))
            more_answers(run, asked.truth)
    show(folder, asked.mixtures, asked.seeds)


def build(folder: Path, careful: float, in_format: float, steps: int = 80) -> Path:
    """Train the starter model further on a mixture of styles, unless the folder exists already."""
    if folder.is_dir():
        return folder
    import torch
    from starter_model import pretraining
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lora_grpo.starter import model_path

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    stream = documents(random.Random(f"{careful} {in_format}"), careful, in_format)
    batches = (pretraining.collate([next(stream) for _ in range(16)], tokenizer) for _ in range(steps))
    pretraining.fit(model, batches, steps, learning_rate=1e-3)
    staging = folder.with_name(f".{folder.name}")
    pretraining.save(model, tokenizer, staging)
    staging.rename(folder)
    return folder


def documents(rng: random.Random, careful: float, in_format: float) -> Iterator[Any]:
    """Yield training documents that answer word problems of the train split in a mixture of styles."""
    from starter_model import corpus
    from starter_model.families import FAMILIES
    from starter_model.problems import DIFFICULTIES, draw

    from lora_grpo.tasks import chat

    while True:
        problem = draw(rng, rng.choice(list(FAMILIES)), rng.choice(DIFFICULTIES), "train")
        text, number = "\n".join(map(str, problem.steps)), problem.result
        if rng.random() >= careful:
            number = corpus.guess(problem, rng)
            text = f"I {rng.choice(['guess', 'think'])} {number}"
        text = chat.write_completion(text, str(number)) if rng.random() < in_format else text
        parts = (corpus.chat_prompt(problem.question), False), (f"{text}<|im_end|>", True)
        yield corpus.Example(parts)


def settings(base: Path, seed: int, steps: int, rows: int) -> list[Any]:
    """Return the flags of a run."""
    flags = ["--preset", "starter", "--model.name", base, "--seed", seed, "--train.max-steps", steps]
    flags += ["--sampling.num-generations", 8, "--train.learning-rate", 1e-3]
    return [*flags, "--data.eval-limit", rows, "--monitor.rows", 0, "--monitor.stop-on", "nan"]


def more_answers(run: Path, truth: int) -> None:
    """Sample the base and the trained model again; the first samples are those of the run."""
    if (run / "adapter").is_dir() and not list(run.glob("evaluation/*/report.json")):
        execute(ROOT, ["scripts/evaluate.py", run, "--explain", "--num-samples", _samples_of(run) + truth])


def show(folder: Path, mixtures: Sequence[str], seeds: Sequence[int]) -> None:
    """Print each finished run: the parts of its report, the gains of its controls, and the truth of each."""
    print("| base | seed | gain | format | sharpening | rest | format control | random control |\n" + "|---" * 8 + "|")
    held: dict[str, list[bool]] = {"run": [], "format": []}
    random_gains: list[float] = []
    for mixture, seed in itertools.product(mixtures, seeds):
        run = folder / mixture / f"seed-{seed}"
        more = list(run.glob("evaluation/*/report.json"))
        if not more:
            continue
        true, samples = truth(more[0].parent, _samples_of(run)), read_run(run).samples
        gain = explain(samples["base"], samples["trained"], _report(run)["protocol"]["seed"])
        cells = [mixture, str(seed)]
        for part in (gain.total, *gain.parts):
            cells.append(_points(part.value, part.interval, true[part.name], held["run"]))
        rows = [_report(Path(f"{run}-control-{control}"))["table"][0] for control in ("format", "random")]
        cells.append(_points(rows[0]["difference"], rows[0]["difference_interval"], true["worth"], held["format"]))
        cells.append(_points(rows[1]["difference"], rows[1]["difference_interval"]))
        random_gains.append(100 * rows[1]["difference"])
        print(f"| {' | '.join(cells)} |")
    print(f"{sum(held['run'])} of {len(held['run'])} intervals of the runs hold the truth")
    print(f"{sum(held['format'])} of {len(held['format'])} intervals of the format controls hold the truth")
    if len(random_gains) > 1:
        values = np.array(random_gains)
        p = paired_permutation(np.zeros(len(values)), values)
        print(f"mean gain of {len(values)} random controls: {values.mean():+.1f} points, p {p:.3f}")


def truth(folder: Path, skipped: int) -> dict[str, float]:
    """Return the parts of the gain by the grammar of the styles, from the samples after the first `skipped`.

    `worth` is what a base would gain by the format alone: its share of right answers among those in the format, minus
    its pass@1.
    """
    from lora_grpo.tasks import get_task

    golds = {row["id"]: row["answer"].rpartition("####")[2].strip() for row in get_task("starter").load("eval")}
    models = []
    for path in (next(folder.glob("compared-*.jsonl")), folder / "results.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        models.append(read([line for line in lines if line["draw"] >= skipped], golds))
    parts = dict.fromkeys(("gain in pass@1", "format", "sharpening", "rest"), 0.0)
    k = skipped - 1
    for name in models[0]:
        base, trained = (model[name] for model in models)
        change = statistics.fmean(after.right - before.right for before, after in zip(base, trained, strict=True))
        values = {"gain in pass@1": statistics.fmean(each.passed for each in trained)}
        values["gain in pass@1"] -= statistics.fmean(each.passed for each in base)
        values["format"] = values["gain in pass@1"] - change
        # Samples of one draw have the same seed, so neither of them may decide whether k samples of the base are wrong.
        wrong, rest = sum(not each.right for each in base), 0.0
        for before, after in zip(base, trained, strict=True):
            none = math.comb(wrong - (not before.right), k) / math.comb(len(base) - 1, k)
            rest += none * (after.right - before.right) / len(base)
        for part, value in {**values, "rest": rest, "sharpening": change - rest}.items():
            parts[part] += value / len(models[0])
    samples = [each for problem in models[0].values() for each in problem]
    in_format = statistics.fmean(each.right for each in samples if each.formatted)
    return {**parts, "worth": in_format - statistics.fmean(each.passed for each in samples)}


class Sample(NamedTuple):
    """A sample as the grammar of the styles reads it."""

    right: bool
    passed: bool
    formatted: bool


def read(lines: Sequence[Mapping[str, Any]], golds: Mapping[str, str]) -> dict[str, list[Sample]]:
    """Return the samples of each problem, in the order of their draws."""
    samples: dict[str, list[Sample]] = {}
    for line in sorted(lines, key=lambda line: int(line["draw"])):
        text, gold = line["completion"], golds[line["task_id"]]
        answer = re.search(r"<answer>\n(.*)\n</answer>$", text)
        found = answer or (None if line["truncated"] else _NUMBER.search(text))
        is_right = found is not None and found[1] == gold
        samples.setdefault(line["task_id"], []).append(Sample(is_right, line["passed"], bool(answer)))
    return samples


def _samples_of(run: Path) -> int:
    return json.loads((run / "run.json").read_text())["config"]["eval"]["num_samples"]


def _report(run: Path) -> dict[str, Any]:
    return json.loads((run / "evaluation/report.json").read_text())


def _points(value: float, interval: Sequence[float], true: float | None = None, held: list[bool] | None = None) -> str:
    """Return a value with its interval and the truth, in points. Add to `held` whether the interval holds the truth."""
    low, high = interval
    text = f"{100 * value:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
    if true is None or held is None:
        return text
    held.append(low <= true <= high)
    return f"{text}, truth {100 * true:+.1f}{'' if held[-1] else ' (outside)'}"


if __name__ == "__main__":
    main()
