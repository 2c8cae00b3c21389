"""What SmolLM2-135M-Instruct scores on each generator of reasoning-gym, as a Markdown table for docs/generators.md.

    python tools/generator_scores.py > docs/generators.md
    python tools/generator_scores.py --only countdown chain_sum --rows 32

The model answers 12 rows of each generator with its default options, 8 times each at temperature 1, after two worked
examples, with at most 48 tokens. Without examples it rarely answers in the requested format. Columns: tokens of the
longest prompt; the share of completions with an answer; the mean score, which is the reward; pass@1, the share of
completions with the full score; and the share of rows whose 8 completions have different scores, from which GRPO
learns. Rows whose prompt has more than 700 tokens are left out. Progress is printed to standard error, and a table of
an interrupted call starts over.
"""

import argparse
import statistics
import sys

from lora_grpo.cli import parse, run_command
from lora_grpo.config import RunConfig, laptop_preset
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.models import load_policy
from lora_grpo.sampling import Sampler, SamplingParams, build_sampler, completion_seed, play_all
from lora_grpo.tasks import chat, grade, load_data

COLUMNS = ("generator", "longest prompt", "answers", "mean score", "pass@1", "rows with different scores")
MOST_TOKENS, GROUP = 700, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="generators; by default all")
    parser.add_argument("--rows", type=int, default=12, help="rows of each generator")
    arguments = parser.parse_args()
    from reasoning_gym.factory import DATASETS

    from lora_grpo.tasks.reasoning_gym import REFUSED

    print(f"| {' | '.join(COLUMNS)} |\n|---{'|---:' * (len(COLUMNS) - 1)}|")
    sampler = None
    for name in arguments.only or sorted(set(DATASETS) - {*REFUSED}):
        flags = ("--task", f"reasoning-gym:{name}", "--data.few-shot", "2", "--data.eval-limit", str(arguments.rows))
        flags += ("--data.options", "size=64", "--preset", "laptop")
        config, _ = parse(flags, recipe="gsm8k_lora", description="", presets={"laptop": laptop_preset()})
        sampler = sampler or build_sampler(load_policy(config), config)
        try:
            print(measure(name, config, sampler), flush=True)
        except (UserError, RunError) as error:
            print(f"| {name} | {first_line(error)} |" + " |" * (len(COLUMNS) - 2), flush=True)


def measure(name: str, config: RunConfig, sampler: Sampler) -> str:
    """Return the row of a generator."""
    rows = load_data(config).eval
    lengths = [len(each) for each in sampler.encode([chat.render_row(sampler.tokenizer, row) for row in rows])]
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= MOST_TOKENS]
    print(name, len(kept), file=sys.stderr)
    if not kept:
        return f"| {name} | {max(lengths)} | | | | |"
    seeds = [completion_seed(0, name, index) for index in range(GROUP * len(kept))]
    groups = play_all(sampler, kept, SamplingParams(GROUP, 1.0, 1.0, 48), seeds, adapter=False)
    graded = [grade(f"reasoning-gym:{name}", group) for group in groups]
    verdicts = [verdict for group in graded for verdict in group]
    answered = statistics.mean(verdict.extracted is not None for verdict in verdicts)
    score, passed = (statistics.mean(getattr(v, each) for v in verdicts) for each in ("value", "passed"))
    mixed = statistics.mean(len({verdict.value for verdict in group}) > 1 for group in graded)
    shares = f"{100 * answered:.0f}% | {score:.2f} | {100 * passed:.0f}% | {100 * mixed:.0f}%"
    return f"| {name} | {max(lengths)} | {shares} |"


if __name__ == "__main__":
    sys.exit(run_command(main))
