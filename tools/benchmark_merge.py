"""Merge a random 1 GB model with lora_grpo and with PEFT, and compare memory and time.

    python tools/benchmark_merge.py --rounds 3
    python tools/benchmark_merge.py --rounds 0 --kills 10

The model has the shape of Qwen2.5-0.5B in four bfloat16 shards. The adapter has rank 32 on every linear layer. Each
method runs in its own process, one at a time. Memory is the peak resident set size. PEFT loads the model, applies the
adapter, merges, and saves. The kit runs `scripts/merge.py`, which also hashes, chooses the dtype
and measures divergences. `merge.py RUN` merges a run of one step from this adapter on the base in 4 bits, so that
divergences are measured on the prompts and completions of the run, and also from the adapter on its 4-bit base.

`--kills` kills `scripts/merge.py` with SIGKILL at times spread over its run time, runs each merge again, and
compares the bytes with those of an uninterrupted merge. The exit code is 1 if they differ.
"""

import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lora_grpo import starter
from lora_grpo.cli import run_command
from lora_grpo.files import atomic, markdown_table
from lora_grpo.flags import read_flags

RANK = 32
SHAPE = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip

PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output, max_shard_size="300MB")
"""


@dataclass(frozen=True)
class Options:
    """Flags."""

    rounds: int = 3
    """Number of times that each method runs."""
    kills: int = 0
    """Number of merges to kill and run again."""
    folder: Path | None = None
    """Folder for the models (3 GB); None uses the system's temporary folder."""


def make_model(folder: Path) -> None:
    """Write a seeded random base model and adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(torch.bfloat16)
    model.save_pretrained(folder / "base", max_shard_size="300MB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(starter.model_path() / name, folder / "base" / name)
    adapted = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-3)
    adapted.base_model.model.config._name_or_path = str(folder / "base")
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "adapter")


def make_run(folder: Path) -> None:
    """Train for a step from the adapter, with completions of random tokens."""
    flags = f"""--preset starter --model.name {folder}/base --lora.from {folder}/adapter --lora.rank {RANK}
        --lora.alpha {2 * RANK} --train.max-steps 1 --train.prompts-per-step 1 --sampling.num-generations 4
        --train.micro-batch-size 1 --eval.num-samples 0 --data.eval-limit 1 --monitor.rows 0
        --output-dir {folder}/run"""
    recipe = str(Path(__file__).resolve().parents[1] / "recipes" / "gsm8k_lora.py")
    subprocess.run([sys.executable, recipe, *flags.split()], check=True, stdout=subprocess.DEVNULL)


def measure(command: list[str]) -> tuple[float, float, float]:
    """Return the peak memory of a command in MB, its run time in seconds, and its CPU time in seconds."""
    started = time.perf_counter()
    waiting = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # PEFT waits as PyTorch does, and lora_grpo sets its own values
    own = {name: value for name, value in os.environ.items() if name not in waiting}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=own)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[:3]} failed: {errors[-2000:]}")
    return usage.ru_maxrss / 1024, time.perf_counter() - started, usage.ru_utime + usage.ru_stime


def main() -> None:
    options = read_flags(Options, sys.argv[1:], __doc__)
    folder = Path(tempfile.mkdtemp(prefix="merge-", dir=options.folder))
    try:
        subprocess.run([sys.executable, __file__, "--make", str(folder)], check=True)
        if options.rounds:
            make_run(folder)
            compare(folder, options.rounds)
        if options.kills and not survives(folder, options.kills):
            sys.exit(1)
    finally:
        shutil.rmtree(folder)


def merge_command(folder: Path, output: Path) -> list[str]:
    """Return the `scripts/merge.py` command with its arguments."""
    script = str(Path(__file__).resolve().parents[1] / "scripts" / "merge.py")
    return [
        sys.executable, script, str(folder / "adapter"), "--base", str(folder / "base"), "--output", str(output)
    ]  # fmt: skip


def survives(folder: Path, kills: int) -> bool:
    """Kill merges and run them again, and return whether all results have the same bytes as an uninterrupted merge."""
    whole, cut = folder / "whole", folder / "cut"
    _, seconds, _ = measure(merge_command(folder, whole))
    expected = {path.name: atomic.sha256(path) for path in whole.iterdir()}
    draw, same = random.Random(0), 0
    for kill in range(kills):
        process = subprocess.Popen(
            merge_command(folder, cut), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        pause = (kill + draw.random()) / kills * seconds
        try:
            process.wait(pause)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        state = "it had ended" if cut.exists() else "it had not ended"
        measure(merge_command(folder, cut))
        found = {path.name: atomic.sha256(path) for path in cut.iterdir()}
        same += found == expected
        print(f"kill {kill + 1} after {pause:.1f} s: {state}; same bytes: {found == expected}", file=sys.stderr)
        shutil.rmtree(cut)
    print(f"{kills} kills, {len(expected)} files: {same} times byte-identical")
    return same == kills


def compare(folder: Path, rounds: int) -> None:
    """Run each method in turn and print a table."""
    base, adapter, output = folder / "base", folder / "adapter", folder / "merged"
    three = [str(base), str(adapter), str(output)]
    kit = merge_command(folder, output)
    of_run = [*kit[:2], str(folder / "run"), "--output", str(output)]
    sides = {
        "PEFT: load, merge, save": [sys.executable, "-c", PEFT, *three],
        "merge.py --dtype bf16": [*kit, "--dtype", "bf16"],
        "merge.py": kit,
        "merge.py RUN": of_run,
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name, command in sides.items():
            shutil.rmtree(output, ignore_errors=True)
            subprocess.run(["sync"], check=True)
            found[name].append(measure(command))
            memory, seconds, cpu = found[name][-1]
            print(f"round {turn + 1}: {name}: {memory:.0f} MB, {seconds:.1f} s, CPU {cpu:.1f} s", file=sys.stderr)
    middle = {name: tuple(map(statistics.median, zip(*runs, strict=True))) for name, runs in found.items()}
    peft = middle["PEFT: load, merge, save"]
    size = sum(path.stat().st_size for path in base.glob("*.safetensors")) / 1e6
    largest = SHAPE["vocab_size"] * SHAPE["hidden_size"] * 2 / 1e6
    learned = (adapter / "adapter_model.safetensors").stat().st_size / 1e6
    print(f"base {size:.0f} MB, largest tensor {largest:.0f} MB, adapter {learned:.0f} MB, {rounds} rounds, medians")
    headings = ["", "peak memory, MB", "of PEFT's", "seconds", "of PEFT's", "CPU seconds", "of PEFT's"]
    rows = []
    for name, (memory, *times) in middle.items():
        row = [name, f"{memory:.0f}", f"{memory / peft[0]:.2f}"]
        for value, of_peft in zip(times, peft[1:], strict=True):
            row += [f"{value:.1f}", f"{value / of_peft:.2f}"]
        rows.append(row)
    print("\n".join(markdown_table(headings, rows)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make_model(Path(sys.argv[2]))
    else:
        sys.exit(run_command(main))
