"""The settings of a run, and the values that can be derived from them without a model.

    config = replace(RunConfig(), gpu_preset("Qwen/Qwen2.5-0.5B-Instruct", train={"max_steps": 100}))
    check_fields(config)                 # checks types and ranges; the error names the flag
    batch_shape(config)                  # completions per step, accumulation steps, micro-batch size

schema.py       RunConfig and its sections: every setting with its default, unit and range
presets.py      defaults that the recipes' presets share
batch.py        splits an optimizer step into micro-batches
trl_fields.py   parses `--grpo KEY=VALUE`, and checks it against TRL's GRPOConfig
"""

from lora_grpo.config.batch import batch_shape, micro_batches, prompts_to_read, smaller_micro_batch
from lora_grpo.config.presets import LAPTOP_FOLDER, LAPTOP_MODEL, gpu_preset, laptop_preset, starter_preset
from lora_grpo.config.schema import (
    MIN_VALIDATION_ROWS,
    SELF,
    STARTER,
    UNUSED_BY_SFT,
    AlarmName,
    Backend,
    ConfigChanges,
    DataConfig,
    EvalConfig,
    Invocation,
    ModelConfig,
    PromptStyle,
    ResolvedBackend,
    RunConfig,
    SamplingConfig,
    TeacherConfig,
    TeacherLoss,
    check_fields,
    endless_steps,
    replace,
)
from lora_grpo.config.trl_fields import (
    UNREAD_FIELDS,
    field_of_micro_batches,
    parse_grpo_overrides,
    typed_grpo_overrides,
)
