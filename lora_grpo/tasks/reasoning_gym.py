"""Tasks of reasoning-gym, such as `--task reasoning-gym:countdown`, from the `tasks` extra.

A generator makes the rows, and its own scorer grades them. Training and evaluation rows have different seeds.
`--data.options` sets fields of the generator's configuration, such as `min_numbers=3`; `size`, the number of rows; or
`level`, which sets all fields that determine how difficult rows are, as the generator's curriculum does.

The answer is read as in GSM8K: after the model's thoughts, from the last `<answer>`, `\\boxed{}` or `####`. The score,
from 0 to 1, is the reward, and a completion passes with 1. Many scorers give a small score to any answer.

Generators and scorers run in processes of their own, in which a seed always gives the same rows, and a score takes at
most ten seconds. Nine scorers run the answer as Python code. They get literals and short formulas only, and any other
answer is wrong.

Source: https://github.com/open-thought/reasoning-gym, version 0.1.25.
"""

import ast
import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.commands import install_command
from lora_grpo.errors import UserError, first_line, suggestion
from lora_grpo.grading import Row, Verdict, find_answers
from lora_grpo.prompts import DEFAULT_STYLE, thoughts, write_completion
from lora_grpo.tasks.task import Task
from lora_grpo.workers import TooSlow, Worker

PREFIX = "reasoning-gym:"
REFUSED = {
    "coin_flip": "its scorer accepts 0 as any probability (0.1.25), so models learn to answer 0",
    "codeio": "it runs programs that a model wrote, which write files, outside of a sandbox",
    "composite": "it mixes others, whose options have no names",
    "game_of_life_halting": "its scorer accepts any text (0.1.25)",
}
"""Generators that are no tasks, and why."""
_SEEDS = {"train": 0, "eval": 1_000_000_000}
"""The seed of the first row of a split. Each row has the next one."""
_SIZES = {"train": 1000, "eval": 200}
"""Rows of a split. A `size` that is given is that of both, but at most 200 rows are for evaluation."""
_MAX_CHARACTERS = 10_000
"""Characters of an answer that is graded."""
_generate = functools.cache(Worker("lora_grpo.tasks.reasoning_gym:generate", 3600.0, imports=["reasoning_gym"]))
_score = Worker("lora_grpo.tasks.reasoning_gym:score", 10.0, imports=["reasoning_gym"])

# What an answer may consist of, as nodes of Python's syntax tree, if its scorer runs it. A name alone does nothing.
_LITERAL = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.unaryop)
_ARITHMETIC = (ast.Expression, ast.Constant, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator)
_FORMULA = (*_ARITHMETIC, ast.Name, ast.Load, ast.Call)
_NODES_IF_RUN = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _LITERAL),
    **dict.fromkeys(("countdown", "puzzle24"), _ARITHMETIC),
    **dict.fromkeys(("intermediate_integration", "polynomial_multiplication", "simple_integration"), _FORMULA),
}
"""The nodes that an answer may have, by generator, for those generators whose scorers run it."""
_LARGEST_IN_EXPONENT = 99
"""The largest number in an exponent of an answer that is run."""
_FUNCTIONS = {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "sqrt", "Abs"}


@dataclasses.dataclass(frozen=True)
class Generator(Task):
    """The task of one generator."""

    grading = "the answer in the last <answer>, \\boxed{} or ####, by the generator's scorer: 1 passes"

    name: str
    """As in reasoning-gym: "countdown"."""

    @property
    def has_gold(self) -> bool:
        """Whether rows have a reference answer. A few generators have only a scorer."""
        [(_, answer)] = self._generated("eval", '{"size": 1}')
        return bool(answer)

    def load(
        self,
        split: str,
        source: str | None = None,
        columns: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> list[Row]:
        """Return the rows of a split; see `Task.load`.

        Args:
            options: fields of the generator's configuration, as NAME=VALUE, with values in JSON or else as text.

        Raises:
            UserError: a source is given, an option is unknown or invalid, or the generator fails.
        """
        if source is not None:
            raise UserError(f"{PREFIX}{self.name} generates its rows, got source {source!r}; remove the source")
        config = self._checked_config(options)
        rows = []
        for index, (question, answer) in enumerate(self._generated(split, config, options)):
            # Some references of `intermediate_integration` contain the integral itself. Such an answer must not pass.
            if answer and not _is_safe(self.name, answer):
                continue
            rows.append(
                {
                    "id": f"{self.name}/{split}/{index}",
                    "question": question,
                    "answer": answer,
                    "split": split,
                    "index": index,
                    "config": config,
                }
            )
        return rows

    def check(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Grade one completion with the generator's scorer."""
        text = thoughts.answer_of(completion)
        if text is None:
            return Verdict(False, thoughts.UNFINISHED, score=0.0)
        answers = find_answers(text)
        if not answers:
            return Verdict(False, "no_answer", score=0.0)
        if len(answers) > 1:
            return Verdict(False, "conflicting_answers", score=0.0)

        [answer] = answers
        wrong = Verdict(False, "wrong_answer", answer, score=0.0)
        if not answer or len(answer) > _MAX_CHARACTERS or not _is_safe(self.name, answer):
            return wrong
        try:
            score = _score(self.name, row["split"], row["config"], row["index"], answer)
        except TooSlow:
            return dataclasses.replace(wrong, reason="timeout")
        except RuntimeError as error:  # some scorers do not catch the errors of their parsers
            return dataclasses.replace(wrong, detail=f"the scorer raised {first_line(error)}")
        passed = score == 1
        return Verdict(passed, "correct" if passed else "wrong_answer", answer, score=score)

    def gold(self, row: Mapping[str, Any]) -> str:
        """Return a completion without reasoning in the row's `prompt_style`."""
        return write_completion("", row["answer"], row.get("prompt_style") or DEFAULT_STYLE)

    def _checked_config(self, options: Sequence[str]) -> str:
        """Return the options as JSON, with which the generator has made a row.

        Raises:
            UserError: one is unknown, or the generator refuses it.
        """
        config_class = _library().DATASETS[self.name][1]
        fields = {field.name for field in dataclasses.fields(config_class)} - {"seed"}
        if _library().has_curriculum(self.name):
            fields.add("level")

        values: dict[str, Any] = {}
        for option in options:
            name, equals, text = option.partition("=")
            if not equals or name not in fields:
                hint = suggestion(name, sorted(fields))
                raise UserError(f"--data.options {option!r}: expected NAME=VALUE with a field of {self.name}; {hint}")
            try:
                values[name] = json.loads(text)
            except ValueError:
                values[name] = text
            if name == "size" and (type(values[name]) is not int or values[name] < 1):
                raise UserError(f"--data.options {option!r}: expected a number of rows, 1 or more")

        # The generator checks the values when it makes a row.
        self._generated("eval", json.dumps({**values, "size": 1}), options)
        return json.dumps(values, sort_keys=True)

    def _generated(self, split: str, config: str, options: Sequence[str] = ()) -> list[tuple[str, str]]:
        """Return the questions and answers of a split; see `generate`.

        Raises:
            UserError: the generator refuses its options, fails at a row, or takes too long.
        """
        try:
            return _generate(self.name, split, config)
        except (RuntimeError, TooSlow) as error:
            shown = f" with --data.options {' '.join(options)}" if options else ""
            raise UserError(
                f"{self.name} makes no {split} rows{shown}: {first_line(error)}; pass other options, or fewer rows: "
                "--data.options size=NUMBER"
            ) from None


def generate(name: str, split: str, config: str) -> list[tuple[str, str]]:
    """Return the questions and answers of a split; an answer is empty if there is none. Called in a `Worker`."""
    rows = []
    for index in range(len(_dataset(name, split, config))):
        entry = _entry(name, split, config, index)
        answer = "" if entry["answer"] is None else str(entry["answer"])
        rows.append((entry["question"], answer))
    return rows


def score(name: str, split: str, config: str, index: int, answer: str) -> float:
    """Return the score of an answer from 0 to 1. Called in a `Worker`."""
    value = float(_dataset(name, split, config).score_answer(answer, _entry(name, split, config, index)))
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


def make_task(name: str) -> Generator:
    """Return the task of a generator.

    Raises:
        UserError: reasoning-gym is not installed, or has no such generator.
    """
    generator = name.removeprefix(PREFIX)
    usable = sorted(set(_library().DATASETS) - set(REFUSED))
    if generator in REFUSED:
        raise UserError(f"{name} cannot be used: {REFUSED[generator]}")
    if generator not in usable:
        hint = suggestion(generator, usable, "`lora-grpo tasks reasoning-gym` lists them")
        raise UserError(f"reasoning-gym has no generator {generator!r}; {hint}")
    return Generator(generator)


@functools.cache
def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        fix = f"run `{install_command('lora-grpo[tasks]')}`"
        raise UserError(f"reasoning-gym is not installed ({error}); {fix}") from None
    return reasoning_gym.factory


@functools.lru_cache(maxsize=64)
def _dataset(name: str, split: str, config: str) -> Any:
    """Return the rows of a split, which are made when they are read."""
    fields = json.loads(config)
    level = fields.pop("level", None)
    size = fields.get("size", _SIZES["train"])
    if split == "eval":
        size = min(size, _SIZES["eval"])
    fields |= {"seed": _SEEDS[split], "size": size}
    if level is None:
        return _library().create_dataset(name, **fields)
    curriculum = _library().create_curriculum(name)
    curriculum.set_global_level(level)
    dataset_class = _library().DATASETS[name][0]
    return dataset_class(dataclasses.replace(curriculum.generate_configuration(), **fields))


@functools.lru_cache(maxsize=4096)
def _entry(name: str, split: str, config: str, index: int) -> dict[str, Any]:
    return _dataset(name, split, config)[index]


def _is_safe(name: str, answer: str) -> bool:
    """Return whether the scorer may get an answer: it does not run it, or the answer is harmless and short to run."""
    allowed_nodes = _NODES_IF_RUN.get(name)
    if allowed_nodes is None:
        return True
    try:
        tree = ast.parse(answer, mode="eval")
        nodes = list(ast.walk(tree))
        if not all(isinstance(node, allowed_nodes) for node in nodes):
            return False
        functions = [node.func for node in nodes if isinstance(node, ast.Call)]
        if not all(isinstance(function, ast.Name) and function.id in _FUNCTIONS for function in functions):
            return False
        return _nested_powers(tree) <= 2
    except SyntaxError:
        # The scorers of literals run an answer with `eval`, which refuses such a text too. The others use SymPy, which
        # rewrites a text before it runs it, and may make a program of it.
        return allowed_nodes is _LITERAL
    except (ValueError, MemoryError, RecursionError):
        return False


def _nested_powers(node: ast.AST) -> float:
    """Return how many powers are nested; infinity if an exponent is large or has a power."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Pow | ast.LShift):
        return max((_nested_powers(child) for child in ast.iter_child_nodes(node)), default=0)
    if _nested_powers(node.right):
        return math.inf
    numbers = [part.value for part in ast.walk(node.right) if isinstance(part, ast.Constant)]
    if len(numbers) > 2:
        return math.inf
    for number in numbers:
        if not isinstance(number, int | float) or abs(number) > _LARGEST_IN_EXPONENT:
            return math.inf
    return _nested_powers(node.left) + 1
