"""Compare a training step whose conversations are played by agents at the endpoint with one of an `Environment`.

The model, SmolLM2-135M, first learns by SFT to write the same eight words in every turn. A step has 64 conversations of
K turns, with the same messages on all sides. Rewards are arbitrary, so that nearly every group has a gradient. The
sides take turns, each in its own process:

    environment   the conversation is played in the process of the run
    agent         an agent sends the same messages with OpenAI's client
    sleeping      the same agent sleeps for 0.2 s after every turn

    python tools/benchmark_agents.py --turns 4 --steps 3 --rounds 3

A ratio is the median over the rounds, with their range.
"""

import argparse
import os
import tempfile
from pathlib import Path

from benchmark_step import LAPTOP, Step, execute, measure, median, ratio
from benchmark_turns import TASK

from lora_grpo.files import markdown_table

AGENT = """
import asyncio, hashlib, os
from openai import AsyncOpenAI

TURNS = int(os.environ["BENCHMARK_TURNS"])
SLEEP = float(os.environ["BENCHMARK_SLEEP"])
THRESHOLD = 0.0
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="-")

def load(split):
    return [{"question": f"Count to eight. ({split} {n})"} for n in range(400 if split == "train" else 16)]

async def agent(row, base_url):
    client = CLIENT.with_options(base_url=base_url)
    messages = [{"role": "user", "content": row["question"]}]
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "Count to eight again."}]
        await asyncio.sleep(SLEEP)
    return hashlib.sha256(f"{os.urandom(8)}".encode()).digest()[0] / 255
"""
SIDES = {"environment": ("environment.py", 0.0), "agent": ("agent.py", 0.0), "sleeping": ("agent.py", 0.2)}
COLUMNS = ("step", "rollouts", "training", "tokens", "peak_gib")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="steps per process; the first is excluded")
    parser.add_argument("--rounds", type=int, default=3, help="processes per side")
    arguments = parser.parse_args()

    tokens = 24 * arguments.turns  # a turn has 9 tokens, and 14 follow it
    rounds: dict[str, list[list[Step]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "environment.py").write_text(TASK, encoding="utf-8")
        Path(folder, "agent.py").write_text(AGENT, encoding="utf-8")
        os.environ["BENCHMARK_TURNS"] = str(arguments.turns)
        os.environ["BENCHMARK_SLEEP"] = "0"
        flags = [*LAPTOP, "--sampling.max-completion-tokens", str(tokens)]
        flags += ["--model.max-sequence-tokens", str(tokens + 512), "--sampling.max-turn-tokens", "12"]
        execute(
            *("recipes/sft_lora.py", *flags, "--task", f"{folder}/environment.py", "--train.max-steps", "8"),
            *("--output-dir", f"{folder}/sft"),
        )
        command = ["recipes/your_task.py", *flags, "--lora.from", f"{folder}/sft"]
        command += ["--train.max-steps", str(arguments.steps), "--train.learning-rate", "1e-6"]
        for number in range(arguments.rounds):
            names = list(SIDES)
            for side in names if number % 2 == 0 else reversed(names):
                task, sleep = SIDES[side]
                os.environ["BENCHMARK_SLEEP"] = str(sleep)
                side_command = [*command, "--task", f"{folder}/{task}", "--seed", str(number)]
                rounds[side].append(measure(side, Path(__file__).parent.parent, *side_command))

    after_first = {side: [steps[1:] for steps in rounds_of_side] for side, rounds_of_side in rounds.items()}
    rows = []
    for side, rounds_of_side in after_first.items():
        values = [median([step for steps in rounds_of_side for step in steps], name) for name in COLUMNS]
        rows.append([side, *(f"{value:.2f}" for value in values)])
    for side, reference in (("agent", "environment"), ("sleeping", "agent")):
        ratios = [ratio(after_first[side], after_first[reference], name) for name in COLUMNS]
        rows.append([f"{side} / {reference}", *ratios])
    print("\n".join(markdown_table(["", *COLUMNS], rows)))


if __name__ == "__main__":
    main()
