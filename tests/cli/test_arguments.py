import json
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
    return parse(arguments, recipe="gsm8k_lora", description="", presets=presets)


def config(*arguments):
    return read(*arguments)[0]


def refusal(*arguments):
    with pytest.raises(UserError) as error:
        read(*arguments)
    message = str(error.value)
    assert "\n" not in message
    assert message.strip()
    return message


def settings(text, name="settings.yaml"):
    Path(name).write_text(text)
    return ["--config", name]


def run_folder(folder, **changes):
    """What a run leaves of its settings."""
    Path(folder).mkdir(parents=True)
    asked = replace(config("--output-dir", folder), changes).to_dict()
    (Path(folder) / "run.json").write_text(json.dumps({"lora_grpo_run": 1, "recipe": "gsm8k_lora", "config": asked}))
    return asked


# Which of preset, file and flag decides


def test_without_arguments_the_hardwares_preset_decides():
    made, how = read()
    assert made.preset == "starter"
    assert made.output_dir == "outputs/gsm8k_lora"
    assert made.train.max_steps == PRESETS["starter"]["train"]["max_steps"]
    assert made.rewards == PRESETS["starter"]["rewards"]
    assert made.lora == RunConfig().lora
    assert (how.dry_run, how.resume, how.overwrite) == (False, False, False)


def test_changed_settings_are_those_that_differ_from_the_preset(monkeypatch):
    assert changed_settings(config("--preset", "starter", "--output-dir", "mine"), PRESETS) == {}
    file = settings("train: {max_steps: 7}")
    made = config("--preset", "starter", "--train.learning-rate", "5e-4", "--eval.k", "2", *file)
    assert changed_settings(made, PRESETS) == {"train.max_steps": 60, "eval.k": [1, 4]}
    assert changed_settings(read("--preset", "12gb", "--dry-run")[0], PRESETS) == {}
    Path("mine.py").write_text("rewards = ['check=2']\ndef load(split): ...\ndef check(completion, row): ...\n")
    assert changed_settings(config("--task", "mine.py"), PRESETS) == {"data.task": "starter"}  # the file's own rewards


def test_sft_has_the_model_and_the_limits_of_the_preset_in_the_task_file():
    """GRPO continues from its adapter, with the same base, chat template and limits."""
    recipes = RECIPE.parent
    own = {
        "model": {"bits": 16},
        "sampling": {"max_completion_tokens": 9},
        "train": {"max_steps": 3, "micro_batch_size": 2},
    }
    text = f"load = gold = check = print\nREWARDS = ('coin_flip=2',)\nPRESETS = {{'starter': {own}}}\n"
    Path("mine.py").write_text(text)
    presets = runpy.run_path(str(recipes / "sft_lora.py"))["PRESETS"]

    def sft(*flags):
        return parse(["--preset", *flags], recipe="sft_lora", description="", presets=presets, method="sft")[0]

    made, bundled = sft("starter", "--task", "mine.py"), sft("starter")
    assert (made.model.bits, made.sampling.max_completion_tokens) == (16, 9)
    assert made.train == replace(bundled.train, {"micro_batch_size": 2})
    assert (made.rewards, bundled.model.bits) == (bundled.rewards, 4)
    assert sft("starter", "--task", "mine.py", "--model.bits", "4").model.bits == 4
    changed = {"data.task": "starter", "train.max_steps": 60}
    assert changed_settings(sft("starter", "--task", "mine.py", "--train.max-steps", "2"), presets) == changed
    grpo = config("--preset", "starter", "--task", "mine.py")
    assert (grpo.model.bits, grpo.rewards) == (4, ("coin_flip=2",))
    assert sft("laptop", "--task", str(recipes / "sql_lora.py"), "--plan").model.chat_template == "qwen2_5"
    # Its micro-batches of 32 completions do not divide the 16 reference answers of a step.
    assert sft("starter", "--task", str(recipes / "guess_lora.py")).train.micro_batch_size == 16


def test_a_recipe_is_a_task_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    presets = {"starter": starter_preset()}
    made, _ = parse(["--task", "recipes/guess_lora.py"], recipe="your_task", description="", presets=presets)
    assert Path(made.data.task).is_file() and made.output_dir == "outputs/guess_lora"
    made, _ = parse(["--task", "gsm8k", "--plan"], recipe="your_task", description="", presets=presets)
    assert made.output_dir == "outputs/gsm8k"
    for wrong in ("recipes/unknown.py", str(tmp_path / "recipes" / "guess_lora.py")):  # another folder is not ours
        with pytest.raises(UserError):
            parse(["--task", wrong], recipe="your_task", description="", presets=presets)


def test_a_flag_goes_over_the_file_and_the_file_over_the_preset():
    file = settings("train: {max_steps: 7, prompts_per_step: 4, micro_batch_size: 64}\nseed: 3\n")
    made = config(*file, "--seed", "9", "--train.prompts-per-step", "8")
    assert (made.seed, made.train.max_steps, made.train.prompts_per_step) == (9, 7, 8)
    assert made.train.learning_rate == PRESETS["starter"]["train"]["learning_rate"]
    # Where the file stands among the flags does not matter.
    assert config("--seed", "9", *file, "--train.prompts-per-step", "8") == made
    assert config("--seed", "9", "--config=settings.yaml", "--train.prompts-per-step=8") == made


def test_the_file_may_name_the_preset_and_a_flag_may_change_it():
    presets = {"starter": PRESETS["starter"], "other": {"train": {"max_steps": 5}}}
    file = settings("preset: other\n")
    assert read(*file, presets=presets)[0].train.max_steps == 5
    assert read(*file, "--preset=starter", presets=presets)[0].train.max_steps == 60


# Spelling


def test_a_negative_number_is_a_value_and_not_a_flag():
    assert config("--grpo", "top_k=-1", "--grpo=epsilon=0.1", "--rewards", "correct_answer=-1").grpo == (
        "top_k=-1",
        "epsilon=0.1",
    )
    for arguments in (["--seed", "-1"], ["--seed=-1"], settings("seed: -1\n")):
        assert "1; expected a value greater than or equal to 0" in refusal(*arguments).replace("'", "")


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
        (["--preset", "9gb"], "unknown preset '9gb'; expected auto, starter, 8gb"),
        (["--preset", "16gb"], "preset 16gb needs a GPU with 16 GB (CUDA_VISIBLE_DEVICES"),
        (["--resume", "--overwrite"], "pass one of them"),
        (["--sampling.server-folder", "/tmp"], "--sampling.server-folder needs --sampling.server-url"),
        (
            ["--sampling.server-url", "http://a", "--sampling.backend", "transformers"],
            "--sampling.server-url needs vLLM",
        ),
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
    whole = Path("sub/my_rewards.py").resolve()
    own = ("correct_answer=2.0", "my_rewards.py:brief", "pattern:a.py:b=1.0", f"{whole}:long=0.5")
    Path("sub/mine.py").write_text(f"REWARDS = {own}\n{TASK}")
    expected = ("correct_answer=2.0", "sub/my_rewards.py:brief", *own[2:])
    assert config("--task", "sub/mine.py").rewards == expected
    assert config("--task", str(Path("sub/mine.py").resolve())).rewards[1] == f"{whole}:brief"
    monkeypatch.chdir("sub")
    assert config("--task", "mine.py").rewards == own
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "my_rewards.py: No such file" in refusal(
        "--task", f"{whole.parent}/mine.py", "--rewards", "my_rewards.py:brief"
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
    ("changes", "flag"),
    [
        ({"model": {"trust_remote_code": True}}, "--model.trust-remote-code"),
        ({"sandbox": {"allow_unsafe": True}}, "--sandbox.allow-unsafe"),
    ],
)
def test_what_lets_code_run_counts_only_on_the_command_line(changes, flag):
    run_folder("old", **changes)
    for foreign in (["--output-dir", "old", "--resume"], ["--config", "old/run.json"]):
        message = refusal(*foreign)
        assert "old/run.json would run" in message and f"pass {flag} to run it" in message
        assert config(*foreign, flag)
        assert config(*foreign, flag.replace(".", ".no-"))
    (name, changed), *_ = changes.items()
    assert f"pass {flag} to run it" in refusal(*settings(json.dumps({name: changed}), "a.json"))
    assert read("--config", "old/run.json", presets={"starter": changes})[0]  # the recipe allows it


# Files that the kit wrote itself


def test_a_run_json_is_a_settings_file():
    run_folder("old", seed=5, train={"learning_rate": 1e-5})
    made = config("--config", "old/run.json")
    assert (made.seed, made.train.learning_rate, made.output_dir) == (5, 1e-5, "old")
    assert config("--config", "old/run.json", "--output-dir", "new").output_dir == "new"


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_a_configuration_written_out_reads_back_the_same(name):
    asked = config(
        "--data.train=a", "--data.eval=b", "--rewards", "pattern:x=y=-0.5", "--grpo", "top_k=-1", "epsilon=1e-5",
        "--lora.rslora", "--eval.k", "2", "--train.learning-rate", "1e-5", "--data.eval-limit", "None",
    )  # fmt: skip
    text = json.dumps(asked.to_dict())
    assert config(*settings(text, name)) == asked


@pytest.mark.parametrize("folder", [("--output-dir", "old"), ("--output-dir=old",), ("--output_dir=old",)])
def test_resume_takes_the_settings_of_the_run(folder):
    run_folder("old", seed=5, train={"learning_rate": 1e-5}, rewards=("integer_answer=1.0",))
    made, how = read("--resume", *folder)
    assert how.resume
    assert (made.seed, made.train.learning_rate, made.rewards) == (5, 1e-5, ("integer_answer=1.0",))
    assert made.output_dir == "old"


def test_with_hours_only_a_limit_of_steps_set_beside_them_counts():
    def limits(*flags):
        made = config(*flags)
        return made.hours, made.step_limit

    assert limits() == (None, 60)
    assert limits("--hours", "0.5") == (0.5, None)
    assert limits("--hours=2", "--train.max_steps=60") == (2, 60)
    assert limits("--hours", "2", *settings("train: {max_steps: 50}")) == (2, None)
    assert limits("--hours", "2", *settings("{hours: 1, train: {max_steps: 50}}")) == (2, 50)
    assert config("--hours", "1").train.max_steps % 8 == config("--hours", "1").train.max_steps % 7 == 0

    run_folder("steps", train={"max_steps": 60})
    assert limits("--resume", "--output-dir", "steps") == (None, 60)
    assert limits("--resume", "--output-dir", "steps", "--hours", "1") == (1, None)
    run_folder("hours", hours=1.0, train={"max_steps": endless_steps(1)})
    assert limits("--resume", "--output-dir", "hours") == (1, None)
    assert limits("--resume", "--output-dir", "hours", "--hours", "3") == (3, None)
    assert limits("--resume", "--output-dir", "hours", "--train.max-steps", "70") == (1, 70)
    assert "train.max_steps" not in changed_settings(config("--hours", "1"), PRESETS)


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


def test_help_shows_the_main_flags_and_help_all_every_flag(capsys):
    shown = {}
    for name in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            read(name, "--seed", "x")
        assert ended.value.code == 0
        shown[name] = capsys.readouterr().out
    assert all(name in shown["--help-all"] for name in flag_names())
    for name in ("--preset", "--resume", "--plan", "--dry-run", "--config", "--model.name", "--train.max-steps"):
        assert name in shown["--help"]
    assert "--sandbox.workers" not in shown["--help"] and "--no-resume" not in shown["--help-all"]
    assert "(default: 60)" in shown["--help"]  # max_steps of the starter preset


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
    ("error", "code", "said"),
    [
        (UserError("no such file"), 2, "error: no such file\n"),
        (RunError("it broke"), 1, "error: it broke\n"),
        (Interrupted("stopped", signal.SIGTERM), 143, "stopped\n"),
        (Interrupted("stopped", signal.SIGINT), 130, "stopped\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_each_ending_has_its_code(error, code, said, capsys, sigterm_as_before):
    assert run_command(raises(error)) == code
    assert capsys.readouterr().err == said
