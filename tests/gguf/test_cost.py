"""gguf_report.json: the KL divergence of each file is that of the model that transformers loads from it."""

import json

import pytest
import torch
from helpers.gguf_models import llama3_tokenizer, qwen_tokenizer, save
from helpers.made_runs import make_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_grpo.gguf import cost
from lora_grpo.gguf.cli import ExportOptions, export
from lora_grpo.gguf.files import REPORT, exported_files
from lora_grpo.merging import texts_of


@pytest.mark.parametrize(
    ("architecture", "tokenizer", "changes"),
    [
        ("LlamaForCausalLM", llama3_tokenizer, {}),
        ("Qwen2ForCausalLM", qwen_tokenizer, {"tie_word_embeddings": True, "dtype": "bfloat16"}),
    ],
)
def test_a_type_costs_what_its_weights_in_transformers_differ_by(tmp_path, capsys, architecture, tokenizer, changes):
    folder = save(tmp_path / "m", architecture, tokenizer(), **changes)
    export(ExportOptions(folder, type=("q8_0", "q4_0", "f32"), output_dir=tmp_path / "out"))
    printed, files = capsys.readouterr().out, exported_files(tmp_path / "out")
    ids, keep = texts_of(AutoTokenizer.from_pretrained(folder), None, cost.TEXTS)

    def logprobs(path, **options):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
        with torch.no_grad():
            logits = [model(torch.tensor([text])).logits[0, -keep:] for text in ids]
        return torch.cat(logits).double().log_softmax(-1)

    before = logprobs(folder)
    for kind in ("q8_0", "q4_0"):
        name = f"m.{kind.upper()}.gguf"
        after = logprobs(tmp_path / "out", gguf_file=name)
        expected = float((before.exp() * (before - after)).sum(-1).mean())
        assert files[name].kl == pytest.approx(expected, rel=1e-3) and expected > 1e-5
        assert f"KL(model || file) {expected:.2g} nats per token" in printed
        assert (files[name].type, files[name].bytes) == (kind, (tmp_path / "out" / name).stat().st_size)
    assert files["m.F32.gguf"].kl == 0
    assert files["m.Q4_0.gguf"].kl > 10 * files["m.Q8_0.gguf"].kl


def test_the_texts_are_completions_of_the_run_if_it_has_any(tmp_path):
    run = make_run(tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(save(run / "merged", "Qwen2ForCausalLM", qwen_tokenizer()))
    assert texts_of(tokenizer, run, cost.TEXTS) == texts_of(tokenizer, None, cost.TEXTS)
    (run / "completions").mkdir()
    rows = [{"id": n, "question": f"What is {n} + {n}?", "completion": f"It is {2 * n}. " * 20} for n in range(20)]
    (run / "completions" / "step-00001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids, keep = texts_of(tokenizer, run, cost.TEXTS)
    assert (len(ids), keep) == (cost.TEXTS, 64)
    export(ExportOptions(run / "merged"))
    assert exported_files(run / "gguf")["run.Q8_0.gguf"].adapter_sha256 is None  # there is no merge report


def test_the_report_has_the_files_of_the_folder_and_a_failure_is_a_note(tmp_path, capsys, monkeypatch):
    folder, out = save(tmp_path / "m", "Qwen2ForCausalLM", qwen_tokenizer()), tmp_path / "out"
    export(ExportOptions(folder, type=("q8_0", "q5_0"), output_dir=out))
    (out / "m.Q5_0.gguf").unlink()

    def fail(*_):
        raise ValueError("no such tensor")

    monkeypatch.setattr(cost, "divergences", fail)
    export(ExportOptions(folder, type=("f16",), output_dir=out))
    assert "note: the KL divergence was not measured: ValueError: no such tensor" in capsys.readouterr().out
    files = exported_files(out)
    assert files.keys() == {"m.Q8_0.gguf", "m.F16.gguf"}
    assert files["m.Q8_0.gguf"].kl is not None
    assert files["m.F16.gguf"].kl is None
    (out / REPORT).write_text("{")
    assert exported_files(out) == {}
