"""`scripts/merge.py` end to end: output files, messages, rejected input, and interrupted merges."""

import json
import random
import shutil
from pathlib import Path

import pytest
from helpers.adapters import live, load, logits_of, make_adapter, make_base
from helpers.made_runs import make_run
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from lora_grpo import starter
from lora_grpo.errors import UserError
from lora_grpo.files import lock
from lora_grpo.merging.merge_model import MergeOptions, merge, merged_model
from lora_grpo.merging.report import read_report
from lora_grpo.models import adapter_sha256, model_files

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "merge.py"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished training run of the bundled model."""
    run = make_run(tmp_path_factory.mktemp("merging") / "run", model_files.weights_fingerprint(starter.model_path()))
    shutil.rmtree(run / "adapter")
    make_adapter(starter.model_path(), run / "adapter", r=8, lora_alpha=16)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(starter.model_path() / name, run / "adapter" / name)
    (run / "completions").mkdir()
    requested = [f"What is {number} and {number}?" for number in range(6)]
    lines = [
        {"id": text, "question": text, "completion": f"<answer>\n{text} is 4\n</answer>" * 3} for text in requested
    ]
    (run / "completions" / "step-00001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_a_run_is_merged_beside_its_adapter_with_all_that_a_model_needs(run, capsys):
    assert merge(MergeOptions(str(run))) == run / "merged"
    out = capsys.readouterr().out
    merged = run / "merged"
    model = load(merged)
    expected = logits_of(live(starter.model_path(), run / "adapter"))
    assert (logits_of(load(merged).float()) - expected).abs().max() < 0.05
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (merged / name).read_bytes() == (run / "adapter" / name).read_bytes()
    assert (merged / "generation_config.json").is_file()
    report = json.loads((merged / "merge_report.json").read_text())
    assert report["dtype"] == "bf16" and str(model.dtype) == "torch.bfloat16"
    assert report["base"] == {
        "name": "starter", "revision": None, "checked": True,
        "fingerprint": model_files.weights_fingerprint(starter.model_path()),
    }  # fmt: skip
    assert report["retained"]["overall"] > 0.99 and report["kl"]["tokens"] == 128
    # The run was trained in 4 bits, which differs from the merge by more than rounding.
    assert report["kl"]["adapter_merged"] < report["kl"]["trained_merged"] < report["kl"]["adapter_base"]
    assert (
        f"merged    {merged}: bf16, 4.0 MB" in out
        and "KL(adapter || base)" in out
        and "4-bit base" in out
        and out.isascii()
    )
    assert str(run) not in (merged / "merge_report.json").read_text()
    assert not list(run.glob(".merged*")) and not list(merged.glob(".*"))


def test_a_finished_merge_answers_and_touches_nothing(no_divergence, run, capsys):
    merge(MergeOptions(str(run)))
    first, before = capsys.readouterr().out, contents(run / "merged")
    times = {path: path.stat().st_mtime_ns for path in (run / "merged").iterdir()}
    assert merge(MergeOptions(str(run), dtype="bf16")) == run / "merged"  # the dtype that auto chose
    assert capsys.readouterr().out == first and contents(run / "merged") == before
    assert times == {path: path.stat().st_mtime_ns for path in (run / "merged").iterdir()}

    refused("contains another merge (full, bf16), with another dtype;", MergeOptions(str(run), dtype="fp32"))
    refused("contains another merge (full, bf16), with another onto;", MergeOptions(str(run), onto="dequantized"))
    (run / "merged" / "model.safetensors").write_bytes(before["model.safetensors"][:-1])
    with pytest.raises(UserError, match=r"model.safetensors is not a complete safetensors file"):
        merge(MergeOptions(str(run)))
    (run / "merged" / "model.safetensors").write_bytes(before["model.safetensors"])
    make_adapter(starter.model_path(), run / "adapter", r=2)
    refused("with another adapter_sha256;", MergeOptions(str(run)))
    assert contents(run / "merged") == before


def test_an_adapter_of_a_16_bit_base_is_not_merged_into_rounded_weights(run):
    record = json.loads((run / "run.json").read_text())
    record["config"]["model"]["bits"] = 16
    (run / "run.json").write_text(json.dumps(record))
    refused("was trained on a base in 16 bits", MergeOptions(str(run), onto="dequantized"))
    assert not (run / "merged").exists()


def test_an_adapter_alone_is_merged_beside_itself_and_says_that_its_base_is_unchecked(run, tmp_path, capsys):
    adapter = shutil.copytree(run / "adapter", tmp_path / "mine")
    base = shutil.copytree(starter.model_path(), tmp_path / "base")
    for name in ("LICENSE", "NOTICE.txt"):
        (base / name).write_text(name)
    assert merge(MergeOptions(str(adapter), base=str(base), dtype="fp32")) == tmp_path / "mine-merged"
    assert "base      not checked" in capsys.readouterr().out
    merged = tmp_path / "mine-merged"
    assert (merged / "LICENSE").read_text() == "LICENSE" and (merged / "NOTICE.txt").is_file()
    report = json.loads((merged / "merge_report.json").read_text())
    assert report["base"]["name"] == "base" and not report["base"]["checked"] and report["kl"]["trained_merged"] is None
    assert report["retained"]["overall"] == pytest.approx(1, abs=1e-5) and report["kl"]["adapter_merged"] < 1e-9
    assert (logits_of(load(merged)) - logits_of(live(base, adapter))).abs().max() < 2e-5
    config = json.loads((merged / "config.json").read_text())
    assert config["dtype"] == "float32" and config["tie_word_embeddings"] is True


def save_tokenizer(folder, *added):
    tokenizer = AutoTokenizer.from_pretrained(starter.model_path())
    tokenizer.add_tokens(list(added))
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(no_divergence, tmp_path):
    size = save_tokenizer(tmp_path / "base")
    base = make_base(tmp_path / "base", vocabulary=size)
    adapter = make_adapter(base, tmp_path / "adapter")  # saved without the embeddings of a resized vocabulary
    options = MergeOptions(str(adapter), base=str(base))
    save_tokenizer(adapter, "<one>", "<two>")
    refused(f"has {size + 2} tokens, and the merged model has embeddings of {size}; ", options)
    assert not list(tmp_path.glob("*adapter-merged*"))
    save_tokenizer(base, "<one>", "<two>")  # as in Gemma 3, whose tokenizer has one token more
    merge(options)


def test_a_float16_base_is_not_rounded_to_bfloat16_by_auto(no_divergence, tmp_path):
    base = make_base(tmp_path / "base", tied=False, dtype="float16")
    adapter = make_adapter(base, tmp_path / "adapter")
    output = merge(MergeOptions(str(adapter), base=str(base)))
    assert json.loads((output / "merge_report.json").read_text())["dtype"] == "fp16"


def test_another_base_is_refused_unless_it_is_insisted_on(no_divergence, run, tmp_path, capsys):
    other = shutil.copytree(starter.model_path(), tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"is not the base that .* was trained on, starter: its weights"):
        merge(MergeOptions(str(run), base=str(other)))
    capsys.readouterr()
    output = merge(MergeOptions(str(run), base=str(other), force_base=True))
    assert not json.loads((output / "merge_report.json").read_text())["base"]["checked"]
    assert "--against" not in capsys.readouterr().out  # it would be refused


def test_the_command_that_verifies_a_merge_has_its_flags(no_divergence, run, tmp_path, capsys):
    adapter = shutil.copytree(run / "adapter", tmp_path / "mine")
    merge(MergeOptions(str(adapter), base="starter", revision="v1", trust_remote_code=True))
    flags = f"--base starter --revision v1 --trust-remote-code --against {tmp_path / 'mine-merged'}\n"
    assert f" {adapter} {flags}" in capsys.readouterr().out
    merge(MergeOptions(str(run), force_base=True))
    assert f" {run} --against {run / 'merged'}\n" in capsys.readouterr().out


def refused(message, options):
    """Check that the command fails with a one-line error."""
    with pytest.raises(UserError) as caught:
        merge(options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_best_adapter_is_merged_beside_the_last_one(no_divergence, run):
    best = run / "best"
    make_adapter(starter.model_path(), best, r=4, lora_alpha=16)
    assert merge(MergeOptions(str(run), what="best")) == run / "best-merged"
    assert read_report(run / "best-merged").identity["adapter_sha256"] == adapter_sha256(best)
    assert merged_model(best) == run / "best-merged" and not (run / "merged").exists()
    assert merged_model(run) == run / "merged"
    assert read_report(run / "merged").identity["adapter_sha256"] == adapter_sha256(run / "adapter")


@pytest.mark.parametrize(
    ("prompt", "adapter", "expected"),
    [("Answer.", "adapter", "Answer."), ("\ud800 é", "adapter", "? é"), (None, "adapter", None), ("a", "start", None)],
)
def test_the_report_has_the_system_prompt_that_the_adapter_was_trained_with(
    no_divergence, run, prompt, adapter, expected
):
    record = json.loads((run / "run.json").read_text())
    record["data"]["system_prompt"] = prompt
    (run / "run.json").write_text(json.dumps(record))
    if adapter == "start":
        shutil.copytree(run / "adapter", run / adapter)
    assert read_report(merge(MergeOptions(str(run / adapter)))).system_prompt == expected


@pytest.mark.parametrize("place", ["mine", "run/checkpoints/checkpoint-2", "run/start"])
def test_only_the_merge_of_an_adapter_as_it_is_now_is_taken_for_its_merge(no_divergence, run, tmp_path, place):
    adapter = make_adapter(starter.model_path(), tmp_path / place, r=4)
    merged = merge(MergeOptions(str(adapter), base="starter"))
    assert merged == adapter.with_name(f"{adapter.name}-merged")
    assert merged_model(adapter) == merged
    make_adapter(starter.model_path(), adapter, r=2)
    with pytest.raises(UserError, match=f"^{merged} was not merged from {adapter} as it is now; delete it"):
        merged_model(adapter)
    (merged / "merge_report.json").unlink()
    with pytest.raises(UserError, match=f"^{merged} was not merged from {adapter} as it is now; delete it"):
        merged_model(adapter)


def test_a_folder_in_use_is_never_written_to(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    refused("contains other files; pass another --output-dir", MergeOptions(str(run), output=tmp_path / "mine"))
    refused("thesis.tex is a file; pass a folder", MergeOptions(str(run), output=tmp_path / "mine" / "thesis.tex"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_two_merges_into_one_folder_do_not_meet(no_divergence, run, monkeypatch):
    staging = run / ".merged.partial"
    staging.mkdir()
    (staging / "model.safetensors").write_bytes(b"of the other process")
    with lock.holding_new(run / "merged"):
        refused(f"another process is using {run / 'merged'}; wait for it", MergeOptions(str(run)))
        assert (staging / "model.safetensors").is_file()

    # The other process finishes between the look for its merge and the lock.
    holding_new = lock.holding_new

    def after_another(path):
        monkeypatch.setattr(lock, "holding_new", holding_new)
        merge(MergeOptions(str(run), dtype="fp32"))
        return holding_new(path)

    monkeypatch.setattr(lock, "holding_new", after_another)
    refused("contains another merge (full, fp32), with another dtype;", MergeOptions(str(run), dtype="bf16"))
    assert read_report(run / "merged").dtype == "fp32"
    assert not list(run.glob(".merged*"))


def test_a_merge_that_would_overflow_is_not_published(run, tmp_path):
    base = shutil.copytree(starter.model_path(), tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][0, 0] = 70000.0
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    options = MergeOptions(str(run), base=str(base), force_base=True, dtype="fp16")
    refused("model.layers.2.mlp.up_proj.weight does not fit fp16's range", options)
    assert not (run / "merged").exists()


def test_six_kills_leave_nothing_half_made_and_end_in_the_same_bytes(run, warm, tmp_path):
    base = tmp_path / "base"
    load(starter.model_path()).save_pretrained(base, max_shard_size="800KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(starter.model_path() / name, base / name)
    adapter = shutil.copytree(run / "adapter", tmp_path / "adapter")

    def start(name, last):
        command = (adapter, "--base", base, "--dtype", "fp16", "--output-dir", tmp_path / name)
        return warm.start(
            ROOT / "tests" / "helpers" / "killed_merge.py", tmp_path / f"{name}.notes", last, *command
        ).end()

    whole = start("whole", 0)
    assert whole.returncode == 0, whole.stderr
    expected = contents(tmp_path / "whole")
    assert len([name for name in expected if name.endswith(".safetensors")]) > 3
    events = (tmp_path / "whole.notes").read_text().splitlines()

    moments = random.Random(5)
    output, kills = tmp_path / "killed", 0
    while kills < 6:
        ended = start("killed", moments.randrange(1, len(events) // 3))
        if ended.returncode == 0:  # the merge finished; the next one starts over
            assert contents(output) == expected
            shutil.rmtree(output)
            continue
        assert ended.returncode == -9, ended.stderr
        kills += 1
        assert not output.exists() or contents(output).keys() >= expected.keys()
    assert start("killed", 0).returncode == 0 and contents(output) == expected


def test_the_command_ends_in_one_line_and_exit_code_2(run, warm):
    ended = warm.start(SCRIPT, run, "--dtype", "int8").end()
    assert ended.returncode == 2 and len(ended.stderr.strip().splitlines()) == 1 and "Traceback" not in ended.stderr
    assert "--dtype" in ended.stderr
    ended = warm.start(SCRIPT, "starter").end()
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
