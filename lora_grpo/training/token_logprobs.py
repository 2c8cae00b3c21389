"""Logprobs in less memory and time, for TRL's own trainer: in tiles, and without completions that have no gradient."""

from collections.abc import Callable
from typing import Any

from lora_grpo import console
from lora_grpo.errors import one_line
from lora_grpo.models import base_model
from lora_grpo.training.trl_compat import TrlHooks, chunked_and_whole, enable_chunked_logprobs


def logprob_tolerance(model: Any) -> float:
    """Return the largest difference between two correct methods, in nats. A missing scale or cap causes far more."""
    import torch

    device = model.get_output_embeddings().weight.device
    is_exact = base_model.is_float32(model) and not torch.is_autocast_enabled(device.type)
    return 1e-3 if is_exact else 0.2


def why_whole(model: Any, compute: Callable[[Any], tuple[Any, Any]]) -> str:
    """Return why logits in parts would differ from the model's (an adapter on the head, a cap), or "", and print it.

    Args:
        compute: returns the logprobs of token ids from logits in parts, and from the model's own.
    """
    import torch

    head, reason = model.get_output_embeddings(), ""
    if hasattr(head, "lora_A"):
        reason = "the adapter changes the output head"
    elif type(head) is not torch.nn.Linear:
        reason = f"the output head is not a plain linear layer but {type(head).__name__}"
    else:
        base_model.keep_frozen(model)  # before the first pass in eval mode
        model.eval()
        with torch.no_grad():
            first = min(1, len(head.weight) - 1)  # without the first token, which is often padding
            ids = torch.arange(first, first + 8, device=head.weight.device) % len(head.weight)
            parts, whole = compute(ids[None])
        apart = (parts.float() - whole.float()).abs().max().item()
        if apart > logprob_tolerance(model):
            reason = f"the {model.config.model_type} model transforms its logits (by {apart:.2g} nats)"
    if reason:
        _report_whole(reason)
    return reason


def _report_whole(reason: str) -> None:
    console.warning(f"computing logits of the whole vocabulary, which takes more memory: {reason}")


class ChunkedLogProbs(TrlHooks):
    """Mixin that computes logits in tiles of 2048 x 8192. List it before TRL's GRPOTrainer in the bases.

    The method is TRL's own, in plain PyTorch. It is not used with Unsloth, which has its own implementation.
    """

    use_liger_kernel: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import torch

        super().__init__(*args, **kwargs)
        if self.fallback_reason:
            return
        scaling = getattr(self.model.config, "logits_scaling", None)  # Granite's
        if scaling and not hasattr(self.model, "get_base_model"):  # whose configuration is saved, so that it must stay
            return
        if scaling:
            self.model.config.logit_scale = 1 / scaling  # the name that TRL reads
        try:
            with self.accelerator.autocast():
                whole = why_whole(
                    self.model, lambda ids: chunked_and_whole(self, self.model, ids, torch.ones_like(ids), 4)
                )
        except self.fallback_errors as error:
            whole = one_line(error)
            _report_whole(whole)
        if not whole:
            enable_chunked_logprobs(self)

    def token_logprobs(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Score at most `batch_size` rows at once. With tiles, TRL would run all completions of a step at once."""
        import torch

        score, batch_size = super().token_logprobs, kwargs.get("batch_size")
        if self.fallback_reason or not self.use_liger_kernel:
            return score(model, *args, **kwargs)
        ids, mask, *rest = args
        batch_size = batch_size or len(ids)
        slices = [slice(start, start + batch_size) for start in range(0, len(ids), batch_size)]
        parts = [score(model, ids[part], mask[part], *rest, **kwargs) for part in slices]
        logprobs, entropies, aux_loss = parts[0]
        if len(parts) > 1:
            logprobs, entropies, aux_loss = (
                None if values[0] is None else torch.cat(values) for values in zip(*parts, strict=True)
            )
        if entropies is not None and not self._entropy_bonus_enabled:  # type: ignore[attr-defined]
            entropies = entropies.detach()  # as TRL's from the full logits
        return logprobs, entropies, aux_loss


class SkipZeroAdvantage(TrlHooks):
    """Mixin that computes no logprobs of completions whose advantage is zero. List it before StepMetrics.

    If all rewards of a group are equal, its advantages are zero, and so is its gradient, unless a KL term or an entropy
    bonus acts on all tokens. TRL still gets values for all tokens: the logprob of the earlier policy, so that the ratio
    is 1, and the sampler's -logprob as an estimate of the entropy. The normalization and the clipping metrics do not
    change, and the mean entropy covers all completions. With top-p, the estimate is that of the truncated distribution.
    """

    _kept: Any = None
    """Rows of the micro-batch that are computed, or None for all."""
    _sampled: Any = None
    """The sampler's logprobs of all rows."""
    _earlier: Any = None
    """Logprobs of the policy that TRL's ratio is relative to; the sampler's if that is the current policy."""

    def compute_grpo_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        kept = self._rows_with_advantage(inputs)
        if kept is None:
            return super().compute_grpo_loss(model, inputs)
        # NaN where vLLM returns no logprob. Any number gives a ratio of 1.
        self._kept, self._sampled = kept, inputs["sampling_per_token_logps"].nan_to_num()
        self._earlier = inputs.get("old_per_token_logps", self._sampled)
        try:
            return super().compute_grpo_loss(model, {**inputs, "kept_rows": kept})
        finally:
            self._kept = self._sampled = self._earlier = None

    def token_logprobs(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        score, kept = super().token_logprobs, self._kept
        if kept is None:
            return score(model, *args, **kwargs)
        ids, mask, *rest = args
        logprobs, entropies, aux_loss = score(model, ids[kept], mask[kept], *rest, **kwargs)
        all_logprobs = self._earlier.to(logprobs.dtype).index_copy(0, kept, logprobs)
        if entropies is not None:
            entropies = (-self._sampled).to(entropies.dtype).index_copy(0, kept, entropies)
        return all_logprobs, entropies, aux_loss

    def _rows_with_advantage(self, inputs: dict[str, Any]) -> Any:
        """Return the rows with an advantage, at least one so that every process has a loss, or None for all rows."""
        if self.fallback_reason or self.loss_depends_on_all_tokens or "sampling_per_token_logps" not in inputs:
            return None
        rows = inputs["advantages"].nonzero().squeeze(1)
        if len(rows) == len(inputs["advantages"]):
            return None
        return rows if len(rows) else inputs["completion_mask"].sum(1).argmin()[None]  # the shortest
