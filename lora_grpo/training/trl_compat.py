"""Code that depends on private methods and attributes of TRL 1.14: the first file to check when TRL is updated.

TRL has no public methods around its phases, so `TrlHooks` overrides the private ones and gives each a public name. The
mixins of this folder override only the public names. The functions below it read or set attributes of TRL's trainers.
tests/training/test_trl_compat.py has one test for each item, or test_drop_in.py for what only scripts use.
"""

import itertools
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.sampling import Decoded


class TrlHooks:
    """Base of the mixins of a GRPOTrainer: public names for the phases of a step, in the order in which they run.

    Unsloth's generated trainer has the same methods, but its `compute_loss` calls no `_compute_loss`.
    """

    model: Any
    args: Any
    accelerator: Any
    state: Any
    keeps_groups_together = False
    """Whether micro-batches are slices in the order of the prompts, instead of TRL's random order."""
    fallback_reason = ""
    """The reason why TRL's own code samples and computes the loss, or "" if this package's does."""
    fallback_errors: tuple[type[Exception], ...] = ()
    """Errors of this package's code, before it has worked once, after which TRL's code takes over. () raises them."""
    _scored: Any = None
    step_inputs: Sequence[Mapping[str, Any]] = ()
    """The rows of the completions that are sampled, one for each completion of this process."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        trained = trained_adapter(model)
        super().__init__(model, *args, **kwargs)  # type: ignore[call-arg]
        # TRL keeps the adapter of a sharded model in the dtype of its base.
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):  # type: ignore[attr-defined]
            use_float32_adapter(self.model, trained)
        self.fallback_reason = self.find_fallback_reason()

    def find_fallback_reason(self) -> str:
        """Return why TRL's own code must sample and compute the loss, or "". Called once, after TRL's constructor."""
        return ""

    def generate_rollouts(self, prompts: list[Any]) -> Any:
        """Sample the completions of a step."""
        return super()._generate(prompts)  # type: ignore[misc]

    def sample_completions(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """Return the token ids of a completion of each prompt, and their logprobs or None. See `generate_rollouts`."""
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)  # type: ignore[misc]

    def reward_rollouts(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> Any:
        """Return the rewards of the completions of all processes, shape (completions, rewards)."""
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids)  # type: ignore[misc]

    def compute_grpo_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Return the loss of a micro-batch."""
        return super()._compute_loss(model, inputs)  # type: ignore[misc]

    def token_logprobs(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return logprobs, entropies and the router's loss. `args` are ids, mask, the completions' width, and more."""
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)  # type: ignore[misc]

    @property
    def is_corrected_by_trl(self) -> bool:
        """Whether TRL corrects the loss for the difference between sampler and trainer (importance sampling)."""
        return bool(self.use_vllm and self.vllm_importance_sampling_correction)  # type: ignore[attr-defined]

    @property
    def loss_depends_on_all_tokens(self) -> bool:
        """Whether a term of the loss acts on tokens whose advantage is zero."""
        terms = self.beta, self._entropy_bonus_enabled, self.aux_loss_enabled  # type: ignore[attr-defined]
        return any(terms) or self.top_entropy_quantile < 1  # type: ignore[attr-defined]

    @property
    def reuses_rollouts(self) -> bool:
        """Whether the rollouts of this micro-batch were trained on before (`num_iterations`)."""
        return bool(self._step // self.args.steps_per_generation % self.num_iterations)  # type: ignore[attr-defined]

    @property
    def micro_batch(self) -> int:
        """Number of the current micro-batch in its step, from 0."""
        return int(self._step % self.args.gradient_accumulation_steps)  # type: ignore[attr-defined]

    def _generate(self, prompts: list[Any]) -> Any:
        return self.generate_rollouts(prompts)

    # These methods have TRL's names of arguments, because subclasses of the trainer may pass them by name.

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        return self.sample_completions(prompt_ids, *args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.step_inputs = inputs
        self._scored = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        return self._scored

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        return self.reward_rollouts(inputs, prompts, completions, completion_ids_list)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        return self.compute_grpo_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("input_ids", "attention_mask", "logits_to_keep")[len(args) :]:
            if name in kwargs:
                args = (*args, kwargs.pop(name))
        return self.token_logprobs(model, *args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        from trl.trainer.utils import split_tensor_dict

        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        scored, self._scored = self._scored, None
        if self.fallback_reason or not self.keeps_groups_together or scored is None or not self.model.training:
            return inputs
        # TRL has just shuffled and split the new rollouts. Split them again without shuffling.
        parts = self.args.steps_per_generation
        self._buffered_inputs = split_tensor_dict(scored, parts)
        return self._buffered_inputs[self._step % parts]  # type: ignore[attr-defined]


def reward_arguments(trainer: Any) -> dict[str, Any]:
    """Return the arguments that TRL passes to rewards besides the columns of the rows and the completions."""
    loggers = {"log_extra": trainer._log_completion_extra, "log_metric": trainer._log_metric}
    return {"trainer_state": trainer.state, **loggers}


def gather_rewards(trainer: Any, values: Sequence[Sequence[float | None]]) -> Any:
    """Return the values of all processes as `reward_rollouts` does. TRL takes NaN for a row that cannot be graded."""
    import torch

    numbers = [[math.nan if value is None else value for value in row] for row in values]
    return trainer.accelerator.gather(torch.tensor(numbers, dtype=torch.float32, device=trainer.accelerator.device))


def sampled_tokens(generated: Any) -> tuple[list[list[int]], list[list[float | None]]]:
    """Return the tokens that the model sampled in `generate_rollouts`, from its result, and the sampler's logprobs."""
    ids, masks, logprobs = generated[1], generated[2], generated[4] or []

    def sampled(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return [[*itertools.compress(row, mask)] for row, mask in zip(rows, masks or rows, strict=True)]

    return (sampled(ids), sampled(logprobs)) if masks and logprobs else (ids, logprobs)


def step_values(trainer: Any) -> Any:
    """Return the metrics of the current step of a GRPOTrainer or SFTTrainer: a list of values for each name."""
    return trainer._metrics["train"]


def ignore_installed_vllm() -> None:
    """Keep TRL from importing vLLM. Call it before TRL's trainers are imported.

    TRL's own vLLM mode is not used. It imports an installed vLLM nevertheless, and a broken one would stop every run.
    """
    from trl import import_utils

    import_utils.is_vllm_available = lambda min_version=None: False


def trained_adapter(model: Any) -> dict[str, Any]:
    """Return a copy of the weights of a PEFT model's adapter, by name; empty if it is new and changes nothing.

    The weights may be frozen: `PeftModel.from_pretrained` loads them so by default.
    """
    if not hasattr(model, "get_base_model"):
        return {}
    weights = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or _is_of_adapter(name, "default")
    }
    # A new LoRA adapter changes nothing, because one factor of each product is zero. Other weights are taken as
    # trained: full copies of layers (`modules_to_save`), token vectors, and those of other methods.
    only_lora = all(re.search(r"\blora_(A|B|embedding_A|embedding_B|magnitude_vector)\b", name) for name in weights)
    zeros = [weight for name, weight in weights.items() if re.search(r"\blora_(B|embedding_A)\b", name)]
    is_new = only_lora and not any(weight.any() for weight in zeros)
    return {} if is_new else weights


def _is_of_adapter(name: str, adapter: str) -> bool:
    """Return whether a parameter of a PEFT model belongs to the adapter: `….lora_A.ADAPTER.weight`, `….ADAPTER`."""
    return f".{adapter}." in name or name.endswith(f".{adapter}")


def use_float32_adapter(model: Any, trained: Mapping[str, Any]) -> None:
    """Cast the adapter of a PEFT model to float32, and correct TRL's reference copy of it.

    TRL casts a quantized model's adapter to bfloat16. Most GRPO updates are smaller than the rounding error of
    bfloat16, and a resumed run would load the adapter in float32.

    TRL's reference of the KL term is a frozen copy of the adapter, named "ref". That of a new adapter is deleted,
    because the base is the same reference. TRL (1.14) leaves out parameters that are no modules: those of embeddings.

    Args:
        trained: result of `trained_adapter` before TRL's trainer was built.
    """
    import torch

    if not hasattr(model, "get_base_model"):  # not a PEFT model
        return
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if not parameter.requires_grad or not _is_of_adapter(name, "default"):
            continue
        dtype = torch.float32
        if ".modules_to_save." in name:  # a layer of the base, which computes in the dtype of the base
            original = parameters[name.replace(".modules_to_save.default.", ".original_module.")]
            dtype = original.dtype if original.is_floating_point() else dtype
        # The cast to bfloat16 rounded it; TRL's reference copy was made before.
        parameter.data = trained.get(name, parameter.data).to(dtype)
    if "ref" not in model.peft_config:
        return
    if not trained:
        model.delete_adapter("ref")
        model.set_adapter("default")
        return
    for name, weight in trained.items():
        reference = parameters.get(f"{name.removesuffix('.default')}.ref")
        if name.endswith(".default") and reference is not None:
            reference.data.copy_(weight)
    for name, module in model.named_modules():
        if name.endswith(".lora_dropout.ref"):
            module.p = 0.0  # the reference is computed in training mode


def unread_generation_settings(trainer: Any) -> list[str]:
    """Return the settings of TRL's `generate` that this package's sampler does not read, such as `suppress_tokens`.

    They are those of the trainer, completed by those of the model (generation_config.json) and transformers' defaults.
    """
    from transformers import GenerationConfig

    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    settings, _ = model._prepare_generation_config(trainer.generation_config)
    defaults = {**GenerationConfig._get_default_generation_params(), "top_k": 0, "guidance_scale": 1.0}
    known = {
        "do_sample": True,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "max_new_tokens": trainer.max_completion_length,
        "eos_token_id": trainer.eos_token_ids,
    }
    unread = [name for name, value in known.items() if getattr(settings, name) != value]
    names = vars(GenerationConfig()).keys() - known.keys() - SAME_TOKENS
    unread += [name for name in names if getattr(settings, name, None) not in (None, defaults.get(name))]
    return sorted(unread)


_LENGTHS_AND_IDS = {"max_length", "pad_token_id", "bos_token_id", "decoder_start_token_id"}  # `max_new_tokens` counts
_MEMORY = {"use_cache", "cache_config", "max_cache_len", "compile_config", "disable_compile", "prefill_chunk_size"}
_BEAMS = {"early_stopping", "length_penalty", "diversity_penalty", "low_memory"}
_OUTPUTS = {"output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"}
_DRAFTS = {"num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "is_assistant"}
_DRAFTS |= {"assistant_lookbehind", "target_lookbehind", "assistant_early_exit", "assistant_ensemble_weight"}
_DRAFTS |= {"max_matching_ngram_size", "speculation_type"}
_SCORES = {"remove_invalid_values", "renormalize_logits"}  # of NaN; of scores that are not returned
_FILE = {"_commit_hash", "_from_model_config", "_original_object_hash", "transformers_version"}
SAME_TOKENS = _LENGTHS_AND_IDS | _MEMORY | _BEAMS | _OUTPUTS | _DRAFTS | _SCORES | _FILE
"""Settings of `generate` that do not change which tokens are sampled."""


def has_own_generate(model: Any, usual: Any) -> bool:
    """Return whether `generate` of a model, or of the base of a PEFT model, is not the usual one of transformers."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "generate" in vars(model) or "generate" in vars(base) or type(base).generate is not usual


def enable_importance_sampling(trainer: Any) -> None:
    """Enable TRL's importance sampling correction, which weights completions by the trainer/sampler probability ratio.

    TRL applies it if `use_vllm` is set. As a constructor argument, `use_vllm` would also start an engine that merges
    the adapter into the base at every sync, so it is set afterwards, and the engine to be synced is a stand-in.
    """
    trainer.use_vllm = True
    trainer.vllm_generation, trainer._last_loaded_step = types.SimpleNamespace(sync_weights=lambda: None), -1


def sample_rollouts(trainer: Any, prompt_ids: list[list[int]], max_tokens: int) -> list[Decoded]:
    """Sample a completion of each of R prompts as a step with TRL's own vLLM does, but from the whole distribution.

    With Unsloth, `_generate_single_turn` wakes the engine up, loads the adapter, samples, and lets the engine sleep.
    """
    generation, kept = trainer.vllm_generation, trainer._last_loaded_step
    plain = {"max_completion_length": max_tokens, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    settings = {name: getattr(generation, name) for name in (*plain, "generation_kwargs")}
    vars(generation).update(plain, generation_kwargs={})
    try:
        token_ids, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, 1)
    finally:
        vars(generation).update(settings)
        trainer._last_loaded_step = kept  # the first step loads its adapter itself
    return [(list(ids), row) for ids, row in zip(token_ids, logprobs, strict=True)]


def enable_chunked_logprobs(trainer: Any) -> None:
    """Compute logits in tiles. As an argument of TRL's, `use_liger_kernel` asks for a package that tiles do not use."""
    from trl.models.utils import _ForwardRedirection

    trainer.use_liger_kernel = True
    trainer._forward_redirection = _ForwardRedirection()


def chunked_and_whole(trainer: Any, *args: Any) -> tuple[Any, Any]:
    """Return the logprobs of the same tokens from tiles and from the full logits. `args` as in `token_logprobs`."""
    return trainer._chunked_logps(*args)[0], trainer._full_logits_logps(*args)[0]
