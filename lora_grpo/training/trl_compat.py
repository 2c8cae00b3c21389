"""Code that depends on private methods and attributes of TRL (1.14, 1.16): the first file to check when it is updated.

TRL has no public methods around its phases, so `FastGRPOTrainer` overrides private ones. What reads or sets private
attributes of TRL's trainers is here. Its tests, in tests/training, are test_trl_compat.py, and test_drop_in.py for what
only scripts use.
"""

import contextlib
import functools
import importlib.util
import itertools
import math
import re
import types
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from lora_grpo.loss import ImportanceSampling, Score, Scored, score_in_slices
from lora_grpo.models import base_of
from lora_grpo.sampling import Decoded

# The state of a step


def has_importance_sampling(trainer: Any) -> bool:
    """Return whether TRL corrects the loss for the difference between sampler and trainer (importance sampling)."""
    return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


def importance_sampling(trainer: Any) -> ImportanceSampling | None:
    """Return how TRL corrects the loss for the difference between sampler and trainer, or None if it does not."""
    if not has_importance_sampling(trainer):
        return None
    smallest = trainer.vllm_importance_sampling_clip_min
    if smallest is None:
        smallest = 0.0
    largest = trainer.vllm_importance_sampling_clip_max
    if largest is None:
        largest = math.inf
    return ImportanceSampling(trainer.vllm_importance_sampling_mode, smallest=smallest, largest=largest)


@contextlib.contextmanager
def no_importance_weights(trainer: Any) -> Iterator[None]:
    """Keep TRL from computing importance weights in the block, and the logprobs that it needs for nothing else.

    For the weights, TRL's `_generate_and_score_completions` runs the model over all completions once more. The policy
    is still the one that sampled, so the loss computes the same logprobs, and can compute the weights itself.

    This leaves the passes without gradients that are needed: TRL computes old logprobs if the policy is updated before
    the last loss of the completions (`num_iterations`, or more `steps_per_generation` than accumulation steps), and
    logprobs of the reference for the KL term (`beta`).
    """
    correction = trainer.vllm_importance_sampling_correction
    trainer.vllm_importance_sampling_correction = False
    try:
        yield
    finally:
        trainer.vllm_importance_sampling_correction = correction


def takes_images(trainer: Any) -> bool:
    """Return whether the trainer's processor takes images."""
    return bool(trainer._is_vlm)


def has_entropy_bonus(trainer: Any) -> bool:
    """Return whether the loss has a term for the entropy, which then has a gradient."""
    return bool(trainer._entropy_bonus_enabled)


def loss_depends_on_all_tokens(trainer: Any) -> bool:
    """Return whether a term of the loss acts on tokens whose advantage is zero."""
    has_kl_term = bool(trainer.beta)
    has_entropy_term = has_entropy_bonus(trainer) or trainer.top_entropy_quantile < 1
    return bool(has_kl_term or has_entropy_term or trainer.aux_loss_enabled)


def tokens_in_step(trainer: Any, inputs: Mapping[str, Any]) -> Any:
    """Return by how many tokens a sum over those of a micro-batch is divided, so that a step has their mean.

    It is the normalizer of TRL's `dapo` loss: accumulation adds up the micro-batches, and DDP averages the processes.
    """
    normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    if trainer.model.training:
        steps = trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
        normalizer = normalizer * steps
    return normalizer


def no_gradient_checkpointing(trainer: Any) -> Any:
    """Return a context in which the trained model does not checkpoint, for a pass without gradients."""
    from trl.models.utils import disable_gradient_checkpointing

    return disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs)


def reuses_rollouts(trainer: Any) -> bool:
    """Return whether the rollouts of this micro-batch were trained on before (`num_iterations`)."""
    rounds = trainer._step // trainer.args.steps_per_generation
    return bool(rounds % trainer.num_iterations)


def micro_batch_number(trainer: Any) -> int:
    """Return the number of the current micro-batch in its step, from 0."""
    return int(trainer._step % trainer.args.gradient_accumulation_steps)


def split_in_order(trainer: Any, rollouts: dict[str, Any]) -> Any:
    """Split rollouts into micro-batches in the order of the prompts, and return the current one.

    TRL has just shuffled and split them. In order, the completions of a prompt stay together.

    Args:
        rollouts: result of TRL's `_generate_and_score_completions`.
    """
    from trl.trainer.utils import split_tensor_dict

    num_parts = trainer.args.steps_per_generation
    trainer._buffered_inputs = split_tensor_dict(rollouts, num_parts)
    return trainer._buffered_inputs[trainer._step % num_parts]


def reward_arguments(trainer: Any) -> dict[str, Any]:
    """Return the arguments that TRL passes to rewards besides the columns of the rows and the completions."""
    return {
        "trainer_state": trainer.state,
        "log_extra": trainer._log_completion_extra,
        "log_metric": trainer._log_metric,
    }


def gather_rewards(trainer: Any, values: Sequence[Sequence[float | None]]) -> Any:
    """Return the values of all processes as `_calculate_rewards` does: shape (completions, rewards).

    TRL takes NaN for a row that cannot be graded.
    """
    import torch

    rows = []
    for row in values:
        rows.append([math.nan if value is None else value for value in row])
    accelerator = trainer.accelerator
    return accelerator.gather(torch.tensor(rows, dtype=torch.float32, device=accelerator.device))


def sampled_tokens(generated: Any) -> tuple[list[list[int]], list[list[float | None]]]:
    """Return the tokens that the model sampled, from the result of TRL's `_generate`, and the sampler's logprobs.

    The completions of a conversation also have tokens of the environment, which are left out.
    """
    completion_ids = generated[1]
    masks = generated[2]  # 1 for tokens of the model; None if all are
    logprobs = generated[4] or []
    if not (masks and logprobs):
        return completion_ids, logprobs

    def only_model_tokens(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return [list(itertools.compress(row, mask)) for row, mask in zip(rows, masks, strict=True)]

    return only_model_tokens(completion_ids), only_model_tokens(logprobs)


PREDECESSORS = "predecessors"
"""The name of this package for the columns before tokens: a field of rollouts, and a tensor of the loss."""


def take_predecessors(trainer: Any, generated: Any) -> Any:
    """Remove the predecessors of completions from the result of TRL's `_generate`, and return them as a tensor.

    TRL would give them to rewards, row by row. See `rollouts/token_tree.py` for what they are.

    Returns:
        Shape (R, completion width), padded as TRL pads the completions, with -1; None if no completion is a tree.
    """
    import torch
    from trl.trainer.utils import pad

    extra_fields = generated[5]
    rows = extra_fields.pop(PREDECESSORS, None)
    if rows is None:
        return None
    predecessors = pad(
        [torch.tensor(row, dtype=torch.long) for row in rows],
        padding_value=-1,
        pad_to_multiple_of=trainer.pad_to_multiple_of,
    )
    return predecessors.to(trainer.accelerator.device)


def step_values(trainer: Any) -> MutableMapping[str, list[float]]:
    """Return the metrics of the current step of a GRPOTrainer or SFTTrainer: a list of values for each name.

    The same object serves all steps.
    """
    return trainer._metrics["train"]


def forget_loss(trainer: Any, loss: float) -> None:
    """Let a step whose logged loss is not finite leave the losses of later steps as they are.

    To begin a new sum, transformers subtracts the logged one from itself, which gives NaN in place of 0. Call it when a
    step is logged.
    """
    if not math.isfinite(loss):
        trainer._tr_loss.zero_()


# Construction


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
    # trained: full copies of layers (`modules_to_save`), token vectors, and weights of other methods.
    only_lora = all(re.search(r"\blora_(A|B|embedding_A|embedding_B|magnitude_vector)\b", name) for name in weights)
    zero_if_new = [weight for name, weight in weights.items() if re.search(r"\blora_(B|embedding_A)\b", name)]
    is_new = only_lora and not any(weight.any() for weight in zero_if_new)
    if is_new:
        return {}
    return weights


def _is_of_adapter(name: str, adapter: str) -> bool:
    """Return whether a parameter of a PEFT model belongs to the adapter: `….lora_A.ADAPTER.weight`, `….ADAPTER`."""
    return f".{adapter}." in name or name.endswith(f".{adapter}")


def use_float32_adapter(model: Any, trained: Mapping[str, Any]) -> None:
    """Cast the adapter of a PEFT model to float32, and correct TRL's reference copy of it.

    TRL casts a quantized model's adapter to bfloat16. Most GRPO updates are smaller than the rounding error of
    bfloat16, and a resumed run would load the adapter in float32.

    TRL's reference of the KL term is a frozen copy of the adapter, named "ref". The copy of a new adapter is
    deleted, because the base is the same reference. TRL (1.14) does not copy parameters that are not modules, as in the
    adapters of embeddings.

    Args:
        trained: result of `trained_adapter` before TRL's trainer was built.
    """
    import torch

    if not hasattr(model, "get_base_model"):  # not a PEFT model
        return
    parameters = dict(model.named_parameters())

    # The adapter
    for name, parameter in parameters.items():
        if not parameter.requires_grad or not _is_of_adapter(name, "default"):
            continue
        dtype = torch.float32
        if ".modules_to_save." in name:  # a layer of the base, which computes in the dtype of the base
            original = parameters[name.replace(".modules_to_save.default.", ".original_module.")]
            if original.is_floating_point():
                dtype = original.dtype
        # TRL's cast has rounded the weights of a trained adapter, so take those from before. TRL's reference copy is
        # from before the cast, too.
        parameter.data = trained.get(name, parameter.data).to(dtype)

    # Its reference copy
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

    TRL takes the trainer's settings, then the model's (generation_config.json), then transformers' defaults.
    """
    from transformers import GenerationConfig

    settings, _ = base_of(trainer.model)._prepare_generation_config(trainer.generation_config)
    defaults = {**GenerationConfig._get_default_generation_params(), "top_k": 0, "guidance_scale": 1.0}
    read_by_sampler = {
        "do_sample": True,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "max_new_tokens": trainer.max_completion_length,
        "eos_token_id": trainer.eos_token_ids,
    }
    # The sampler takes these from the trainer, so `generate` must not have other values.
    unread = [name for name, value in read_by_sampler.items() if getattr(settings, name) != value]
    # It does not have the others, so they must be off.
    other_names = vars(GenerationConfig()).keys() - read_by_sampler.keys() - SAME_TOKENS
    unread += [name for name in other_names if getattr(settings, name, None) not in (None, defaults.get(name))]
    return sorted(unread)


# `max_new_tokens` replaces `max_length`.
_LENGTHS_AND_IDS = {"max_length", "pad_token_id", "bos_token_id", "decoder_start_token_id"}
_MEMORY = {"use_cache", "cache_config", "max_cache_len", "compile_config", "disable_compile", "prefill_chunk_size"}
_BEAMS = {"early_stopping", "length_penalty", "diversity_penalty", "low_memory"}
_OUTPUTS = {"output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"}
_DRAFTS = {"num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "is_assistant"}
_DRAFTS |= {"assistant_lookbehind", "target_lookbehind", "assistant_early_exit", "assistant_ensemble_weight"}
_DRAFTS |= {"max_matching_ngram_size", "speculation_type"}
# The first replaces NaN. The second shifts all scores of a step by a constant, which only returned scores show.
_SCORES = {"remove_invalid_values", "renormalize_logits"}
_FILE = {"_commit_hash", "_from_model_config", "_original_object_hash", "transformers_version"}
SAME_TOKENS = _LENGTHS_AND_IDS | _MEMORY | _BEAMS | _OUTPUTS | _DRAFTS | _SCORES | _FILE
"""Settings of `generate` that do not change which tokens are sampled."""


def has_own_generate(model: Any, transformers_generate: Any) -> bool:
    """Return whether `generate` of a model, or of the base of a PEFT model, is not that of transformers."""
    base = base_of(model)
    is_set_on_object = "generate" in vars(model) or "generate" in vars(base)
    return is_set_on_object or type(base).generate is not transformers_generate


def enable_importance_sampling(trainer: Any) -> None:
    """Enable TRL's importance sampling correction, which weights completions by the trainer/sampler probability ratio.

    TRL applies it if `use_vllm` is set. As a constructor argument, `use_vllm` would also start an engine that merges
    the adapter into the base at every sync, so it is set afterwards, and the engine to be synced is a stand-in.
    """
    trainer.use_vllm = True
    trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = -1


def without_text(generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `generation_kwargs` for TRL's vLLM mode with which vLLM does not decode the tokens of completions.

    TRL reads only token ids and logprobs. Stop strings are found in the text, so they keep it.
    """
    if generation_kwargs.get("stop"):
        return dict(generation_kwargs)
    return {"detokenize": False, **generation_kwargs}


def sample_rollouts(trainer: Any, prompt_ids: list[list[int]], max_tokens: int) -> list[Decoded]:
    """Sample a completion of each of R prompts as a step with TRL's own vLLM does, but from the whole distribution.

    With Unsloth, `_generate_single_turn` wakes the engine up, loads the adapter, samples, and lets the engine sleep.
    """
    generation = trainer.vllm_generation
    whole_distribution: dict[str, Any] = {
        "max_completion_length": max_tokens,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "generation_kwargs": without_text({}),
    }
    settings = {name: getattr(generation, name) for name in whole_distribution}
    last_loaded_step = trainer._last_loaded_step
    vars(generation).update(whole_distribution)
    try:
        token_ids, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, 1)
    finally:
        vars(generation).update(settings)
        trainer._last_loaded_step = last_loaded_step  # the first step loads its adapter itself
    return [Decoded(list(ids), ids_logprobs) for ids, ids_logprobs in zip(token_ids, logprobs, strict=True)]


# Logits in tiles


def has_fused_head() -> bool:
    """Return whether TRL patches the model's forward so that it returns logprobs, in tiles, in place of logits (1.16).

    TRL 1.14 has methods of its trainers instead: one for whole logits, and one for tiles.
    """
    from trl.trainer import utils

    return hasattr(utils, "add_fused_lm_head")


CPU_TILE = (1024, 8192)
"""Tokens and vocabulary entries of a tile of a fused head's logits on a CPU."""


def fit_fused_head_to_cpu() -> None:
    """Have TRL's fused head (1.16) compute less at a time on a CPU, and no logits that it throws away.

    Call it before a trainer is built. It changes nothing on a GPU.
    """
    import torch

    if torch.cuda.is_available() or not has_fused_head():
        return
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    # TRL's tiles have 4096 tokens and 32,768 entries, and without Triton, nine tensors of a tile's size exist at once.
    chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE = CPU_TILE
    if has_divergence_kernel():
        from trl.kernels import chunked_divergence

        chunked_divergence.TOKEN_CHUNK_SIZE, chunked_divergence.VOCAB_CHUNK_SIZE = CPU_TILE
    # The head asks this function whether to leave out prompts and padding. TRL includes them where Triton cannot run,
    # because some accelerators would compile again for each number of tokens; PyTorch on a CPU does not compile.
    utils._use_triton = lambda device: True


def add_fused_head(trainer: Any, base: Any) -> None:
    """Have TRL (1.16) patch the forward of a second model as it has patched that of the trainer's model."""
    if not has_fused_head():
        return
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(base, temperature=trainer.temperature, cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32)


def compare_fused_head(model: Any, ids: Any) -> tuple[Any, Any]:
    """Return the logprobs of the tokens of rows from the fused head of a trainer's model, and from its own logits.

    Args:
        model: the base that TRL patched.
        ids: token ids, shape (R, T).
    """
    fused_logprobs = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs  # (R, T - 1)
    distributions = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    logprobs = distributions.gather(2, ids[:, 1:, None]).squeeze(2)
    return fused_logprobs, logprobs


@dataclass(frozen=True)
class TrlTiles:
    """TRL's logits in tiles, in plain PyTorch on a CPU."""

    trainer: Any
    score: Score
    """TRL's function for logprobs."""
    model: Any
    """The trainer's model, or its teacher."""

    def compare(self, ids: Any) -> tuple[Any, Any]:
        """Return the logprobs of the last four tokens of rows from tiles, and from the full logits."""
        import torch

        trainer = self.trainer
        arguments = (self.model, ids, torch.ones_like(ids), 4)
        if has_fused_head():
            return self.score(*arguments)[0], _score_whole_logits(trainer, *arguments)[0]
        return trainer._chunked_logps(*arguments)[0], trainer._full_logits_logps(*arguments)[0]

    def enable(self) -> Score:
        """Return the function that scores in tiles. The trainer's own one still computes the full logits."""
        if has_fused_head():
            return self.score
        from trl.models.utils import _ForwardRedirection

        self.trainer._forward_redirection = _ForwardRedirection()
        return self._score_in_tiles

    def _score_in_tiles(self, *args: Any, **kwargs: Any) -> Any:
        """Score with TRL 1.14's switch for tiles on.

        It is off otherwise, because only one of the model and its teacher may have tiles. It is not set as an argument
        of the trainer, which would ask for the package liger-kernel, although tiles do not use it.
        """
        self.trainer.use_liger_kernel = True
        try:
            return self.score(*args, **kwargs)
        finally:
            self.trainer.use_liger_kernel = False


def tiles_of(trainer: Any, score: Score, model: Any) -> TrlTiles | None:
    """Return TRL's tiles, or None if they would need a change of the configuration that is saved with the model.

    Args:
        score: TRL's function for logprobs, which the trainer overrides.
        model: the trainer's model, or its teacher.
    """
    logits_scaling = getattr(model.config, "logits_scaling", None)  # Granite's
    if logits_scaling and not has_fused_head():
        if not hasattr(model, "get_base_model"):  # without an adapter, its configuration is saved
            return None
        model.config.logit_scale = 1 / logits_scaling  # the name that TRL 1.14 reads
    return TrlTiles(trainer, score, model)


def whole_logits_score(trainer: Any, score: Score) -> Score:
    """Return the function that computes logprobs from the logits of the whole vocabulary.

    Args:
        score: TRL's function for logprobs, which does so in TRL 1.14 as long as tiles are not enabled.
    """
    if has_fused_head():
        return functools.partial(score_in_slices, functools.partial(_score_whole_logits, trainer))
    return score


def _score_whole_logits(
    trainer: Any,
    model: Any,
    input_ids: Any,
    attention_mask: Any,
    logits_to_keep: int,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **_: Any,
) -> Scored:
    """Do the same as TRL's `_get_per_token_logps_and_entropies`, for text, from whole logits, with all rows at once."""
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    router_arguments = {"output_router_logits": True} if compute_aux_loss else {}
    output = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        logits_to_keep=logits_to_keep + 1,
        use_cache=False,
        **router_arguments,
    )
    # The last logits are of the token after the completion. Some models ignore `logits_to_keep`.
    logits = output.logits[:, :-1][:, -logits_to_keep:]
    completion_ids = input_ids[:, -logits_to_keep:]
    options = {"temperature": trainer.temperature, "row_mask": attention_mask[:, -logits_to_keep:]}

    entropies = None
    if compute_entropy:
        logprobs, entropies = selective_log_softmax_and_entropy(
            logits, completion_ids, entropy_requires_grad=has_entropy_bonus(trainer), **options
        )
    else:
        logprobs = selective_log_softmax(logits, completion_ids, **options)
    router_loss = output.aux_loss if compute_aux_loss else None
    return logprobs, entropies, router_loss


# Divergences of whole distributions


DIVERGENCES = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}
"""TRL's `beta` of a divergence, by its name in `teacher.loss`."""


def has_divergence_kernel() -> bool:
    """Return whether TRL computes divergences in tiles (1.16)."""
    return has_fused_head() and importlib.util.find_spec("trl.kernels.chunked_divergence") is not None


@dataclass(frozen=True)
class Logits:
    """The logits of N tokens, as the hidden states and the head from which they can be computed in tiles."""

    hidden_states: Any
    """Shape (N, hidden size)."""
    weight: Any
    """Of the head, shape (vocabulary, hidden size)."""
    bias: Any
    scale: float
    """The model multiplies its logits by this."""
    cap: float | None
    """The model limits its logits to this (`final_logit_softcapping`)."""

    @classmethod
    def of(cls, base: Any, hidden_states: Any) -> Self:
        """Return the logits of a model's hidden states.

        Source: `DistillationTrainer._compute_loss`, TRL 1.16.
        """
        config = base.config.get_text_config()
        head = base.get_output_embeddings()
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(hidden_states, head.weight, head.bias, _logit_scale(config), cap)


def _logit_scale(config: Any) -> float:
    """Return the factor of a model's logits, which has several names."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        factor: float | None = getattr(config, name, None)
        if factor is not None:
            return factor
    logits_scaling: float | None = getattr(config, "logits_scaling", None)
    if logits_scaling is None:
        return 1.0
    if config.model_type == "hyperclovax":
        return logits_scaling
    return 1 / logits_scaling  # Granite and others divide by it


def token_divergences(student: Logits, teacher: Logits, beta: float, temperature: float) -> Any:
    """Return the divergence of N tokens in nats, shape (N,), with a gradient for the student's hidden states.

    The tiles are those of TRL's DistillationTrainer. If one model has embeddings of more tokens, which are padding,
    only the tokens of both are compared.

    Args:
        beta: one of `DIVERGENCES`.
        temperature: by which logits are divided.
    """
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    vocabulary = min(len(student.weight), len(teacher.weight))

    def shared(tensor: Any) -> Any:
        """Return the rows of a head's weight or bias for the tokens of both models. A bias may be None."""
        return None if tensor is None else tensor[:vocabulary]

    divergences, _ = ChunkedDivergenceFunction.apply(
        student.hidden_states,
        shared(student.weight),
        shared(student.bias),
        teacher.hidden_states,
        shared(teacher.weight),
        shared(teacher.bias),
        beta,
        temperature,
        student.scale,
        student.cap,
        teacher.scale,
        teacher.cap,
    )
    return divergences
