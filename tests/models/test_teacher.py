"""`--teacher` before anything is loaded: what a name stands for, and what is refused."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_models import CONFIGS, make_model
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from lora_grpo import starter
from lora_grpo.cli.arguments import parse
from lora_grpo.errors import UserError
from lora_grpo.memory import make_plan
from lora_grpo.models import check_teacher_tokenizer, find_teacher

PRESETS = {"starter": {"model": {"engine": "peft"}}}
CONFIG = {"peft_type": "LORA", "base_model_name_or_path": "starter", "r": 4, "lora_alpha": 12}
CONFIG |= {"target_modules": ["q_proj"], "lora_dropout": 0.05}
RECORD = {"lora_grpo_run": 1, "config": {}, "data": {}, "policy": {}, "versions": {}}
HINTED = "def load(split): return []\ndef check(completion, row): return True\ndef teacher_prompt(row): return 'Yes.'\n"
AGENT = "def load(split): return []\ndef agent(row, base_url): return 1\ndef teacher_prompt(row): return 'Yes.'\n"


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """Return a function that writes an adapter, and work in the folder above it."""
    monkeypatch.chdir(tmp_path)

    def write(folder, value=1.0, **changes):
        path = tmp_path / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        weights = {f"{name}.lora_A.weight": (4, 192), f"{name}.lora_B.weight": (192, 4)}
        tensors = {key: np.full(shape, value, np.float32) for key, shape in weights.items()}
        save_file(tensors, path / "adapter_model.safetensors")
        return path

    return write


def read(line):
    arguments = ["--preset", "starter", *shlex.split(line)]
    return parse(arguments, recipe="r", description="", presets=PRESETS)[0]


def test_a_run_has_no_teacher_by_default():
    assert find_teacher(read("")) is None


def test_an_adapter_of_the_same_base_needs_no_second_model(adapter):
    adapter("a")
    teacher = find_teacher(read("--teacher a"))
    assert (teacher.kind, teacher.adapter, teacher.base) == ("adapter", Path("a"), None)


def test_the_folder_of_the_base_is_the_base(adapter):
    """A second model in memory would compute the same. It teaches a model that starts from an adapter."""
    adapter("a")
    teacher = find_teacher(read(f"--teacher {starter.model_path()} --lora.from a"))
    assert (teacher.kind, teacher.base) == ("base", None)


def test_another_model_and_its_adapter_have_a_base_of_their_own(adapter, tmp_path):
    folder = make_model(tmp_path / "other", CONFIGS["llama"])
    teacher = find_teacher(read("--teacher other --teacher.bits 16"))
    assert (teacher.kind, teacher.base.name, teacher.base.loaded_bits, teacher.adapter) == ("model", "other", 16, None)
    adapter("a", base_model_name_or_path=str(folder))
    teacher = find_teacher(read("--teacher a"))
    assert (teacher.kind, teacher.base.name, teacher.base.loaded_bits) == ("model", str(folder), 4)
    assert teacher.adapter == Path("a")


def test_distributions_may_be_weighed_by_completions(adapter):
    """Their loss does not depend on the advantages."""
    adapter("a")
    assert find_teacher(read("--teacher a --teacher.loss jsd --grpo importance_sampling_level=sequence"))


def test_a_resumed_run_keeps_the_commit_of_its_teacher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = read("--teacher org/model --output-dir out")
    assert find_teacher(config).base.revision is None
    (tmp_path / "out").mkdir()
    record = {**RECORD, "policy": {"teacher_revision": "c" * 40}}
    (tmp_path / "out" / "run.json").write_text(json.dumps(record))
    assert find_teacher(config, resumed=True).base.revision == "c" * 40


def test_self_is_the_model_before_training(adapter, tmp_path):
    (tmp_path / "hinted.py").write_text(HINTED)
    adapter("a")
    teacher = find_teacher(read("--teacher self --task hinted.py"))
    assert (teacher.kind, teacher.adapter, teacher.has_own_prompt) == ("base", None, True)
    teacher = find_teacher(read("--teacher self --task hinted.py --lora.from a"))
    assert (teacher.kind, teacher.adapter) == ("adapter", Path("a"))


def test_other_teachers_read_the_prompts_of_the_model_unless_told_otherwise(adapter, tmp_path):
    (tmp_path / "hinted.py").write_text(HINTED)
    adapter("a")
    assert not find_teacher(read("--teacher a --task hinted.py")).has_own_prompt
    assert find_teacher(read("--teacher a --task hinted.py --teacher.own-prompt")).has_own_prompt


REFUSED = {
    "no such folder": ("--teacher ./missing", "does not exist"),
    "a run without an adapter": ("--teacher run", r"run/adapter/adapter_config\.json does not exist"),
    "a folder of something else": ("--teacher empty", r"has no config\.json"),
    "the base of a model without an adapter": ("--teacher starter", "is the model that training starts from"),
    "a copy of that base": ("--teacher copy-of-base", "is the model that training starts from"),
    "an adapter with biases": ("--teacher biased", "sets bias, which may change the base"),
    "an adapter whose start changed the base": ("--teacher pissa", "sets init_lora_weights, which may change the base"),
    "an adapter on other weights than in its training": ("--teacher moved", "has other weights than in its training"),
    "weights of whole completions": ("--teacher a --grpo importance_sampling_level=sequence", "mean advantage"),
    "the adapter that training starts from": ("--lora.from a --teacher a", "is the model that training starts from"),
    "a copy of that adapter": ("--lora.from a --teacher copy", "is the model that training starts from"),
    "self with the model's prompt": (
        "--teacher self --teacher.no-own-prompt",
        "is the model that training starts from",
    ),
    "an adapter without a prompt of its own": ("--teacher a --teacher.own-prompt", r"teacher_prompt\(row\)"),
    "self without a prompt of its own": ("--teacher self", r"teacher_prompt\(row\)"),
    "an adapter whose base is gone": ("--teacher gone", "does not exist here"),
    "a teacher in the output folder": ("--teacher out/adapter --output-dir out", "is inside --output-dir"),
    "an agent with a prompt for its teacher": ("--teacher a --task agent.py", "makes its own prompts"),
    "Unsloth's loss": ("--teacher a --model.engine unsloth", "needs --model.engine peft"),
    "a loss of whole completions": ("--teacher a --grpo loss_type=vespo", "loss_type=vespo"),
    "a mask of whole completions": ("--teacher a --grpo off_policy_mask_threshold=0.5", "off_policy_mask_threshold"),
    "a loss that does not exist": ("--teacher a --teacher.loss kl", "teacher.loss"),
    "no weight": ("--teacher a --teacher.weight 0", "teacher.weight"),
    "a weight without a teacher": ("--teacher.reward-weight 0", r"--teacher\.reward-weight has no effect"),
    "a prompt without a teacher": ("--teacher.no-own-prompt", r"--teacher\.own-prompt has no effect"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_name_that_cannot_teach_is_refused(adapter, tmp_path, case):
    flags, message = REFUSED[case]
    adapter("a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    adapter("out/adapter")
    adapter("gone", base_model_name_or_path="./no/such/base")
    shutil.copytree(starter.model_path(), tmp_path / "copy-of-base")
    adapter("biased", bias="lora_only")
    adapter("pissa", init_lora_weights="pissa")
    adapter("moved/adapter", base_model_name_or_path=str(make_model(tmp_path / "other", CONFIGS["llama"])))
    record = {**RECORD, "config": {"model": {"name": str(tmp_path / "other")}}, "policy": {"fingerprint": "0" * 64}}
    (tmp_path / "moved" / "run.json").write_text(json.dumps(record))
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "agent.py").write_text(AGENT)
    with pytest.raises(UserError, match=message) as raised:
        read(flags)
    assert "\n" not in str(raised.value)


DOCS = Path(__file__).resolve().parents[2] / "docs" / "distill.md"
COMMANDS = [
    shlex.split(line)[2:]
    for line in DOCS.read_text().replace("\\\n", " ").splitlines()
    if line.startswith("lora-grpo train ")
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_commands_of_the_documentation_name_a_teacher(adapter, tmp_path, words):
    """The runs that they name are where those commands write by default."""
    for value, recipe in enumerate(("sft_lora", "laptop_lora"), start=1):
        adapter(f"outputs/{recipe}", value)
    (tmp_path / "my_task.py").write_text(HINTED)
    recipe, *flags = words
    if recipe.endswith(".py"):
        flags += ["--task", recipe]
        recipe = "your_task"
    config, _ = parse(flags, recipe=f"{recipe}_lora", description="", presets=PRESETS)
    assert find_teacher(config)
    assert not config.folder.exists(), "the folder of another run"


def test_sft_has_no_teacher(adapter):
    adapter("a")
    with pytest.raises(UserError, match=r"--teacher\.name is for GRPO"):
        parse(["--teacher", "a"], recipe="r", description="", presets=PRESETS, method="sft")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are stored in awq"),
        ({"model_type": "mamba"}, "it has not been tested"),
    ],
)
def test_the_plan_refuses_a_model_that_cannot_teach(tmp_path, changes, reason):
    folder = make_model(tmp_path / "other", CONFIGS["llama"])
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    line = f"--teacher {folder} --plan"
    config, invocation = parse(["--preset", "starter", *shlex.split(line)], recipe="r", description="", presets=PRESETS)
    with pytest.raises(UserError, match=f"cannot be a teacher: {reason}"):
        make_plan(config, invocation)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path):
    make_model(tmp_path / "other", CONFIGS["llama"])
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer = AutoTokenizer.from_pretrained(starter.model_path())
    teacher = find_teacher(read(f"--teacher {tmp_path / 'other'}"))
    check_teacher_tokenizer(teacher, tokenizer)
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="has another tokenizer"):
        check_teacher_tokenizer(teacher, tokenizer)
