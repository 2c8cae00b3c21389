"""GGUF export: transformers and the gguf package read the files back; unsupported models are rejected."""

import json
import os
import shlex
import shutil
import stat
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from helpers.adapters import make_adapter as make_peft_adapter
from helpers.gguf_models import llama2_tokenizer, llama3_tokenizer, qwen_tokenizer, save
from helpers.made_runs import make_adapter, make_run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lora_grpo import starter
from lora_grpo.errors import RunError, UserError
from lora_grpo.gguf import types, writer
from lora_grpo.gguf.export_model import ExportOptions, export
from lora_grpo.gguf.writer import write_gguf
from lora_grpo.hub import PushOptions, push_to_hub
from lora_grpo.merging import MergeOptions, merge
from lora_grpo.prompts.styles import SYSTEM_PROMPTS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "export_gguf.py"
# transformers 5.17 does not read head_dim from a qwen3 file and uses 128, as in all published models.
QWEN3 = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA3_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """A Qwen2 model. The width of `down_proj` is a multiple of 32, and the embedding has three unused rows."""
    return save(tmp_path_factory.mktemp("qwen2") / "merged", "Qwen2ForCausalLM", qwen_tokenizer())


@pytest.fixture
def copy(qwen2, tmp_path):
    """A copy of the model that a test may modify."""
    return Path(shutil.copytree(qwen2, tmp_path / "merged"))


def read(path):
    reader = gguf.GGUFReader(path)
    return {name: entry.contents() for name, entry in reader.fields.items()}, {t.name: t for t in reader.tensors}


def reload(path):
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def source(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


# Round trip


@pytest.mark.parametrize(
    ("architecture", "tokenizer", "changes", "kind"),
    [
        ("Qwen2ForCausalLM", qwen_tokenizer, {}, "bf16"),
        ("Qwen2ForCausalLM", qwen_tokenizer, {"tie_word_embeddings": True}, "f16"),
        ("Qwen3ForCausalLM", qwen_tokenizer, QWEN3, "f16"),
        ("LlamaForCausalLM", llama3_tokenizer, {"head_dim": 32, "rope_parameters": {"rope_theta": 5e5}}, "bf16"),
        ("LlamaForCausalLM", llama2_tokenizer, {}, "f32"),
        ("MistralForCausalLM", llama2_tokenizer, {"sliding_window": None}, "f16"),
    ],
)
def test_every_architecture_comes_back_with_its_weights_and_logits(tmp_path, architecture, tokenizer, changes, kind):
    save(tmp_path / "merged", architecture, tokenizer(), **changes)
    write_gguf(tmp_path / "merged", {kind: tmp_path / "merged.gguf"})
    model, again = source(tmp_path / "merged"), reload(tmp_path / "merged.gguf")
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # vectors are not quantized
                parameter.copy_(parameter.to(dtype))
    read_back = again.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, read_back[name]), name
    assert again.config.tie_word_embeddings == model.config.tie_word_embeddings
    prompt = torch.arange(3, 43)[None]
    with torch.no_grad():
        # The weights are equal, so only the rounding of the frequencies to 32 bits in the metadata may differ.
        torch.testing.assert_close(again(prompt).logits, model(prompt).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_quantized_weights_are_within_a_step_of_their_block(qwen2, tmp_path, kind):
    write_gguf(qwen2, {kind: tmp_path / "m.gguf"})
    fields, tensors = read(tmp_path / "m.gguf")
    assert fields["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]
    weights = load_file(qwen2 / "model.safetensors")
    for name, of in (
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("output.weight", "lm_head.weight"),
    ):
        of_kind = kind if name != "output.weight" else "q8_0"
        assert tensors[name].tensor_type.name == of_kind.upper()
        blocks = weights[of].numpy().reshape(-1, 32)
        again = dequantize(tensors[name].data, tensors[name].tensor_type).reshape(-1, 32)
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        spread = blocks.max(axis=1, keepdims=True) - blocks.min(axis=1, keepdims=True)
        # Half a step; for q4_0 and q5_0 a full step, because values at the end opposite the largest are clipped.
        step = {"q8_0": largest / 127 / 2, "q5_0": largest / 16, "q4_0": largest / 8}.get(of_kind)
        if step is None:
            step = spread / (31 if of_kind == "q5_1" else 15) / 2
        assert (np.abs(again - blocks) <= step + 2e-3 * largest).all()  # the scale is a 16-bit float
        assert np.abs(again - blocks).max() > 0
    assert {t.tensor_type.name for t in tensors.values() if len(t.shape) == 1} == {"F32"}


def test_rows_that_do_not_divide_into_blocks_are_16_bit(tmp_path):
    save(tmp_path / "merged", "Qwen2ForCausalLM", qwen_tokenizer(), intermediate_size=72)
    write_gguf(tmp_path / "merged", {"q4_0": tmp_path / "m.gguf"})
    tensors = read(tmp_path / "m.gguf")[1]
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name == "F16"
    assert tensors["blk.1.ffn_up.weight"].tensor_type.name == "Q4_0"


# Metadata


def test_the_metadata_are_those_that_llama_cpp_builds_from(tmp_path):
    save(tmp_path / "merged", "LlamaForCausalLM", llama3_tokenizer(), head_dim=32, rope_parameters=LLAMA3_ROPE)
    (tmp_path / "merged" / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model.\n")
    write_gguf(tmp_path / "merged", {"bf16": tmp_path / "maths.BF16.gguf"})
    fields, tensors = read(tmp_path / "maths.BF16.gguf")
    expected = {
        "general.architecture": "llama", "general.type": "model", "general.name": "maths",
        "general.license": "apache-2.0", "general.file_type": gguf.LlamaFileType.MOSTLY_BF16,
        "llama.context_length": 256, "llama.embedding_length": 64, "llama.block_count": 2,
        "llama.feed_forward_length": 96, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 32, "llama.attention.value_length": 32, "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 5000.0, "llama.vocab_size": 403,
    }  # fmt: skip
    assert {name: fields.get(name) for name in expected} == expected
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    # Short wavelengths are unchanged; those longer than the original context are scaled by 8 (arXiv:2407.21783).
    factors = tensors["rope_freqs.weight"].data
    waves = 2 * np.pi * 5000.0 ** (np.arange(0, 32, 2) / 32)
    assert factors[waves < 64 / 4] == pytest.approx(1)
    assert factors[waves > 64] == pytest.approx(8)
    between = (waves > 64 / 4) & (waves < 64)
    assert between.any()
    assert (np.diff(factors[between]) > 0).all()
    assert 1 < factors[between].min() < factors[between].max() < 8


PRIVATE_CARDS = {
    "base_model": "base_model: /home/alice/models/b", "base_models": "base_model:\n- ~/alice/b\n- file:///data/alice/b",
    "a parent": "base_model: ../alice/b", "deep": "base_model: data/alice/b", "one that exists": "base_model: alice/b",
    "base_model with fields": "base_model:\n- name: b\n  repo_url: /data/alice/b\n  url: file:///data/alice",
    "license_link": "license: other\nlicense_link: /home/alice/LICENSE", "Windows": "license_link: D:\\alice\\LICENSE",
    "datasets": "datasets:\n- /data/alice/rows.jsonl\n- 'C:\\Users\\alice\\rows.json'", "dataset": "dataset: ~/alice",
    "text": "description: Trained in /home/alice.", "url": "repo_url: file:///data/alice",
    "tags": "tags: [/home/alice]",
}  # fmt: skip


@pytest.mark.parametrize("front_matter", PRIVATE_CARDS.values(), ids=PRIVATE_CARDS)
def test_local_paths_of_a_model_card_are_left_out(copy, tmp_path, monkeypatch, front_matter):
    (tmp_path / "alice" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    change_config(copy, _name_or_path="/alice")
    (copy / "README.md").write_text(f"---\nauthor: me\n{front_matter}\n---\n")
    fields = read_general(copy, tmp_path)
    assert "alice" not in str(fields).lower()
    assert fields["general.author"] == "me"


def test_other_entries_of_a_model_card_and_its_settings_are_written(copy, tmp_path):
    (copy / "README.md").write_text(
        "---\nlicense_link: ./LICENSE\nbase_model: [owner/base, /data/x]\ndatasets: [https://example.com/a/b/c]\n"
        "tags: [and/or]\nurl: https://example.com/home/alice\n---\n"
    )
    (copy / "generation_config.json").write_text('{"temperature": 0.5}')
    expected = {
        "general.license.link": "./LICENSE", "general.base_model.count": 1, "general.base_model.0.name": "Base",
        "general.base_model.0.repo_url": "https://huggingface.co/owner/base", "general.tags": ["and/or"],
        "general.dataset.0.repo_url": "https://example.com/a/b/c", "general.sampling.temp": 0.5,
        "general.source.url": "https://example.com/home/alice",
    }  # fmt: skip
    assert read_general(copy, tmp_path).items() >= expected.items()


def read_general(folder, tmp_path):
    """Export a model and return the fields that describe it."""
    write_gguf(folder, {"q8_0": tmp_path / "m.Q8_0.gguf"})
    return {name: value for name, value in read(tmp_path / "m.Q8_0.gguf")[0].items() if name.startswith("general.")}


def test_biases_of_a_llama_are_turned_like_its_weights(tmp_path):
    # llama.cpp reads these biases; transformers 5.17 ignores them.
    save(tmp_path / "m", "LlamaForCausalLM", llama2_tokenizer(), attention_bias=True, mlp_bias=True)
    write_gguf(tmp_path / "m", {"f32": tmp_path / "m.gguf"})
    tensors, weights = read(tmp_path / "m.gguf")[1], load_file(tmp_path / "m" / "model.safetensors")
    rows = [head * 16 + half * 8 + i for head in range(2) for i in range(8) for half in range(2)]
    for kind in ("weight", "bias"):
        for name, order in (("k", rows), ("v", range(32))):
            stored = weights[f"model.layers.1.self_attn.{name}_proj.{kind}"][list(order)]
            assert torch.equal(stored, torch.from_numpy(tensors[f"blk.1.attn_{name}.{kind}"].data.copy()))
    assert "blk.1.ffn_down.bias" in tensors


def test_a_sliding_window_ends_the_context(tmp_path):
    save(tmp_path / "m", "MistralForCausalLM", llama2_tokenizer(), sliding_window=100)
    _, notes = write_gguf(tmp_path / "m", {"f16": tmp_path / "m.gguf"})
    assert read(tmp_path / "m.gguf")[0]["llama.context_length"] == 100
    assert "the context is 100 tokens, the model's sliding window" in notes


def test_a_tied_head_that_was_written_all_the_same_is_not_written_twice(tmp_path):
    save(tmp_path / "m", "Qwen2ForCausalLM", qwen_tokenizer(), tie_word_embeddings=True)

    def untie(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    change_weights(tmp_path / "m", untie)
    write_gguf(tmp_path / "m", {"f16": tmp_path / "m.gguf"})
    assert "output.weight" not in read(tmp_path / "m.gguf")[1]


# Rejected models


def spoil(name, value):
    def change(weights):
        weights[name].view(-1)[5] = value

    return lambda folder: change_weights(folder, change)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("spoiled", "kind", "message"),
    [
        (spoil(UP, float("nan")), "f32", f"{UP} contains NaN or infinity"),
        (spoil(UP, -70000.0), "f16", f"{UP} has 7e.04, .* limited to 65504; pass --type bf16"),
        (lambda f: change_weights(f, lambda w: w.pop(UP)), "f16", f"lacks {UP}, which config.json implies"),
        (
            lambda f: change_config(f, architectures=["GemmaForCausalLM"]),
            "f16",
            "is a GemmaForCausalLM; supported are LlamaForCausalLM, .*Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        (lambda f: change_config(f, hidden_act="gelu"), "f16", "hidden_act is gelu"),
        (
            lambda f: change_config(f, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "f16",
            "the rotary embedding is .*'dynamic'.*; supported are the rope types default and llama3",
        ),
    ],
)
def test_what_would_be_wrong_is_refused_and_leaves_nothing(copy, tmp_path, spoiled, kind, message):
    spoiled(copy)
    with pytest.raises(UserError, match=message) as refused:
        write_gguf(copy, {kind: tmp_path / "out" / "m.gguf"})
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


# The file on disk


def test_an_interrupted_export_leaves_no_file_and_the_next_replaces_what_was_begun(qwen2, tmp_path, monkeypatch):
    output, begun = tmp_path / "m.gguf", tmp_path / ".m.gguf.partial"
    tofile = types.Encoded.tofile

    def interrupted(encoded, file):
        tofile(encoded, file)
        raise KeyboardInterrupt

    monkeypatch.setattr(types.Encoded, "tofile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_gguf(qwen2, {"f16": output})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    begun.write_bytes(b"of a process that was killed" * 100_000)
    write_gguf(qwen2, {"f16": output})
    assert list(tmp_path.iterdir()) == [output]
    assert read(output)[1]


# K-quants


def fake_quantizer(folder, text):
    folder.mkdir()
    program = folder / writer.QUANTIZE
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(folder)


def test_a_k_quant_is_made_by_llama_quantize_from_a_file_that_loses_nothing(tmp_path, monkeypatch):
    save(tmp_path / "merged", "Qwen2ForCausalLM", qwen_tokenizer(), dtype="bfloat16")
    (tmp_path / "out").mkdir()
    path = fake_quantizer(tmp_path / "bin", f'echo "$3" > {tmp_path}/requested; cp "$1" "$2"')
    monkeypatch.setenv("PATH", path + os.pathsep + os.environ["PATH"])
    write_gguf(tmp_path / "merged", {"q4_k_m": tmp_path / "out" / "m.Q4_K_M.gguf"})
    assert (tmp_path / "requested").read_text() == "Q4_K_M\n"
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["m.Q4_K_M.gguf"]
    fields, tensors = read(tmp_path / "out" / "m.Q4_K_M.gguf")
    assert tensors["output.weight"].tensor_type.name == "BF16"
    assert fields["general.name"] == "m"


def test_what_a_killed_k_quant_leaves_is_replaced_by_one_of_another_type(qwen2, tmp_path, monkeypatch):
    output = tmp_path / "out"
    path = fake_quantizer(
        tmp_path / "bin", f'cp "$1" "{tmp_path}/left"; echo "$1" > "{tmp_path}/its path"; cp "$1" "$2"'
    )
    monkeypatch.setenv("PATH", path + os.pathsep + os.environ["PATH"])
    write_gguf(qwen2, {"q4_k_m": output / "m.Q4_K_M.gguf"})
    shutil.copy(tmp_path / "left", (tmp_path / "its path").read_text().strip())
    write_gguf(qwen2, {"q5_k_m": output / "m.Q5_K_M.gguf"})
    assert sorted(file.name for file in output.iterdir()) == ["m.Q4_K_M.gguf", "m.Q5_K_M.gguf"]


def test_if_llama_quantize_fails_the_older_file_stays(qwen2, tmp_path, monkeypatch):
    path = fake_quantizer(tmp_path / "bin", 'cp "$1" "$2"; echo "no such type" >&2; exit 3')
    monkeypatch.setenv("PATH", path + os.pathsep + os.environ["PATH"])
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "m.gguf").write_bytes(b"older")
    with pytest.raises(RunError, match="llama-quantize failed with code 3: no such type"):
        write_gguf(qwen2, {"q4_k_m": tmp_path / "all" / "m.gguf"})
    assert [file.read_bytes() for file in (tmp_path / "all").iterdir()] == [b"older"]


def test_without_llama_quantize_a_type_that_works_is_named(qwen2, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"--type q4_k_m needs llama.cpp's llama-quantize.* another --type: .*q4_1"):
        write_gguf(qwen2, {"q4_k_m": tmp_path / "m.gguf"})


# The command


def test_the_command_writes_beside_the_folder_and_says_how_to_use_it(warm, copy, tmp_path):
    ended = warm.start(SCRIPT, "merged", "--modelfile", cwd=tmp_path).end()
    assert ended.returncode == 0, ended.stderr
    output = tmp_path / "merged-gguf" / "merged.Q8_0.gguf"
    names = ["merged.Q8_0.Modelfile", output.name, "params", "template"]
    assert sorted(path.name for path in output.parent.glob("[!.]*")) == names
    assert f"llama-cli -m {output}" in ended.stdout
    assert "ollama create merged -f" in ended.stdout
    assert read(output)[0]["general.name"] == "merged"


def test_a_folder_without_a_model_is_refused_and_nothing_is_made_beside_it(tmp_path):
    (tmp_path / "outputs").mkdir()
    with pytest.raises(UserError, match=r"outputs contains no config\.json"):
        export(ExportOptions(tmp_path / "outputs"))
    with pytest.raises(UserError, match=r"outputs contains no config\.json"):
        export(ExportOptions(tmp_path / "outputs", output_dir=tmp_path / "a" / "new" / "folder"))
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


@pytest.mark.parametrize(
    "command",
    [
        lambda source: export(ExportOptions(source)),
        lambda source: push_to_hub(PushOptions(str(source), "me/mine", dry_run=True)),
    ],
    ids=["export-gguf", "push"],
)
def test_a_source_that_is_missing_or_a_file_is_refused(command, tmp_path):
    (tmp_path / "gsm8k_lora").mkdir()
    (tmp_path / "notes").write_text("")
    with pytest.raises(UserError, match=r"/gsm9k_lora does not exist; did you mean 'gsm8k_lora'\?$"):
        command(tmp_path / "gsm9k_lora")
    with pytest.raises(UserError, match=r"/notes' is not a folder; give a run, or "):
        command(tmp_path / "notes")


def test_home_folders_are_those_of_the_user(copy, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    [file] = export(ExportOptions(Path("~/merged"), output_dir=Path("~/my files")))
    assert file == tmp_path / "my files" / "merged.Q8_0.gguf"
    assert file.is_file() and not (tmp_path / "~").exists()


def test_an_adapter_whose_base_has_moved_names_the_command_that_takes_another_base(tmp_path):
    adapter = make_adapter(tmp_path / "mine", base=str(tmp_path / "moved"))
    with pytest.raises(UserError, match=f"^lora-grpo merge {adapter}: .* does not exist here; pass it with --base$"):
        export(ExportOptions(adapter))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_modelfile_has_the_system_prompt_of_the_run(qwen2, tmp_path):
    run = make_run(tmp_path / "run")
    shutil.copytree(qwen2, run / "merged")
    export(ExportOptions(run / "merged", modelfile=True, output_dir=tmp_path / "out"))
    (modelfile,) = (tmp_path / "out").glob("*.Modelfile")
    assert 'SYSTEM """Respond in the following format' in modelfile.read_text()


def test_a_modelfile_that_an_export_without_one_would_change_is_named_and_stays(qwen2, tmp_path, capsys):
    run = make_run(tmp_path / "run")
    shutil.copytree(qwen2, run / "merged")
    export(ExportOptions(run / "merged", modelfile=True))
    capsys.readouterr()
    export(ExportOptions(run / "merged"))
    export(ExportOptions(run / "merged", type=("q4_0",)))  # the Modelfile of the other file is still right
    assert "note" not in capsys.readouterr().out

    record = json.loads((run / "run.json").read_text())
    record["data"]["system_prompt"] = None
    (run / "run.json").write_text(json.dumps(record))
    before = {path.name: path.read_bytes() for path in (run / "gguf").iterdir()}
    export(ExportOptions(run / "merged"))
    [note] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert ": run.Q8_0.Modelfile, system;" in note and "--modelfile" in note
    assert {path.name: path.read_bytes() for path in (run / "gguf").iterdir()} == before
    export(ExportOptions(run / "merged", modelfile=True))
    export(ExportOptions(run / "merged"))
    assert "note" not in capsys.readouterr().out and not (run / "gguf" / "system").exists()


def test_a_model_that_was_merged_elsewhere_has_the_system_prompt_of_its_run(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    shutil.rmtree(run / "adapter")
    make_peft_adapter(starter.model_path(), run / "adapter")
    merged = merge(MergeOptions(str(run), output=tmp_path / "elsewhere" / "model"))
    shutil.rmtree(run)
    [file] = export(ExportOptions(merged, modelfile=True))
    assert f'SYSTEM """{SYSTEM_PROMPTS["xml"]}"""' in file.with_suffix(".Modelfile").read_text()
    assert (file.parent / "system").read_text() == SYSTEM_PROMPTS["xml"]
    assert f"-sys {shlex.quote(SYSTEM_PROMPTS['xml'])}" in capsys.readouterr().out
    # The card is written from the files in the folder, too.
    for folder in (merged, file.parent):
        push_to_hub(PushOptions(str(folder), "me/mine", dry_run=True))
        assert SYSTEM_PROMPTS["xml"] in capsys.readouterr().out


def test_the_command_writes_several_types_with_their_sizes(qwen2, tmp_path, capsys):
    export(ExportOptions(qwen2, type=("q8_0", "f16", "q8_0"), output_dir=tmp_path, modelfile=True))
    printed = capsys.readouterr().out
    for kind in ("Q8_0", "F16"):
        path = tmp_path / f"{qwen2.name}.{kind}.gguf"
        assert printed.count(f"{path}  {path.stat().st_size / 1e6:.1f} MB") == 1
        assert f"FROM ./{path.name}\n" in path.with_suffix(".Modelfile").read_text()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"trained for a day")
    with pytest.raises(FileExistsError):
        export(ExportOptions(qwen2, output_dir=tmp_path / "adapter_model.safetensors"))
    with pytest.raises(UserError, match=r"--output-dir .*/m\.gguf is the name of a file; pass a folder"):
        export(ExportOptions(qwen2, output_dir=tmp_path / "m.gguf"))
    assert not (tmp_path / "m.gguf").exists()
