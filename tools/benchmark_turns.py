"""Compare a training step of conversations with single-turn steps of as many tokens.

The model, SmolLM2-135M, first learns by SFT to write the same eight words in every turn. A step of the side `turns` has
64 conversations of K turns. The side `single` has conversations of one turn, and K of its steps sample as many tokens.
Rewards are arbitrary, so that nearly every group has a gradient. The sides take turns, each in its own process.

    python tools/benchmark_turns.py --turns 4 --steps 3 --rounds 3

A ratio is the time of a step of `turns`, divided by K times that of a step of `single`: the median of the rounds, with
their range. A conversation also has tokens of the environment, which the model reads in rollouts and in training. The
last row therefore divides each ratio by that of `tokens`, which pass through the trained model.
"""

import argparse
import os
import tempfile
from pathlib import Path

from benchmark_step import LAPTOP, Step, execute, measure, median, median_and_range

from lora_grpo.files import markdown_table

TASK = """
import hashlib, os

TURNS = int(os.environ["BENCHMARK_TURNS"])
MAX_TURNS, THRESHOLD = TURNS, 0.0

def load(split):
    return [{"question": f"Count to eight. ({split} {n})"} for n in range(400 if split == "train" else 16)]

class Environment:
    def reset(self, **row):
        self.text = ""

    def reply(self, text):
        self.text += text
        return "Count to eight again."

    def get_reward(self):
        return hashlib.sha256(f"{id(self)} {self.text}".encode()).digest()[0] / 255

def gold(row):
    return [{"role": "assistant", "content": "one two three four five six seven eight"}] * TURNS
"""
TIMES = ("step", "rollouts", "training", "training_cpu")
COLUMNS = (*TIMES, "tokens", "peak_gib")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="steps per process; the first is excluded")
    parser.add_argument("--rounds", type=int, default=3, help="processes per side")
    arguments = parser.parse_args()
    tokens = 24 * arguments.turns  # a turn has 9 tokens, and 14 follow it
    sides = {"turns": arguments.turns, "single": 1}
    rounds: dict[str, list[list[Step]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder, "count.py")
        task.write_text(TASK, encoding="utf-8")
        flags = [*LAPTOP, "--task", str(task), "--sampling.max-completion-tokens", str(tokens)]
        flags += ["--model.max-sequence-tokens", str(tokens + 64), "--sampling.max-turn-tokens", "12"]
        os.environ["BENCHMARK_TURNS"] = str(arguments.turns)
        execute("recipes/sft_lora.py", *flags, "--train.max-steps", "8", "--output-dir", f"{folder}/sft")
        command = ["recipes/your_task.py", *flags, "--lora.from", f"{folder}/sft"]
        command += ["--train.max-steps", str(arguments.steps), "--train.learning-rate", "1e-6"]
        for number in range(arguments.rounds):
            for side in list(sides) if number % 2 == 0 else reversed(sides):
                os.environ["BENCHMARK_TURNS"] = str(sides[side])
                rounds[side].append(measure(side, Path(__file__).parent.parent, *command, "--seed", str(number)))
    rows = []
    for side, of_side in rounds.items():
        values = [median([step for steps in of_side for step in steps[1:]], name) for name in COLUMNS]
        rows.append([side, *(f"{value:.2f}" for value in values)])
    pairs = [(turns[1:], single[1:]) for turns, single in zip(rounds["turns"], rounds["single"], strict=True)]

    def ratios(name: str) -> list[float]:
        times = 1 if name == "peak_gib" else arguments.turns
        return [median(turns, name) / (times * median(single, name)) for turns, single in pairs]

    rows.append([f"turns / ({arguments.turns} x single)", *(median_and_range(ratios(name)) for name in COLUMNS)])
    more_tokens = ratios("tokens")
    each = []
    for name in TIMES:
        each.append(median_and_range([ratio / more for ratio, more in zip(ratios(name), more_tokens, strict=True)]))
    rows.append(["of the same tokens", *each, "", ""])
    print("\n".join(markdown_table(["", *COLUMNS], rows)))


if __name__ == "__main__":
    main()
