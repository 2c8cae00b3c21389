"""Time the rollouts of a default training step and the samples of an evaluation, and compare with another checkout.

Both sides use the bundled model, the default settings and the same seeds. Each side is one process. They take turns, so
other load affects both. The parts:

- `step`: 16 completions for each of 8 prompts, as in a training step.
- `evaluation`: 4 samples for each of 64 held-out rows, the unit of an evaluation.
- `greedy`: one greedy completion for each of 256 held-out rows.
- `few-shot`: the step's prompts with 4 worked examples.

`matrices` is the time of the step's matrix multiplications alone: every linear layer on as many rows as each pass has.

    git worktree add /tmp/before HEAD~1
    python tools/benchmark_rollouts.py --before /tmp/before --rounds 10
"""

import argparse
import functools
import hashlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("step", "evaluation", "greedy", "few-shot")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout of this repository to compare with")
    parser.add_argument("--rounds", type=int, default=10, help="times each side runs, after one that is not counted")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch (default: torch's own number)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments.threads)
    sides = {"now": ROOT, **({"before": arguments.before.resolve()} if arguments.before else {})}
    workers = {side: start(root, arguments.threads) for side, root in sides.items()}
    for part in (*arguments.parts, "matrices"):
        taken: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        digests = set()
        for number in range(arguments.rounds + 1):
            for side in list(sides) if number % 2 else reversed(sides):
                if part == "matrices" and side != "now":
                    continue
                wall, cpu, tokens, digest = ask(workers[side], part, number)
                digests.add((number, digest))
                if number:
                    taken[side].append((wall, cpu))
        print(f"{part}, {tokens} tokens, medians of {arguments.rounds}:")
        for name, index in (("seconds", 0), ("CPU seconds", 1)):
            values = {side: [each[index] for each in times] for side, times in taken.items() if times}
            line = ", ".join(f"{side} {statistics.median(each):.3f}" for side, each in values.items())
            if len(values) == 2:
                ratios = [now / before for now, before in zip(values["now"], values["before"], strict=True)]
                line += f", ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"  {name}: {line}", flush=True)
        if len(digests) > arguments.rounds + 1:
            print("  the sides sampled different tokens")
    for worker in workers.values():
        worker.communicate("", timeout=60)


def start(root: Path, threads: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--work", "--threads", str(threads)]
    from lora_grpo.cli import limit_spinning  # the tree of `before` may have none

    limit_spinning()  # both sides wait as this tree does
    environment = {**os.environ, "PYTHONPATH": str(root)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=root)


def ask(worker: subprocess.Popen[str], part: str, seed: int) -> tuple[float, float, int, str]:
    """Return the seconds and CPU seconds of one run, its number of tokens, and a digest of them."""
    assert worker.stdin and worker.stdout
    worker.stdin.write(f"{json.dumps([part, seed])}\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("["):
            wall, cpu, tokens, digest = json.loads(line)
            return wall, cpu, tokens, digest
    sys.exit("a worker ended")


def work(threads: int) -> None:
    """Answer requests on stdin, one line each."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    parts = make_parts()
    for line in sys.stdin:
        part, seed = json.loads(line)
        started, cpu_started = time.perf_counter(), time.process_time()
        ids = parts[part](seed)
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu_started
        digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
        print(json.dumps([wall, cpu, sum(map(len, ids)), digest]), flush=True)


def make_parts() -> dict[str, Callable[[int], list[list[int]]]]:
    """Return functions from a seed to token ids, by name."""
    from lora_grpo.cli import parse
    from lora_grpo.models import load_policy
    from lora_grpo.sampling import SamplingParams, build_sampler, completion_seed
    from lora_grpo.tasks import chat, load_data

    presets = runpy.run_path("recipes/gsm8k_lora.py")["PRESETS"]

    def settings(*flags: str) -> Any:
        return parse(["--preset", "starter", *flags], recipe="gsm8k_lora", description="", presets=presets)[0]

    config = settings()
    policy = load_policy(config)
    sampler = build_sampler(policy, config)
    data = load_data(config)
    few_shot = load_data(settings("--data.few-shot", "4"))
    group, most = config.sampling.num_generations, config.sampling.max_completion_tokens
    training = SamplingParams(group, config.sampling.temperature, config.sampling.top_p, most)

    def seeds(seed: int, count: int) -> list[int]:
        return [completion_seed(seed, "benchmark", number) for number in range(count)]

    def step(rows: Any, seed: int) -> list[list[int]]:
        start = 8 * seed % (len(rows) - 8)
        prompts = [chat.render_row(sampler.tokenizer, row) for row in rows[start : start + 8]]
        groups = sampler.sample(prompts, training, seeds(seed, 8 * group))
        return [each.token_ids for samples in groups for each in samples]

    held_out = [chat.render_row(sampler.tokenizer, row) for row in data.eval]

    def evaluation(count: int, params: SamplingParams, seed: int) -> list[list[int]]:
        prompts = sorted(held_out, key=len)[:count]
        with sampler.awake(adapter=False):
            sampler.fit_batch(prompts, most)
            stream = list(sampler.stream(prompts, params, seeds(seed, count * params.num_samples)))
        return [each.token_ids for _, samples in stream for each in samples]

    @functools.cache  # so that the sampling is in the round that is not counted
    def sampled_passes() -> tuple[list[list[int]], list[int]]:
        prompts = sampler.encode([chat.render_row(sampler.tokenizer, row) for row in data.train[:8]])
        common = next(number for number, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1)
        ids = step(data.train, 0)
        decoding = [sum(len(each) > number for each in ids) for number in range(max(map(len, ids)))]
        return ids, [common + sum(len(each) - common for each in prompts), *decoding[1:]]

    def matrices(seed: int) -> list[list[int]]:
        import torch

        ids, passes = sampled_passes()
        layers = [module for module in sampler.model.modules() if isinstance(module, torch.nn.Linear)]
        inputs = {layer.in_features: torch.randn(max(passes), layer.in_features) for layer in layers}
        with torch.no_grad():
            for rows in passes:
                for layer in layers:
                    layer(inputs[layer.in_features][:rows])
        return ids

    sampled = SamplingParams(config.eval.num_samples, config.eval.temperature, config.eval.top_p, most)
    return {
        "step": lambda seed: step(data.train, seed),
        "evaluation": lambda seed: evaluation(64, sampled, seed),
        "greedy": lambda seed: evaluation(256, SamplingParams(1, 0.0, 1.0, most), seed),
        "few-shot": lambda seed: step(few_shot.train, seed),
        "matrices": matrices,
    }


if __name__ == "__main__":
    main()
