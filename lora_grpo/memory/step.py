"""The settings that determine the memory of a GRPO step, in addition to the model's shape."""

from dataclasses import dataclass, replace
from typing import Literal

from lora_grpo.config import RunConfig, prompts_to_read
from lora_grpo.memory import unsloth
from lora_grpo.memory.lengths import RowLengths
from lora_grpo.memory.teacher import TeacherSize

SamplerKind = Literal["transformers", "vllm", "shared", "server", "merged"]
"""`transformers`: the trained model itself. `vllm`: an engine with its own copy of the base. `shared`: Unsloth's
engine, which shares the base with the trainer. `server`: vLLM in another process, whose memory is not planned.
`merged`: on a CPU, a dequantized copy of the model with its adapter."""


def starts_vllm(sampler: SamplerKind) -> bool:
    """Return whether the run starts a vLLM engine, with its own copy of the base or on the trainer's."""
    return sampler in ("vllm", "shared")


@dataclass(frozen=True)
class Step:
    """What the memory of a GRPO step depends on. The optimizer step is cut into micro-batches of equal size."""

    config: RunConfig
    micro_batch_size: int
    """Completions in one forward and backward pass."""
    sequences: int
    """Number of completions that are decoded at once."""
    sampler: SamplerKind = "transformers"
    unsloth_kernels: bool = False
    """Unsloth's trainer runs the step, with its own kernels in the layers."""
    on_cpu: bool = False
    """Everything except the 4-bit weights is float32, without autocast."""
    packed: bool = False
    """Each prompt of a micro-batch is read once for its group."""
    free: int = 0
    """Bytes of the GPU that are free before the run. They decide how many rows Unsloth scores at once."""
    teacher: TeacherSize | None = None
    """The teacher of the run; None without one."""
    row_lengths: RowLengths | None = None
    """The lengths of the run's rows; None if every row has the maximum length."""

    @property
    def engine_sleeps(self) -> bool:
        """Whether a vLLM engine gives its memory back while the model is trained. True without an engine."""
        return not self.uses_vllm or self.config.sampling.engine_sleep is not False

    @property
    def uses_vllm(self) -> bool:
        """Whether a vLLM engine of this run samples."""
        return starts_vllm(self.sampler)

    @property
    def float_bytes(self) -> int:
        """Bytes of a number in activations and in parameters that are not quantized."""
        return 4 if self.on_cpu else 2

    @property
    def offloads(self) -> bool:
        """Whether the inputs of the layers wait for the backward pass in host memory."""
        is_long = self.config.model.max_sequence_tokens >= unsloth.LEAST_OFFLOADED
        return self.unsloth_kernels and is_long and bool(self.config.train.gradient_checkpointing)

    @property
    def completion(self) -> int:
        """Longest completion, in tokens."""
        return self.config.sampling.max_completion_tokens

    @property
    def length(self) -> int:
        """Longest prompt plus completion, in tokens."""
        limit = self.config.model.max_sequence_tokens
        if self.row_lengths is None:
            return limit
        return min(limit, self.row_lengths.longest_prompt + self.completion)

    @property
    def trained_length(self) -> int:
        """Longest row in a micro-batch, in tokens: in SFT, a prompt with its reference answer."""
        if self.row_lengths is None or not self.row_lengths.longest_answered:
            return self.length
        return min(self.length, self.row_lengths.longest_answered)

    @property
    def padded_tokens(self) -> int:
        """Tokens of the rows of a micro-batch, if all are as long as the longest."""
        return self.micro_batch_size * self.trained_length

    @property
    def tokens(self) -> int:
        """Tokens that the layers read in a micro-batch."""
        prompts = self.micro_batch_size
        if self.packed:
            prompts = prompts_to_read(self.micro_batch_size, self.config.sampling.num_generations)
        prompt_tokens = prompts * (self.trained_length - self.completion)
        completion_tokens = self.micro_batch_size * self.completion
        return prompt_tokens + completion_tokens

    def with_teacher_prompts(self) -> "Step":
        """Return the step with the prompts that its teacher reads, which may be longer than those of the model."""
        lengths = self.row_lengths
        if lengths is None or not lengths.longest_teacher_prompt:
            return self
        return replace(self, row_lengths=replace(lengths, longest_prompt=lengths.longest_teacher_prompt))
