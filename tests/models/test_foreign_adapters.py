"""Adapters of other tools: what they compute is what PEFT's own adapter computes, or one line says what to do."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import foreign_adapters as write
from helpers.foreign_adapters import CONFIG, PREFIX, WEIGHTS
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_grpo import starter
from lora_grpo.cli import verbs
from lora_grpo.cli.arguments import parse
from lora_grpo.errors import UserError
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.hub import PushOptions, push, push_to_hub
from lora_grpo.merging import MergeOptions, merge, merge_model
from lora_grpo.merging.report import Divergences
from lora_grpo.models import ModelFlags, load_policy, resolve
from lora_grpo.sampling import build

QUESTION = "Omar buys 3 apples at $10 each. How much does Omar pay?"
TARGETS = ["q_proj", "v_proj", "down_proj"]


def train(folder, *, layers=None, dora=False):
    """Train an adapter of the bundled model for a few steps on one text."""
    base = starter.model_path()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=TARGETS, use_dora=dora, layers_to_transform=layers
    )
    torch.manual_seed(0)
    model = get_peft_model(model, config)
    ids = torch.tensor([AutoTokenizer.from_pretrained(base)(QUESTION)["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(5):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Return a function that gives the folder of an adapter that was trained with these options."""
    made = {}

    def adapter(**options):
        key = json.dumps(options)
        if key not in made:
            made[key] = train(tmp_path_factory.mktemp("trained") / "adapter", **options)
        return made[key]

    return adapter


@pytest.fixture(scope="module", autouse=True)
def no_divergence(module_patch):
    """Skip the divergence, because its three forward passes take longer than the rest of a merge."""
    module_patch.setattr(merge_model, "measure_divergences", lambda *arguments: Divergences(not_measured="in a test"))


@pytest.fixture(scope="module")
def module_patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def logprobs(model):
    ids = torch.tensor([AutoTokenizer.from_pretrained(starter.model_path())(QUESTION)["input_ids"]])
    with torch.no_grad():
        return model.eval()(ids).logits.log_softmax(-1)


def with_peft(adapter):
    base = AutoModelForCausalLM.from_pretrained(starter.model_path(), dtype=torch.float32)
    return logprobs(PeftModel.from_pretrained(base, adapter))


def as_evaluated(folder, **flags):
    """The logprobs of the policy that an evaluation samples with."""
    target = resolve(str(folder), ModelFlags(**flags))
    sampler = build.load_sampler(target, "transformers", build.load_tokenizer(target), 0, 0)
    sampler.wake_up(adapter=True)
    return logprobs(sampler.model)


CANONICAL = [
    write.peft,
    write.trl_checkpoint,
    write.unsloth,
    write.llama_factory,
    write.ms_swift,
    write.axolotl,
    write.verl,
    write.torchtune,
]
CONVERTED = [
    write.areal,
    write.relax,
    write.soup,
    write.compiled_layers,
    write.fsdp,
    write.ddp,
    write.swift_model,
    write.mlx,
    write.mlx_by_unsloth,
]
ALL = [*CANONICAL, *CONVERTED]


def name_of(tool):
    return tool.__name__


@pytest.mark.parametrize("tool", ALL, ids=name_of)
def test_every_command_reads_what_a_tool_writes(tool, adapters, tmp_path, capsys):
    trained = adapters()
    expected = with_peft(trained)
    base = logprobs(AutoModelForCausalLM.from_pretrained(starter.model_path(), dtype=torch.float32))
    assert (expected - base).abs().max() > 1
    folder = tool(trained, tmp_path / "their_adapter")

    # An evaluation, a merge and a GGUF file. The merged model and the GGUF file are beside the adapter.
    torch.testing.assert_close(as_evaluated(folder), expected, rtol=0, atol=1e-5)
    merged = merge(MergeOptions(str(folder), dtype="fp32"))
    assert merged == folder.with_name(f"{folder.name}-merged").resolve()
    original = merge(MergeOptions(str(trained), dtype="fp32", output=tmp_path / "original"))
    assert (merged / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    [gguf] = export(ExportOptions(folder, type=("f16",)))
    assert gguf.is_file() and gguf.parent.parent == folder.parent

    # What was converted is said once.
    notes = [line for line in capsys.readouterr().err.splitlines() if "PEFT's format" in line]
    assert len(notes) == (tool in CONVERTED)
    if tool in CANONICAL:
        assert resolve(str(folder), ModelFlags()).adapter == folder


@pytest.mark.parametrize("tool", [write.verl, write.areal, write.mlx], ids=name_of)
def test_the_command_line_reads_it_and_says_once_what_was_converted(tool, adapters, tmp_path, capfd):
    folder = tool(adapters(), tmp_path / "their_adapter")
    chat = ["chat", str(folder), "--max-completion-tokens", "8", QUESTION]
    evaluate = ["evaluate", str(folder), "--task", "starter", "--limit", "2", "--max-completion-tokens", "8"]
    for command in (chat, [*evaluate, "--output-dir", str(tmp_path / "evaluation")], ["merge", str(folder)]):
        assert verbs.run_front_door(command) == 0, capfd.readouterr().err
        notes = [line for line in capfd.readouterr().err.splitlines() if "PEFT's format" in line]
        assert len(notes) <= 1 and all(str(folder) in note for note in notes)


@pytest.mark.parametrize("tool", [write.unsloth, write.torchtune, write.areal, write.mlx], ids=name_of)
def test_training_continues_from_it(tool, adapters, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tool(adapters(), tmp_path / "their_adapter")
    presets = {"starter": {"model": {"engine": "peft", "bits": 16}}}
    arguments = ["--preset", "starter", "--lora.from", str(folder), "--model.name", str(starter.model_path())]
    config = parse(arguments, recipe="r", description="", presets=presets)[0]
    assert (config.lora.rank, config.lora.alpha, set(config.lora.targets)) == (4, 8, set(TARGETS))
    policy = load_policy(config)
    torch.testing.assert_close(logprobs(policy.model), with_peft(adapters()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tool", [write.ms_swift, write.areal, write.mlx], ids=name_of)
def test_a_push_uploads_peft_s_files(tool, adapters, tmp_path, monkeypatch, capsys):
    folder = tool(adapters(), tmp_path / "their_adapter")
    (folder / "LICENSE").write_text("Their license")
    monkeypatch.setattr(push, "send", lambda *_: "https://hub/me/theirs")
    pushed = push_to_hub(PushOptions(str(folder), "me/theirs"))
    output = capsys.readouterr().out
    assert output.startswith(f"{folder} (adapter) -> me/theirs")
    assert f" {folder} --against " in output  # not the converted copy, which this process deletes
    assert {"LICENSE", CONFIG, WEIGHTS} < set(pushed.files)
    assert not {"adapters.safetensors", "args.json"} & set(pushed.files)


def test_the_dora_of_mlx(adapters, tmp_path):
    trained = adapters(dora=True)
    folder = write.mlx(trained, tmp_path / "adapters", kind="dora")
    torch.testing.assert_close(as_evaluated(folder), with_peft(trained), rtol=0, atol=1e-5)


def test_the_last_layers_of_mlx(adapters, tmp_path):
    """mlx-lm adapts the last 16 layers by default."""
    trained = adapters(layers=[2, 3])
    folder = write.mlx(trained, tmp_path / "adapters", num_layers=2)
    torch.testing.assert_close(as_evaluated(folder), with_peft(trained), rtol=0, atol=1e-5)
    merged = merge(MergeOptions(str(folder), dtype="fp32"))
    original = merge(MergeOptions(str(trained), dtype="fp32", output=tmp_path / "original"))
    assert (merged / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    refuses_start(folder, "adapts only the last layers")


def refuses_start(folder, message):
    presets = {"starter": {"model": {"engine": "peft"}}}
    with pytest.raises(UserError, match=message):
        parse(["--preset", "starter", "--lora.from", str(folder)], recipe="r", description="", presets=presets)


def test_what_is_converted_has_the_same_hash_in_every_process(adapters, tmp_path):
    folder = write.mlx(adapters(), tmp_path / "adapters")
    program = (
        "import sys; from lora_grpo.models import ModelFlags, resolve\n"
        "target = resolve(sys.argv[1], ModelFlags()); print(target.identity['adapter_sha256'], target.adapter)"
    )
    outputs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program, str(folder)]
        outputs.append(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    [(first_hash, first_folder), (second_hash, second_folder)] = [output.split() for output in outputs]
    assert first_hash == second_hash == resolve(str(folder), ModelFlags()).identity["adapter_sha256"]
    # Each process removes its own when it ends.
    assert first_folder != second_folder
    assert not Path(first_folder).exists() and not Path(second_folder).exists()
    first = resolve(str(folder), ModelFlags()).adapter
    assert resolve(str(folder), ModelFlags()).adapter == first

    # A changed adapter is converted again.
    weights = load_file(folder / "adapters.safetensors")
    save_file({name: weight * 2 for name, weight in weights.items()}, folder / "adapters.safetensors")
    assert resolve(str(folder), ModelFlags()).identity["adapter_sha256"] != first_hash


def test_pickled_weights_are_converted_by_the_command_in_the_error(adapters, tmp_path):
    folder = shutil.copytree(adapters(), tmp_path / "adapter")
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match="pickled weights are not loaded") as refusal:
        resolve(str(folder), ModelFlags())
    command = str(refusal.value).split('python -c "')[1].removesuffix('"')
    subprocess.run([sys.executable, "-c", command], cwd=folder, check=True)
    torch.testing.assert_close(as_evaluated(folder), with_peft(adapters()), rtol=0, atol=1e-5)


# What is refused.


def changed_config(**changes):
    """An adapter of PEFT with other settings."""

    def make(adapter, folder):
        return write.renamed(adapter, folder, str, **changes)

    return make


def only(name, *others):
    """A folder with a file in place of the weights."""

    def make(adapter, folder):
        write.peft(adapter, folder)
        (folder / WEIGHTS).rename(folder / name)
        for other in others:
            (folder / other).unlink()
        return folder

    return make


def with_weights(function):
    """An adapter with what a function makes of its weights."""

    def make(adapter, folder):
        settings, weights = write.read(adapter)
        return write.write(folder, settings, function(weights))

    return make


def twice(weights):
    return {**weights, **{write.named(key): weight.clone() for key, weight in weights.items()}}


def two_adapters(weights):
    keys = list(weights)
    return {write.named(key, "one" if key == keys[0] else "two"): weight for key, weight in weights.items()}


def empty(weights):
    return {key: weight[:0] for key, weight in weights.items()}


def elsewhere(weights):
    return {key.replace("model.layers", "transformer.h"): weight for key, weight in weights.items()}


def mlx(**changes):
    return lambda adapter, folder: write.mlx(adapter, folder, **changes)


def mlx_experts(adapter, folder):
    write.mlx(adapter, folder)
    name = "model.layers.0.mlp.switch_mlp.up_proj"
    experts = {f"{name}.lora_a": torch.ones(2, 4, 192), f"{name}.lora_b": torch.ones(2, 640, 4)}
    save_file(experts, folder / "adapters.safetensors")
    return folder


def mlx_embedding(adapter, folder):
    write.mlx(adapter, folder)
    parts = {"model.embed_tokens.lora_a": torch.ones(768, 4), "model.embed_tokens.lora_b": torch.ones(4, 192)}
    save_file(parts, folder / "adapters.safetensors")
    return folder


def mlx_full(adapter, folder):
    write.mlx(adapter, folder)
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}, folder / "adapters.safetensors")
    return folder


def torchtune_dora(adapter, folder):
    """`tune_to_peft_adapter_weights` renames the magnitudes; the recipes write no use_dora (torchtune 0.7)."""
    write.torchtune(adapter, folder)
    weights = load_file(folder / WEIGHTS)
    weights[f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector"] = torch.ones(192)
    save_file(weights, folder / WEIGHTS)
    return folder


def swift_root(adapter, folder):
    write.swift_model(adapter, folder)
    return folder


def verl_checkpoint(adapter, folder):
    """verl/trainer: global_step_N/actor/lora_adapter, with the configuration of the base in `actor/huggingface`."""
    write.verl(adapter, folder / "actor")
    (folder / "actor" / "huggingface").mkdir()
    (folder / "actor" / "huggingface" / "config.json").write_text("{}")
    return folder


def checkpoints(adapter, folder):
    for name in ("checkpoint-100", "checkpoint-20"):
        write.peft(adapter, folder / name)
    return folder


REFUSED = {
    "verl without alpha": (changed_config(lora_alpha=0), "lora_alpha 0.*verl.*write that of the training"),
    "no alpha": (changed_config(lora_alpha=None), "lora_alpha"),
    "no base": (changed_config(base_model_name_or_path=None), "--base"),
    "base of another machine": (changed_config(base_model_name_or_path="/mnt/base"), "/mnt/base.*--base"),
    "pickled": (only("adapter_model.bin"), "pickled.*save_file"),
    "torchtune's own format": (only("adapter_model.pt"), "torchtune.*merged model"),
    "no weights": (only("other.bin"), f"no {WEIGHTS}"),
    "no configuration": (only(WEIGHTS, CONFIG), f"{CONFIG}.*copy the whole folder"),
    "torchtune's DoRA": (torchtune_dora, "use_dora.*torchtune.*merged model"),
    "two names for a weight": (with_weights(twice), "two weights for .*lora_A"),
    "two adapters": (with_weights(two_adapters), "one, two.*selected_adapters"),
    "ZeRO-3": (with_weights(empty), "ZeRO-3.*stage3_gather_16bit_weights_on_model_save"),
    "ms-swift's folder": (swift_root, "pass .*/theirs/default$"),
    "checkpoints": (checkpoints, "pass .*/theirs/checkpoint-100$"),
    "verl's checkpoint": (verl_checkpoint, "pass .*/theirs/actor/lora_adapter$"),
    "MLX, full": (mlx_full, "no weight of LoRA.*mlx_lm.fuse"),
    "MLX, type full": (mlx(kind="full"), "fine_tune_type 'full'.*mlx_lm.fuse"),
    "MLX before 0.19": (mlx(lora_layers=16), "before 0.19.*mlx_lm.fuse"),
    "MLX without scale": (mlx(lora_parameters={"rank": 4}), "no scale"),
    "MLX, experts": (mlx_experts, "stacked experts.*mlx_lm.fuse"),
    "MLX, embedding": (mlx_embedding, "embedding.*mlx_lm.fuse"),
    "MLX's own base": (mlx(model="mlx-community/Qwen2.5-0.5B-Instruct-4bit"), "format of MLX.*--base"),
    "ms-swift's QA-LoRA": (
        lambda adapter, folder: write.renamed(adapter, folder, str, swift_type="LORA", use_qa_lora=True),
        "ms-swift.*swift export",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(case, adapters, tmp_path, capfd):
    make, message = REFUSED[case]
    folder = make(adapters(), tmp_path / "theirs")
    commands = (["chat", str(folder), QUESTION], ["evaluate", str(folder)], ["merge", str(folder)])
    for command in (*commands, ["export-gguf", str(folder)]):
        assert verbs.run_front_door(command) == 2
        *notes, error = capfd.readouterr().err.splitlines()
        assert all(note.startswith("note: ") for note in notes)
        assert re.search(message, error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


@pytest.mark.parametrize("command", ["chat", "merge"])
def test_weights_that_match_no_module_are_never_left_out(command, adapters, tmp_path, capfd):
    folder = with_weights(elsewhere)(adapters(), tmp_path / "theirs")
    arguments = [QUESTION] if command == "chat" else []
    assert verbs.run_front_door([command, str(folder), *arguments]) == 2
    assert "transformer.h.0" in capfd.readouterr().err.splitlines()[-1]


def test_a_start_is_refused_with_the_same_lines(adapters, tmp_path):
    refuses_start(mlx(kind="full")(adapters(), tmp_path / "full"), "fine_tune_type 'full'")
    refuses_start(swift_root(adapters(), tmp_path / "swift"), "pass .*/swift/default$")
    converted = mlx(model="mlx-community/x")(adapters(), tmp_path / "mlx")
    refuses_start(converted, rf'format of MLX.*"model": "starter" in {converted}/{CONFIG}')


def test_a_model_with_its_adapter_in_a_subfolder_says_that_the_adapter_is_left_out(adapters, tmp_path, capfd):
    """verl's model merger writes the base as a model, and `lora_adapter` in the same folder."""
    folder = shutil.copytree(starter.model_path(), tmp_path / "merged_by_verl")
    write.verl(adapters(), folder)
    assert verbs.run_front_door(["chat", str(folder), "--max-completion-tokens", "4", QUESTION]) == 0
    assert f"without the adapter in {folder / 'lora_adapter'};" in capfd.readouterr().err


def test_a_merge_into_a_4_bit_base_of_unsloth_names_the_16_bit_one(adapters, tmp_path):
    from lora_grpo.config import ModelConfig
    from lora_grpo.models import base_model

    packed = base_model.load_base(ModelConfig(name=str(starter.model_path()), bits=4))
    base = tmp_path / "tiny-unsloth-bnb-4bit"
    packed.save_pretrained(base)
    folder = changed_config(base_model_name_or_path=str(base))(adapters(), tmp_path / "theirs")
    with pytest.raises(UserError, match=rf"pass the 16-bit model .* {tmp_path}/tiny, with --base"):
        merge(MergeOptions(str(folder)))
