"""docs/while-it-trains.md has a row for each setting that an alarm or a preview advises."""

import ast
import re
import typing
from pathlib import Path

from helpers.flags import flag_names
from helpers.tiny_runs import run_tiny

from lora_grpo.commands import RECIPES
from lora_grpo.config import RunConfig
from lora_grpo.data import sft_command
from lora_grpo.monitoring import alarms
from lora_grpo.preview import diagnosis
from lora_grpo.runs import read_metrics

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/while-it-trains.md").read_text(encoding="utf-8")
SETTING = re.compile(r"--grpo \w+|--(?!grpo)[a-z][a-z.-]*|train sft")


METRICS = ("loss", "grad_norm", "reward", "entropy")


def tables_of(title):
    """Return the rows of each table of a section, without the header."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [[line.split("|")[1:-1] for line in table.splitlines()[2:]] for table in tables]


def settings_in(text):
    return set(SETTING.findall(text))


def texts_of(module):
    """Yield the text of each string, without docstrings."""
    for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and isinstance(child.value, str) and not isinstance(node, ast.Expr):
                yield child.value


def test_every_setting_that_is_advised_has_a_row_with_what_it_does():
    from trl import GRPOConfig

    tables = tables_of("Basis of the advice")
    shown, rejected = ({setting for row in table for setting in settings_in(row[0])} for table in tables)
    assert "--train.beta" in rejected
    advised = {setting for module in (alarms, diagnosis) for text in texts_of(module) for setting in settings_in(text)}
    advised |= settings_in(sft_command(RunConfig()).partition(" --")[0])
    assert {"--train.learning-rate", "--sampling.num-generations", "train sft"} <= advised
    assert advised - shown == set()
    for setting in shown | rejected:
        kind, _, field = setting.partition(" ")
        known = {"--grpo": typing.get_type_hints(GRPOConfig), "train": RECIPES}.get(kind, flag_names())
        assert (field or kind) in known, setting


def test_settings_that_clip_the_ratio_change_nothing(tmp_path):
    """With one optimizer step for each batch of completions, the ratio is 1. The page says so."""
    clipped = ("epsilon=0.01", "epsilon_high=0.28", "delta=1.5")
    assert all(f"`{item.partition('=')[0]}`" in PAGE for item in clipped)
    sides = [run_tiny(tmp_path / str(len(grpo)), grpo=grpo)[0] for grpo in ((), clipped)]
    one, other = ([[step[name] for name in METRICS] for step in read_metrics(run.folder)] for run in sides)
    assert one == other and all(norm for _, norm, *_ in one)
