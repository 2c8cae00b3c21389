"""Compare GRPO steps in float32 with steps whose linear layers multiply in bfloat16, with the laptop preset on a CPU.

`bfloat16` rounds the inputs and weights of all linear layers except the adapter and the head, in the trained model and
in the sampler's merged copy. The steps of one run take turns, with a learning rate of almost zero.

    python recipes/sft_lora.py --preset laptop
    python tools/benchmark_16bit.py outputs/sft_lora --rounds 3

Columns, medians without the first step of each side: CPU seconds of a step, its rollouts and its training; tokens that
pass through the layers in training; mean absolute difference of sampler's and trainer's logprobs, in nats per token.
"""

import argparse
import contextlib
import json
import runpy
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import benchmark_step

from lora_grpo import pipeline
from lora_grpo.monitoring import LOGPROB_MISMATCH
from lora_grpo.sampling.merged_copy import MergedCopySampler

RECIPE = str(benchmark_step.ROOT / "recipes" / "laptop_lora.py")
FLAGS = ("--preset", "laptop", "--train.learning-rate", "1e-12", "--monitor.stop-on", "nan", *benchmark_step.FEW_ROWS)


def round_layer(module: Any, weight: Any) -> None:
    weight = weight.bfloat16()
    vars(module)["forward"] = lambda inputs: (inputs.bfloat16() @ weight.T).float()


class RoundedSampler(MergedCopySampler):
    def wake_up(self, *, adapter: bool) -> None:
        from torch.nn import Linear

        super().wake_up(adapter=adapter)
        for module in self.model.base_model.modules():
            if isinstance(module, Linear):
                round_layer(module, module.weight)


def main() -> None:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit
    from transformers import TrainerCallback

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", help="folder of the SFT run")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each side that are counted")
    arguments = parser.parse_args()
    mismatches: list[float] = []
    prepare = pipeline.prepare_training

    def prepare_training(run: Any, policy: Any, rows: Any, sampler: Any, *others: Any) -> Any:
        samplers = sampler, RoundedSampler(policy.model, policy.tokenizer, policy.eos_token_ids)
        training = prepare(run, policy, rows, sampler, *others)
        layers = [module for module in policy.model.modules() if isinstance(module, Linear4bit)]

        class Turns(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
                training.trainer.step_sampling.sampler = samplers[state.global_step % 2]
                for layer in layers:
                    vars(layer).pop("forward", None)
                    if state.global_step % 2:
                        round_layer(layer, dequantize_4bit(layer.weight.data, layer.weight.quant_state))

            on_step_end = on_train_begin

            def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
                mismatches.extend([logs[LOGPROB_MISMATCH]] if LOGPROB_MISMATCH in logs else [])

        training.trainer.add_callback(Turns)
        return training

    pipeline.prepare_training = prepare_training
    with tempfile.TemporaryDirectory() as folder:
        benchmark_step.measure_steps(Path(folder, "steps.jsonl"))
        sys.argv = [RECIPE, *FLAGS, "--lora.from", arguments.start, "--output-dir", f"{folder}/run"]
        sys.argv += ["--train.max-steps", str(2 * arguments.rounds + 2)]
        with contextlib.suppress(SystemExit):
            runpy.run_path(RECIPE, run_name="__main__")
        lines = [json.loads(line) for line in Path(folder, "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    print("\n| | step, CPU s | rollouts | training | tokens | mismatch |\n|---|---:|---:|---:|---:|---:|")
    for number, side in enumerate(("float32", "bfloat16"), start=2):
        values = [
            statistics.median(step[name] - step.get(less, 0) for step in lines[number::2])
            for name, less in (("cpu", ""), ("cpu", "training_cpu"), ("training_cpu", ""), ("tokens", ""))
        ]
        mismatch = statistics.median(mismatches[number::2])
        print(f"| {side} |", *(f"{value:,.1f} |" for value in values), f"{mismatch:.1e} |")


if __name__ == "__main__":
    main()
