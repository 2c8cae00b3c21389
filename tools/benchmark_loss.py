"""Time the loss pass of PEFT in each of the ways that `FastGRPOTrainer` can compute it.

    python tools/benchmark_loss.py --model Qwen/Qwen2.5-1.5B-Instruct --groups 4 --completions 8 --prompt 128 \\
        --completion 512 --repeats 5

| way | attribute of the trainer |
|---|---|
| `sdpa` | the default |
| `flex` | `packed_attention = "flex"`: packed rows attend by FlexAttention |
| `compiled` | `compiled_layers = True`: norms and MLPs by torch.compile |

All ways train the same model on the same random tokens, one after the other in one process, and take turns in each
repeat. The first repeat compiles, and is not counted. A line of JSON for each way: median seconds of loss and backward
pass, the peak of the GPU's memory in GiB (null on a CPU), the loss, why rows were padded, if they were, and whether
layers were compiled. On a CPU, PyTorch has no gradient of FlexAttention, so `flex` reads padded rows.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from lora_grpo.config import RunConfig, replace

WAYS: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "flex": {"packed_attention": "flex"},
    "compiled": {"compiled_layers": True},
}
"""The attributes of the trainer in each way."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The size of a micro-batch."""

    groups: int
    """Number of prompts."""
    completions: int
    """Number of completions of each prompt."""
    prompt: int
    """Length of the prompts, in tokens."""
    completion: int
    """Length of the longest completion, in tokens. The others are evenly spread below it."""


def time_loss_passes(config: RunConfig, tokens: Tokens, repeats: int, ways: Sequence[str] = tuple(WAYS)) -> list[Any]:
    """Return a dictionary for each way, with the fields that the module's docstring lists.

    Args:
        config: names the model, its bits and the adapter; `train.gradient_checkpointing` applies.
        repeats: counted repeats.
    """
    import torch

    from lora_grpo.models import load_policy

    policy = load_policy(config)
    on_gpu = torch.cuda.is_available()
    inputs = _random_inputs(tokens, vocabulary=len(policy.tokenizer), device=policy.model.device)
    results = {}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {way: _trainer(config, policy, tokens, way, folder) for way in ways}
        for repeat in range(repeats + 1):
            for way, trainer in trainers.items():
                # The trainers share the model, whose attention and layers the last one has set.
                trainer.loss_pass = trainer.build_loss_pass(trainer.model)
                trainer.model.train()
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                    torch.cuda.synchronize()
                started = time.perf_counter()
                loss = trainer.compute_loss(trainer.model, dict(inputs))
                loss.backward()
                if on_gpu:
                    torch.cuda.synchronize()
                if repeat:
                    seconds[way].append(time.perf_counter() - started)
                trainer.model.zero_grad()
                results[way] = {
                    "way": way,
                    "peak_gib": torch.cuda.max_memory_allocated() / 1024**3 if on_gpu else None,
                    "loss": loss.item(),
                    "padded_rows": trainer.packing_disabled_reason,
                    "compiled_layers": trainer.loss_pass.compiles_layers,
                }
    return [{**results[way], "seconds": statistics.median(seconds[way])} for way in ways]


def _trainer(config: RunConfig, policy: Any, tokens: Tokens, way: str, folder: str) -> Any:
    import torch
    from datasets import Dataset
    from trl import GRPOConfig

    from lora_grpo.training import FastGRPOTrainer

    trainer_class = type("Trainer", (FastGRPOTrainer,), WAYS[way])
    on_gpu = torch.cuda.is_available()
    trainer = trainer_class(
        policy.model,
        processing_class=policy.tokenizer,
        args=GRPOConfig(
            output_dir=folder,
            num_generations=tokens.completions,
            per_device_train_batch_size=tokens.groups * tokens.completions,
            max_completion_length=tokens.completion,
            gradient_checkpointing=config.train.gradient_checkpointing,
            router_aux_loss_coef=0.0,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * tokens.groups),
        reward_funcs=[lambda completions, **columns: [0.0] * len(completions)],
    )
    trainer.current_gradient_accumulation_steps = 1
    if trainer.args.gradient_checkpointing:  # as `train` does
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    return trainer


def _random_inputs(tokens: Tokens, vocabulary: int, device: Any) -> dict[str, Any]:
    """Return the tensors of TRL's loss, with an advantage for every completion."""
    import torch

    generator = torch.Generator().manual_seed(0)
    rows = tokens.groups * tokens.completions
    lengths = torch.linspace(1, tokens.completion, rows).long()
    prompts = torch.randint(1, vocabulary, (tokens.groups, tokens.prompt), generator=generator)
    completion_mask = (torch.arange(tokens.completion) < lengths[:, None]).long()
    completions = torch.randint(1, vocabulary, completion_mask.shape, generator=generator)
    inputs = {
        "prompt_ids": prompts.repeat_interleave(tokens.completions, dim=0),
        "prompt_mask": torch.ones(rows, tokens.prompt, dtype=torch.long),
        "completion_ids": completions * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.randn(rows, generator=generator),
        "num_items_in_batch": completion_mask.sum().float(),
    }
    return {name: value.to(device) for name, value in inputs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bits", type=int, choices=(4, 16), default=4)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=tuple(WAYS))
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations of the layers")
    parser.add_argument("--repeats", type=int, default=5)
    for field, size in (("groups", 4), ("completions", 8), ("prompt", 128), ("completion", 512)):
        parser.add_argument(f"--{field}", type=int, default=size)
    arguments = parser.parse_args()
    changes = {
        "model": {"name": arguments.model, "bits": arguments.bits, "engine": "peft"},
        "train": {"gradient_checkpointing": not arguments.no_checkpointing},
    }
    config = replace(RunConfig(output_dir="unused"), changes)
    tokens = Tokens(arguments.groups, arguments.completions, arguments.prompt, arguments.completion)
    for result in time_loss_passes(config, tokens, arguments.repeats, arguments.ways):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
