"""Adapters as GGUF: the file has the updates in the layout of llama.cpp, and what --lora cannot apply is refused."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers.adapters import LINEAR, make_adapter
from helpers.gguf_models import llama2_tokenizer, llama3_tokenizer, qwen_tokenizer, save
from helpers.made_runs import make_run
from safetensors.numpy import load_file, save_file

from lora_grpo import starter
from lora_grpo.errors import UserError
from lora_grpo.gguf import lora
from lora_grpo.gguf.cli import ExportOptions, export
from lora_grpo.gguf.lora import LORA_FILE, write_lora
from lora_grpo.gguf.writer import write_gguf
from lora_grpo.hub.files import UploadFile, collect, stale
from lora_grpo.merging import MergeOptions, merge

QWEN3 = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}


def read(path):
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}, {t.name: t.data for t in reader.tensors}


def updates(path):
    """Return what llama.cpp adds to each weight, (out, in), in float64."""
    fields, tensors = read(path)
    alpha, found = fields["adapter.lora.alpha"], {}
    for name in {name.rpartition(".")[0] for name in tensors}:
        a, b = (tensors[f"{name}.lora_{part}"].astype("f8") for part in "ab")
        rank = b.shape[1]
        scale = alpha / rank if alpha else 1.0
        found[name] = scale * (a @ b.T if name == "token_embd.weight" else b @ a)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(tmp_path_factory.mktemp("base") / "base", "Qwen2ForCausalLM", qwen_tokenizer())


@pytest.mark.parametrize(
    ("architecture", "tokenizer", "changes", "options"),
    [
        ("Qwen2ForCausalLM", qwen_tokenizer, {"tie_word_embeddings": True}, {}),
        ("Qwen2ForCausalLM", qwen_tokenizer, {}, {"target_modules": [*LINEAR, "embed_tokens", "lm_head"]}),
        ("Qwen3ForCausalLM", qwen_tokenizer, QWEN3, {"use_rslora": True}),
        ("LlamaForCausalLM", llama3_tokenizer, {"head_dim": 32}, {"lora_alpha": 7}),
        (
            "MistralForCausalLM",
            llama2_tokenizer,
            {"sliding_window": None},
            {
                "use_rslora": True,
                "rank_pattern": {"q_proj": 2, "down_proj": 3},
                "alpha_pattern": {"layers.0.*k_proj": 0.7},
            },
        ),
    ],
)
def test_the_file_adds_what_a_merge_adds(tmp_path, architecture, tokenizer, changes, options):
    base = save(tmp_path / "base", architecture, tokenizer(), **changes)
    adapter = make_adapter(base, tmp_path / "adapter", **options)
    merge(MergeOptions(str(adapter), dtype="fp32", output=tmp_path / "merged"))
    for name in ("base", "merged"):
        write_gguf(tmp_path / name, {"f32": tmp_path / f"{name}.gguf"})
    write_lora(adapter, tmp_path / "lora.gguf")
    found = updates(tmp_path / "lora.gguf")
    before, after = (read(tmp_path / f"{name}.gguf")[1] for name in ("base", "merged"))
    changed = {name for name in before if np.abs(after[name] - before[name]).max() > 0}
    assert found.keys() == changed and len(changed) >= 14
    for name, update in found.items():
        # The difference of two float32 tensors has their rounding.
        assert np.abs(update - (after[name].astype("f8") - before[name])).max() < 2e-7, name
        assert np.abs(update).max() > 1e-3


def test_matrices_are_those_of_the_adapter_to_the_bit(base, tmp_path):
    adapter = make_adapter(base, tmp_path / "adapter", lora_alpha=6, r=4)
    write_lora(adapter, tmp_path / "lora.gguf")
    fields, tensors = read(tmp_path / "lora.gguf")
    expected = {
        "general.architecture": "qwen2", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 6.0,
        "general.base_model.0.name": "base", "general.file_type": gguf.LlamaFileType.ALL_F32,
    }  # fmt: skip
    assert {name: fields.get(name) for name in expected} == expected
    weights = load_file(adapter / "adapter_model.safetensors")
    assert len(tensors) == len(weights)
    stored = "base_model.model.model.layers.1.mlp.down_proj.lora_"
    assert np.array_equal(tensors["blk.1.ffn_down.weight.lora_a"], weights[f"{stored}A.weight"])
    assert np.array_equal(tensors["blk.1.ffn_down.weight.lora_b"], weights[f"{stored}B.weight"])


def test_an_alpha_of_zero_changes_nothing(base, tmp_path):
    """llama.cpp reads it as a scale of 1."""
    write_lora(make_adapter(base, tmp_path / "adapter", lora_alpha=0), tmp_path / "lora.gguf")
    assert not any(update.any() for update in updates(tmp_path / "lora.gguf").values())


# Refused


def change_settings(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_adapter(folder, **changes):
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    weights.update({name: np.full_like(weights[name], value) for name, value in changes.items()})
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "has DoRA, .*--lora cannot apply; export the merged model with --what merged"),
        ({"modules_to_save": ["lm_head"]}, "has fully trained modules, "),
        ({"trainable_token_indices": [1, 2]}, "has trained tokens, "),
        ({"bias": "lora_only"}, "has trained biases, "),
        ({"target_parameters": ["experts.down_proj"]}, "has stacked experts, "),
        ({"resize": 500}, r"has a trained or resized (lm_head|model.embed_tokens)\.weight, "),
    ],
)
def test_what_lora_cannot_apply_is_refused_by_name(base, tmp_path, options, message):
    if "target_parameters" in options:  # of a model without experts
        change_settings(make_adapter(base, tmp_path / "adapter"), **options)
    else:
        make_adapter(base, tmp_path / "adapter", **options)
    adapter = tmp_path / "adapter"
    if "resize" not in options:  # before the base is looked for
        change_settings(adapter, base_model_name_or_path="/missing")
    with pytest.raises(UserError, match=message):
        write_lora(adapter, tmp_path / "out" / LORA_FILE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_one_of_two_tied_weights_cannot_be_changed(tmp_path, target):
    base = save(tmp_path / "base", "Qwen2ForCausalLM", qwen_tokenizer(), tie_word_embeddings=True)
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", target])
    with pytest.raises(UserError, match=f"trains .*{target}.weight, which the base uses as embedding and as head"):
        write_lora(adapter, tmp_path / LORA_FILE)


def test_an_adapter_without_matrices_or_with_nan_or_of_an_unknown_architecture_is_refused(base, tmp_path):
    adapter = make_adapter(base, tmp_path / "adapter")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    change_adapter(adapter, **{name: float("nan")})
    with pytest.raises(UserError, match=f"{name} holds NaN or infinity; train again"):
        write_lora(adapter, tmp_path / LORA_FILE)
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".*"))
    save_file({}, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="has no LoRA matrices"):
        write_lora(adapter, tmp_path / LORA_FILE)
    gemma = save(tmp_path / "gemma", "GemmaForCausalLM", qwen_tokenizer(), head_dim=16)
    adapter = make_adapter(gemma, tmp_path / "of_gemma")
    with pytest.raises(UserError, match="is a GemmaForCausalLM; supported are LlamaForCausalLM"):
        write_lora(adapter, tmp_path / LORA_FILE)


def test_a_base_that_moved_names_the_command_with_the_flag(base, tmp_path):
    adapter = make_adapter(base, tmp_path / "adapter")
    change_settings(adapter, base_model_name_or_path=None)
    with pytest.raises(UserError, match=r"^lora-grpo merge .*adapter: .*does not specify a base model.*--base$"):
        write_lora(adapter, tmp_path / LORA_FILE)


def test_too_small_a_disk_is_refused(base, tmp_path, monkeypatch):
    adapter = make_adapter(base, tmp_path / "adapter")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    with pytest.raises(UserError, match=r"has 1.0 MB free and needs"):
        write_lora(adapter, tmp_path / LORA_FILE)


def test_an_interrupted_export_keeps_the_older_file(base, tmp_path, monkeypatch):
    adapter = make_adapter(base, tmp_path / "adapter")
    write_lora(adapter, tmp_path / LORA_FILE)
    before = (tmp_path / LORA_FILE).read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(lora._Factor, "tofile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_lora(adapter, tmp_path / LORA_FILE)
    assert (tmp_path / LORA_FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [LORA_FILE]


# The command


def test_the_command_writes_beside_the_adapter_and_says_how_to_use_it(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    export(ExportOptions(run, what="adapter"))
    assert f"llama-cli -m BASE.gguf --lora {run / 'adapter' / LORA_FILE}" in capsys.readouterr().out
    assert read(run / "adapter" / LORA_FILE)[0]["general.name"] == "run"
    assert not (run / "merged").exists()
    shutil.copytree(run / "adapter", run / "best")
    export(ExportOptions(run / "best", what="adapter"))
    assert read(run / "best" / LORA_FILE)[0]["general.name"] == "run-best"
    export(ExportOptions(run / "adapter", what="adapter", output_dir=tmp_path / "out", type=("f32",)))
    assert (tmp_path / "out" / LORA_FILE).is_file()
    for options, message in (
        ({"type": ("q4_0",)}, "--type q4_0 is for models, and an adapter is f32"),
        ({"modelfile": True}, "--modelfile is for models"),
        ({"source": Path(starter.model_path())}, "holds no adapter with adapter_config.json and safetensors"),
    ):
        with pytest.raises(UserError, match=message):
            export(ExportOptions(**{"source": run, "what": "adapter", **options}))


# The Hub


def test_the_file_is_pushed_with_its_adapter_and_not_as_a_model(tmp_path):
    run = make_run(tmp_path / "run")
    export(ExportOptions(run, what="adapter"))
    files, _ = collect(run / "adapter", "adapter", "starter")
    assert LORA_FILE in {file.name for file in files}
    (run / "gguf").mkdir()
    shutil.copy(run / "adapter" / LORA_FILE, run / "gguf" / "model.gguf")
    with pytest.raises(UserError, match=r"model\.gguf is an adapter, .* folder of its adapter as adapter_model\.gguf"):
        collect(run / "gguf", "gguf", "starter")


def test_an_older_file_in_the_repository_is_deleted_only_with_its_adapter():
    existing = [LORA_FILE, "old.Q4_0.gguf", "adapter_model.safetensors"]
    assert stale(existing, [UploadFile("adapter_model.safetensors", b"")], "adapter") == [LORA_FILE]
    assert stale(existing, [UploadFile("new.gguf", b"")], "gguf") == ["old.Q4_0.gguf"]


# llama.cpp


PROMPTS = [
    "What is 3 + 4?", "Tom has 12 pens and buys 7 more. How many pens has he?", "What is 9 * 6?", "What is 81 - 26?",
    "A box holds 6 eggs. How many eggs do 5 boxes hold?", "Ann reads 4 pages a day. How many in 9 days?",
    "Mia has 15 apples and eats 8. How many are left?", "What is half of 48?",
]  # fmt: skip


def answers(gguf_file, prompts, adapter=None):
    """Return llama.cpp's greedy answers to lists of token ids."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf_file)
    params.n_ctx, params.n_parallel, params.warmup, params.cache_prompt = 256, 1, False, False
    params.cpuparams.n_threads, params.verbosity = 1, 0
    if adapter:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    server = xllamacpp.Server(params)
    request = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    return [server.handle_completions({**request, "prompt": each})["choices"][0]["text"] for each in prompts]


@pytest.mark.engines
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("starter", {}),
        ("Qwen2ForCausalLM", {"target_modules": [*LINEAR, "embed_tokens", "lm_head"], "use_rslora": True}),
        ("LlamaForCausalLM", {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.*k_proj": 30}}),
    ],
)
def test_base_and_adapter_answer_as_the_merged_model_in_llama_cpp(tmp_path, name, options):
    pytest.importorskip("xllamacpp")
    from transformers import AutoTokenizer

    if name == "starter":
        base = starter.model_path()
        tokenizer = AutoTokenizer.from_pretrained(base)
    else:
        tokenizer = llama3_tokenizer() if name.startswith("Llama") else qwen_tokenizer()
        base = save(tmp_path / "base", name, tokenizer)
    adapter = make_adapter(base, tmp_path / "adapter", lora_alpha=16, **options)
    merged = merge(MergeOptions(str(adapter), dtype="fp32", output=tmp_path / "merged"))
    write_gguf(base, {"f32": tmp_path / "base.gguf"})
    write_gguf(merged, {"f32": tmp_path / "merged.gguf"})
    write_lora(adapter, tmp_path / "lora.gguf")
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)["input_ids"]
        for prompt in PROMPTS
    ]
    expected = answers(tmp_path / "merged.gguf", prompts)
    assert answers(tmp_path / "base.gguf", prompts, tmp_path / "lora.gguf") == expected
    alone = answers(tmp_path / "base.gguf", prompts)
    assert all(len(answer) > 3 for answer in expected)
    assert sum(one != other for one, other in zip(alone, expected, strict=True)) == len(prompts)
