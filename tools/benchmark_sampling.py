"""Compare the throughput of continuous batching, static batching, `model.generate`, and vLLM.

All methods sample the same prompts with the bundled model in float32, 64 completions at a time:

- `continuous` starts a new completion when one ends.
- `static` starts 64 completions at a time and removes those that end.
- `generate` calls `model.generate` on 64 at a time.
- `vllm` uses vLLM with the same weights, if vLLM is installed.
- `vllm adapter` adds a LoRA adapter. The other methods would merge it into the weights at no cost per token.

The methods take turns in one process, so other load affects all of them. Forward passes are also counted. They predict
the throughput where the time of a pass does not depend on the number of rows, as on a GPU that is not saturated.

    python tools/benchmark_sampling.py --prompts 100 --rounds 5
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from lora_grpo.cli import limit_spinning
from lora_grpo.config import vllm_available
from lora_grpo.sampling import SamplingParams, completion_seed

SAMPLES = 4
PARAMS = SamplingParams(SAMPLES, temperature=1.2, top_p=1.0, max_tokens=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100, help=f"{SAMPLES} completions of each")
    parser.add_argument("--slots", type=int, default=64, help="completions at once, a multiple of 4")
    parser.add_argument("--rounds", type=int, default=5, help="times each side runs, after one that is not counted")
    arguments = parser.parse_args()
    if min(arguments.prompts, arguments.rounds) < 1 or arguments.slots < SAMPLES or arguments.slots % SAMPLES:
        parser.error(f"--prompts and --rounds must be at least 1 and --slots a multiple of {SAMPLES}")
    limit_spinning()
    sides, passes = make_sides(arguments.prompts, arguments.slots)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(arguments.rounds + 1):
        for name in list(sides) if number % 2 else reversed(sides):
            passes.clear()
            started = time.perf_counter()
            lengths = sides[name](number)
            seconds = time.perf_counter() - started
            if number:
                rates[name].append(sum(lengths) / seconds)
            print(
                f"round {number}, {name:12}: {sum(lengths) / seconds:6.0f} tokens/s, {len(lengths)} completions of "
                f"{statistics.mean(lengths):.0f} tokens on average, {max(lengths)} at most, {len(passes)} passes",
                flush=True,
            )
    median = {name: statistics.median(each) for name, each in rates.items()}
    print(", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in median.items()), f"(medians of {arguments.rounds})")
    for other in list(sides)[1:]:
        print(f"continuous / {other} = {median['continuous'] / median[other]:.2f}")


def make_sides(num_prompts: int, slots: int) -> tuple[dict[str, Callable[[int], list[int]]], list[int]]:
    """Return the methods by name, and a list to which each forward pass appends its number of rows.

    Each method is a function from a seed to the lengths of the completions.
    """
    import torch
    from starter_model import problems
    from starter_model.corpus import chat_prompt
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lora_grpo import starter
    from lora_grpo.sampling import Sampler

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(starter.model_path(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(starter.model_path(), padding_side="left")
    prompts = [chat_prompt(problem.question) for problem in problems.pool("eval", num_prompts)]
    batches = [prompts[start : start + slots // SAMPLES] for start in range(0, num_prompts, slots // SAMPLES)]
    sampler = Sampler(model, tokenizer, [tokenizer.eos_token_id])
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *inputs: passes.append(len(inputs[2]["input_ids"])), with_kwargs=True)

    def sampled(batches: list[list[str]], slots: int | None, seed: int) -> list[int]:
        sampler.batch_size = slots
        return [length for batch in batches for length in lengths(sampler, batch, seed)]

    def generated(seed: int) -> list[int]:
        torch.manual_seed(seed)
        lengths = []
        for batch in batches:
            inputs = tokenizer(batch, return_tensors="pt", padding=True, add_special_tokens=False)
            output = model.generate(
                **inputs,
                do_sample=True,
                temperature=PARAMS.temperature,
                top_k=0,
                num_return_sequences=SAMPLES,
                max_new_tokens=PARAMS.max_tokens,
            )
            ended = output[:, inputs["input_ids"].shape[1] :] == tokenizer.eos_token_id
            first = torch.where(ended.any(dim=1), ended.int().argmax(dim=1) + 1, ended.shape[1])
            lengths += first.tolist()
        return lengths

    sides: dict[str, Callable[[int], list[int]]] = {
        "continuous": lambda seed: sampled([prompts], slots, seed),
        "static": lambda seed: sampled(batches, None, seed),
        "generate": generated,
    }
    if vllm_available():
        sides |= vllm_sides(prompts, tokenizer)
    return sides, passes


def lengths(sampler: Any, prompts: list[str], seed: int) -> list[int]:
    """Return the lengths of the completions in tokens."""
    seeds = [completion_seed(seed, "benchmark", number) for number in range(SAMPLES * len(prompts))]
    return [len(each.token_ids) for _, group in sampler.stream(prompts, PARAMS, seeds) for each in group]


def vllm_sides(prompts: list[str], tokenizer: Any) -> dict[str, Callable[[int], list[int]]]:
    """Return the vLLM methods: the base alone, and with a random rank-16 adapter on every linear layer."""
    from peft import LoraConfig, get_peft_model

    from lora_grpo.config import ModelConfig
    from lora_grpo.models import Overrides, base_model, resolve
    from lora_grpo.sampling import build

    settings = ModelConfig(bits=16)
    with tempfile.TemporaryDirectory() as folder:
        adapter = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False, lora_alpha=1)
        get_peft_model(base_model.load_base(settings), adapter).save_pretrained(folder)
        target = resolve(folder, Overrides(base="starter"))
        sampler = build.load_sampler(target, "vllm", tokenizer, PARAMS.max_tokens + 200, 0)

    def sample(adapter: bool, seed: int) -> list[int]:
        sampler.wake_up(adapter=adapter)
        return lengths(sampler, prompts, seed)

    return {"vllm": lambda seed: sample(False, seed), "vllm adapter": lambda seed: sample(True, seed)}


if __name__ == "__main__":
    main()
