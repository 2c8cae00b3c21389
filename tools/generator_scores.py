"""What SmolLM2-135M-Instruct scores on each generator of reasoning-gym, as the page docs/generators.md.

    python tools/generator_scores.py > docs/generators.md
    python tools/generator_scores.py --only countdown chain_sum

As `--preview` does, with two worked examples, without which the model rarely answers in the requested format: 8 prompts
of the default options, 8 completions each at temperature 1 with at most 48 tokens. An interrupted call starts over.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence

from lora_grpo.cli import parse, run_command
from lora_grpo.config import laptop_preset
from lora_grpo.data import fit_data, load_data
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.files import markdown_table
from lora_grpo.models import load_policy
from lora_grpo.preview.diagnosis import measure
from lora_grpo.preview.sample_groups import sample_groups
from lora_grpo.sampling import build_sampler

INTRODUCTION = """# What a small model scores on reasoning-gym

SmolLM2-135M-Instruct, before any training, on the default options of each generator, with two worked examples in the
prompt (`--data.few-shot 2`): 8 prompts, 8 completions of each at temperature 1, at most 48 tokens. GRPO learns nothing
from groups with equal rewards. Where nothing passes, train on reference answers first (`recipes/sft_lora.py`), or make
the rows easier with `--data.options`. Questions with two or three possible answers pass by guessing. Brackets: 95%
intervals. Measured with `python tools/generator_scores.py` on {device} with PyTorch {version}.
"""
COLUMNS = ("generator", "reward", "passed", "no answer", "groups with equal rewards")
REASONS = {
    "their prompts have more than": "With two examples, most prompts have more than 700 tokens",
    "no reference answers": "No reference answers, which examples and SFT need",
}
"""Titles of the lists of generators that cannot be measured, by a part of the error."""
FLAGS = (
    *("--preset", "laptop", "--data.few-shot", "2", "--data.options", "size=64", "--data.eval-limit", "1"),
    *("--sampling.max-completion-tokens", "48", "--model.max-sequence-tokens", "748", "--rewards", "correct_answer=1"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="generators; by default all")
    arguments = parser.parse_args()
    import torch
    from reasoning_gym.factory import DATASETS

    from lora_grpo.tasks.reasoning_gym import REFUSED

    sampler, found = None, []
    for name in arguments.only or sorted(set(DATASETS) - {*REFUSED}):
        flags = (*FLAGS, "--task", f"reasoning-gym:{name}")
        config, _ = parse(flags, recipe="gsm8k_lora", description="", presets={"laptop": laptop_preset()})
        sampler = sampler or build_sampler(load_policy(config), config)
        try:
            rows = fit_data(load_data(config), sampler.tokenizer, config).train
            measured = measure(sample_groups(config, sampler, rows))
            mean, _ = measured.rewards["sum"] or (0.0, 0.0)
            found.append((name, f"{mean:.2f}", *map(str, (measured.solved, measured.unparsed, measured.flat))))
        except (UserError, RunError) as error:
            found.append((name, first_line(error)))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    print(INTRODUCTION.format(device=device, version=torch.__version__) + page(found), end="")


def page(found: Sequence[tuple[str, ...]]) -> str:
    """Return the table of generators on which something passed, the highest first, and lists of the others.

    Args:
        found: the cells of each generator, or its name and an error.
    """
    passed, lists = [], dict[str, list[str]]()
    for name, *cells in found:
        if len(cells) > 1 and not cells[1].startswith("0%"):
            passed.append((name, *cells))
            continue
        title = next((title for part, title in REASONS.items() if part in cells[0]), cells[0])
        lists.setdefault("Nothing passed" if len(cells) > 1 else title, []).append(f"`{name}`")
    passed.sort(key=lambda cells: int(cells[2].split("%")[0]), reverse=True)
    lines = ["", *markdown_table(COLUMNS, passed)]
    for title, names in lists.items():
        lines += [*textwrap.wrap(f"{title} ({len(names)}): {', '.join(names)}.", 120), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_command(main))
