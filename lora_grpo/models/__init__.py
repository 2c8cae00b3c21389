"""Models: resolve names, load the base model and the trainable policy.

policy = load_policy(config)               # frozen base model + LoRA adapter, tokenizer, eos_token_ids
spec = resolve("outputs/run", ModelFlags()) # a run, an adapter, a model folder or a Hub id

architectures.py  which models can be trained, decided from config.json
target.py         resolves a name to a ModelSpec: base model, adapter, tokenizer, run
model_files.py    locates a model's files: local folders, the Hub cache, and files still to be downloaded
tokenizers.py     the tokenizer of a model spec, its chat template, and the tokens that end its completions
base_model.py     sets up torch, loads the base model and its tokenizer; reports why an engine did not start
adapter.py        reads adapter_config.json
start_adapter.py  --lora.from: checks the adapter that a run starts from, and copies it into the run
policy.py         loads the base model with an adapter, using PEFT or Unsloth; saves and loads an adapter
"""

from lora_grpo.models import architectures, base_model, model_files
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
from lora_grpo.models.architectures import NOT_IN_VLLM, TRAINABLE
from lora_grpo.models.policy import Policy, check_model, load_adapter, load_policy, load_tokenizer, save_adapter
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
    source_adapter,
)
from lora_grpo.models.tokenizers import completion_ends, tokenizer_of
