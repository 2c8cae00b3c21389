"""Instructions that a program can check, such as "answer in three bullet points": IFEval and IFBench, from the `tasks`
extra.

`ifeval` and `ifbench` are benchmarks. They train on rows of the same form, from `--data.train`: `prompt`,
`instruction_id_list`, and `kwargs`, a list with the arguments of each instruction. The prompt is the user's message;
there is no system message, and no answer format.

A completion passes if it follows all instructions of its row, which is the benchmarks' strict accuracy at the level of
prompts. The rule `loose` also tries it without its first line, its last line, or asterisks. The reward is the fraction
of instructions that are followed. Only what follows the model's thoughts is checked. if-verifiable checks in a process
of its own, for at most ten seconds.

Sources: https://github.com/google-research/google-research/tree/master/instruction_following_eval (arXiv:2311.07911),
https://github.com/allenai/IFBench (arXiv:2507.02833), by way of the package if-verifiable, version 0.1.2.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.commands import install_command
from lora_grpo.errors import UserError, first_line
from lora_grpo.grading import CheckError, Row, Verdict
from lora_grpo.prompts import thoughts
from lora_grpo.tasks import sources
from lora_grpo.tasks.columns import row_ids, with_loaded_columns, without_row_entries
from lora_grpo.tasks.task import Task
from lora_grpo.workers import TooSlow, Worker

_DATASETS = {"ifeval": "google/IFEval@train", "ifbench": "allenai/IFBench_test@train"}
_PLAIN_TEXT = 'Tom said: "Here is a plain text." It has two sentences.'
"""A text that every checker can read."""
_follow = Worker("lora_grpo.tasks.instructions:follow", seconds=10.0, imports=["if_verifiable"])


@dataclass(frozen=True)
class Instructions(Task):
    """The task `ifeval` or `ifbench`."""

    COLUMNS = ("prompt", "instruction_id_list", "kwargs")
    has_gold = False
    has_own_prompts = True
    grading = "all instructions of the prompt, without the model's thoughts, by if-verifiable (`strict`)"

    name: str

    def load(self, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        """Return the rows of a split; see `Task.load`."""
        if source is None and split == "train":
            raise UserError(
                f"{self.name} is a benchmark without training rows; pass --data.train with rows of the same form"
            )
        source = source or _DATASETS[self.name]
        records = sources.read(source, split, self.COLUMNS, columns)
        ids = row_ids([record.columns for record in records], self.name)
        rows = []
        for row_id, record in zip(ids, records, strict=True):
            if "key" in record.columns:  # of the datasets
                row_id = f"{self.name}/{record.columns['key']}"
            rows.append(_row(record, row_id))
        return sources.unique(rows, source)

    def check(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Grade one completion.

        Raises:
            CheckError: a checker needs data of NLTK that is not there, or there is no such instruction.
        """
        no_rule = {"strict": False, "loose": False}
        answer = thoughts.answer_of(completion)
        if answer is None:
            return Verdict(False, thoughts.UNFINISHED, rules=no_rule, score=0.0)
        try:
            strict, loose = _follow(self.name, row["question"], row["instructions"], row["arguments"], answer)
        except TooSlow:
            return Verdict(False, "timeout", rules=no_rule, score=0.0)
        except RuntimeError as error:
            if "nltk" in str(error).lower():
                raise CheckError(
                    "a checker needs data of NLTK; run `python -m nltk.downloader punkt punkt_tab stopwords "
                    f"averaged_perceptron_tagger_eng` ({first_line(error)})"
                ) from None
            raise CheckError(f"{self.name} row {row['id']}: {first_line(error)}") from None

        passed = all(strict)
        missed = [name for name, is_followed in zip(row["instructions"], strict, strict=True) if not is_followed]
        return Verdict(
            passed,
            "correct" if passed else "wrong_answer",
            rules={"strict": passed, "loose": all(loose)},
            detail=f"does not follow {', '.join(missed)}" if missed else None,
            score=sum(strict) / len(strict),
        )


def make_task(name: str) -> Instructions:
    """Return the task `ifeval` or `ifbench`.

    Raises:
        UserError: if-verifiable is not installed.
    """
    if importlib.util.find_spec("if_verifiable") is None:
        raise UserError(f"{name} needs the package if-verifiable; run `{install_command('lora-grpo[tasks]')}`")
    return Instructions(name)


def _row(record: sources.Record, row_id: str) -> Row:
    columns = record.columns
    [prompt] = sources.texts(columns, ["prompt"], record.where)
    names = columns["instruction_id_list"]
    entries = columns["kwargs"]
    if not isinstance(names, list) or not names or not isinstance(entries, list) or len(entries) != len(names):
        raise UserError(f"{record.where}: expected lists of the same length in instruction_id_list and kwargs")

    # A dataset has all arguments of all instructions in each entry, and null for those that the instruction lacks.
    arguments_of_instructions = []
    for entry in entries:
        if entry is not None and not isinstance(entry, Mapping):
            raise UserError(f"{record.where}: kwargs has {entry!r:.60}; expected an object with arguments, or null")
        arguments_of_instructions.append({name: value for name, value in (entry or {}).items() if value is not None})

    other_columns = without_row_entries(columns)
    for name in Instructions.COLUMNS:
        other_columns.pop(name, None)
    row: Row = {
        "answer": "",
        **other_columns,
        "id": row_id,
        "question": prompt,
        "prompt": [{"role": "user", "content": prompt}],
        "instructions": names,
        "arguments": arguments_of_instructions,
    }
    return with_loaded_columns(row, columns, record.where)


def follow(
    name: str, prompt: str, instructions: Sequence[str], arguments: Sequence[Mapping[str, Any]], completion: str
) -> tuple[list[bool], list[bool]]:
    """Return whether each instruction is followed, by the strict and by the loose rule. Called in a `Worker`."""
    import if_verifiable
    import langdetect

    langdetect.DetectorFactory.seed = 0  # it samples, and the same text must get the same grade
    sample_class = {"ifeval": if_verifiable.IFEvalSample, "ifbench": if_verifiable.IFBenchSample}[name]
    sample = sample_class(key=0, prompt=prompt, instruction_id_list=instructions, kwargs=arguments)
    none_followed = [False] * len(instructions)
    try:
        results, _ = if_verifiable.evaluate_output_for_sample(name, sample, completion)
    except Exception:  # noqa: BLE001 - of a checker, on a text without words or nested too deep
        # If the row is the cause, as with wrong arguments, this raises an exception, too.
        if_verifiable.evaluate_output_for_sample(name, sample, _PLAIN_TEXT)
        return none_followed, none_followed
    if not results and not completion.strip():
        return none_followed, none_followed
    unknown = set(instructions) - {result.instruction_id for result in results}
    if unknown:
        raise ValueError(f"no instruction {', '.join(sorted(unknown))}")
    return [result.strict_pass for result in results], [result.loose_pass for result in results]
