"""The code that settings name: the command that resumes a run names it, and run.json has the digests of its files."""

import shlex

from lora_grpo.cli.main import resume_command
from lora_grpo.config.schema import DataConfig, ModelConfig, RunConfig
from lora_grpo.rewards import parse_reward_specs, resolve
from lora_grpo.settings import user_files


def test_the_command_to_go_on_names_the_code_that_the_run_needs(tmp_path):
    for name in ("mine.py", "task.py"):
        (tmp_path / name).write_text("def one(completions, **columns):\n    return [1.0 for _ in completions]\n")
    rewards, task = (f"{tmp_path}/mine.py:one=1.0", f"{tmp_path}/task.py:one"), str(tmp_path / "task.py")
    config = RunConfig(
        output_dir="my run", rewards=rewards, data=DataConfig(task=task), model=ModelConfig(trust_remote_code=True)
    )
    words = shlex.split(resume_command(config))
    named = ["--task", task, "--rewards", *rewards, "--model.trust-remote-code"]
    assert words[2:] == [*named, "--resume", "--output-dir", "my run"]


def test_the_files_of_the_user_are_those_of_rewards_and_the_modules_beside_them(tmp_path):
    rewards, helper = tmp_path / "mine.py", tmp_path / "my_scores.py"
    rewards.write_text("from my_scores import mine\n")
    helper.write_text("def mine(completions, **columns):\n    return [1.0 for _ in completions]\n")
    spec = (f"{rewards}:mine", r"pattern:\w+\.py:\d+=1.0")
    before = user_files(RunConfig(rewards=spec))
    assert [*before] == [str(rewards), str(helper)]
    (reward, _) = resolve(parse_reward_specs(spec))
    assert reward.function(prompts=["a"], completions=["b"]) == [1.0]
    helper.write_text(helper.read_text().replace("1.0", "0.5"))
    after = user_files(RunConfig(rewards=spec))
    assert after[str(rewards)] == before[str(rewards)] and after[str(helper)] != before[str(helper)]
