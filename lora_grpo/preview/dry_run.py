"""`--dry-run`: the settings, one prompt and the rewards of its reference answer, without the weights of a model."""

from pathlib import Path
from typing import Any

from lora_grpo import console
from lora_grpo.config import RunConfig
from lora_grpo.data import Data, gold_episodes, teacher_prompt_text
from lora_grpo.grading import Row
from lora_grpo.prompts import chat
from lora_grpo.rewards import Scorer, parse_reward_specs, resolve
from lora_grpo.rollouts import has_agent
from lora_grpo.tasks import get_task


def show_settings(config: RunConfig) -> None:
    """Print the settings as YAML for `--config`."""
    import yaml

    console.result(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))


def dry_run(config: RunConfig, data: Data, tokenizer: Any) -> None:
    """Print one rendered prompt, and the rewards of its reference answer. The rows fit the context."""
    rows = data.train
    scorer = Scorer(resolve(parse_reward_specs(config.rewards)), tokenizer, rows)
    if has_agent(rows[0]):
        console.result(f"--- row {rows[0]['id']}, for which the agent makes the prompts\n{rows[0]['question']}")
    else:
        console.result(f"--- prompt of {rows[0]['id']}\n{chat.render_row(tokenizer, rows[0])}")
    if config.teacher.reads_own_prompt:
        console.result(f"--- prompt of the teacher\n{teacher_prompt_text(tokenizer, rows[0])}")
    if has_agent(rows[0]):
        console.result("--- no reference answer: --preview plays episodes of the agent")
    elif get_task(config.data.task).has_gold:
        _show_reference_answer(config, rows[0], tokenizer, scorer)
    else:
        console.result(f"--- no reference answer: {Path(config.data.task).name} has no gold(row)")
    console.result(f"--- {len(rows)} training rows, {len(data.eval)} evaluation rows; nothing was trained")


def _show_reference_answer(config: RunConfig, row: Row, tokenizer: Any, scorer: Scorer) -> None:
    """Print the reference answer of a row, and its rewards or, with SFT, the number of tokens in its loss."""
    [gold] = gold_episodes(tokenizer, [row])
    console.result(f"--- reference answer\n{gold.text}")
    length = len(gold.token_ids)
    limit = config.sampling.max_completion_tokens
    if length > limit:
        console.note(f"warning: its {length} tokens exceed --sampling.max-completion-tokens {limit}")
    if config.method == "sft":
        console.result(f"--- {sum(gold.loss_mask)} tokens with its end: the loss is on these, not on the prompt")
        return

    batch = scorer.score_episodes([gold])
    console.result("--- its rewards")
    for reward in scorer.rewards:
        value = batch.values[0][reward.name]
        text = "not gradable"
        if value is not None:
            text = f"{value:g} of 1, weight {reward.weight:g}"
        console.result(f"{reward.name:24} {text}")
    total = batch.rewards[0]
    text = "not gradable" if total is None else f"{total:g}"
    console.result(f"{'sum':24} {text}")
