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

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.grading import CheckError, Row, Verdict
from lora_grpo.prompts import thoughts
from lora_grpo.tasks import sources
from lora_grpo.tasks.columns import own_columns, row_ids, with_record
from lora_grpo.workers import TooSlow, Worker

COLUMNS = ("prompt", "instruction_id_list", "kwargs")
_DATASETS = {"ifeval": "google/IFEval@train", "ifbench": "allenai/IFBench_test@train"}
_follow = Worker("lora_grpo.tasks.instructions:follow", seconds=10.0, imports=["if_verifiable"])


def read(name: str) -> Any:
    """Return the task `ifeval` or `ifbench`.

    Raises:
        UserError: if-verifiable is not installed.
    """
    if importlib.util.find_spec("if_verifiable") is None:
        raise UserError(f"{name} needs the package if-verifiable; run `pip install 'lora-grpo[tasks]'`")
    given = {"load": functools.partial(load, name), "check": functools.partial(check, name)}
    return SimpleNamespace(**given, has_gold=False, COLUMNS=COLUMNS)


def load(name: str, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
    """Return the rows of a split; see `Task.load`."""
    if source is None and split == "train":
        raise UserError(f"{name} is a benchmark without training rows; pass --data.train with rows of the same form")
    rows: list[Row] = []
    records = sources.read(source or _DATASETS[name], split, COLUMNS, columns)
    ids = row_ids([record for _, record in records], name)
    for row_id, (where, record) in zip(ids, records, strict=True):
        prompt, names, arguments = (record[column] for column in COLUMNS)
        sources.texts(record, ("prompt",), where)
        if not isinstance(names, list) or not names or not isinstance(arguments, list) or len(arguments) != len(names):
            raise UserError(f"{where}: expected lists of the same length in instruction_id_list and kwargs")
        given = [{key: value for key, value in (each or {}).items() if value is not None} for each in arguments]
        if "key" in record:
            row_id = f"{name}/{record['key']}"
        row: Row = {"answer": ""}
        row |= {key: value for key, value in own_columns(record).items() if key not in COLUMNS}
        row |= {"id": row_id, "question": prompt, "prompt": [{"role": "user", "content": prompt}]}
        row |= {"instructions": names, "arguments": given}
        rows.append(with_record(row, record, where))
    return sources.unique(rows, source or _DATASETS[name])


def check(name: str, completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade one completion.

    Raises:
        CheckError: a checker needs data of NLTK that is not there.
    """
    answer = thoughts.answer_of(completion)
    if answer is None:
        rules = {"strict": False, "loose": False}
        return Verdict(False, thoughts.UNFINISHED, rules=rules, score=0.0)
    try:
        strict, loose = _follow(name, row["question"], row["instructions"], row["arguments"], answer)
    except TooSlow:
        return Verdict(False, "timeout", score=0.0)
    except RuntimeError as error:
        if "nltk" in str(error).lower():
            raise CheckError(
                "a checker needs data of NLTK; run `python -m nltk.downloader punkt punkt_tab stopwords "
                f"averaged_perceptron_tagger_eng` ({first_line(error)})"
            ) from None
        raise CheckError(f"{name} row {row['id']}: {first_line(error)}") from None
    passed = all(strict)
    missed = [each for each, follows in zip(row["instructions"], strict, strict=True) if not follows]
    return Verdict(
        passed,
        "correct" if passed else "wrong_answer",
        rules={"strict": passed, "loose": all(loose)},
        detail=f"does not follow {', '.join(missed)}" if missed else None,
        score=sum(strict) / len(strict),
    )


def follow(
    name: str, prompt: str, instructions: Sequence[str], arguments: Sequence[Mapping[str, Any]], completion: str
) -> tuple[list[bool], list[bool]]:
    """Return whether each instruction is followed, by the strict and by the loose rule. Called in a `Worker`."""
    import if_verifiable
    import langdetect

    langdetect.DetectorFactory.seed = 0  # it samples, and the same text must get the same grade
    kind = {"ifeval": if_verifiable.IFEvalSample, "ifbench": if_verifiable.IFBenchSample}[name]
    sample = kind(key=0, prompt=prompt, instruction_id_list=instructions, kwargs=arguments)
    try:
        results, _ = if_verifiable.evaluate_output_for_sample(name, sample, completion)
    except IndexError:  # of a checker, on a text without words
        return [False] * len(instructions), [False] * len(instructions)
    if not results and not completion.strip():
        return [False] * len(instructions), [False] * len(instructions)
    if unknown := {*instructions} - {each.instruction_id for each in results}:
        raise ValueError(f"no instruction {', '.join(sorted(unknown))}")
    return [each.strict_pass for each in results], [each.loose_pass for each in results]
