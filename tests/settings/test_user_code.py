"""The code that settings name: the command that resumes a run names it, and run.json has the digests of its files."""

import shlex

import pytest

from lora_grpo.cli.main import resume_command
from lora_grpo.config.schema import DataConfig, ModelConfig, RunConfig, TeacherConfig
from lora_grpo.errors import UserError
from lora_grpo.rewards import parse_reward_specs, resolve
from lora_grpo.settings import user_files
from lora_grpo.settings.user_code import refuse_unnamed_code

REWARD = "def mine(completions, **columns):\n    return [{value} for _ in completions]\n"


def test_the_command_to_go_on_names_the_code_that_the_run_needs(tmp_path):
    for name in ("mine.py", "task.py"):
        (tmp_path / name).write_text(REWARD.format(value=1.0))
    task = str(tmp_path / "task.py")
    rewards = (f"{tmp_path}/mine.py:mine=1.0", f"{tmp_path}/task.py:mine")
    config = RunConfig(
        output_dir="my run", rewards=rewards, data=DataConfig(task=task), model=ModelConfig(trust_remote_code=True)
    )
    _, _, *arguments = shlex.split(resume_command(config))
    code = ["--task", task, "--rewards", *rewards, "--model.trust-remote-code"]
    assert arguments == [*code, "--resume", "--output-dir", "my run"]


def test_the_code_of_a_teacher_that_a_file_names_is_not_that_of_the_model():
    from_file = RunConfig(model=ModelConfig(trust_remote_code=True), teacher=TeacherConfig(name="theirs/model"))
    by_user = RunConfig(model=ModelConfig(trust_remote_code=True))
    with pytest.raises(UserError, match=r"theirs/model; .* pass --teacher theirs/model --model.trust-remote-code"):
        refuse_unnamed_code(from_file, by_user, "theirs.yaml")
    refuse_unnamed_code(from_file, from_file, "theirs.yaml")


def test_the_files_of_the_user_are_those_of_rewards_and_the_modules_beside_them(tmp_path):
    reward_file = tmp_path / "mine.py"
    helper = tmp_path / "my_scores.py"
    reward_file.write_text("from my_scores import mine\n")
    helper.write_text(REWARD.format(value=1.0))
    specs = (f"{reward_file}:mine", r"pattern:\w+\.py:\d+=1.0")
    digests = user_files(RunConfig(rewards=specs))
    assert list(digests) == [str(reward_file), str(helper)]
    reward, _ = resolve(parse_reward_specs(specs))
    assert reward.function(prompts=["a"], completions=["b"]) == [1.0]

    helper.write_text(REWARD.format(value=0.5))
    digests_after = user_files(RunConfig(rewards=specs))
    assert digests_after[str(reward_file)] == digests[str(reward_file)]
    assert digests_after[str(helper)] != digests[str(helper)]


def test_the_files_of_the_user_include_the_program_of_an_agent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    task = "def load(split): return []\nAGENT = ['uv', 'run', 'agent.py']\n"
    (tmp_path / "mine" / "task.py").write_text(task)
    (tmp_path / "mine" / "agent.py").write_text("import moves\n")
    (tmp_path / "mine" / "moves.py").write_text("best = 1\n")
    digests = user_files(RunConfig(data=DataConfig(task="mine/task.py")))
    assert list(digests) == ["mine/task.py", "mine/agent.py", "mine/moves.py"]
