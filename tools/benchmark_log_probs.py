"""Time the loss and backward pass of the default run's micro-batch, with tiled logits and with full logits.

The two alternate in one process, so other load affects both. Times are CPU time of all threads. Completion lengths are
evenly spaced from one token to the maximum. Tiled logits skip padding, full logits do not.

    python tools/benchmark_log_probs.py --rounds 30
    python tools/benchmark_log_probs.py --rounds 30 --full     # all completions at the maximum length
"""

import argparse
import copy
import statistics
import tempfile
import time
from pathlib import Path

from lora_grpo.cli import limit_spinning
from lora_grpo.sampling import build_sampler

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measured passes of each variant")
    parser.add_argument("--full", action="store_true", help="use the maximum length for all completions")
    arguments = parser.parse_args()
    limit_spinning()
    import runpy

    import torch

    from lora_grpo.cli import parse
    from lora_grpo.config import Invocation
    from lora_grpo.models import load_policy
    from lora_grpo.runs import open_run
    from lora_grpo.tasks import load_data
    from lora_grpo.training import make_trainer, synthetic_inputs

    presets = runpy.run_path(str(ROOT / "recipes" / "gsm8k_lora.py"))["PRESETS"]
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--preset", "starter", "--output-dir", f"{folder}/run", "--data.eval-limit", "1"]
        config, _ = parse(flags, recipe="gsm8k_lora", description="", presets=presets)
        data = load_data(config)
        run = open_run(config, Invocation(), "gsm8k_lora", data.record)
        policy = load_policy(config)
        trainer = make_trainer(run, policy, data.train, build_sampler(policy, config))
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        trainer.model.train()
        inputs = synthetic_inputs(trainer, trainer.args.per_device_train_batch_size, 60, "cpu")
        if not arguments.full:
            mask = inputs["completion_mask"]
            rows, longest = mask.shape
            lengths = (torch.arange(rows) + 1) * longest // rows
            inputs["completion_mask"] = (torch.arange(longest)[None] < lengths[:, None]).long()
            inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(WARM_UP + arguments.rounds):
            for chunked in (True, False) if number % 2 else (False, True):
                trainer.use_liger_kernel = chunked  # TRL's name for tiled logits
                started = time.process_time()
                trainer.compute_loss(trainer.model, copy.copy(inputs)).backward()
                times[chunked].append(time.process_time() - started)
                trainer.model.zero_grad()
    tiles, whole = (statistics.median(times[way][WARM_UP:]) for way in (True, False))
    print(
        f"tiles {tiles:.3f} s, whole logits {whole:.3f} s of CPU time a micro-batch: {100 * (tiles / whole - 1):+.1f} %"
    )


if __name__ == "__main__":
    main()
