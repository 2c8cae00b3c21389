"""Runs the recipe's arrows in this process and prints, as its last line, what no file of a run tells.

A test starts it as a command: Unsloth patches what it finds, and vLLM keeps its engine for the life of a process.
"""

import hashlib
import json
import runpy
import sys
from pathlib import Path

from lora_grpo.cli.arguments import parse
from lora_grpo.data import fit_data, load_data
from lora_grpo.memory.plan import make_plan
from lora_grpo.models.policy import load_policy
from lora_grpo.prompts.chat import render_row
from lora_grpo.runs import claim_run, open_run
from lora_grpo.sampling.build import build_sampler
from lora_grpo.sampling.sampler import SamplingParams
from lora_grpo.training import prepare_training, train
from lora_grpo.training.logprob_check import trainer_log_probs

RECIPE = Path(__file__).resolve().parent.parent.parent / "recipes" / "gsm8k_lora.py"


def frozen_bytes(model):
    """Return a hash of every weight that is not trained, with what unpacks the 4-bit ones."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            continue
        state = getattr(parameter, "quant_state", None)
        nested = getattr(state, "state2", None)
        tensors = [parameter.data, *(each.absmax for each in (state, nested) if each is not None)]
        for tensor in tensors:
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def free_gib():
    """Return the card's free memory with all of this process's own caches given back."""
    import gc

    import torch

    if not torch.cuda.is_available():
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 1024**3


def compared_log_probs(trainer, sampler, prompts, max_tokens):
    """Return the trainer's log-probabilities as it trains on them, and from logits of the whole vocabulary."""
    import torch

    drawn = sampler.sample(prompts, SamplingParams(1, 1.0, 1.0, max_tokens), range(len(prompts)))
    prompt_ids, completions = sampler.encode(prompts), [rollout.token_ids for [rollout] in drawn]
    full = trainer_log_probs(trainer, prompt_ids, completions, 1.0)
    device = next(trainer.model.parameters()).device
    width, keep = max(map(len, prompt_ids)), max(map(len, completions))
    rows, masks = [], []
    for prompt, completion in zip(prompt_ids, completions, strict=True):
        left, right = width - len(prompt), keep - len(completion)
        rows.append([0] * left + prompt + completion + [0] * right)
        masks.append([0] * left + [1] * (len(prompt) + len(completion)) + [0] * right)
    with torch.no_grad():
        found, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, torch.tensor(rows, device=device), torch.tensor(masks, device=device), keep
        )
    trained = [row[: len(ids)] for row, ids in zip(found.float().tolist(), completions, strict=True)]
    return trained, full


def main():
    presets = runpy.run_path(str(RECIPE))["PRESETS"]
    # A test measures what an engine gives back when it sleeps.
    flags = [*sys.argv[1:], "--sampling.engine-sleep"]
    config, how = parse(flags, recipe="gsm8k_lora", description="", presets=presets)
    data = load_data(config)
    config, plan = make_plan(config, how)
    claim_run(config, how)
    run = open_run(config, how, "gsm8k_lora", data.record, plan.record())
    policy = load_policy(config)
    rows = fit_data(data, policy.tokenizer, config).train
    sampler = build_sampler(policy, config)
    training = prepare_training(run, policy, rows, sampler)
    run.begin(policy.record)

    before = frozen_bytes(policy.model)
    train(training)
    found = {"frozen_before": before, "frozen_after": frozen_bytes(policy.model)}
    sampler.wake_up(adapter=True)
    found["free_awake_gib"] = free_gib()
    sampler.sleep()
    found["free_asleep_gib"] = free_gib()
    prompts = [render_row(policy.tokenizer, row) for row in rows[:8]]
    length = config.sampling.max_completion_tokens
    found["trained_log_probs"], found["full_log_probs"] = compared_log_probs(training.trainer, sampler, prompts, length)
    found["record"] = run.record
    print(json.dumps(found))


if __name__ == "__main__":
    main()
