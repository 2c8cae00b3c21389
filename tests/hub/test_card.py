"""The card is accurate: it includes all measured results, nothing that was not measured, and no local paths."""

import json
import re
import shlex
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import yaml
from helpers.adapters import make_adapter
from helpers.gguf_models import published_template
from helpers.pushed_runs import (
    BASE,
    PRIVATE,
    make_merged,
    make_run,
    measured,
    report_of,
    row,
    safetensors,
    write_evaluation,
)
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from lora_grpo import starter
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, json_files
from lora_grpo.hub.push import PushOptions, prepare, push_to_hub
from lora_grpo.hub.uploads import CARD
from lora_grpo.models import ModelFlags, resolve

GOLDEN = Path(__file__).with_name("golden_card.txt")
LEFT_OUT = "measured other weights; it is left out"


def write_adapter(run, name, content):
    """Change a file in a run's adapter, as if training had written it."""
    with atomic.new_folder(run / "adapter") as staging:
        shutil.copytree(run / "adapter", staging, dirs_exist_ok=True)
        (staging / name).write_bytes(content)


def make_gguf(run, *names):
    (run / "gguf").mkdir()
    for name in names or ("trained-Q4_K_M.gguf",):
        writer = gguf.GGUFWriter(run / "gguf" / name, "qwen2")
        writer.add_name(name)
        writer.add_tensor("output_norm.weight", np.zeros(64, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return run / "gguf"


def card_of(folder, kind):
    """Return a card's front matter, its text, and all uploaded files by name."""
    files, *_ = prepare(folder, kind, "me/trained")
    by_name = {file.name: file for file in files}
    card = ModelCard(by_name[CARD].content.decode())
    return card.data.to_dict(), card.text, by_name


def results_in(data):
    return {m["name"]: m["value"] for result in data["model-index"][0]["results"] for m in result["metrics"]}


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


# Contents


def test_the_card_of_an_adapter_is_the_golden_one(run):
    """To accept a change, delete golden_card.txt, run this test, and read the new file."""
    (run / "report").mkdir()
    (run / "report" / "reward.png").write_bytes(b"\x89PNG plot")
    files, *_ = prepare(run / "adapter", "adapter", "me/trained")
    text = files[-1].content.decode()
    if not GOLDEN.is_file():
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert {file.name: file.read() for file in files}["reward.png"] == b"\x89PNG plot"
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    compile(block, "example", "exec")


def test_a_merged_model_has_the_scores_of_its_adapter_as_such(run):
    data, text, files = card_of(merged := make_merged(run), "merged")
    assert (data["base_model"], data["base_model_relation"]) == (BASE, "finetune")
    assert data["library_name"] == "transformers" and "model-index" not in data
    assert "not for the files in this repository" in text and "| pass@1 | 31.7" in text
    assert "99.9% of the adapter's update" in text and "by 0.00012 nats per token" in text
    assert json.loads(files["config.json"].content) == {"model_type": "qwen2"}
    assert "vllm serve me/trained" in text and "merge_report.json" not in files
    write_evaluation(run, merged)
    assert results_in(card_of(merged, "merged")[0]) == {"pass@1, greedy, 1319 rows": 54.3}


def test_the_example_gives_the_chat_template_the_variables_of_the_run(run):
    write_adapter(run, "chat_template.jinja", published_template("qwen3").encode())
    _, text, _ = card_of(run / "adapter", "adapter")
    assert 'return_tensors="pt", enable_thinking=False\n).to(model.device)' in text
    assert """ --default-chat-template-kwargs '{"enable_thinking": false}' --enable-lora""" in text
    write_adapter(run, "chat_template.jinja", b"{{ date_string }}{{ messages }}")
    _, text, _ = card_of(run / "adapter", "adapter")
    assert 'return_tensors="pt", date_string="26 Jul 2024"\n).to(model.device)' in text


def test_remote_code_is_mentioned(tmp_path):
    run = make_run(tmp_path / "run", record__policy__trust_remote_code=True)
    for kind in ("adapter", "merged"):
        _, text, _ = card_of(run / "adapter" if kind == "adapter" else make_merged(run), kind)
        assert text.count("trust_remote_code=True") == 2 and "--trust-remote-code" in text
        assert "**The base needs code from its repository**" in text


def test_the_card_says_how_many_samples_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", report__evaluated__failed=3)
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "- left out, because the agent failed: samples 3 of trained\n" in text


def test_sft_has_its_method_and_the_plot_of_its_loss(tmp_path):
    run = make_run(tmp_path / "sft", record__config__method="sft", record__data__task="mbpp")
    (run / "report").mkdir()
    (run / "report" / "sft-loss.png").write_bytes(b"\x89PNG")
    data, text, files = card_of(run / "adapter", "adapter")
    assert '<img src="sft-loss.png"' in text and "sft-loss.png" in files and "supervised fine-tuning" in text
    assert data["tags"][0] == "sft" and "Write a function" in text and "| rewards |" not in text


BASES = {
    # Its name in the adapter, what the card calls it, and how the example loads it.
    "bundled": ("starter", "the starter model, a toy with 2 million parameters", "    model_path(), "),
    "in a folder": ("my base", "a model from a local folder named my base", '    "path/to/my base", '),
}


@pytest.mark.parametrize("base", BASES)
def test_a_base_that_is_not_on_the_hub_is_named_and_not_linked(tmp_path, base):
    name, description, argument = BASES[base]
    base_model = "starter"
    if base == "in a folder":
        base_model = str(shutil.copytree(starter.model_path(), tmp_path / name))
    fingerprint = "f" * 64
    run = make_run(
        tmp_path / "run",
        record__policy__base_model=base_model,
        record__policy__revision=None,
        record__policy__fingerprint=fingerprint,
    )
    data, text, files = card_of(run / "adapter", "adapter")
    assert "base_model" not in data
    assert "license" in data
    assert json.loads(files["adapter_config.json"].content)["base_model_name_or_path"] == name
    assert description in text
    assert argument in text
    assert text.count(fingerprint) == 1
    assert "vllm serve" not in text
    assert str(tmp_path) not in text


HOSTILE = 'x"\n---\nlicense: mit\n---\n# Owned | `a` <script>alert(1)</script> [l](http://evil) {{ 7*7 }} *b* _c_'


@pytest.mark.parametrize(
    ("source", "task_sha256", "is_shown"),
    [(None, None, True), (f"{PRIVATE}/held out.jsonl", None, False), (None, "e" * 64, False)],
)
def test_a_fixed_problem_is_shown_if_its_rows_are_public(tmp_path, source, task_sha256, is_shown):
    run = make_run(
        tmp_path / "run",
        report__protocol__data_source=source,
        report__protocol__task_sha256=task_sha256,  # of a file gsm8k.py
        report__fixed=[{"task_id": "b", "before": [0, 2], "after": [2, 2]}],
    )
    rows = [{"task_id": name, "question": f"{name}: ````\n{HOSTILE}\n</details>"} for name in "ab"]
    before = []
    after = []
    for name in "ab":
        for number in range(2):
            sample = {"task_id": name, "completion": f"answer {number} to {name}"}
            before.append({**sample, "passed": False})
            after.append({**sample, "passed": True})
    files = {"rows.jsonl": rows, "base.samples.jsonl": before, "trained.samples.jsonl": after}
    for name, lines in files.items():
        atomic.write_text(run / "evaluation" / name, json_files.dump_lines(lines))

    _, text, _ = card_of(run / "adapter", "adapter")
    fenced = f"`````\nb: ````\n{HOSTILE}\n</details>\n`````\n\nBefore:\n\n```\nanswer 0 to b\n```"
    assert (fenced in text) == is_shown
    assert ("## Before and after" in text) == is_shown
    assert ("Owned" in text) == is_shown


def test_an_adapter_alone_has_no_scores_and_no_placeholders(tmp_path, run):
    for folder in (tmp_path / "alone" / "adapter", run / "older"):  # the second is not its run's adapter
        shutil.copytree(run / "adapter", folder)
        data, text, _ = card_of(folder, "adapter")
        assert not {"model-index", "datasets", "license", "base_model", "language"} & data.keys()
        assert data["tags"] == ["lora"]
        for absent in ("valuation", "rewards", "| data |", "versions", "None", "nan", "GRPO", "250"):
            assert absent not in text, absent


@pytest.mark.parametrize("source", [f"{PRIVATE}/mine.jsonl", "private/customers"])
def test_rows_of_a_users_file_have_no_dataset_and_no_language(tmp_path, source):
    run = make_run(tmp_path / "file", record__data__train__source=source)
    data, text, _ = card_of(run / "adapter", "adapter")
    assert not {"language", "datasets"} & data.keys()
    assert source not in text and f"| train | {Path(source).name} |" in text


@pytest.mark.parametrize("task", [f"{PRIVATE}/gsm8k.py", "python:gsm8k"])
def test_a_users_task_with_the_title_of_a_built_in_one_has_no_dataset(tmp_path, task):
    public = {"record__data__eval__source": None, "report__protocol__data_source": None}
    data, text, _ = card_of(make_run(tmp_path / "public", **public) / "adapter", "adapter")
    assert data["datasets"] == ["openai/gsm8k"] and data["language"] == "en"
    assert data["model-index"][0]["results"][0]["dataset"]["type"] == "openai/gsm8k"
    assert "| eval | openai/gsm8k |" in text

    changes = {"record__config__data__task": task, "report__protocol__task_sha256": "e" * 64}
    run = make_run(tmp_path / "own", **public, **changes)
    data, text, _ = card_of(run / "adapter", "adapter")
    assert not {"language", "datasets"} & data.keys()
    assert "openai/gsm8k" not in text and "| eval | gsm8k |" in text
    assert results_in(data)  # under a name that no dataset has
    for result in data["model-index"][0]["results"]:
        assert result["dataset"] == {"name": "gsm8k", "type": "gsm8k-other-rows"}


# Evaluations of these weights


def test_a_quick_look_stays_here_and_a_protocol_has_one_entry(run, capsys):
    results_of_run = {"pass@1, 4 samples at temperature 1, 30 rows": 45.5, "pass@1, greedy, 30 rows": 60.0}

    def published_with(**protocol):
        write_evaluation(run, run / "adapter", **protocol)
        data, _, _ = card_of(run / "adapter", "adapter")
        shutil.rmtree(run / "evaluation" / "gsm8k")
        return results_in(data)

    assert published_with(limit=40, rows=40) == results_of_run
    assert "gsm8k has a report of 40 rows (--limit); it is left out" in capsys.readouterr().err
    # The same greedy protocol as the run's own evaluation: its figure is published already.
    assert published_with(rows=30, data_sha256="c" * 64, max_completion_tokens=64) == results_of_run
    assert published_with(few_shot=4) == {**results_of_run, "pass@1, greedy, 4-shot, 1319 rows": 54.3}


def test_scores_of_other_weights_are_left_out(run, tmp_path, capsys):
    other = make_run(tmp_path / "other", adapter_bytes=7)
    write_evaluation(run, other / "adapter")
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "54.3" not in text and "31.7" in text and capsys.readouterr().err.count(LEFT_OUT) == 1
    shutil.rmtree(run / "evaluation" / "gsm8k")

    merged = make_merged(run)
    write_evaluation(run, merged)
    (merged / "model.safetensors").write_bytes(safetensors(byte=b"\x09"))
    (merged / "merge_report.json").unlink()  # the source adapter is unknown
    data, text, _ = card_of(merged, "merged")
    assert "| pass@1 |" not in text and "model-index" not in data
    assert capsys.readouterr().err.count(LEFT_OUT) == 2

    (run / "evaluation" / "report.json").write_text('{"protocol": 1}')
    assert "| pass@1 |" not in card_of(run / "adapter", "adapter")[1]
    write_adapter(run, "adapter_model.safetensors", safetensors(byte=b"\x03"))
    assert "**Not evaluated:**" in card_of(run / "adapter", "adapter")[1]


def test_the_best_adapter_has_its_own_results_or_the_command_that_measures_them(run, capsys):
    with atomic.new_folder(run / "best") as staging:
        shutil.copytree(run / "adapter", staging, dirs_exist_ok=True)
        (staging / "adapter_model.safetensors").write_bytes(safetensors(byte=b"\x05"))
    record = json.loads((run / "run.json").read_text())
    record["best"] = {"step": 40, "reward": 2.75, "accuracy": 0.5}
    (run / "run.json").write_text(json.dumps(record))
    best = run / "best"
    data, text, _ = card_of(best, "adapter")
    assert "model-index" not in data and "| pass@1 |" not in text
    assert "for 40 steps by lora_grpo" in text and "highest validation reward, 2.75" in text
    assert f"lora-grpo evaluate {run} --what best --compare base\n" in capsys.readouterr().err

    write_evaluation(run, best)
    data, text, _ = card_of(best, "adapter")
    assert results_in(data) == {"pass@1, greedy, 1319 rows": 54.3} and "31.7" not in text
    text = card_of(run / "adapter", "adapter")[1]
    assert "54.3" not in text and "for 250 steps" in text and "validation" not in text

    capsys.readouterr()
    push_to_hub(PushOptions(str(run), "me/trained", what="best", dry_run=True))
    assert f"{best} (adapter) -> me/trained (private)" in capsys.readouterr().out


# GGUF files


def write_gguf_evaluation(run, file, score, **protocol):
    """Write what `evaluate.py FILE --compare RUN/merged` leaves."""
    label = file.stem.rpartition("-")[2].lower()
    source = {"gguf_sha256": atomic.sha256(file), "quantization": label, "engine": "llama.cpp b1"}
    report = report_of(
        measured(label, source, **{"pass@1": score}),
        measured("merged", {"weights_sha256": "a" * 64, "bits": 16, "quantization": "none"}, **{"pass@1": 0.5}),
        table=[row("pass@1", 0.5, score, 0.01)],
        **{"rows": 200, "data_sha256": "c" * 64, "num_samples": 1, "temperature": 0.0, "max_completion_tokens": 64},
    )
    report["protocol"] |= protocol
    (run / "evaluation" / f"gguf-{label}").mkdir()
    atomic.write_json(run / "evaluation" / f"gguf-{label}" / "report.json", report)


def test_the_card_of_gguf_files_has_their_sizes_and_what_their_types_cost(run, capsys):
    folder = make_gguf(run, "trained-Q4_0.gguf", "trained-Q5_0.gguf", "trained-Q8_0.gguf")
    for name, score in (("Q4_0", 0.488), ("Q8_0", 0.5)):
        write_gguf_evaluation(run, folder / f"trained-{name}.gguf", score)
    size = (folder / "trained-Q5_0.gguf").stat().st_size
    data, text, _ = card_of(folder, "gguf")
    shown = f"{size / 1e3:.1f} kB"
    assert [line for line in text.splitlines() if line.startswith("| trained")] == [
        f"| trained-Q4_0.gguf | {shown} | 48.8 [38.8, 58.8] |",
        f"| trained-Q5_0.gguf | {shown} | – |",
        f"| trained-Q8_0.gguf | {shown} | 50.0 [40.0, 60.0] |",
    ]
    assert "q4_0 costs 1.2 points of pass@1 [-3.8, 6.2] against merged" in text
    assert "greedy pass@1: percent of 200 problems" in text
    (command,) = re.findall("^llama-cli .*", text, re.MULTILINE)
    assert shlex.split(command)[3:] == ["--hf-file", "trained-Q8_0.gguf", "-sys", "$SYSTEM"]
    assert "ollama run hf.co/me/trained:Q8_0\n" in text and "Not evaluated" not in text
    assert results_in(data)["pass@1, greedy, 200 rows, trained-Q4_0.gguf"] == 48.8
    assert (data["library_name"], data["base_model_relation"]) == ("gguf", "finetune")
    card_of(run / "adapter", "adapter")
    assert "gguf-q4_0" not in capsys.readouterr().err


def test_the_commands_for_gguf_files_run_this_file(run):
    folder = make_gguf(run)
    _, text, _ = card_of(folder, "gguf")
    (block,) = (part for part in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "llama-cli" in part)
    words = shlex.split(block)
    assert words[0].startswith("SYSTEM=Respond") and "\n" in words[0]
    assert words[1:] == ["llama-cli", "--hf-repo", "me/trained", "--hf-file", "trained-Q4_K_M.gguf", "-sys", "$SYSTEM"]
    assert "ollama run hf.co/me/trained:Q4_K_M\n" in text and "chat template" not in text


# Damaged files, private data and hostile text


def test_an_adapter_that_changed_since_training_is_refused(run):
    (run / "adapter" / "adapter_model.safetensors").write_bytes(safetensors(byte=b"\x03"))
    with pytest.raises(UserError, match=r"adapter_model.safetensors has changed since it was written; restore"):
        prepare(run / "adapter", "adapter", "me/trained")
    (run / "adapter" / "manifest.json").unlink()
    prepare(run / "adapter", "adapter", "me/trained")


def test_a_merged_model_that_changed_since_merging_or_lacks_a_shard_is_refused(run):
    merged = make_merged(run)
    path = merged / "model.safetensors"
    atomic.write_json(merged / "manifest.json", {"sha256": {path.name: atomic.sha256(path)}})
    prepare(merged, "merged", "me/trained")
    path.write_bytes(safetensors(byte=b"\x07"))
    with pytest.raises(UserError, match=r"model.safetensors has changed since it was written"):
        prepare(merged, "merged", "me/trained")
    (merged / "manifest.json").unlink()
    path.rename(merged / "model-00001-of-00002.safetensors")
    where = {"lora_A.weight": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (merged / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(UserError, match=r"model-00002-of-00002.safetensors"):
        prepare(merged, "merged", "me/trained")


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("merged", "model.safetensors", safetensors()),
        ("merged", "model.safetensors.index.json", b'{"weight_map": {}}'),
        ("merged", "tokenizer.json", b'{"model": {}}'),
        ("gguf", "trained-Q4_K_M.gguf", None),
    ],
)
def test_a_file_that_is_cut_off_is_not_uploaded(run, kind, name, content):
    folder = make_merged(run) if kind == "merged" else make_gguf(run)
    content = content or (folder / name).read_bytes()
    (folder / name).write_bytes(content)
    prepare(folder, kind, "me/trained")
    for kept in (0, 3, len(content) // 2, len(content) - 9, len(content) - 1):
        (folder / name).write_bytes(content[:kept])
        with pytest.raises(UserError, match=rf"{name} (cannot be read|is not a complete)"):
            prepare(folder, kind, "me/trained")


SECRET = "hf_" + "AbCdEfGhIj" * 3


@pytest.mark.parametrize("secret", [SECRET, "an-odd-token-of-mine"])
@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", CARD])
def test_a_token_in_a_file_or_in_the_card_is_refused(tmp_path, monkeypatch, name, secret):
    monkeypatch.setenv("HF_TOKEN", "an-odd-token-of-mine")
    run = make_run(tmp_path / "run", **({"record__config__grpo": [f"hub_token={secret}"]} if name == CARD else {}))
    if name != CARD:
        write_adapter(run, name, json.dumps({"x": f"key={secret}"}).encode())
    with pytest.raises(UserError, match=rf"^{name}.* contains text that looks like a Hub token") as caught:
        prepare(run / "adapter", "adapter", "me/trained")
    assert secret not in str(caught.value)


def test_no_path_of_this_machine_is_uploaded(tmp_path):
    run = make_run(tmp_path / "run", record__config__grpo=[f"{PRIVATE}/grpo"])
    make_merged(run)
    for kind in ("adapter", "merged"):
        files, *_ = prepare(run / kind, kind, "me/trained")
        for file in files:
            for private in (PRIVATE, "somebody", str(run.parent)):
                assert private.encode() not in file.read(), (kind, file.name, private)


@pytest.mark.parametrize(
    "path",
    ["record__data__task", "record__data__eval__source", "record__policy__base_model", "report__evaluated__label"],
)
def test_text_from_files_stays_text(tmp_path, path):
    run = make_run(tmp_path / "run", **{path: HOSTILE})
    files, *_ = prepare(run / "adapter", "adapter", "me/trained")
    text = files[-1].content.decode()
    front = yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))
    assert front["library_name"] == "peft" and "license" not in front
    comments = ("# pip install ", "# The client must ")
    headings = [line for line in text.splitlines() if line.startswith("# ") and not line.startswith(comments)]
    assert headings == ["# trained"]
    assert "<script" not in text and "](http://evil)" not in text


# The example ends where the training ended


def with_tokenizer(folder, eos, template):
    tokenizer = AutoTokenizer.from_pretrained(starter.model_path())
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("kind", ["adapter", "merged"])
@pytest.mark.parametrize(
    ("settings", "passed"),
    [
        ({"eos_token_id": 2}, "eos_token_id=[1, 2]"),
        ({"eos_token_id": [2, 1]}, ""),
        ({"eos_token_id": [2, 1], "repetition_penalty": 1.1, "temperature": 0.7}, "repetition_penalty=1.0"),
        (None, ""),  # no base on this machine: nothing is known
    ],
)
def test_the_example_ends_as_the_training_did_and_samples_as_the_evaluation(tmp_path, kind, settings, passed):
    folder = tmp_path / kind
    base = shutil.copytree(starter.model_path(), folder if kind == "merged" else tmp_path / "base")
    template = (base / "chat_template.jinja").read_text()
    if kind == "adapter":
        make_adapter(starter.model_path(), folder, r=2, target_modules=["q_proj"])
    with_tokenizer(folder, "<|im_start|>" if settings else "<|im_end|>", template)
    (base / "generation_config.json").write_text(json.dumps(settings or {"eos_token_id": 2}))
    adapter_config = folder / "adapter_config.json"
    if kind == "adapter":
        values = json.loads(adapter_config.read_text())
        name = str(base) if settings else "nobody/nothing"
        adapter_config.write_text(json.dumps(values | {"base_model_name_or_path": name}))
    _, text, _ = card_of(folder, kind)
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    compile(block, "example", "exec")
    assert block.count("eos_token_id") == passed.count("eos_token_id") and passed in block
    assert block.count("repetition_penalty") == passed.count("repetition_penalty")


# Files and names of the base


@pytest.mark.parametrize(
    ("link", "files", "expected"),
    [
        ("LICENSE", [], None),
        ("LICENSE", ["LICENSE"], "LICENSE"),
        ("terms/LICENSE.pdf", ["LICENSE"], None),
        ("https://example.org/terms", [], "https://example.org/terms"),
    ],
)
def test_the_card_links_a_license_that_is_uploaded(tmp_path, link, files, expected):
    base = shutil.copytree(starter.model_path(), tmp_path / "my base")
    (base / "README.md").write_text(f"---\nlicense: other\nlicense_name: terms\nlicense_link: {link}\n---\n")
    source = {"base_model": str(base), "revision": None, "fingerprint": "f" * 64}
    run = make_run(tmp_path / "run", **{f"record__policy__{key}": value for key, value in source.items()})
    for name in files:
        write_adapter(run, name, b"terms")
    data, _, uploaded = card_of(run / "adapter", "adapter")
    assert (data["license"], data["license_name"], data.get("license_link")) == ("other", "terms", expected)
    assert {*files} <= uploaded.keys()


def test_the_license_of_a_merged_model_is_that_of_its_base_and_of_no_other_folder(tmp_path, monkeypatch):
    for place, license_id in (("there", "mit"), ("here", "apache-2.0")):
        (tmp_path / place / "my-base").mkdir(parents=True)
        (tmp_path / place / "my-base" / "README.md").write_text(f"---\nlicense: {license_id}\n---\n")
    monkeypatch.chdir(tmp_path / "here")
    base = {"base_model": str(tmp_path / "there" / "my-base"), "revision": None, "fingerprint": "f" * 64}
    run = make_run(tmp_path / "run", **{f"record__policy__{key}": value for key, value in base.items()})
    report_path = make_merged(run) / "merge_report.json"
    report = json.loads(report_path.read_text())
    report["base"] = {"name": "my-base", "revision": None, "fingerprint": "f" * 64, "checked": True}
    report_path.write_text(json.dumps(report))
    shutil.copy(report_path, make_gguf(run))
    for kind in ("merged", "gguf"):
        data, text, _ = card_of(run / kind, kind)
        assert data["license"] == "mit"
        assert "a local folder named my-base" in text

    report["base"]["fingerprint"] = "e" * 64  # of a base that --force-base has accepted
    for kind in ("merged", "gguf"):
        (run / kind / "merge_report.json").write_text(json.dumps(report))
        assert "license" not in card_of(run / kind, kind)[0]


WINDOWS = {
    r"C:\Users\somebody\models\my-base": "my-base",
    "D:/somebody/my-base": "my-base",
    r"\\somebody\share\my-base": "my-base",
    r"..\somebody\my-base": "my-base",
    "../somebody/my-base": "my-base",
}


@pytest.mark.parametrize(("base", "shown"), WINDOWS.items())
def test_a_path_of_another_machine_is_not_shown_and_is_no_hub_id(tmp_path, base, shown):
    source = {"base_model": base, "revision": None, "fingerprint": None}
    run = make_run(tmp_path / "run", **{f"record__policy__{key}": value for key, value in source.items()})
    settings = json.loads((run / "adapter" / "adapter_config.json").read_text())
    write_adapter(run, "adapter_config.json", json.dumps(settings | {"base_model_name_or_path": base}).encode())
    data, text, files = card_of(run / "adapter", "adapter")
    assert "base_model" not in data and f"a local folder named {shown}" in text
    assert json.loads(files["adapter_config.json"].content)["base_model_name_or_path"] == shown
    assert not any(b"somebody" in file.read() for name, file in files.items() if name == CARD or "config" in name)
    alone = shutil.copytree(run / "adapter", tmp_path / "alone")
    with pytest.raises(UserError, match="does not exist here; pass it with --base"):
        resolve(str(alone), ModelFlags())


TEACHERS = {
    "an adapter": (
        {
            "name": "grpo",
            "kind": "adapter",
            "has_adapter": True,
            "base_model": None,
            "bits": None,
            "has_own_prompt": False,
        },
        "learned from the adapter `grpo` on the same base",
    ),
    "itself": (
        {
            "name": "self",
            "kind": "base",
            "has_adapter": False,
            "base_model": None,
            "bits": None,
            "has_own_prompt": True,
        },
        "learned from its base, without an adapter, which read more than this model did",
    ),
    "a model of the Hub": (
        {
            "name": "owner/large",
            "kind": "model",
            "has_adapter": False,
            "base_model": "owner/large",
            "revision": "d" * 40,
            "bits": 4,
            "has_own_prompt": False,
        },
        "learned from [owner/large](https://huggingface.co/owner/large), in 4 bits",
    ),
    "an adapter of a model in a folder": (
        {
            "name": "mine",
            "kind": "model",
            "has_adapter": True,
            "base_model": f"{PRIVATE}/large",
            "bits": 16,
            "has_own_prompt": False,
        },
        "learned from the adapter `mine` of `large`, in 16 bits",
    ),
    "a model in a folder of the working directory": (
        {
            "name": "large",
            "kind": "model",
            "has_adapter": False,
            "base_model": "models/large",
            "bits": 4,
            "has_own_prompt": False,
        },
        "learned from `large`, in 4 bits",
    ),
    "a model in a folder with another name": (
        {
            "name": "Large-7B",
            "kind": "model",
            "has_adapter": False,
            "base_model": f"{PRIVATE}/linked",
            "bits": 4,
            "has_own_prompt": False,
        },
        "learned from `linked`, in 4 bits",
    ),
    "the model before training": (
        {
            "name": "self",
            "kind": "adapter",
            "has_adapter": True,
            "base_model": None,
            "bits": None,
            "has_own_prompt": True,
        },
        "learned from the adapter that training started from, which read more than this model did",
    ),
}


@pytest.mark.parametrize("case", TEACHERS)
@pytest.mark.parametrize("reward_weight", [0.0, 1.0])
def test_the_card_names_the_teacher(run, case, reward_weight):
    teacher, text = TEACHERS[case]
    record = json.loads((run / "run.json").read_text())
    record["teacher"] = teacher
    record["policy"]["teacher_sha256"] = "e" * 64
    record["config"]["teacher"] |= {"name": f"{PRIVATE}/runs/{teacher['name']}", "reward_weight": reward_weight}
    atomic.write_json(run / "run.json", record)
    _, card, _ = card_of(run / "adapter", "adapter")
    expected = f"The model {'also ' if reward_weight else ''}{text} (on-policy distillation)."
    assert expected in card
    assert ("The rewards were only measured." in card) == (reward_weight == 0)
    assert ("license is not known" in card) == (teacher["kind"] == "model")
    assert f"teacher: SHA-256 `{'e' * 64}`" in card
    assert "teacher.loss" in card and PRIVATE not in card


def test_the_card_tells_the_license_of_the_teacher(run, tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    record = json.loads((run / "run.json").read_text())
    record["teacher"] = {
        "name": "large", "kind": "model", "has_adapter": False, "base_model": str(tmp_path / "large"), "bits": 4,
        "has_own_prompt": False,
    }  # fmt: skip
    atomic.write_json(run / "run.json", record)
    _, card, _ = card_of(run / "adapter", "adapter")
    assert "The teacher's license is `apache-2.0`." in card
