"""The commands of `lora-grpo`: train, evaluate, chat, merge, export-gguf, push, report, check-gpu.

The docstring of a command is the description that its `--help` shows. A script in `scripts/` runs one of them.
"""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lora_grpo import __version__, commands
from lora_grpo.cli.main import run_command
from lora_grpo.errors import UserError, suggestion
from lora_grpo.flags import read_flags


def train(arguments: Sequence[str]) -> NoReturn:
    """Train an adapter with a recipe, and evaluate the model before and after.

    lora-grpo train gsm8k                    # grade-school math; chooses the preset for this machine
    lora-grpo train code                     # Python functions, rewarded by their unit tests
    lora-grpo train sft                      # supervised fine-tuning on reference answers, before GRPO
    lora-grpo train length                   # the smallest example: answers of a given length
    lora-grpo train my_task.py               # your task: a file with rows and a check; see docs/your-task.md
    lora-grpo train my_recipe.py             # a copy of a recipe, with its own presets
    lora-grpo train gsm8k --help             # the flags of a recipe

    A task file uses the presets of the `task` recipe. The run is saved in outputs/my_task.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(inspect.cleandoc(str(train.__doc__)), file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else UserError.exit_code)
    name, *flags = arguments
    if name in commands.RECIPES:
        path = commands.recipe_file(name)
    elif name.endswith(".py"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"{name}: no such file; expected a task file or a recipe")
        if "run_recipe(" not in path.read_text(encoding="utf-8", errors="replace"):  # a task, not a recipe
            path, flags = commands.recipe_file("task"), ["--data.task", name, *flags]
            if not any(re.match("--(output[-_]dir|config)(=|$)", flag) for flag in flags):
                flags = ["--output-dir", f"outputs/{Path(name).stem}", *flags]
    else:
        known = [each for each in commands.RECIPES if each != "task"]
        raise UserError(f"unknown recipe {name!r}; {suggestion(name, [*known, 'my_task.py'])}")
    sys.argv[1:] = flags
    sys.path.insert(0, str(path.resolve().parent))  # as for `python path`: a recipe may import the files beside it
    runpy.run_path(str(path), run_name="__main__")
    raise UserError(f"{path} does not call run_recipe; end it with `if __name__ == '__main__': run_recipe(...)`")


def evaluate(arguments: Sequence[str]) -> None:
    """Evaluate a run, an adapter or a model on GSM8K, HumanEval, MBPP or your task, or grade a file of samples.

        lora-grpo evaluate outputs/gsm8k_lora --compare base
        lora-grpo evaluate Qwen/Qwen2.5-Coder-0.5B-Instruct --task humaneval --k 1 10 --temperature 0.8
        lora-grpo evaluate outputs/gsm8k_lora/gguf/gsm8k_lora.Q4_0.gguf --compare outputs/gsm8k_lora/merged
        lora-grpo evaluate samples.jsonl --task humaneval

    Reports pass@k with 95% intervals and, for two models, a paired test. If the evaluation is interrupted, run the same
    command to continue; for a finished evaluation, the command prints the stored results. A file of samples has
    one JSON object per line with `task_id` and `completion`, the format of HumanEval's harness.
    """
    from lora_grpo.evaluation import EvaluateOptions, evaluate_and_report

    evaluate_and_report(read_flags(EvaluateOptions, arguments, evaluate.__doc__))


def chat(arguments: Sequence[str]) -> None:
    """Ask a run, an adapter, a model or a GGUF file questions, and see the answers before and after training.

        lora-grpo chat outputs/gsm8k_lora                       # type questions; Ctrl-D ends
        lora-grpo chat outputs/gsm8k_lora "Tom has 3 plums and buys 4. How many plums does he have?"
        lora-grpo chat outputs/gsm8k_lora/gguf/gsm8k_lora.Q4_0.gguf

    Prompts have the system prompt and the chat template of the training. Each question is answered alone, as in
    training.
    """
    from lora_grpo.cli.chat import ChatOptions, run_chat

    run_chat(read_flags(ChatOptions, arguments, chat.__doc__))


def merge(arguments: Sequence[str]) -> None:
    """Merge an adapter into its base model, in Hugging Face format, and report how much is lost to rounding.

        lora-grpo merge outputs/gsm8k_lora                      # to outputs/gsm8k_lora/merged
        lora-grpo merge my_adapter --base Qwen/Qwen2.5-1.5B-Instruct --output-dir merged --dtype bf16

    Small updates can be lost in bfloat16. The report shows how much of the update survives, and `--dtype auto` uses the
    lowest precision that keeps 99% of it.
    """
    from lora_grpo import merging

    merging.merge(read_flags(merging.MergeOptions, arguments, merge.__doc__))


def export_gguf(arguments: Sequence[str]) -> None:
    """Export a run, a merged model or an adapter as a GGUF file for llama.cpp, Ollama and LM Studio.

        lora-grpo export-gguf outputs/gsm8k_lora --modelfile
        lora-grpo export-gguf merged/ --type q4_k_m

    K-quants such as q4_k_m need llama.cpp's llama-quantize on the PATH.
    """
    from lora_grpo.gguf import ExportOptions, export

    export(read_flags(ExportOptions, arguments, export_gguf.__doc__))


def push(arguments: Sequence[str]) -> None:
    """Push a run to the Hugging Face Hub, with a model card that reports the measured results.

        lora-grpo push outputs/gsm8k_lora YOU/gsm8k-lora --dry-run       # list files, print the card
        lora-grpo push outputs/gsm8k_lora YOU/gsm8k-lora
        lora-grpo push outputs/gsm8k_lora YOU/gsm8k-merged --what merged

    The repository is private unless --public is passed. The token comes from `hf auth login` or HF_TOKEN, never from an
    argument. All files are uploaded in a single commit. If the upload is interrupted, run the same command to upload
    the missing files.
    """
    from lora_grpo.hub import PushOptions, push_to_hub, refuse_tokens_in

    refuse_tokens_in(arguments)
    push_to_hub(read_flags(PushOptions, arguments, push.__doc__))


def report(arguments: Sequence[str]) -> None:
    """Write a report on a run: results, diagnostics, and every completion on one page.

        lora-grpo report outputs/gsm8k_lora

    The report is one self-contained HTML file that works offline. Every run writes it at the end; for an unfinished
    run, this command reports the progress so far.
    """
    from lora_grpo import report as folder

    folder.report(read_flags(folder.ReportOptions, arguments, report.__doc__))


def check_gpu(arguments: Sequence[str]) -> None:
    """Check whether this GPU can run a recipe, and which engine and sampling backend is the fastest.

        lora-grpo check-gpu                    # at most 30 minutes, no network access
        lora-grpo check-gpu --short            # the default engine first, at most 5 minutes for each run

    The model has the shape of Qwen2.5-1.5B (0.5B below 12 GB), with random weights. Each row of the table reports the
    step time by phase, and the planned and measured memory. The table is also printed after Ctrl-C.
    The fastest engine becomes the meaning of `auto` on this GPU. The exit code is 1 if a run failed or had no time to
    finish a step, and 2 without a GPU.
    """
    from lora_grpo import planning

    planning.check_gpu(read_flags(planning.Options, arguments, check_gpu.__doc__), commands.recipe_file("gsm8k"))


VERBS = {
    verb.__name__.replace("_", "-"): verb
    for verb in (train, evaluate, chat, merge, export_gguf, push, report, check_gpu)
}


def run_front_door(arguments: Sequence[str]) -> int:
    """Run `lora-grpo` with these arguments, and return the exit code."""
    commands.enter(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"lora-grpo {__version__}: LoRA + GRPO on one GPU\n"]
        lines += [f"  {name:12} {str(verb.__doc__).splitlines()[0]}" for name, verb in VERBS.items()]
        lines += ["\nlora-grpo COMMAND --help shows the flags of a command."]
        print("\n".join(lines), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else UserError.exit_code
    name, *rest = arguments
    if name == "--version":
        print(f"lora-grpo {__version__}")
        return 0
    if name not in VERBS:
        print(f"error: unknown command {name!r}; {suggestion(name, VERBS)}", file=sys.stderr)
        return UserError.exit_code
    return run_command(lambda: VERBS[name](rest))


def run_verb(name: str) -> int:
    """Run one command with the arguments of this process, for a script, and return the exit code."""
    return run_command(lambda: VERBS[name](sys.argv[1:]))
