"""The exact loss pass: TRL's loss and gradient from fewer tokens, in less time and memory. It does not need TRL.

loss_pass = ExactLossPass(model, score, tokenizer, tiles=tiles)      # tests what the model allows
with loss_pass.micro_batch(inputs, may_skip_rows=True):                 # the trainer's loss of R completions
    logprobs, entropies, _ = loss_pass.logprobs(model, ids, mask, completion_width)

completions with advantage zero  ──► left out     ┐
prompts of a group               ──► read once    ├──► backbone ──► hidden states ──► tiles of logits ──► logprobs
padding                          ──► not read     ┘

exact_pass.py           ExactLossPass: the order of the steps below, and what to do if one of them is not possible
zero_advantage.py       which completions have no gradient, because their advantage is zero
distillation.py         advantages of tokens, and divergences, from a teacher's logprobs
importance_sampling.py  weights that correct for the difference between sampler and trainer
sampler_comparison.py   that difference, over a step
micro_batch.py          the completions whose loss is computed, with values for the ones that are left out
trees.py                completions that are trees: where each token is, and their paths as rows of their own
packing.py              layout of a packed micro-batch: the position of each token, and what it attends to
attention.py            the attention of that layout, as implementations for transformers
compiled_layers.py      norms and MLPs as fused kernels, if the trainer asks for them
shared_prompts.py       hooks that pack what the backbone reads, and the test that a model allows it
tiles.py                the test that a model allows logits in tiles, and scoring one slice of rows at a time
padding.py              the test that a model does not count padding, without which nothing here is exact
probes.py               tokens and tolerance of the tests of a model
scoring.py              what the pass needs from a trainer

With LoRA dropout, the completions of a group share one dropout mask for their prompt, because it is read once. TRL
draws one for each completion.
"""

from lora_grpo.loss.attention import PackedAttention
from lora_grpo.loss.distillation import TEACHER_LOGPROBS, Distillation, TeacherComparison
from lora_grpo.loss.exact_pass import ExactLossPass
from lora_grpo.loss.importance_sampling import ImportanceSampling
from lora_grpo.loss.padding import padding_obstacle
from lora_grpo.loss.sampler_comparison import SamplerComparison
from lora_grpo.loss.scoring import Score, Scored
from lora_grpo.loss.tiles import report_whole_logits, score_in_slices, tiles_obstacle
