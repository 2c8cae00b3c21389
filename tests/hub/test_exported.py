"""GGUF files of another adapter, or of an unknown model, are not pushed beside a card of the run."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from helpers.gguf_files import write_header
from helpers.gguf_models import qwen_tokenizer, save
from helpers.pushed_runs import make_merged, make_run

from lora_grpo.errors import UserError
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.hub import PushOptions, push_to_hub
from lora_grpo.models import adapter_sha256


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run whose merged model was exported in two types."""
    run = make_run(tmp_path_factory.mktemp("exported") / "mine")
    report = (make_merged(run) / "merge_report.json").read_text()
    shutil.rmtree(run / "merged")
    save(run / "merged", "Qwen2ForCausalLM", qwen_tokenizer())
    (run / "merged" / "merge_report.json").write_text(report)
    export(ExportOptions(run, type=("q8_0", "q4_0")))
    return run


@pytest.fixture
def run(exported, tmp_path):
    return Path(shutil.copytree(exported, tmp_path / "mine"))


def train_again(run):
    """Change the adapter of a run, and its merged model."""
    (run / "adapter" / "adapter_config.json").write_text(
        (run / "adapter" / "adapter_config.json").read_text().replace('"r": 16', '"r": 8')
    )
    path = run / "merged" / "merge_report.json"
    identity = {"adapter_sha256": adapter_sha256(run / "adapter")}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"identity": identity}))


def push(source, **options):
    push_to_hub(PushOptions(str(source), "me/mine", dry_run=True, **options))


def refusal(source, monkeypatch, **options):
    """Return why a push is refused before anything is sent or asked."""
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", None)
        patched.setattr("lora_grpo.hub.facts.gather", None)
        with pytest.raises(UserError) as caught:
            push(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_of_an_earlier_adapter_is_refused(run, monkeypatch, capsys):
    train_again(run)
    message = refusal(run, monkeypatch, what="gguf")
    assert all(text in message for text in ("mine.Q4_0.gguf was made from another adapter", str(run / "adapter")))
    export(ExportOptions(run))  # q8_0 only: the other file is of the earlier adapter
    message = refusal(run, monkeypatch, what="gguf")
    assert "mine.Q4_0.gguf" in message and "mine.Q8_0.gguf" not in message
    assert "lora-grpo export-gguf" in message and "delete" in message
    (run / "gguf" / "mine.Q4_0.gguf").unlink()
    push(run, what="gguf")
    assert "mine.Q8_0.gguf" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["made elsewhere", "damaged"])
def test_a_file_of_an_unknown_adapter_is_refused(run, monkeypatch, change):
    path = run / "gguf" / "mine.Q4_0.gguf"
    if change == "made elsewhere":
        write_header(path)
    else:
        path.write_bytes(path.read_bytes()[:-1])
    message = refusal(run, monkeypatch, what="gguf")
    assert path.name in message and "delete" in message


def test_files_of_the_best_adapter_are_compared_with_it(run, monkeypatch):
    shutil.copytree(run / "adapter", run / "best")
    shutil.copytree(run / "gguf", run / "best-gguf")
    train_again(run)
    push(run / "best-gguf")
    (run / "best" / "adapter_config.json").write_text("{}")
    message = refusal(run / "best-gguf", monkeypatch)
    assert "mine.Q4_0.gguf" in message and str(run / "best") in message


def test_a_model_that_the_run_did_not_train_is_refused_as_unknown(run, tmp_path, monkeypatch):
    shutil.rmtree(run / "gguf")
    theirs = save(tmp_path / "theirs", "Qwen2ForCausalLM", qwen_tokenizer())
    export(ExportOptions(theirs, output_dir=run / "gguf"))
    assert not (run / "gguf" / "merge_report.json").exists()
    message = refusal(run, monkeypatch, what="gguf")
    assert "theirs.Q8_0.gguf" in message


@pytest.mark.parametrize(
    ("name", "adapter"), [("start-merged", "start"), ("final", "best"), ("merged-dequantized", "adapter")]
)
def test_another_model_of_a_run_has_files_of_its_own(run, monkeypatch, capsys, name, adapter):
    if adapter != "adapter":
        config = shutil.copytree(run / "adapter", run / adapter) / "adapter_config.json"
        config.write_text(config.read_text().replace('"r": 16', '"r": 4'))
    model = shutil.copytree(run / "merged", run / name)
    report = json.loads((model / "merge_report.json").read_text())
    report["identity"] = {"adapter_sha256": adapter_sha256(run / adapter)}
    (model / "merge_report.json").write_text(json.dumps(report))
    before = {path.name: path.read_bytes() for path in (run / "gguf").iterdir()}

    [file] = export(ExportOptions(model))
    assert file == run / f"{name}-gguf" / f"mine-{name}.Q8_0.gguf"
    assert f"{run / adapter} --against {file}" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (run / "gguf").iterdir()} == before

    # The run did not produce the adapter that it started from, so the card of this model does not describe the run.
    for folder in (model, file.parent):
        push(folder)
        assert ("trained with GRPO on" in capsys.readouterr().out) == (adapter != "start")
    (run / adapter / "adapter_config.json").write_text("{}")
    for folder in (model, file.parent):
        assert f"{folder} was merged from an adapter that {run} does not have" in refusal(folder, monkeypatch)


def test_files_that_no_export_wrote_are_pushed(run, tmp_path, capsys):
    (tmp_path / "plain").mkdir()
    shutil.copy(run / "gguf" / "mine.Q4_0.gguf", tmp_path / "plain" / "theirs.gguf")
    push(tmp_path / "plain")
    printed = capsys.readouterr()
    assert "theirs.gguf" in printed.out
    assert printed.err == ""
