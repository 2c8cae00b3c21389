"""A model: what its name stands for, and the policy that is loaded from it.

    spec = resolve("outputs/run", ModelFlags())   # a run, an adapter, a model folder or a Hub id
    policy = load_policy(config)                  # frozen base model + LoRA adapter, tokenizer, eos_token_ids

A ModelSpec says what a name stands for: files of a base, an adapter and a tokenizer; nothing is loaded. A Policy is
loaded: y = W x + (alpha / r) * B (A x) in every target layer, with W frozen in 4 or 16 bits and A and B trained.

Files, before anything is loaded:
model_files.py     locates a model's files: local folders, the Hub cache, and files still to be downloaded
adapter.py         reads adapter_config.json
adapter_formats.py gives the adapters of other tools in PEFT's format
architectures.py   which models can be trained, decided from config.json
target.py          resolves a name to a ModelSpec: base model, adapter, tokenizer, run
start_adapter.py   --lora.from: checks the adapter that a run starts from, and copies it into the run
teacher.py         --teacher: what the name stands for, and whether it can teach this model

Loaded models:
engines.py         sets up torch and silences libraries; reports why an engine did not start
base_model.py      loads the base model in 4 or 16 bits, and its tokenizer
stop_tokens.py     the tokens that end a completion
tokenizers.py      the tokenizer of a model spec, its chat template, and the tokens that end its completions
policy.py          loads the policy of a run; saves and loads an adapter
peft_policy.py     the base with an adapter, by transformers, bitsandbytes and PEFT
teacher_model.py   loads a teacher: an adapter beside the trained one, or a second model
unsloth_policy.py  the same by Unsloth, which also starts vLLM
"""

from lora_grpo.models import architectures, base_model, engines, model_files, stop_tokens, unsloth_policy
from lora_grpo.models.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PATTERNS,
    SELECTION,
    SavedAdapter,
    adapter_sha256,
    features,
    read_adapter,
)
from lora_grpo.models.adapter_formats import holds_adapter, nested_adapter, origin_of, peft_folder
from lora_grpo.models.architectures import TRAINABLE, in_vllm
from lora_grpo.models.policy import Policy, check_engines, load_adapter, load_policy, load_tokenizer, save_adapter
from lora_grpo.models.start_adapter import keep_start, prepare_tokenizer, start_folder, with_start
from lora_grpo.models.target import (
    BASE,
    BEST,
    START,
    ModelFlags,
    ModelSpec,
    choose_adapter,
    resolve,
    run_of,
)
from lora_grpo.models.teacher import Teacher, check_teacher_tokenizer, find_teacher
from lora_grpo.models.teacher_model import TeacherModel, load_teacher
from lora_grpo.models.tokenizers import completion_ends, tokenizer_of
