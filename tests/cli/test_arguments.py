"""The command line of a recipe: which setting decides, what is refused, and what runs code."""

import json
import re
import runpy
import signal
from pathlib import Path

import pytest
from helpers.flags import flag_names

from lora_grpo.cli.arguments import parse
from lora_grpo.cli.main import run_command
from lora_grpo.config import endless_steps, replace, starter_preset
from lora_grpo.config.schema import RunConfig
from lora_grpo.errors import Interrupted, RunError, UserError
from lora_grpo.settings import changed_settings

RECIPE = Path(__file__).parents[2] / "recipes" / "gsm8k_lora.py"
PRESETS = runpy.run_path(str(RECIPE))["PRESETS"]


@pytest.fixture(autouse=True)
def no_gpu_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def read(*arguments, presets=PRESETS):
    """Return the settings and the invocation of a command line."""
    return parse(arguments, recipe="gsm8k_lora", description="", presets=presets)


def config(*arguments):
    """Return the settings that a command line asks for."""
    return read(*arguments)[0]


def refusal(*arguments):
    """Return the one line with which a command line is refused."""
    with pytest.raises(UserError) as error:
        read(*arguments)
    message = str(error.value)
    assert "\n" not in message
    assert message.strip()
    return message


def settings(text, name="settings.yaml"):
    """Write a file of settings, and return the arguments that name it."""
    Path(name).write_text(text)
    return ["--config", name]


def run_folder(folder, **changes):
    """Write what a run leaves of its settings."""
    Path(folder).mkdir(parents=True)
    settings_of_run = replace(config("--output-dir", folder), changes).to_dict()
    record = {"lora_grpo_run": 1, "recipe": "gsm8k_lora", "config": settings_of_run}
    (Path(folder) / "run.json").write_text(json.dumps(record))


# Which of preset, file and flag decides


def test_without_arguments_the_hardwares_preset_decides():
    chosen, invocation = read()
    assert chosen.preset == "starter"
    assert chosen.output_dir == "outputs/gsm8k_lora"
    assert chosen.train.max_steps == PRESETS["starter"]["train"]["max_steps"]
    assert chosen.rewards == PRESETS["starter"]["rewards"]
    assert chosen.lora == RunConfig().lora
    assert not (invocation.dry_run or invocation.resume or invocation.overwrite)


def test_changed_settings_are_those_that_differ_from_the_preset():
    file = settings("train: {max_steps: 7}")
    changed = config("--preset", "starter", "--train.learning-rate", "5e-4", "--eval.k", "2", *file)
    assert changed_settings(changed, PRESETS) == {"train.max_steps": 60, "eval.k": [1, 4]}


def test_a_folder_the_presets_own_values_and_the_rewards_of_a_task_file_are_no_changed_settings():
    assert changed_settings(config("--preset", "starter", "--output-dir", "mine"), PRESETS) == {}
    assert changed_settings(config("--preset", "12gb", "--dry-run"), PRESETS) == {}
    Path("mine.py").write_text("rewards = ['check=2']\ndef load(split): ...\ndef check(completion, row): ...\n")
    assert changed_settings(config("--task", "mine.py"), PRESETS) == {"data.task": "starter"}


def test_what_was_chosen_for_a_run_is_no_changed_setting_when_it_is_resumed():
    run_folder("run", model={"engine": "peft"}, sampling={"backend": "transformers"}, seed=7)
    begun = json.loads(Path("run", "run.json").read_text()) | {"changed_settings": {"seed": 0}}
    resumed = config("--resume", "--output-dir", "run", "--train.keep-checkpoints", "5")
    assert resumed.model.engine == "peft"
    assert set(changed_settings(resumed, PRESETS, begun)) == {"seed", "train.keep_checkpoints"}


TASK_WITH_A_PRESET = """
load = gold = check = print
REWARDS = ("coin_flip=2",)
PRESETS = {
    "starter": {
        "model": {"bits": 16},
        "sampling": {"max_completion_tokens": 9},
        "train": {"max_steps": 3, "micro_batch_size": 2},
    }
}
"""
SFT_PRESETS = runpy.run_path(str(RECIPE.with_name("sft_lora.py")))["PRESETS"]


def sft(*arguments):
    return parse(arguments, recipe="sft_lora", description="", presets=SFT_PRESETS, method="sft")[0]


def test_sft_has_the_model_and_the_limits_of_the_preset_in_the_task_file():
    """GRPO continues from its adapter, with the same base, chat template and limits."""
    Path("mine.py").write_text(TASK_WITH_A_PRESET)
    bundled = sft("--preset", "starter")
    mine = sft("--preset", "starter", "--task", "mine.py")
    assert (mine.model.bits, mine.sampling.max_completion_tokens) == (16, 9)
    assert mine.train == replace(bundled.train, {"micro_batch_size": 2})  # and its own steps
    assert (mine.rewards, bundled.model.bits) == (bundled.rewards, "auto")
    assert sft("--preset", "laptop", "--task", recipe_file("sql_lora"), "--plan").model.chat_template == "qwen2_5"


def test_a_flag_of_sft_goes_over_the_preset_in_the_task_file():
    Path("mine.py").write_text(TASK_WITH_A_PRESET)
    mine = ("--preset", "starter", "--task", "mine.py")
    assert sft(*mine, "--model.bits", "4").model.bits == 4
    shorter = sft(*mine, "--train.max-steps", "2")
    assert changed_settings(shorter, SFT_PRESETS) == {"data.task": "starter", "train.max_steps": 60}


def test_sft_has_the_settings_that_the_task_file_has_for_it():
    Path("mine.py").write_text(TASK_WITH_A_PRESET + 'SFT_PRESETS = {"starter": {"train": {"max_steps": 5}}}')
    task = ("--preset", "starter", "--task", "mine.py")
    mine = sft(*task)
    assert (mine.model.bits, mine.train.max_steps, mine.train.micro_batch_size) == (16, 5, 2)
    assert sft(*task, "--train.max-steps", "7").train.max_steps == 7
    assert changed_settings(mine, SFT_PRESETS) == {"data.task": "starter"}
    assert config(*task).train.max_steps == 60


def test_an_unknown_setting_for_sft_in_the_task_file_is_refused():
    Path("mine.py").write_text(TASK_WITH_A_PRESET + 'SFT_PRESETS = {"starter": {"train": {"max_step": 5}}}')
    with pytest.raises(UserError, match=r"unknown key train.max_step; did you mean 'train.max_steps'\?"):
        sft("--preset", "starter", "--task", "mine.py")


def test_grpo_has_the_rewards_of_the_task_file_and_not_its_preset():
    Path("mine.py").write_text(TASK_WITH_A_PRESET)
    grpo = config("--preset", "starter", "--task", "mine.py")
    assert (grpo.model.bits, grpo.rewards) == ("auto", ("coin_flip=2",))


def test_micro_batches_that_do_not_divide_the_step_of_sft_are_smaller():
    """Those of the recipe have 32 completions; a step of SFT has 16 reference answers."""
    assert sft("--preset", "starter", "--task", recipe_file("guess_lora")).train.micro_batch_size == 16


def recipe_file(name):
    return str(RECIPE.with_name(f"{name}.py"))


def your_task(*arguments):
    return parse(arguments, recipe="your_task", description="", presets={"starter": starter_preset()})[0]


def test_a_recipe_is_a_task_from_any_folder():
    guess = your_task("--task", "recipes/guess_lora.py")
    assert Path(guess.data.task).is_file() and guess.output_dir == "outputs/guess_lora"
    assert your_task("--task", "gsm8k", "--plan").output_dir == "outputs/gsm8k"


def test_a_file_that_is_no_recipe_is_no_task(tmp_path):
    for path in ("recipes/unknown.py", str(tmp_path / "recipes" / "guess_lora.py")):  # another folder is not ours
        with pytest.raises(UserError):
            your_task("--task", path)


def test_a_flag_goes_over_the_file_and_the_file_over_the_preset():
    file = settings("train: {max_steps: 7, prompts_per_step: 4, micro_batch_size: 64}\nseed: 3\n")
    chosen = config(*file, "--seed", "9", "--train.prompts-per-step", "8")
    assert (chosen.seed, chosen.train.max_steps, chosen.train.prompts_per_step) == (9, 7, 8)
    assert chosen.train.learning_rate == PRESETS["starter"]["train"]["learning_rate"]
    # Where the file stands among the flags does not matter.
    assert config("--seed", "9", *file, "--train.prompts-per-step", "8") == chosen
    assert config("--seed", "9", "--config=settings.yaml", "--train.prompts-per-step=8") == chosen


def test_the_file_may_name_the_preset_and_a_flag_may_change_it():
    presets = {"starter": PRESETS["starter"], "other": {"train": {"max_steps": 5}}}
    file = settings("preset: other\n")
    assert read(*file, presets=presets)[0].train.max_steps == 5
    assert read(*file, "--preset=starter", presets=presets)[0].train.max_steps == 60


def test_a_flag_that_no_task_of_the_run_reads_is_refused():
    Path("mine.py").write_text(TASK_WITH_A_PRESET)
    turns = ("--sampling.max-turn-tokens", "8")
    assert "there are none in gsm8k; " in refusal(*turns, "--task", "gsm8k", "--preset", "starter")
    guess = your_task("--task", "recipes/guess_lora.py", *turns)
    assert guess.sampling.max_turn_tokens == 8
    style = ("--data.prompt-style", "xml")
    assert "--data.prompt-style has no effect on the prompts of mine; " in refusal("--task", "mine.py", *style)
    assert config("--task", "mine.py", "--data.eval-task", "starter", *style).data.prompt_style == "xml"

    # A file may be of another task.
    file = settings("sampling: {max_turn_tokens: 8}\ndata: {prompt_style: xml}\n")
    assert config(*file, "--task", "mine.py").sampling.max_turn_tokens == 8


def test_a_method_in_a_file_that_is_not_the_recipes_is_refused():
    assert "method: sft" in refusal(*settings("method: sft\n"))
    run_folder("old", method="sft")
    assert config("--config", "old/run.json").method == "grpo"
    assert sft(*settings("method: grpo\n"), "--preset", "starter").method == "sft"  # settings of GRPO are dropped


def test_two_actions_are_refused():
    assert "--dry-run and --plan cannot be combined" in refusal("--plan", "--dry-run")


# Spelling


def test_a_negative_number_is_a_value_and_not_a_flag():
    chosen = config("--grpo", "top_k=-1", "--grpo=epsilon=0.1", "--rewards", "correct_answer=-1")
    assert chosen.grpo == ("top_k=-1", "epsilon=0.1")
    assert chosen.rewards == ("correct_answer=-1",)
    for arguments in (["--seed", "-1"], ["--seed=-1"], settings("seed: -1\n")):
        assert re.search("-1'?; expected a value greater than or equal to 0", refusal(*arguments))


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.max-step", "4"], "--train.max-step; did you mean '--train.max-steps'?"),
        (["--learning-rate", "1"], "did you mean '--train.learning-rate'?"),
        (["--model.engine", "fast"], "--model.engine is 'fast'; expected 'auto', 'peft' or 'unsloth'"),
        (["--seed", "x"], "--seed is 'x'; expected a valid integer"),
        (["--model.name", "outputs/run"], "--model.name outputs/run does not exist"),
        (["--hours", "0.01"], "--hours is '0.01'; expected a value greater than or equal to 0.02"),
        (["--hours", "1", "--train.lr-scheduler", "cosine"], "--hours alone does not set it; pass --train.max-steps"),
        (["--hours", "1", "--data.filter-by-difficulty"], "--hours alone does not set it; pass --train.max-steps too"),
        (["--seed"], "--seed: expected one argument"),
        (["--output-dir", ""], "--output-dir is empty"),
        (["--config="], "--config is empty"),
        (["--output-dir", "outputs", "--model.name", "outputs/base"], "--model.name outputs/base is inside"),
        (["--preset", "9gb"], "unknown preset '9gb'; expected auto, starter, laptop, 8gb"),
        (["--preset", "16gb"], "preset 16gb needs a GPU with 16 GB (CUDA_VISIBLE_DEVICES"),
        (["--resume", "--overwrite"], "pass one of them"),
        (["--sampling.server-folder", "/tmp"], "--sampling.server-folder needs --sampling.server-url"),
        (
            ["--sampling.server-url", "http://a", "--sampling.backend", "transformers"],
            "--sampling.server-url needs vLLM",
        ),
        (
            ["--sampling.engine-sleep", "--sampling.backend", "transformers"],
            "--sampling.engine-sleep needs vLLM; leave",
        ),
        (["--sampling.no-engine-sleep", "--sampling.backend", "transformers"], "--sampling.no-engine-sleep needs vLLM"),
        (["--sampling.reproducible", "--sampling.backend", "transformers"], "--sampling.reproducible needs vLLM"),
        (
            ["--grpo", "vllm_importance_sampling_mode=token_mask", "--sampling.backend", "transformers"],
            "--grpo vllm_importance_sampling_mode needs vLLM; leave",
        ),
        (["--sampling.reproducible", "--sampling.server-url", "http://a"], "--sampling.reproducible has no effect on"),
        (["--sampling.engine-sleep", "--sampling.server-url", "http://a"], "--sampling.engine-sleep has no effect on"),
        (["--data.task", "humaneval", "--data.eval-task", "mbpp"], "--data.task humaneval has no training split"),
        (["--data.train", "a.jsonl"], "--data.train and --data.eval need each other"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments, message, capsys):
    Path("outputs/base").mkdir(parents=True)
    assert message in refusal(*arguments)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "settings.yaml contains NoneType; expected e.g. `train: {max_steps: 60}`"),
        ("seed: [\n", "--config settings.yaml cannot be read: "),
        ("sead: 1\n", "settings.yaml: unknown key sead; did you mean 'seed'?"),
        ("train: {max_stepz: 1}\n", "settings.yaml: unknown key train.max_stepz; did you mean 'train.max_steps'?"),
        ("resume: true\n", "settings.yaml: unknown key resume"),
        ("train: 5\n", "settings.yaml: train is 5; expected a mapping of settings"),
        ("train: {max_steps: many}\n", "settings.yaml: --train.max-steps is 'many'; expected a valid integer"),
        ("rewards: {correct_answer: 1}\n", "settings.yaml: --rewards is {'correct_answer': 1}; expected a list"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(text, message):
    assert message in refusal(*settings(text))


# Tasks


def test_files_over_the_starters_problems_are_read_as_gsm8k():
    assert config().data.task == "starter"
    assert config("--data.train", "a.jsonl", "--data.eval", "b.jsonl").data.task == "gsm8k"
    assert config("--data.task", "gsm8k", "--data.train", "a.jsonl").data.task == "gsm8k"
    assert config(*settings("data: {train: a.jsonl, eval: b.jsonl}\n")).data.task == "gsm8k"


TASK = "def load(split): return [{'question': 'a'}]\ndef check(completion, row): return True\n"


def test_a_task_file_suggests_its_rewards():
    Path("mine.py").write_text(TASK)
    assert config("--task", "mine.py").data.task == "mine.py"
    assert config("--task=mine.py").rewards == ("correct_answer=1.0",)
    Path("other.py").write_text(f"REWARDS = ('correct_answer=2.0', 'near_length:9')\n{TASK}")
    assert config("--data.task", "other.py").rewards == ("correct_answer=2.0", "near_length:9")
    assert config("--task", "other.py", "--rewards", "near_length:8").rewards == ("near_length:8",)
    assert config("--task", "other.py", *settings("rewards: [near_length:7]\n")).rewards == ("near_length:7",)
    assert len(config("--task", "gsm8k").rewards) == 5


def test_reward_files_of_a_task_file_are_beside_it(tmp_path, monkeypatch):
    Path("sub").mkdir()
    Path("sub/my_rewards.py").write_text("def brief(completions, **columns): ...\nlong = brief\n")
    absolute = Path("sub/my_rewards.py").resolve()
    rewards = ("correct_answer=2.0", "my_rewards.py:brief", "pattern:a.py:b=1.0", f"{absolute}:long=0.5")
    Path("sub/mine.py").write_text(f"REWARDS = {rewards}\n{TASK}")
    from_parent = ("correct_answer=2.0", "sub/my_rewards.py:brief", "pattern:a.py:b=1.0", f"{absolute}:long=0.5")
    assert config("--task", "sub/mine.py").rewards == from_parent
    assert config("--task", str(Path("sub/mine.py").resolve())).rewards[1] == f"{absolute}:brief"
    monkeypatch.chdir("sub")
    assert config("--task", "mine.py").rewards == rewards
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "my_rewards.py: No such file" in refusal(
        "--task", f"{absolute.parent}/mine.py", "--rewards", "my_rewards.py:brief"
    )


def test_a_task_file_runs_only_if_it_is_named_on_the_command_line():
    Path("mine.py").write_text(f"open('ran', 'w')\n{TASK}")
    for name, flag in (("task", "--task"), ("eval_task", "--data.eval-task")):
        assert f"pass {flag} mine.py to run it" in refusal(*settings(f"data: {{{name}: mine.py}}\n"))
    run_folder("old", data={"task": "mine.py"})
    assert "--task mine.py to run it" in refusal("--config", "old/run.json")
    assert "--task mine.py to run it" in refusal("--output-dir", "old", "--resume")
    assert not Path("ran").exists()
    assert "--task mine.py to run it" in refusal(*settings("data: {task: mine.py}\n"), "--seed", "1")
    assert config("--output-dir", "old", "--resume", "--task", "./mine.py").data.task == "./mine.py"
    assert config("--data.eval-task=mine.py").data.eval_task == "mine.py"
    assert Path("ran").exists()


def test_a_reward_file_runs_only_if_it_is_named_on_the_command_line():
    Path("mine.py").write_text("open('ran', 'w')\ndef one(completions, **columns): return [1.0] * len(completions)\n")
    specs = ["integer_answer=0.5", "mine.py:one=2.0"]
    run_folder("old", rewards=specs)
    for foreign in (["--output-dir", "old", "--resume"], ["--config", "old/run.json"]):
        message = "old/run.json would run the reward file mine.py; if you trust it, pass --rewards integer_answer=0.5 "
        assert message in refusal(*foreign, "--dry-run")
        assert config(*foreign, "--rewards", *specs).rewards == tuple(specs)
        assert config(*foreign, "--rewards", "integer_answer=0.5").rewards == ("integer_answer=0.5",)
    preset = {"starter": {"rewards": ("mine.py:one=1.0",)}}  # the recipe names it
    assert read("--config", "old/run.json", presets=preset)[0].rewards == tuple(specs)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("changes", "flag", "opposite_flag"),
    [
        ({"model": {"trust_remote_code": True}}, "--model.trust-remote-code", "--model.no-trust-remote-code"),
        ({"sandbox": {"allow_unsafe": True}}, "--sandbox.allow-unsafe", "--sandbox.no-allow-unsafe"),
    ],
)
def test_what_lets_code_run_counts_only_on_the_command_line(changes, flag, opposite_flag):
    run_folder("old", **changes)
    for foreign in (["--output-dir", "old", "--resume"], ["--config", "old/run.json"]):
        message = refusal(*foreign)
        assert "old/run.json would run" in message and f"pass {flag} to run it" in message
        assert config(*foreign, flag)
        assert config(*foreign, opposite_flag)
    assert f"pass {flag} to run it" in refusal(*settings(json.dumps(changes), "a.json"))
    assert read("--config", "old/run.json", presets={"starter": changes})[0]  # the recipe allows it


# Files that the kit wrote itself


def test_a_run_json_is_a_settings_file():
    run_folder("old", seed=5, train={"learning_rate": 1e-5})
    chosen = config("--config", "old/run.json")
    assert (chosen.seed, chosen.train.learning_rate, chosen.output_dir) == (5, 1e-5, "old")
    assert config("--config", "old/run.json", "--output-dir", "new").output_dir == "new"


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_a_configuration_written_out_reads_back_the_same(name):
    chosen = config(
        "--data.train=a", "--data.eval=b", "--rewards", "pattern:x=y=-0.5", "--grpo", "top_k=-1", "epsilon=1e-5",
        "--lora.rslora", "--eval.k", "2", "--train.learning-rate", "1e-5", "--data.eval-limit", "None",
    )  # fmt: skip
    text = json.dumps(chosen.to_dict())
    assert config(*settings(text, name)) == chosen


@pytest.mark.parametrize("folder", [("--output-dir", "old"), ("--output-dir=old",), ("--output_dir=old",)])
def test_resume_takes_the_settings_of_the_run(folder):
    run_folder("old", seed=5, train={"learning_rate": 1e-5}, rewards=("integer_answer=1.0",))
    chosen, invocation = read("--resume", *folder)
    assert invocation.resume
    assert (chosen.seed, chosen.train.learning_rate, chosen.rewards) == (5, 1e-5, ("integer_answer=1.0",))
    assert chosen.output_dir == "old"


def limits(*flags):
    """Return the hours and the steps that end a run, None for no limit."""
    chosen = config(*flags)
    return chosen.hours, chosen.step_limit


def test_with_hours_only_a_limit_of_steps_set_beside_them_counts():
    assert limits() == (None, 60)
    assert limits("--hours", "0.5") == (0.5, None)
    assert limits("--hours=2", "--train.max_steps=60") == (2, 60)
    assert limits("--hours", "2", *settings("train: {max_steps: 50}")) == (2, None)
    assert limits("--hours", "2", *settings("{hours: 1, train: {max_steps: 50}}")) == (2, 50)


def test_the_steps_of_a_run_with_hours_are_no_setting_of_the_user():
    config_with_hours = config("--hours", "1")
    assert config_with_hours.train.max_steps % 8 == config_with_hours.train.max_steps % 7 == 0
    assert "train.max_steps" not in changed_settings(config_with_hours, PRESETS)


def test_a_resumed_run_may_have_settings_of_vllm_although_auto_became_the_built_in_sampler():
    run_folder("old", sampling={"backend": "transformers", "reproducible": True})
    assert config("--resume", "--output-dir", "old").sampling.reproducible


def test_a_resumed_run_has_its_limit_unless_another_one_is_given():
    run_folder("steps", train={"max_steps": 60})
    assert limits("--resume", "--output-dir", "steps") == (None, 60)
    assert limits("--resume", "--output-dir", "steps", "--hours", "1") == (1, 60)
    run_folder("cosine", train={"max_steps": 60, "lr_scheduler": "cosine"})
    assert limits("--resume", "--output-dir", "cosine", "--hours", "1") == (1, 60)
    run_folder("hours", hours=1.0, train={"max_steps": endless_steps(1)})
    assert limits("--resume", "--output-dir", "hours") == (1, None)
    assert limits("--resume", "--output-dir", "hours", "--hours", "3") == (3, None)
    assert limits("--resume", "--output-dir", "hours", "--train.max-steps", "70") == (1, 70)


def test_resuming_what_is_not_there_is_refused_with_the_nearest_run():
    assert refusal("--resume") == "--resume: there is no run in outputs/gsm8k_lora; leave out --resume to start one"
    run_folder("outputs/first")
    assert "no run in outputs/frist; did you mean 'first'?" in refusal("--resume", "--output-dir", "outputs/frist")
    assert "no run in outputs/frist" in refusal("--resume", "--plan", "--output-dir", "outputs/frist")
    Path("outputs/frist").mkdir()
    assert "no run in outputs/frist" in refusal("--resume", "--output-dir", "outputs/frist")


def test_a_run_of_another_recipe_is_not_resumed():
    run_folder("old")
    with pytest.raises(UserError, match="the run in old is one of the recipe 'gsm8k_lora', not of 'code_lora'"):
        parse(["--resume", "--output-dir", "old"], recipe="code_lora", description="", presets=PRESETS)
    assert parse(["--config", "old/run.json"], recipe="code_lora", description="", presets=PRESETS)


# Help and endings


def test_the_first_line_names_the_task_that_the_preset_chose(capsys):
    read("--preset", "starter")
    assert "; task starter, model starter\n" in capsys.readouterr().err


def help_text(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        read(flag, "--seed", "x")
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_main_flags(capsys):
    text = help_text("--help", capsys)
    for name in ("--preset", "--resume", "--plan", "--dry-run", "--config", "--model.name", "--train.max-steps"):
        assert name in text
    assert "--sandbox.workers" not in text
    assert "(default: 60)" in text  # max_steps of the starter preset


def test_help_all_shows_every_flag(capsys):
    text = help_text("--help-all", capsys)
    assert [name for name in flag_names() if name not in text] == []
    assert "--no-resume" not in text


def raises(error):
    def main():
        raise error

    return main


@pytest.fixture
def sigterm_as_before():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (UserError("no such file"), 2, "error: no such file\n"),
        (RunError("it broke"), 1, "error: it broke\n"),
        (Interrupted("stopped", signal.SIGTERM), 143, "stopped\n"),
        (Interrupted("stopped", signal.SIGINT), 130, "stopped\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_each_ending_has_its_exit_code(error, exit_code, message, capsys, sigterm_as_before):
    assert run_command(raises(error)) == exit_code
    assert capsys.readouterr().err == message
