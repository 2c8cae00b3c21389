"""GRPO as others do it, on the rows, rewards and settings of one of our runs.

    python tools/on_card/rivals.py trl LINES FLAGS        # TRL's GRPOTrainer with its own vLLM in the same process
    python tools/on_card/rivals.py unsloth LINES FLAGS    # Unsloth's model and trainer, as in its notebooks

FLAGS are those of recipes/gsm8k_lora.py. LINES is a JSON Lines file with what TRL logs for each step, its
`time/rollouts` and `time/training`, and torch's peak so far. Without a GPU, both sample with transformers.
"""

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lora_grpo.cli import parse
from lora_grpo.config import RunConfig, batch_shape
from lora_grpo.data import fit_data, load_data, prompt_order
from lora_grpo.hardware import use_one_gpu
from lora_grpo.models import engines, model_files, unsloth_policy
from lora_grpo.rewards import graded, parse_reward_specs, resolve

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gsm8k_lora.py"
_UNSLOTH_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    rival, lines, *flags = sys.argv[1:]
    use_one_gpu()
    presets = runpy.run_path(str(RECIPE))["PRESETS"]
    config, _ = parse(flags, recipe="gsm8k_lora", description="", presets=presets)
    if rival == "unsloth":  # before TRL, which it patches; with the variables that it needs on this GPU
        unsloth_policy.import_unsloth()
    else:
        engines.hide_flashinfer()
    train(rival, config, Path(lines))


def train(rival: str, config: RunConfig, lines: Path) -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = torch.cuda.is_available()
    if rival == "unsloth":
        model, tokenizer = load_unsloth(config)
        adapter = None
    else:
        model = model_files.source(config.model.name)
        tokenizer = AutoTokenizer.from_pretrained(model)
        adapter = LoraConfig(
            task_type="CAUSAL_LM", r=config.lora.rank, lora_alpha=config.lora.alpha, target_modules="all-linear"
        )
    rows = fit_data(load_data(config), tokenizer, config).train
    order = prompt_order(len(rows), config.train.max_steps * config.train.prompts_per_step, config.seed)
    rewards = resolve(parse_reward_specs(config.rewards))

    arguments: dict[str, Any] = {
        "output_dir": config.output_dir,
        "max_steps": config.train.max_steps,
        "per_device_train_batch_size": config.train.micro_batch_size,
        "gradient_accumulation_steps": batch_shape(config).accumulation_steps,
        "num_generations": config.sampling.num_generations,
        "max_completion_length": config.sampling.max_completion_tokens,
        "temperature": config.sampling.temperature,
        "learning_rate": config.train.learning_rate,
        "lr_scheduler_type": config.train.lr_scheduler,
        "warmup_steps": config.train.warmup_steps,
        "max_grad_norm": config.train.max_grad_norm,
        "loss_type": "dapo",
        "beta": config.train.beta,
        "optim": config.train.optimizer,
        "reward_weights": [reward.weight for reward in rewards],
        "gradient_checkpointing": config.train.gradient_checkpointing,
        "shuffle_dataset": False,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": config.seed,
    }
    if on_gpu:
        arguments |= {"use_vllm": True, "vllm_mode": "colocate"}
        arguments["vllm_max_model_length"] = config.model.max_sequence_tokens
    if rival == "trl":
        arguments["model_init_kwargs"] = {"dtype": "bfloat16" if on_gpu else "float32"}

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(rows).select(order),
        reward_funcs=[graded(config.data.task, rows, reward.function) for reward in rewards],
        peft_config=adapter,
    )
    measure(trainer, lines)
    trainer.train()


def load_unsloth(config: RunConfig) -> tuple[Any, Any]:
    """Return the model with a new adapter, and its tokenizer, as Unsloth's notebooks for GRPO make them."""
    import torch
    from unsloth import FastLanguageModel

    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {"dtype": torch.float32}
    if on_gpu:
        options = {"fast_inference": True, "max_lora_rank": config.lora.rank, "gpu_memory_utilization": 0.6}
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_files.source(config.model.name),
        max_seq_length=config.model.max_sequence_tokens,
        load_in_4bit=config.model.bits == 4,
        use_exact_model_name=True,  # otherwise Unsloth looks for its own copy of the model on the internet
        **options,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        lora_dropout=0,
        target_modules=_UNSLOTH_TARGETS,
        use_gradient_checkpointing="unsloth" if config.train.gradient_checkpointing else False,
        random_state=config.seed,
    )
    return model, tokenizer


def measure(trainer: Any, lines: Path) -> None:
    """Write a line for each step that the trainer logs."""
    import torch
    from transformers import TrainerCallback

    spent = {"rollouts": 0.0, "rewards": 0.0}

    def time_calls(name: str, phase: str) -> None:
        method = getattr(trainer, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = method(*args, **kwargs)
            spent[phase] += time.perf_counter() - started
            return result

        setattr(trainer, name, timed)

    time_calls("_generate", "rollouts")
    time_calls("_calculate_rewards", "rewards")
    completions = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps

    class Lines(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "step_time" not in logs:
                return
            line = {**logs, **{f"time/{phase}": seconds for phase, seconds in spent.items()}}
            line["time/training"] = logs["step_time"] - sum(spent.values())
            line["rollouts/tokens_per_second"] = logs["completions/mean_length"] * completions / spent["rollouts"]
            spent.update(rollouts=0.0, rewards=0.0)
            if torch.cuda.is_available():
                line["torch_peak_gib"] = round(torch.cuda.max_memory_allocated() / 1024**3, 2)
            with lines.open("a", encoding="utf-8") as file:
                print(json.dumps(line), file=file)

    trainer.add_callback(Lines())


if __name__ == "__main__":
    main()
