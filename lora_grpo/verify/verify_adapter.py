"""`lora-grpo verify`: find out whether a merged model, a file, an engine or a server uses an adapter."""

from __future__ import annotations

import dataclasses
import filecmp
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import PositiveInt

from lora_grpo import console
from lora_grpo.config import check_fields
from lora_grpo.errors import RunError, UserError
from lora_grpo.flags import Flag
from lora_grpo.models import (
    ADAPTER_WEIGHTS,
    BEST,
    START,
    ModelFlags,
    ModelSpec,
    choose_adapter,
    resolve,
)
from lora_grpo.runs import checkpoints_in
from lora_grpo.verify import record
from lora_grpo.verify.compare import compare
from lora_grpo.verify.observe import CHAT_TOKENS, Observations, Training, observe, training_of
from lora_grpo.verify.open_target import check_target, is_address, open_target
from lora_grpo.verify.probes import choose_prompts
from lora_grpo.verify.reference import Reference
from lora_grpo.verify.report import TargetReport, VerifyReport, show

T = TypeVar("T")

_CHECKPOINTS = 3
"""Number of a run's newest checkpoints that a target may use instead of the adapter."""


@dataclass(frozen=True)
class VerifyOptions(ModelFlags):
    """Flags of `lora-grpo verify`."""

    source: Annotated[str, Flag("RUN|ADAPTER")]
    """A run folder, an adapter folder, or the Hub id of an adapter."""
    against: tuple[str, ...] = ()
    """What must use the adapter: a merged model's folder, a GGUF file, `transformers` or `vllm` in this process, or the
    address of an OpenAI-compatible server, with the model's name there: http://127.0.0.1:8000#NAME."""
    prompts: Path | None = None
    """Prompts to compare on: a text file with one on each line, or JSON Lines with `messages`, `prompt` or `question`;
    default: those of the run's last steps, else general questions."""
    num_prompts: PositiveInt = 12
    """Number of prompts."""
    tokens: PositiveInt = 32
    """Number of tokens to sample for each prompt."""
    weight_bits: Literal[4, 5, 8, 16, 32] | None = None
    """Bits per weight of the target, which determine the expected rounding; default: as the target reports, else 16."""
    bits: Literal[4, 16] | None = None
    """Precision of the reference base; default: 16, then also 4 (NF4) for a run that was trained in 4 bits, if a target
    matches neither base nor adapter in 16 bits."""


def run_verify(options: VerifyOptions) -> None:
    """Verify, and print the report.

    Raises:
        RunError: a target does not use the adapter, or that cannot be told.
    """
    report, spec = _verify(options)
    show(report)  # first: verification.json of the run may be damaged
    record.keep(report, spec)
    problem = report.problem
    if problem:
        raise RunError(problem)


def verify(options: VerifyOptions) -> VerifyReport:
    """Compare the targets with an adapter and its base, and return what they are.

    The base and the adapter, which are one model, score the tokens of all targets.

    Raises:
        UserError: the adapter, a target or the prompts are wrong.
    """
    report, spec = _verify(options)
    record.keep(report, spec)
    return report


def _verify(options: VerifyOptions) -> tuple[VerifyReport, ModelSpec]:
    """Return the report of `verify`, which is not kept yet, and the adapter."""
    check_fields(options)
    if not options.against:
        raise UserError("nothing to verify; pass --against with a merged model, a GGUF file, an engine or a server")
    trained_spec = resolve(choose_adapter(options.source, options.what), options, bits=options.bits)
    if trained_spec.adapter is None:
        raise UserError(f"{options.source} has no adapter; pass a run or an adapter")
    spec = dataclasses.replace(trained_spec, base=dataclasses.replace(trained_spec.base, bits=options.bits or 16))
    prompts, prompts_from = choose_prompts(options.prompts, spec, options.num_prompts)
    training = training_of(spec, prompts)
    for name in options.against:
        check_target(name, training.tokenizer)

    if all(is_address(name) for name in options.against):
        # Servers answer while the model is loaded. Targets in this process are closed before, because of the memory.
        asking = _in_background(lambda: _ask_all(options, spec, training))
        reference = Reference(spec, training.end_token_ids)
        reference.load()
        observations = asking.result()
    else:
        observations = _ask_all(options, spec, training)
        reference = Reference(spec, training.end_token_ids)
    other_adapters = _other_adapters(spec)

    def compare_with(reference: Reference, observed: Observations) -> TargetReport:
        return compare(observed, training, reference, other_adapters, options.weight_bits)

    reports = [compare_with(reference, observed) for observed in observations]
    del reference  # at most one model is loaded
    if trained_spec.base.bits != spec.base.bits:
        # `lora-grpo serve` and models merged onto `dequantized` have the base in 4 bits.
        quantized = Reference(trained_spec, training.end_token_ids)  # loads nothing before it scores
        for index, observed in enumerate(observations):
            if reports[index].result.finding != "neither":
                continue
            found = compare_with(quantized, observed)
            if found.result.finding != "neither":
                reports[index] = dataclasses.replace(found, base_bits=4)
    return VerifyReport(adapter=str(spec.adapter), prompts=prompts_from, targets=tuple(reports)), spec


def _in_background(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread. The end of the process, such as by Ctrl-C, does not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name="lora_grpo-asking", daemon=True).start()
    return future


def _ask_all(options: VerifyOptions, spec: ModelSpec, training: Training) -> list[Observations]:
    """Load, ask and close each target before the next one."""
    longest_prompt = max(len(token_ids) for token_ids in training.prompt_ids)
    sequence_tokens = longest_prompt + max(options.tokens, CHAT_TOKENS)
    observations = []
    for name in options.against:
        console.note(f"asking {name}")
        target = open_target(name, spec, training.tokenizer, sequence_tokens, options)
        try:
            observations.append(observe(target, training, options.tokens))
        finally:
            target.close()
    return observations


def _other_adapters(spec: ModelSpec) -> dict[str, Path]:
    """Return the other adapters of a run, which a target may use by mistake, by their names."""
    run = spec.run_folder
    if run is None or spec.adapter is None:
        return {}
    folders = {"the run's last adapter": run / "adapter", "the run's best adapter": run / BEST}
    folders["the adapter that the run started from"] = run / START
    for checkpoint in checkpoints_in(run / "checkpoints")[:_CHECKPOINTS]:
        folders[f"the adapter of step {checkpoint.step}"] = checkpoint.path
    other_adapters = {}
    for name, folder in folders.items():
        weights = folder / ADAPTER_WEIGHTS
        if weights.is_file() and not filecmp.cmp(weights, spec.adapter / ADAPTER_WEIGHTS, shallow=False):
            other_adapters[name] = folder
    return other_adapters
