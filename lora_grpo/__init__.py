"""LoRA + GRPO on one GPU: overview of the package.

    tasks ────► sampling ────► rewards ────► training ────► run folder: adapter/, run.json, metrics.jsonl
    rows and    completions,   one score     GRPO update         │
    prompts     G per prompt   each              │               ├─► evaluation   base against trained, with p-values
                    ▲                            │               ├─► report       one HTML page
                    └────── updated adapter ─────┘               ├─► merging      one model ─► gguf
                                                                 └─► hub          model card, push

    import lora_grpo as lg

    run = lg.train("my_task.py", config=lg.Config(train={"max_steps": 200}), rewards=[brief])
    lg.evaluate(run, compare="base")

api.py is this Python API. Start reading with `pipeline.py`, which runs every recipe. The `__init__.py` of each folder
describes its files.

api.py         train, evaluate, merge, ...: functions, as notebooks call them
pipeline.py    plan, load, evaluate the base, train, evaluate again, report
cli/           command line -> settings; exceptions -> one line and an exit code
settings/      preset, files and given settings -> checked configuration
config/        every setting with its unit; presets, batch arithmetic
hardware/      GPUs, drivers, and what `auto` chooses for this machine
prompts/       the text around answers: chat templates, prompt styles, turns, thoughts
grading/       answers and programs of completions -> verdicts
tasks/         GSM8K, HumanEval, MBPP, bundled problems, tasks of other packages, a user's file
data/          splits, their order and fingerprints
starter/       the bundled 2-million-parameter model and its problems
sandbox/       runs programs that a model wrote, isolated from their tests and from this machine
rewards/       NAME=WEIGHT -> functions that score completions
models/        a model: what its name stands for (run, adapter, folder, Hub id), and the policy loaded from it
memory/        the memory that a run needs, and the settings that make it fit: --plan
sampling/      completions from a policy or a GGUF file: built-in sampler, Unsloth, vLLM here or on a server, llama.cpp
rollouts/      episodes: completions and conversations, and the loop that plays them
loss/          the exact loss pass: logprobs from fewer tokens, in less memory
monitoring/    metrics of steps, alarms, validation and the best adapter, --hours, trackers
training/      TRL's GRPO and SFT trainers, the run, the logprob check
audit/         attacks on a grader: --audit
preview/       what a run would do, before it trains: --preview, --dry-run
gpu_check/     which engine is the fastest on this GPU
runs/          the run folder: run.json, metrics.jsonl, checkpoints
evaluation/    samples, verdicts, pass@k, paired tests, reports
report/        a run as one HTML page
merging/       merges an adapter into its base, tensor by tensor
gguf/          GGUF files for llama.cpp, Ollama and LM Studio, their size and quality
verify/        whether an engine, a file or a server uses an adapter
hub/           files, model card and push
files/         atomic writes, locks, JSON Lines, safetensors

__main__.py is `lora-grpo`, and commands.py the table of its commands. python_objects.py holds the objects that Python
code passes instead of names, process_state.py sets and restores the state of a process, and workers.py calls functions
in a process with a time limit. asynchronous.py, console.py, flags.py, distributed.py, progress.py and errors.py belong
to no folder.

Code imports from another folder only the names that its `__init__.py` provides, and only from folders listed before its
own in `LINES` of tests/test_structure.py. Heavy packages (torch, transformers, trl, peft, unsloth, vllm, datasets) are
imported inside functions, so that --help and --plan start quickly.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lora_grpo.api import (
        Config,
        Evaluation,
        Merged,
        TrainedRun,
        audit,
        evaluate,
        export_gguf,
        merge,
        plan,
        preview,
        push,
        report,
        train,
        verify,
    )
    from lora_grpo.errors import RunError, UserError
    from lora_grpo.training import FastGRPOTrainer

__all__ = [
    "Config",
    "Evaluation",
    "FastGRPOTrainer",
    "Merged",
    "RunError",
    "TrainedRun",
    "UserError",
    "audit",
    "evaluate",
    "export_gguf",
    "merge",
    "plan",
    "preview",
    "push",
    "report",
    "train",
    "verify",
]

_MODULES = {"FastGRPOTrainer": "training", "RunError": "errors", "UserError": "errors"}
"""The modules of the public names that are not in `api`."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import lora_grpo` loads nothing."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lora_grpo.{_MODULES.get(name, 'api')}"), name)


class _Package(ModuleType):
    """This package. Its `report`, `preview`, `audit` and `verify` are functions, although folders have these names.

    `from lora_grpo.report import write_report` imports from the folder.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_folder_of_function = name in __all__ and isinstance(value, ModuleType)
        if not is_folder_of_function:  # which Python's import would set
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
