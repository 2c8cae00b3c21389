"""Files of every kind that a push sends are refused if they are cut off."""

import json

import gguf
import numpy as np
import pytest
from helpers.pushed_runs import make_merged, make_run, safetensors

from lora_grpo.errors import UserError
from lora_grpo.files import atomic
from lora_grpo.hub.push import prepare


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def make_gguf(run):
    (run / "gguf").mkdir()
    writer = gguf.GGUFWriter(run / "gguf" / "trained-Q4_K_M.gguf", "qwen2")
    writer.add_tensor("token_embd.weight", np.ones((4, 32), dtype=np.float32))
    writer.add_tensor("output.weight", np.ones((4, 256), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return run / "gguf"


def test_a_gguf_file_that_is_cut_off_anywhere_is_refused(run):
    folder = make_gguf(run)
    (path,) = folder.iterdir()
    content = path.read_bytes()
    prepare(folder, "gguf", "me/trained")
    for kept in (0, 3, 4, 20, 100, len(content) // 2, len(content) - 300, len(content) - 4, len(content) - 1):
        path.write_bytes(content[:kept])
        with pytest.raises(UserError, match=r"\.gguf is not a complete GGUF file \(.*\); export it again$"):
            prepare(folder, "gguf", "me/trained")


def pieces(count=20):
    """A SentencePiece model: messages in field 1, and settings in field 2."""
    entries = [bytes([0x0A, 8, *f"piece{n:03}".encode()]) for n in range(count)]
    return b"".join(entries) + bytes([0x12, 3, 1, 2, 3])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b'{"model": {}}', r"tokenizer\.json cannot be read"),
        ("tokenizer.model", pieces(), r"tokenizer\.model is not a complete SentencePiece model"),
        ("special_tokens_map.json", b'{"eos_token": "x"}', r"special_tokens_map\.json cannot be read"),
        (
            "chat_template.jinja",
            b"{% generation %}{{ messages }}{% endgeneration %}",
            "is not a complete chat template",
        ),
        ("other.safetensors", safetensors(), r"other\.safetensors is not a complete safetensors file"),
        ("model.safetensors", safetensors(), r"model\.safetensors is not a complete safetensors file"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', r"index\.json cannot be read"),
    ],
)
def test_a_file_of_any_model_that_is_cut_off_is_not_uploaded(run, name, content, message):
    merged = make_merged(run)
    (merged / name).write_bytes(content)
    prepare(merged, "merged", "me/trained")
    for kept in (0, len(content) // 2, len(content) - 1):
        (merged / name).write_bytes(content[:kept])
        with pytest.raises(UserError, match=message):
            prepare(merged, "merged", "me/trained")


def test_a_modelfile_that_is_cut_off_is_not_uploaded(run):
    folder = make_gguf(run)
    path = folder / "trained.Modelfile"
    text = (
        'FROM ./trained-Q4_K_M.gguf\nTEMPLATE """{{ .Content }}"""\nSYSTEM """5" nails"""\nPARAMETER stop "<|end|>"\n'
    )
    path.write_text(text)
    prepare(folder, "gguf", "me/trained")
    for kept in (0, 3, 40, 65, -1, -10):
        path.write_text(text[:kept])
        with pytest.raises(UserError, match=r"is cut off: .* write it again"):
            prepare(folder, "gguf", "me/trained")
    path.write_text("FROM ./other.gguf\n")
    with pytest.raises(UserError, match=r"needs \./other\.gguf, which is not in"):
        prepare(folder, "gguf", "me/trained")


def test_what_a_merge_wrote_beside_the_weights_is_checked(run):
    merged = make_merged(run)
    path = merged / "merge_report.json"
    report = json.loads(path.read_text())
    digest = atomic.sha256(merged / "tokenizer.json")
    report["files"] = [{"file": "tokenizer.json", "bytes": 2, "sha256": digest}]
    path.write_text(json.dumps(report))
    prepare(merged, "merged", "me/trained")
    (merged / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(UserError, match=r"tokenizer\.json is missing or not as merging wrote it; .*merge_report\.json"):
        prepare(merged, "merged", "me/trained")
