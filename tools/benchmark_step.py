"""Compare the time of a training step in the default run with a plain GRPOTrainer script that does the same work.

All variants use the bundled model in NF4 with the same adapter, prompts, rewards, loss, and batch of 128 completions.
`kit` is the recipe. `kit vllm` is the recipe with `--sampling.backend vllm`, if vLLM is installed. `plain` uses TRL as
documented: `peft_config`, and generation by the trainer. The variants alternate, each in its own process, so other load
affects all of them. The report shows TRL's `step_time` without the first two steps, the tokens per second of the
rollouts, and the final reward.

    python tools/benchmark_step.py --steps 8 --rounds 3
"""

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lora_grpo.config import vllm_available

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2
SHOWN = {"step_time": "s per step", "rollouts/tokens_per_second": "tokens/s", "time/rollouts": "s of it sampling"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps per process, the first two excluded")
    parser.add_argument("--rounds", type=int, default=3, help="processes per side")
    parser.add_argument("--side", choices=("kit", "kit vllm", "plain"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP or arguments.rounds < 1:
        parser.error(f"--steps must be above {WARM_UP} and --rounds at least 1")
    if arguments.side:
        steps = plain(arguments.steps) if arguments.side == "plain" else kit(arguments.steps, arguments.side)
        print(json.dumps(steps))
        return
    sides = ["kit", "plain", *(["kit vllm"] if vllm_available() else [])]
    seen: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    environment = {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    for number in range(arguments.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            command = [sys.executable, __file__, "--side", side, "--steps", str(arguments.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            steps = json.loads(done.stdout.splitlines()[-1])
            seen[side] += steps[WARM_UP:]
            rewards = [step["reward"] for step in steps]
            last = max(1, len(rewards) // 4)
            print(
                f"round {number + 1}, {side:8}: {_medians(steps[WARM_UP:])}; reward {rewards[0]:.2f} in step 1, "
                f"{statistics.mean(rewards[-last:]):.2f} in the last {last}",
                flush=True,
            )
    for side in sides:
        print(f"{side:8}: {_medians(seen[side])} (medians of {len(seen[side])} steps)")
    plain_time = _median(seen["plain"], "step_time")
    for side in sides:
        if side != "plain":
            print(f"{side} / plain = {_median(seen[side], 'step_time') / plain_time:.2f} of a step's time")


def _median(steps: list[dict[str, float]], name: str) -> float:
    return statistics.median(step[name] for step in steps)


def _medians(steps: list[dict[str, float]]) -> str:
    return ", ".join(f"{_median(steps, name):.{0 if 'tokens' in name else 2}f} {unit}" for name, unit in SHOWN.items())


def kit(steps: int, side: str) -> list[dict[str, float]]:
    """Run the recipe with its default settings or with vLLM, and return the metrics of each step."""
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [
            "gsm8k_lora.py",
            *("--preset", "starter", "--output-dir", f"{folder}/run", "--train.max-steps", str(steps)),
            *("--data.eval-limit", "1", "--eval.num-samples", "0"),
            *("--sampling.backend", "vllm" if side == "kit vllm" else "auto"),
        ]
        runpy.run_path(str(ROOT / "recipes" / "gsm8k_lora.py"))["main"]()
        return [
            json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]


def plain(steps: int) -> list[dict[str, float]]:
    """Do the same with TRL alone and return the metrics of each step."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from trl import GRPOConfig, GRPOTrainer

    from lora_grpo import starter
    from lora_grpo.cli import parse
    from lora_grpo.config import batch_shape
    from lora_grpo.rewards import parse_reward_specs, resolve
    from lora_grpo.tasks import load_data, prompt_order
    from lora_grpo.training import StepMetrics

    class TimedTrainer(StepMetrics, GRPOTrainer):
        """TRL's trainer with timings."""

    presets = runpy.run_path(str(ROOT / "recipes" / "gsm8k_lora.py"))["PRESETS"]
    config, _ = parse(["--preset", "starter"], recipe="gsm8k_lora", description="", presets=presets)
    rows = load_data(config).train
    rewards = resolve(parse_reward_specs(config.rewards))
    order = prompt_order(len(rows), steps * config.train.prompts_per_step, config.seed)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        starter.model_path(), quantization_config=quantization, dtype=torch.float32
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=config.train.micro_batch_size,
            gradient_accumulation_steps=batch_shape(config).accumulation_steps,
            num_generations=config.sampling.num_generations,
            max_completion_length=config.sampling.max_completion_tokens,
            learning_rate=config.train.learning_rate,
            lr_scheduler_type=config.train.lr_scheduler,
            max_grad_norm=config.train.max_grad_norm,
            loss_type="dapo",
            beta=config.train.beta,
            optim=config.train.optimizer,
            reward_weights=[reward.weight for reward in rewards],
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=config.seed,
        )
        trainer = TimedTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(starter.model_path()),
            args=settings,
            train_dataset=Dataset.from_list(rows).select(order),
            reward_funcs=[reward.function for reward in rewards],
            peft_config=LoraConfig(
                task_type="CAUSAL_LM", r=config.lora.rank, lora_alpha=config.lora.alpha, target_modules="all-linear"
            ),
        )
        trainer.train()
    return [entry for entry in trainer.state.log_history if "step_time" in entry]


if __name__ == "__main__":
    main()
