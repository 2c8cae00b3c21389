"""Build the bundled starter model from scratch: tokenizer, pretraining, evaluation in NF4, and model card."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from starter_model import code_families, code_styles, corpus, pretraining
from starter_model.families import FAMILIES
from starter_model.problems import DIFFICULTIES

from lora_grpo.flags import read_flags
from lora_grpo.starter import model_path
from lora_grpo.tasks import sources

TASKS = {"starter": "xml", "starter-code": "code"}
"""Prompt style of each task that the model is evaluated on."""


@dataclass(frozen=True)
class Options:
    """Settings of the build."""

    output: Path = field(default_factory=model_path)
    """Output folder. It is replaced at the end."""
    seed: int = 0
    """Seed of the corpus and of the weights."""
    steps: int = 2750
    """Optimizer steps of pretraining."""
    settling_steps: int = 250
    """Optimizer steps of the last phase, which sets the final shares of the styles."""
    batch_size: int = 32
    """Documents per step."""
    learning_rate: float = 2e-3
    """Peak learning rate of AdamW, with 50 warmup steps and cosine decay to 1/20."""
    settling_learning_rate: float = 5e-4
    """Peak learning rate of the settling steps, which use a new AdamW optimizer."""
    eval_problems: int = 480
    """Number of eval problems per task for the evaluation in NF4."""
    threads: int = 2
    """CPU threads."""


def measure(folder: Path, count: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the accuracy of the NF4-quantized model by task: "sampled" (temperature 1) and "greedy"."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    from lora_grpo.tasks import get_task, grade_all

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)
    model.eval()
    torch.manual_seed(seed)
    figures: dict[str, dict[str, float]] = {}
    for name, style in TASKS.items():
        rows = sources.sample(get_task(name).load("eval"), count, seed)
        prompts = [corpus.chat_prompt(row["question"], style) for row in rows]
        figures[name] = {}
        for how, settings in (
            ("sampled", {"do_sample": True, "temperature": 1.0, "top_k": 0}),
            ("greedy", {"do_sample": False}),
        ):
            texts: list[str] = []
            for start in range(0, count, 80):
                inputs = tokenizer(prompts[start : start + 80], return_tensors="pt", padding=True)
                with torch.inference_mode():
                    output = model.generate(**inputs, max_new_tokens=64, **settings)
                texts += tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
            figures[name][how] = sum(verdict.passed for verdict in grade_all(name, texts, rows)) / count
    return figures


def card(options: Options, parameters: int, seconds: float, figures: dict[str, dict[str, float]]) -> str:
    """Return the text of the model's README."""
    words = [corpus.mixture_name(family, difficulty) for family in FAMILIES for difficulty in DIFFICULTIES]
    code = [code_styles.mixture_name(family) for family in code_families.FAMILIES]
    mixtures = "\n".join(
        f"| {name} | {words.count(name)} | {code.count(name)} | "
        + " | ".join(f"{share:.0%}, {late:.0%}" for share, late in zip(shares, corpus.SETTLED[name], strict=True))
        + " |"
        for name, shares in corpus.MIXTURES.items()
    )
    stages = ((pretraining.PHASES, options.steps), (pretraining.SETTLING, options.settling_steps))
    phases = "\n".join(
        f"| {round(phase.steps * steps)} | {phase.code:.0%} | {phase.drills:.0%} | {phase.practice:.0%} |"
        for stage, steps in stages
        for phase in stage
    )
    accuracy = "\n".join(f"| `{name}` | {of['sampled']:.3f} | {of['greedy']:.3f} |" for name, of in figures.items())
    return f"""---
license: apache-2.0
language: en
library_name: transformers
tags: [grpo, toy]
---
# lora-grpo starter

A Qwen2-shaped model with {parameters:,} parameters, pretrained from scratch to demonstrate GRPO on a
laptop. It answers the generated word problems of the `starter` task, writes the tiny Python functions of
the `starter-code` task, and can do nothing else.

It was **made to be improvable**: it has three answer styles, and the likeliest one is often not the best. A gain on it
shows that training works, not how much other models would gain.

| style | word problem | code problem |
|---|---|---|
| careful | every step in the requested format | the correct function in a Python block |
| careless | a guess in the requested format, or no last step | a function that prints, has a bug or returns nothing |
| unformatted | a number without a format | prose |

Share of each style, and the number of kinds of word problem (family × difficulty) and families of code problem with
that mixture. The second share applies to code problems in the last phase:

| mixture | word kinds | code families | {" | ".join(corpus.STYLES)} |
|---|---|---|---|---|---|
{mixtures}

Phases of pretraining. "Practice" documents are always careful; the others follow the table above:

| steps | code | drills (bare sums), share of non-code | practice, share of the rest |
|---|---|---|---|
{phases}

- Built by `python tools/build_starter.py --steps {options.steps} --settling-steps {options.settling_steps} \
--seed {options.seed}` in {seconds / 60:.0f} \
minutes on {options.threads} CPU threads: {options.batch_size} documents a step, AdamW with peak learning rate \
{options.learning_rate:g}, in the last phase a new one with {options.settling_learning_rate:g}.
- No document is about a problem of the eval split; a hash of numbers and function bodies separates the splits.

Accuracy of the NF4-quantized model on {options.eval_problems} eval problems of each task:

| task | sampled at temperature 1 | greedy |
|---|---|---|
{accuracy}
"""


def replace_folder(source: Path, target: Path) -> None:
    """Replace the target with a finished folder."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def main(options: Options) -> None:
    """Build the model, evaluate it, and write the folder."""
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    for name, shares in corpus.MIXTURES.items():
        print(f"{name}: " + ", ".join(f"{m} {share:.0%}" for m, share in zip(corpus.STYLES, shares, strict=True)))
    started = time.perf_counter()
    tokenizer = pretraining.build_tokenizer(options.seed)
    model = pretraining.build_model(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(tokenizer)} tokens, {parameters:,} parameters")
    pretraining.pretrain(model, tokenizer, options.seed, options.steps, options.batch_size, options.learning_rate)
    pretraining.pretrain(
        model,
        tokenizer,
        options.seed + 1,
        options.settling_steps,
        options.batch_size,
        options.settling_learning_rate,
        pretraining.SETTLING,
    )
    seconds = time.perf_counter() - started

    target = options.output.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        pretraining.save(model, tokenizer, folder)
        figures = measure(folder, options.eval_problems, options.seed)
        (folder / "README.md").write_text(card(options, parameters, seconds, figures), encoding="utf-8")
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.chmod(0o644)
        replace_folder(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, accuracy in figures.items():
        how = ", ".join(f"{how} {figure:.3f}" for how, figure in accuracy.items())
        print(f"NF4 on {options.eval_problems} eval problems of {name}: {how}")
    print(f"wrote {target}; next: read its README.md")


if __name__ == "__main__":
    main(read_flags(Options, sys.argv[1:], __doc__))
