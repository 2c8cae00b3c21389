"""Compare a training step of this tree with one of another commit, and with a plain GRPOTrainer script.

Sides: `plain` is TRL as documented (`peft_config`, generation by the trainer); `plain16` is the same script with an
unquantized base and bfloat16 autocast, which on a CPU is faster than a base in bfloat16; `fast` is the plain script
with FastGRPOTrainer; `unsloth` is the plain script with Unsloth's model, whose trainer on a CPU is TRL's (after `make
engines`); `before` is the recipe at the commit `--before`; `now` is the recipe of this tree. All of them do the same
work: base in NF4 (except `plain16`), adapter in float32, no gradient checkpointing, the same prompts, rewards, loss and
number of completions. They take turns, each in its own process, so that other load affects all of them. In a round, all
sides have the same seed.

Workloads: `starter` is the default recipe. `few-shot` puts 4 worked examples before each question, so that prompts are
about nine times as long as completions. `vllm` is the default recipe with vLLM's CPU build (after `make engines`), for
the sides `before` and `now`. `long` samples up to 512 tokens at temperature 4, at which the model rarely
ends a completion, and rewards their length, so that all completions have different rewards. `laptop` is the recipe of
docs/laptop.md with the model that `make laptop-model` writes, `gsm8k` that of recipes/gsm8k_lora.py with the same
model, and `tools` is recipes/sql_lora.py, whose conversations `plain` samples with TRL's `environment_factory`. All
sides of these three continue from an adapter that SFT first trains on the recipe's base; on the other base, of
`plain16`, rewards begin lower.

    python tools/benchmark_step.py --before 31c8bed --workloads starter few-shot long --steps 6 --rounds 3
    python tools/benchmark_step.py --workloads laptop --sides plain plain16 fast now --steps 4 --rounds 3
    python tools/benchmark_step.py --workloads tools --steps 3 --rounds 2

Columns, medians over all steps but the first of each process: seconds of a step with its optimizer step, without
checkpoints and validation; of them rollouts, rewards, and the rest, which is training; the CPU seconds of training,
which depend less on other load; tokens that pass through the layers of the trained model outside of rollouts, padding
included; and the largest peak of resident memory. A ratio is the median of the rounds' ratios, with their range. The
last column is the mean reward of these steps with its standard error, and in a row of ratios the mean difference
between steps with the same prompts.
"""

import argparse
import contextlib
import json
import math
import os
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FEW_ROWS = ("--data.eval-limit", "1", "--eval.num-samples", "0")  # evaluation does not affect training
STARTER = ("recipes/gsm8k_lora.py", "--preset", "starter", *FEW_ROWS)
LAPTOP = ("--preset", "laptop", "--model.name", str(ROOT / "models" / "SmolLM2-135M-Instruct"), *FEW_ROWS)
WORKLOADS: dict[str, tuple[str, ...]] = {
    "starter": STARTER,
    "few-shot": (*STARTER, "--data.few-shot", "4"),
    "vllm": (*STARTER, "--sampling.backend", "vllm"),
    "long": (
        *(*STARTER, "--sampling.max-completion-tokens", "512", "--sampling.temperature", "4"),
        *("--rewards", "longer_is_better", "--train.prompts-per-step", "2", "--train.micro-batch-size", "8"),
    ),
    "laptop": ("recipes/laptop_lora.py", *LAPTOP),
    "gsm8k": ("recipes/gsm8k_lora.py", *LAPTOP),
    "tools": ("recipes/sql_lora.py", *LAPTOP, "--train.prompts-per-step", "1"),  # with 4, `plain` takes 10 minutes
}
SFT: dict[str, tuple[str, ...]] = {
    "laptop": ("--task", "recipes/laptop_lora.py"),
    "gsm8k": (),
    "tools": ("--task", "recipes/sql_lora.py", "--train.prompts-per-step", "4", "--train.max-steps", "16"),
}
"""Flags of the SFT before the measured steps, of the workloads whose base gets no reward."""
SIDES = {"plain": (), "plain16": ("--model.bits", "16"), "fast": (), "unsloth": (), "now": ()}
RATIOS = (("before", "plain"), ("fast", "plain"), ("unsloth", "plain"), ("now", "plain"), ("now", "plain16"))
RATIOS += (("now", "unsloth"), ("now", "before"))
COLUMNS = {"step": "step, s", "rollouts": "rollouts, s", "rewards": "rewards, s", "training": "training, s"}
COLUMNS |= {"training_cpu": "training, CPU s", "tokens": "tokens", "peak_gib": "peak, GiB"}
Step = dict[str, float]


def main() -> None:
    if sys.argv[1:2] == ["--child"]:  # --child SIDE FILE RECIPE FLAGS
        return child(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="commit to compare with; without it there is no such side")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["starter", "few-shot", "long"])
    parser.add_argument("--sides", nargs="+", choices=[*SIDES], default=["plain", "now"])
    parser.add_argument("--steps", type=int, default=6, help="steps per process; the first is excluded")
    parser.add_argument("--rounds", type=int, default=3, help="processes per side and workload")
    parser.add_argument("--start", type=Path, help="an SFT run to continue from, instead of running SFT first")
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.rounds < 1:
        parser.error("--steps must be at least 2 and --rounds at least 1")
    with checked_out(arguments.before) as before, tempfile.TemporaryDirectory() as folder:
        sides = {"before": before} if before else {}
        sides |= dict.fromkeys(arguments.sides, ROOT)
        for workload in arguments.workloads:
            command = [*WORKLOADS[workload], "--train.max-steps", str(arguments.steps)]
            if workload in SFT:
                start = arguments.start or Path(folder, "sft")
                if not arguments.start:
                    execute("recipes/sft_lora.py", *LAPTOP, *SFT[workload], "--output-dir", str(start))
                command += ["--lora.from", str(start.resolve())]
            rounds: dict[str, list[list[Step]]] = {side: [] for side in sides}
            for number in range(arguments.rounds):
                for side in list(sides) if number % 2 == 0 else reversed(sides):
                    rounds[side].append(measure(side, sides[side], *command, "--seed", str(number)))
                    print(f"{workload}, round {number + 1}, {side}: {outcome(rounds[side][-1])}", flush=True)
            print(table(workload, rounds), flush=True)


@contextlib.contextmanager
def checked_out(commit: str | None) -> Iterator[Path | None]:
    """Check out a commit into a temporary folder."""
    if commit is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", f"{folder}/tree", commit], check=True)
        try:
            yield Path(folder, "tree")
        finally:
            subprocess.run([*git, "remove", "--force", f"{folder}/tree"], check=True)


def environment(tree: Path) -> dict[str, str]:
    from lora_grpo.process_state import limit_spinning  # the tree of `before` may have none

    limit_spinning()  # all sides wait as this tree does
    return {**os.environ, "PYTHONPATH": str(tree), "TRL_EXPERIMENTAL_SILENCE": "1"}


def execute(*command: str, tree: Path = ROOT) -> None:
    """Run a Python program in a process of its own, or exit with its error."""
    done = subprocess.run([sys.executable, *command], cwd=tree, env=environment(tree), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")


def measure(side: str, tree: Path, *command: str) -> list[Step]:
    """Run one side of a recipe's command and return its steps."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "steps.jsonl")
        flags = [*command, *SIDES.get(side, ()), "--output-dir", f"{folder}/run"]
        execute(__file__, "--child", side, str(file), *flags, tree=tree)
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def median(steps: list[Step], name: str) -> float:
    return max(step[name] for step in steps) if name == "peak_gib" else statistics.median(s[name] for s in steps)


def outcome(steps: list[Step]) -> str:
    first, last = steps[0], steps[-1]
    return (
        f"{median(steps[1:], 'step'):.2f} s per step; step 1: reward {first['reward']:.4f}, loss {first['loss']:.5f}, "
        f"gradient norm {first['grad_norm']:.5f}; step {len(steps)}: reward {last['reward']:.4f}"
    )


def table(workload: str, rounds: dict[str, list[list[Step]]]) -> str:
    """Return a Markdown table of one workload, with a row for each pair of sides in RATIOS."""
    from lora_grpo.files import markdown_table  # the tree of `before` may have none

    after_first = {side: [steps[1:] for steps in of_side] for side, of_side in rounds.items()}
    rewards = {side: [step["reward"] for steps in each for step in steps] for side, each in after_first.items()}
    rows = []
    for side, of_side in after_first.items():
        values = {name: median([step for steps in of_side for step in steps], name) for name in COLUMNS}
        cells = (f"{value:,.{0 if name == 'tokens' else 2}f}" for name, value in values.items())
        rows.append([side, *cells, mean(rewards[side])])
    for side, other in RATIOS:
        if side in after_first and other in after_first:
            cells = (ratio(after_first[side], after_first[other], name) for name in COLUMNS)
            differences = [ours - theirs for ours, theirs in zip(rewards[side], rewards[other], strict=True)]
            rows.append([f"{side} / {other}", *cells, mean(differences, "+")])
    return "\n".join(["", *markdown_table([workload, *COLUMNS.values(), "reward"], rows)])


def mean(values: list[float], sign: str = "") -> str:
    """Return the mean of the values of steps and its standard error, which one step does not have."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):{sign}.3f} ± {error:.3f}"


def ratio(ours: list[list[Step]], theirs: list[list[Step]], name: str) -> str:
    """Return the median and the range of the ratios of rounds, because load changes less in a round than over all."""
    below = [median(steps, name) for steps in theirs]
    if not all(below):
        return ""
    return median_and_range([median(steps, name) / value for steps, value in zip(ours, below, strict=True)])


def median_and_range(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def child(side: str, file: str, recipe: str, *flags: str) -> None:
    """Run one side in this process, and write a line for each step to a file."""
    if side == "unsloth":  # before TRL, which it patches
        os.environ |= {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": f"{Path(file).parent}/compiled"}
        import unsloth  # noqa: F401
    from trl import import_utils

    import_utils.is_vllm_available = lambda min_version=None: False  # no side uses it, and its import is slow
    import lora_grpo

    assert lora_grpo.__path__[0].startswith(os.environ["PYTHONPATH"]), lora_grpo.__path__
    measure_steps(Path(file))
    if side in ("plain", "plain16", "fast", "unsloth"):
        return script(recipe, flags, side)
    sys.argv = [recipe, *flags]
    runpy.run_path(recipe, run_name="__main__")


def measure_steps(file: Path) -> None:
    """Patch TRL's trainer, and with it any subclass, to time its phases and count tokens."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer, SFTTrainer

    spent: Step = defaultdict(float)
    sampling = False

    def timed(name: str, phase: str) -> None:
        original = getattr(GRPOTrainer, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal sampling
            sampling, started, cpu_started = phase == "rollouts", time.perf_counter(), time.process_time()
            try:
                return original(self, *args, **kwargs)
            finally:
                sampling = False
                spent[phase] += time.perf_counter() - started
                spent["training_cpu"] -= time.process_time() - cpu_started

        setattr(GRPOTrainer, name, method)

    def count(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if not sampling:
            spent["tokens"] += inputs[0].numel() // inputs[0].shape[-1]

    class Meter(TrainerCallback):
        """Times whole steps. It is called before lora_grpo's monitor, which runs validation passes."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            spent.clear()
            cpu = time.process_time()
            spent.update(step=-time.perf_counter(), cpu=-cpu, training_cpu=-cpu, tokens=0, rewards=0, rollouts=0)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            spent["step"] += time.perf_counter()
            spent["cpu"] += time.process_time()
            spent["training_cpu"] += time.process_time()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "grad_norm" not in logs:  # the last line, of the whole run
                return
            line = {**spent, **{name: logs[name] for name in ("reward", "loss", "grad_norm") if name in logs}}
            line["rewards"] = logs.get("time/rewards", line["rewards"])  # the recipe's trainer replaces TRL's method
            line["training"] = line["step"] - line["rollouts"] - line["rewards"]
            line["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
            with file.open("a", encoding="utf-8") as lines:
                print(json.dumps(line), file=lines)

    def init_sft(self: Any, *args: Any, _original: Any = SFTTrainer.__init__, **kwargs: Any) -> None:
        _original(self, *args, **kwargs)
        self.add_callback(Meter)

    def init(self: Any, *args: Any, _original: Any = GRPOTrainer.__init__, **kwargs: Any) -> None:
        _original(self, *args, **kwargs)
        self.add_callback(Meter)
        # Samplers made before have a copy of the model without this hook.
        layers = (module for name, module in self.model.named_modules() if name.endswith(".base_layer"))
        next(layers).register_forward_hook(count)

    GRPOTrainer.__init__ = init
    SFTTrainer.__init__ = init_sft
    timed("_generate", "rollouts")
    timed("_calculate_rewards", "rewards")


def script(recipe: str, flags: tuple[str, ...], side: str) -> None:
    """Do the recipe's work with TRL alone, with Unsloth, or with FastGRPOTrainer in place of TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from lora_grpo.cli import parse
    from lora_grpo.data import fit_data, load_data, prompt_order, split_validation
    from lora_grpo.files import lock
    from lora_grpo.models import load_adapter, model_files, start_folder
    from lora_grpo.rewards import graded, parse_reward_specs, resolve
    from lora_grpo.tasks import get_task
    from lora_grpo.training import FastGRPOTrainer

    presets = runpy.run_path(recipe)["PRESETS"]
    method = "sft" if Path(recipe).stem == "sft_lora" else "grpo"
    config, _ = parse(list(flags), recipe=Path(recipe).stem, description="", presets=presets, method=method)
    lock.claim(Path(config.output_dir))
    if method == "sft":
        return sft_script(config)
    start, environment = start_folder(config), getattr(get_task(config.data.task), "environment", None)
    tokenizer = AutoTokenizer.from_pretrained(start or model_files.source(config.model.name))
    rows, _ = split_validation(fit_data(load_data(config), tokenizer, config).train, config)
    rewards = resolve(parse_reward_specs(config.rewards))
    if environment:  # TRL gives `reset` the columns of the dataset, and adds its text to the prompt
        rows = [{**row["loaded_row"], "prompt": before_reset(row)} for row in rows]
        factory, final_reward = in_two_parts(environment.python_class)
    trainer = (FastGRPOTrainer if side == "fast" else GRPOTrainer)(
        model=load_unsloth(config) if side == "unsloth" else load_model(config),
        processing_class=tokenizer,
        args=GRPOConfig(
            **training_arguments(config),
            num_generations=config.sampling.num_generations,
            max_completion_length=config.sampling.max_completion_tokens,
            temperature=config.sampling.temperature,
            loss_type="dapo",
            beta=config.train.beta,
            reward_weights=None if environment else [reward.weight for reward in rewards],
            max_tool_calling_iterations=environment and environment.constants.MAX_TURNS - 1,
            shuffle_dataset=False,
            bf16=side == "plain16",
        ),
        train_dataset=Dataset.from_list(rows).select(
            prompt_order(len(rows), config.train.max_steps * config.train.prompts_per_step, config.seed)
        ),
        reward_funcs=final_reward
        if environment
        else [graded(config.data.task, rows, reward.function) for reward in rewards],
        environment_factory=factory if environment else None,
        peft_config=None if start or side == "unsloth" else new_adapter(config),
    )
    use_float32_adapter(trainer.model)
    if start:
        load_adapter(trainer.model, start)  # exactly: TRL has rounded it
    train(trainer)


def sft_script(config: Any) -> None:
    """Do the work of recipes/sft_lora.py with TRL's SFTTrainer alone, for a task without conversations."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from lora_grpo.data import fit_data, load_data, prompt_order
    from lora_grpo.models import model_files
    from lora_grpo.tasks import get_task

    tokenizer = AutoTokenizer.from_pretrained(model_files.source(config.model.name))
    rows = fit_data(load_data(config), tokenizer, config).train
    task = get_task(config.data.task)
    order = prompt_order(len(rows), config.train.max_steps * config.train.prompts_per_step, config.seed)
    examples = [
        {"prompt": rows[index]["prompt"], "completion": [{"role": "assistant", "content": task.gold(rows[index])}]}
        for index in order
    ]
    trainer = SFTTrainer(
        model=load_model(config),
        processing_class=tokenizer,
        args=SFTConfig(
            **training_arguments(config),
            max_length=config.model.max_sequence_tokens,
            train_sampling_strategy="sequential",
            bf16=False,
        ),
        train_dataset=Dataset.from_list(examples),
        peft_config=new_adapter(config),
    )
    use_float32_adapter(trainer.model)
    train(trainer)


def train(trainer: Any) -> None:
    """Train, from the last checkpoint in the output folder if there is one."""
    from transformers.trainer_utils import get_last_checkpoint

    trainer.train(resume_from_checkpoint=get_last_checkpoint(trainer.args.output_dir))


def training_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments that TRL's two trainers share."""
    from lora_grpo.config import batch_shape

    return {
        "output_dir": config.output_dir,
        "max_steps": config.train.max_steps,
        "per_device_train_batch_size": config.train.micro_batch_size,
        "gradient_accumulation_steps": batch_shape(config).accumulation_steps,
        "learning_rate": config.train.learning_rate,
        "lr_scheduler_type": config.train.lr_scheduler,
        "warmup_steps": config.train.warmup_steps,
        "max_grad_norm": config.train.max_grad_norm,
        "optim": config.train.optimizer,
        "gradient_checkpointing": bool(config.train.gradient_checkpointing),  # TRL's default is True
        "use_cpu": True,
        "logging_steps": 1,
        "save_steps": config.train.checkpoint_steps,
        "save_total_limit": config.train.keep_checkpoints,
        "report_to": [],
        "disable_tqdm": True,
        "seed": config.seed,
    }


def new_adapter(config: Any) -> Any:
    """Return PEFT's configuration of a new adapter."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM", r=config.lora.rank, lora_alpha=config.lora.alpha, target_modules="all-linear"
    )


def use_float32_adapter(model: Any) -> None:
    """Undo TRL's conversion of the adapter to bfloat16, which is slow on a CPU without such instructions."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def before_reset(row: dict[str, Any]) -> list[dict[str, str]]:
    """Return the prompt of a row without the text that `reset` returned."""
    *earlier, last = row["prompt"]
    return [*earlier, {**last, "content": last["content"].removesuffix(row["reset_text"])}]


def in_two_parts(kind: Any) -> tuple[Any, Any]:
    """Return an environment as TRL takes it: the class without `reply`, which TRL would offer as a tool, and a reward
    function that gives it the last message.
    """
    factory = type(kind.__name__, (kind,), {"reply": None, "get_reward": None})

    def final_reward(completions: list[Any], environments: list[Any], **columns: Any) -> list[float]:
        for completion, environment in zip(completions, environments, strict=True):
            if completion[-1]["role"] == "assistant" and not completion[-1].get("tool_calls"):
                kind.reply(environment, completion[-1].get("content") or "")
        return [kind.get_reward(environment) for environment in environments]

    return factory, final_reward


def load_model(config: Any) -> Any:
    """Return the base, with the adapter that the run starts from, if any."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from lora_grpo.models import model_files, start_folder

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        model_files.source(config.model.name),
        quantization_config=quantization if config.model.loaded_bits == 4 else None,
        dtype=torch.float32,
    )
    start = start_folder(config)
    return PeftModel.from_pretrained(model, start, is_trainable=True) if start else model


def load_unsloth(config: Any) -> Any:
    """Return the base in 4 bits with a new adapter, as Unsloth's documentation makes them."""
    import torch
    from unsloth import FastLanguageModel

    from lora_grpo.models import model_files

    model, _ = FastLanguageModel.from_pretrained(
        model_files.source(config.model.name),
        max_seq_length=config.model.max_sequence_tokens,
        load_in_4bit=config.model.loaded_bits == 4,
        dtype=torch.float32,
        use_exact_model_name=True,
    )
    return FastLanguageModel.get_peft_model(
        model,
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        lora_dropout=0,
        use_gradient_checkpointing=bool(config.train.gradient_checkpointing),
        random_state=config.seed,
    )


if __name__ == "__main__":
    main()
