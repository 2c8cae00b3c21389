"""A few real training steps on the embedded model."""

import copy
import functools
import json

from lora_grpo.config import replace
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.data import load_data, split_validation
from lora_grpo.models.policy import load_policy
from lora_grpo.runs import claim_run, open_run
from lora_grpo.sampling.build import build_sampler
from lora_grpo.tasks import get_task, sources
from lora_grpo.training import prepare_training, train

TINY = {
    "model": {"engine": "peft"},
    "lora": {"rank": 4, "alpha": 8},
    "data": {"task": "starter", "train_limit": 8, "eval_limit": 4},
    "sampling": {"num_generations": 4, "max_completion_tokens": 32},
    "rewards": ("xml_tag_count=0.5", "near_length:60"),
    "train": {
        "max_steps": 3,
        "prompts_per_step": 2,
        "micro_batch_size": 4,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "checkpoint_steps": 2,
        "completions_steps": 2,
    },
}


@functools.cache
def starter_data():
    """The starter's rows: a second to generate, and the same for every run that asks for no others."""
    return load_data(replace(RunConfig(), TINY))


def write_starter_files(folder):
    """Write 8 rows to train on and 4 to evaluate, and return the flags of a recipe that reads them.

    All rows of the starter task take longer to generate than training on these few.
    """
    flags = []
    for split, size in (("train", 8), ("eval", 4)):
        path = folder / f"{split}.jsonl"
        lines = []
        for row in sources.sample(get_task("starter").load(split), size, 0):
            lines.append(json.dumps({"question": row["question"], "answer": row["answer"]}) + "\n")
        path.write_text("".join(lines))
        flags += [f"--data.{split}", path]
    return flags


def begin_tiny(folder, invocation=None, *, validates=False, **changes):
    """Return a run that is ready to train."""
    config = replace(replace(RunConfig(output_dir=str(folder)), TINY), changes)
    data = load_data(config) if "data" in changes else copy.deepcopy(starter_data())
    claim_run(config, invocation or Invocation())
    run = open_run(config, invocation or Invocation(), "test", data.record)
    policy = load_policy(config)
    rows = data.train
    validation_rows = []
    if validates:
        rows, validation_rows = split_validation(data.train, config)
    return prepare_training(run, policy, rows, build_sampler(policy, config), validation_rows)


def run_tiny(folder, invocation=None, *, before=None, **changes):
    """Train as a recipe does. `before` is called with the `Training` before it begins."""
    training = begin_tiny(folder, invocation, **changes)
    training.run.begin(training.policy.record)
    if before:
        before(training)
    train(training)
    return training.run, training.policy
