"""Run recipes with Unsloth's trainer and a stand-in for the vLLM engine that shares its weights, which may be broken.

    python tests/gpu_rig/shared_vllm.py FOLDER

Unsloth's and TRL's own code loads adapters, wakes the engine up, asks for rollouts, and lets it sleep. The stand-in
replaces `vllm.LLM`, whose kernels need a GPU: it decodes with the trained model, and with exactly the tensors of a
request's adapter. Each case is a fork, so that Unsloth is imported once. `FOLDER/codes.json` gets their exit codes.
"""

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import card
import torch
from vllm_arguments import Extension

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = """--preset starter --model.engine unsloth --sampling.backend vllm --model.bits 16 --data.eval-limit 4
    --sampling.max-completion-tokens 8 --train.max-steps 2 --train.prompts-per-step 2
    --train.micro-batch-size 2 --monitor.rows 16 --monitor.every-steps 1"""
CASES = ("whole", "stop", "sft", "injection", "stale", "asleep", "evaluation")


class Engine:
    """Stands for `vllm.LLM`. `case` says how it is broken."""

    def __init__(self, model, case):
        self.model, self.case, self.shared_weights = model, case, True
        self.asleep = self.lost = False
        self.loaded = None  # (id, tensors) of the only adapter
        self.model_config = SimpleNamespace(enable_sleep_mode=True, max_model_len=32768)
        config = SimpleNamespace(model_config=self.model_config)
        self.waiting = []
        self.llm_engine = SimpleNamespace(
            is_sleeping=lambda: self.asleep,
            vllm_config=config,
            has_unfinished_requests=lambda: bool(self.waiting),
            add_request=lambda *request, lora_request: self.waiting.append((*request, lora_request)),
            renderer=SimpleNamespace(render_cmpl=lambda prompts: prompts),
            step=self.step,
        )

    def sleep(self, level=1):
        self.asleep = True
        self.lost = self.lost or (self.case == "asleep" and self.loaded is not None)

    def wake_up(self, tags=None):
        self.asleep = False

    def load(self, request):
        """Return the tensors that are served, as vLLM does: read from a file or copied, once for each id."""
        from safetensors.torch import load_file

        if request is None or self.lost or (self.case == "evaluation" and request.lora_path):
            return None
        if self.loaded is None or (self.loaded[0] != request.lora_int_id and self.case != "stale"):
            tensors = request.lora_tensors or load_file(Path(request.lora_path) / "adapter_model.safetensors")
            self.loaded = request.lora_int_id, {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return self.loaded[1]

    @contextlib.contextmanager
    def serving(self, tensors):
        """Have the model compute with these tensors, or without an adapter."""
        own = {name: parameter for name, parameter in self.model.named_parameters() if ".lora_" in name}
        trained = [parameter.detach().clone() for parameter in own.values()]
        for name, parameter in own.items():
            key = f"base_model.model.{name.replace('.default', '')}"
            parameter.copy_(tensors[key] if tensors else torch.zeros_like(parameter))
        yield
        for parameter, value in zip(own.values(), trained, strict=True):
            parameter.copy_(value)

    def step(self):
        """Complete all requests of the engine."""
        names, prompts, params, adapters = zip(*self.waiting, strict=True)
        self.waiting = []
        for name, output in zip(names, self.generate(prompts, [*params], lora_request=adapters[0]), strict=True):
            output.request_id, output.outputs[0].finish_reason = name, "length"
            yield output

    @torch.no_grad()
    def generate(self, prompts, sampling_params, use_tqdm=False, lora_request=None):
        assert not self.asleep
        rows = [list(each["prompt_token_ids"]) for each in prompts]
        params = sampling_params[0] if isinstance(sampling_params, list) else sampling_params
        assert params.temperature > 0 and params.top_p == 1
        assert params.detokenize == bool(params.stop)  # text is decoded only for stop strings
        sampled = [[] for _ in rows]
        with self.serving(self.load(lora_request)):
            for _ in range(params.max_tokens):
                whole = [torch.tensor(row + [t for t, _ in new]) for row, new in zip(rows, sampled, strict=True)]
                ids, mask = (
                    torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_side="left")
                    for each in (whole, [torch.ones_like(row) for row in whole])
                )
                logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -1]
                logprobs = torch.log_softmax(logits.float() / params.temperature, dim=-1)
                tokens = torch.multinomial(logprobs.exp(), 1)
                for new, token, row in zip(sampled, tokens.flatten().tolist(), logprobs.tolist(), strict=True):
                    new.append((token, SimpleNamespace(logprob=row[token], rank=1)))
        ends = [SimpleNamespace(token_ids=[t for t, _ in new], logprobs=[{t: p} for t, p in new]) for new in sampled]
        return [SimpleNamespace(prompt_token_ids=ids, outputs=[end]) for ids, end in zip(rows, ends, strict=True)]


def run(case, folder):
    """Run a recipe with the stand-in. This process ends with its exit code."""
    from transformers import TrainerCallback
    from trl.generation.vllm_generation import VLLMGeneration
    from unsloth import FastLanguageModel

    from lora_grpo import pipeline
    from lora_grpo.models import base_model

    class SleepsInTraining(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            assert model.vllm_engine.asleep

    load, prepare_training = FastLanguageModel.from_pretrained, pipeline.prepare_training

    def load_with_engine(*arguments, **options):
        """Attach the engine as `fast_inference` does (llama.py)."""
        assert options.pop("fast_inference")
        names = ("max_lora_rank", "max_num_seqs", "gpu_memory_utilization")
        model, tokenizer = load(*arguments, **{name: each for name, each in options.items() if name not in names})
        model.vllm_engine = Engine(model, case)
        model.fast_generate, model.fast_generate_batches = model.vllm_engine.generate, None
        return model, tokenizer

    def prepare_watched_training(*arguments):
        training = prepare_training(*arguments)
        training.trainer.add_callback(SleepsInTraining())
        return training

    FastLanguageModel.from_pretrained = load_with_engine
    base_model.compute_dtype = lambda: torch.float32
    pipeline.prepare_training = prepare_watched_training
    pipeline.evaluate = lambda *arguments: []
    pipeline.finish_run = lambda run, before, after: run.finish({})
    if case == "injection":  # Unsloth's adapter never reaches the engine, as with an earlier version
        VLLMGeneration.generate = VLLMGeneration.generate.__wrapped__
    recipe = "sft_lora.py" if case == "sft" else "gsm8k_lora.py"
    more = "--sampling.max-completion-tokens 48" if case == "sft" else "--sampling.num-generations 2"
    if case == "stop":
        more += """ --grpo generation_kwargs={"stop":["~~"]}"""
    sys.argv = [str(ROOT / "recipes" / recipe), *ARGUMENTS.split(), *more.split(), "--output-dir", str(folder / case)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main():
    folder, codes = Path(sys.argv[1]), {}
    card.pretend("Tesla T4", "14.74", "7.5")
    card.autocast_on_cpu()
    sys.modules.update((name, Extension(name)) for name in ("vllm._C_stable_libtorch", "vllm.cumem_allocator"))
    card.import_unsloth()
    from unsloth_zoo.vllm_utils import patch_vllm

    patch_vllm()  # as `fast_inference` does
    for case in CASES:
        child = os.fork()
        if not child:
            output = os.open(folder / f"{case}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            with card.OnCpu():
                return run(case, folder)
        codes[case] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
