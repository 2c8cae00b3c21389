"""Compare the rounding of lora_grpo's merges and of PEFT's `merge_and_unload`, by architecture.

    python tools/merge_rounding.py                 # those in the first table of docs/models.md; a minute
    python tools/merge_rounding.py qwen3_5 gemma4

For each, a tiny model with random weights in bfloat16 gets a random adapter, which changes its predictions by
KL(adapter || base) nats per token. The other columns are KL(adapter || merged model), with merged weights in bfloat16,
as a percentage of that. An adapter that was trained on the NF4 base is added by `merge` to the weights that were
quantized for training, and by `--onto dequantized` to their NF4 values; `merge_and_unload` quantizes the sum to NF4
again.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from lora_grpo.cli import run_command
from lora_grpo.config import RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.merging import MergeOptions, merge
from lora_grpo.models import base_model
from lora_grpo.models.policy import load_policy

DEVIATION = 0.05
"""Standard deviation of the adapter's numbers."""
TEXTS, TOKENS = 8, 64


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on a CPU, forward passes are in float32 and add no rounding
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    from helpers.tiny_models import CONFIGS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CONFIGS))
    names = parser.parse_args().names or [*CONFIGS]
    if unknown := set(names) - set(CONFIGS):
        raise UserError(f"no architecture {', '.join(sorted(unknown))}; known are {', '.join(CONFIGS)}")
    print("| | 16-bit base | `merge` | `merge_and_unload` | 4-bit base | `merge` | `--onto dequantized` | ", end="")
    print("`merge_and_unload` |\n|---|" + "---:|" * 7)
    for name in names:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            cells = [*row(Path(folder), name, 16), *row(Path(folder), name, 4)]
        label = f"`{CONFIGS[name]['model_type']}`" + ", sliding window" * ("sliding" in name)
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


def row(folder: Path, name: str, bits: int) -> list[str]:
    """Return the cells of one architecture with a base of `bits` bits."""
    import torch
    from helpers.tiny_models import CONFIGS, make_model
    from peft import PeftModel
    from transformers import AutoConfig

    base, adapter = make_model(folder / f"base-{bits}", CONFIGS[name]), folder / f"adapter-{bits}"
    auto = base_model.auto_class(AutoConfig.from_pretrained(base))
    auto.from_pretrained(base).bfloat16().save_pretrained(base)
    model = load_policy(replace(RunConfig(), {"model": {"name": str(base), "bits": bits, "engine": "peft"}})).model
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=DEVIATION)
    model.save_pretrained(adapter)
    trained = log_probs(model)
    with model.disable_adapter():
        change = divergence(trained, log_probs(model))
    others = []
    for onto in ("full", "dequantized")[: 2 if bits == 4 else 1]:
        options = MergeOptions(str(adapter), dtype="bf16", onto=onto, output=folder / f"{onto}-{bits}")
        others.append(auto.from_pretrained(merge(options), dtype=torch.float32))
    if bits == 16:  # as a script loads the model
        model = PeftModel.from_pretrained(auto.from_pretrained(base, dtype=torch.bfloat16), adapter)
    unloaded = model.merge_and_unload()
    others.append(unloaded.float() if bits == 16 else unloaded)
    lost = [100 * divergence(trained, log_probs(other)) / change for other in others]
    return [f"{change:.2g}", *(f"{each:.0f}%" if each >= 9.5 else f"{each:.1g}%" for each in lost)]


def log_probs(model: Any) -> Any:
    """Return the log probabilities of every next token of random texts, (texts, tokens, vocabulary)."""
    import torch

    ids = torch.randint(3, 700, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(ids).logits.double().log_softmax(dim=-1)


def divergence(one: Any, other: Any) -> float:
    return float((one.exp() * (one - other)).sum(dim=-1).mean())


if __name__ == "__main__":
    sys.exit(run_command(main))
