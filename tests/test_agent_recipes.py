"""The folders of recipes/agents: each plays from an empty folder, in an environment that uv makes."""

import json
import shutil
import time
from pathlib import Path

import pytest

from lora_grpo.audit import audit_agents
from lora_grpo.audit.stand_ins import TEMPLATE, StandIn
from lora_grpo.config import ModelConfig, RunConfig, SamplingConfig, replace
from lora_grpo.data import gold_episodes, load_data
from lora_grpo.models import base_model, prepare_tokenizer
from lora_grpo.tasks import get_task

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "agents"

pytestmark = pytest.mark.registry


@pytest.mark.parametrize("name", ["mcp_tools", "sqlite_tools"])
def test_sft_has_the_tokens_of_the_agent(name, tmp_path):
    """A model that says what the reference conversations say passes, and it has read what SFT trains on."""
    folder = tmp_path / name
    shutil.copytree(RECIPES / name, folder, ignore=shutil.ignore_patterns(".venv", "uv.lock", "__pycache__"))
    config = replace(RunConfig(), {"data": {"task": str(folder / "sft.py")}, "model": {"chat_template": TEMPLATE}})
    tokenizer = base_model.load_tokenizer(ModelConfig())
    prepare_tokenizer(tokenizer, config, None)
    sft_rows = load_data(config).train[:20]
    references = gold_episodes(tokenizer, sft_rows)

    gold = get_task(str(folder / "sft.py")).module.gold
    reference_model = StandIn("reference", "", lambda asked: text_of(gold(asked.row)[asked.call_number]))
    task = get_task(str(folder / "task.py"))
    stage = audit_agents._Stage(task.agent, SamplingConfig(), tmp_path / "agent.log")
    rows = [{**row, "task": str(folder / "task.py")} for row in task.load("train")[:20]]
    try:
        episodes = stage.play(reference_model, rows, time.monotonic() + 300)
    finally:
        stage.pool.close()

    for episode, reference in zip(episodes, references, strict=True):
        assert not episode.played.failure
        assert episode.played.verdict.passed
        last_call = episode.played.calls[-1]
        conversation = tokenizer.decode(last_call.all_ids)
        assert conversation == tokenizer.decode(reference.prompt_ids + reference.token_ids)


def text_of(message):
    """Return a turn as the model writes it."""
    for call in message.get("tool_calls", ()):
        return f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
    return message["content"]
