"""What SmolLM2-135M-Instruct scores on each generator of reasoning-gym, as a Markdown table for docs/generators.md.

    python tools/generator_scores.py > docs/generators.md
    python tools/generator_scores.py --only countdown chain_sum

As `--preview` does, with two worked examples, without which the model rarely answers in the requested format: 8 prompts
of the default options, 8 completions each at temperature 1 with at most 48 tokens. Columns: the reward; the shares of
completions that pass and that have no answer; and the share of groups without different rewards, from which GRPO learns
nothing. A generator whose prompts have more than 700 tokens is named with the reason. A table of an interrupted call
starts over.
"""

import argparse
import sys

from lora_grpo.cli import parse, run_command
from lora_grpo.config import laptop_preset
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.models import load_policy
from lora_grpo.planning.diagnosis import measure
from lora_grpo.planning.preview import sample_groups
from lora_grpo.sampling import build_sampler
from lora_grpo.tasks import fit_data, load_data

COLUMNS = ("generator", "reward", "passed", "no answer", "groups with equal rewards")
FLAGS = (
    *("--preset", "laptop", "--data.few-shot", "2", "--data.options", "size=64", "--data.eval-limit", "1"),
    *("--sampling.max-completion-tokens", "48", "--model.max-sequence-tokens", "748", "--rewards", "correct_answer=1"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="generators; by default all")
    arguments = parser.parse_args()
    from reasoning_gym.factory import DATASETS

    from lora_grpo.tasks.reasoning_gym import REFUSED

    print(f"| {' | '.join(COLUMNS)} |\n|---{'|---:' * (len(COLUMNS) - 1)}|")
    sampler = None
    for name in arguments.only or sorted(set(DATASETS) - {*REFUSED}):
        flags = (*FLAGS, "--task", f"reasoning-gym:{name}")
        config, _ = parse(flags, recipe="gsm8k_lora", description="", presets={"laptop": laptop_preset()})
        sampler = sampler or build_sampler(load_policy(config), config)
        try:
            rows = fit_data(load_data(config), sampler.tokenizer, config).train
            found = measure(sample_groups(config, sampler, rows))
            mean, _ = found.rewards["sum"] or (0.0, 0.0)
            print(f"| {name} | {mean:.2f} | {found.solved} | {found.unparsed} | {found.flat} |", flush=True)
        except (UserError, RunError) as error:
            print(f"| {name} | {first_line(error)} |" + " |" * (len(COLUMNS) - 2), flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
