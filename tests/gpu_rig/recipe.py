"""Run the recipe on given rollouts, and record the gradients of each step.

    python tests/gpu_rig/card.py CARD tests/gpu_rig/recipe.py ROLLOUTS DTYPE PACKING --model.engine ...

PACKING is `exact`, `leaking` (packed rows attend to each other), or `trusted` (the same, but Unsloth's gradient pass
has already verified its packing on rows that hid it).

The first run samples with the policy itself and writes its completions and their logprobs to the file ROLLOUTS. Later
runs read them, so another engine trains on the same batches. As on a GPU with vLLM, the trainer corrects for the
difference between the sampler's logprobs and its own. The adapter's gradients, before clipping, are written to
FOLDER/gradients/STEP.pt, and the functions that compute logprobs to FOLDER/overrides.json.
"""

import functools
import json
import runpy
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers.overrides import count_calls, overrides, rejected_calls

from lora_grpo import pipeline
from lora_grpo.models import base_model
from lora_grpo.sampling import Decoded, VllmSampler, build_sampler
from lora_grpo.training import prepare

ROOT = Path(__file__).resolve().parents[2]


class GivenRollouts(VllmSampler):
    """Returns recorded completions, or samples and records them. As a VllmSampler, it enables the correction."""

    def __init__(self, path, sampler):
        self.path = path
        self.sampler = sampler
        self.tokenizer = sampler.tokenizer
        self.eos_token_ids = sampler.eos_token_ids
        self.recorded = json.loads(path.read_text()) if path.exists() else None
        self.new = {}

    def wake_up(self, *, adapter):
        self.sampler.wake_up(adapter=adapter)

    def sleep(self):
        self.sampler.sleep()

    def stream(self, prompts, params, seeds):
        key = json.dumps([list(prompts), list(seeds)])
        if self.recorded is None:
            decoded = self.sample_anew(prompts, params, seeds)
            self.new.setdefault(key, []).append(decoded)
            self.path.write_text(json.dumps(self.new))
        else:
            calls = self.recorded[key]
            decoded = calls[0]
            if len(calls) > 1:  # the logprob check repeats its calls
                calls.pop(0)
        samples = self.to_samples([Decoded(token_ids, logprobs) for token_ids, logprobs in decoded], params)
        for index in range(len(prompts)):
            start = index * params.num_samples
            yield index, samples[start : start + params.num_samples]

    def sample_anew(self, prompts, params, seeds):
        """Return the token ids and logprobs of all completions, in the order of the prompts."""
        decoded = []
        groups = dict(self.sampler.stream(prompts, params, seeds))
        for index in sorted(groups):
            for sample in groups[index]:
                decoded.append((sample.token_ids, sample.logprobs))
        return decoded

    def close(self):
        self.sampler.close()


def code_points(completions, **columns):
    """Return the mean code point of each completion, times 0.01: a reward that nearly always differs."""
    texts = [completion[0]["content"] for completion in completions]
    return [0.01 * sum(map(ord, text)) / max(len(text), 1) for text in texts]


class RecordGradients(TrainerCallback):
    def __init__(self, folder):
        self.folder = folder

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.folder.mkdir(exist_ok=True)
        gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.dtype == torch.float32, name
                gradients[name] = parameter.grad.clone()
        torch.save(gradients, self.folder / f"{state.global_step}.pt")


def leak(model, packing):
    """Have attention ignore where packed rows end."""
    import unsloth

    unsloth.models.llama.get_packed_info_from_kwargs = lambda *args, **options: None
    if packing == "trusted":
        model._unsloth_seq_packing_grad_ok = True
        model._unsloth_seq_packing_grad_verified_T = model._unsloth_seq_packing_grad_verified_seg = 1 << 20


def record_logprob_functions():
    """Return a set that fills with (variant, with gradients) of each call for logprobs in Unsloth's passes."""
    from unsloth_zoo import rl_replacements
    from unsloth_zoo.fused_losses import fused_linear

    calls = set()

    def record(module, name, variant):
        function = getattr(module, name)

        @functools.wraps(function)  # Unsloth reads the defaults of its parameters
        def call(*args, **options):
            calls.add((variant, torch.is_grad_enabled()))
            return function(*args, **options)

        setattr(module, name, call)

    record(fused_linear, "fused_linear_logprobs", "fused")
    record(rl_replacements, "chunked_hidden_states_selective_log_softmax", "unrolled")
    return calls


def write_overrides(trainer, calls, logprob_functions):
    """Write which overrides the run called, and which calls of the class below they would reject."""
    base = next(cls for cls in type(trainer).__mro__ if not cls.__module__.startswith("lora_grpo"))
    rejected = {}
    for owner, name in overrides(base):
        if isinstance(trainer, owner):
            rejected[f"{owner.__name__}.{name}"] = rejected_calls(owner, name, base)
    report = {
        "trainer": base.__name__,
        "rejected": rejected,
        "called": dict(calls),
        "logprobs": sorted(logprob_functions),
        "inputs of the loss": sorted(trainer._buffered_inputs[0]),
    }
    (Path(trainer.args.output_dir).parent / "overrides.json").write_text(json.dumps(report, indent=1))


def main():
    _, rollouts_file, dtype_name, packing, *flags = sys.argv
    rollouts = Path(rollouts_file)
    dtype = getattr(torch, dtype_name)
    sys.argv = [str(ROOT / "recipes" / "gsm8k_lora.py"), *flags]
    prepare_training = pipeline.prepare_training
    trainers = []
    calls = {}
    logprob_functions = set()

    def prepare_recording_training(run, policy, *args):
        nonlocal calls, logprob_functions
        calls = count_calls(setattr)  # after Unsloth is imported
        if policy.engine == "unsloth":
            logprob_functions = record_logprob_functions()
        if packing != "exact":
            leak(policy.model, packing)
        training = prepare_training(run, policy, *args)
        training.trainer.add_callback(RecordGradients(run.folder / "gradients"))
        trainers.append(training.trainer)
        return training

    base_model.compute_dtype = lambda: dtype
    pipeline.build_sampler = lambda policy, config: GivenRollouts(rollouts, build_sampler(policy, config))
    pipeline.prepare_training = prepare_recording_training
    if dtype != torch.float32:  # the noise of the check depends on the dtype; the recorded calls are those of float32
        prepare.check_logprobs = lambda *args: None
    pipeline.evaluate = lambda *args: []  # evaluation does not use the trainer
    pipeline.finish_run = lambda run, before, after: run.finish({})
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:  # the recipe ends with sys.exit
        for trainer in trainers:
            write_overrides(trainer, calls, logprob_functions)


if __name__ == "__main__":
    main()
