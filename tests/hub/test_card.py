"""The card is true: what was measured is on it, what was not is absent, and nothing of this machine is."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from helpers.pushed_runs import BASE, COMMIT, PRIVATE, make_run, measured, report_of, safetensors
from huggingface_hub import ModelCard
from huggingface_hub.repocard import RepoCard

from lora_grpo import starter
from lora_grpo.config.schema import RunConfig
from lora_grpo.errors import UserError
from lora_grpo.files import atomic
from lora_grpo.hub.card import escape
from lora_grpo.hub.files import CARD, CARD_MARK
from lora_grpo.hub.push import prepare
from lora_grpo.models.target import ModelSpec


def write_adapter(run, name, content):
    """Change a file of a run's adapter as training itself would have written it."""
    with atomic.new_folder(run / "adapter") as staging:
        shutil.copytree(run / "adapter", staging, dirs_exist_ok=True)
        (staging / name).write_bytes(content)


def write_asked(run, kind, folder, rows=1319, **changes):
    """Write what scripts/evaluate.py leaves of an adapter or a merged model."""
    from lora_grpo.config.schema import ModelConfig

    if kind == "adapter":
        target = ModelSpec("", ModelConfig(name=str(folder), revision=COMMIT), BASE, folder, folder)
    else:
        target = ModelSpec("", ModelConfig(name=str(folder)), str(folder), None, folder)
    source = {**target.identity, "engine": "vllm 1", "dtype": "bfloat16", "device": "NVIDIA T4"}
    settings = {"data_sha256": "e" * 64, "num_samples": 1, "temperature": 0.0, "max_completion_tokens": 512}
    report = report_of(measured("trained", source, **{"pass@1": 0.543}), rows=rows, **settings, **changes)
    (run / "evaluation" / "gsm8k").mkdir(parents=True)
    atomic.write_json(run / "evaluation" / "gsm8k" / "report.json", report)


def make_merged(run, **report):
    merged = run / "merged"
    merged.mkdir()
    (merged / "config.json").write_text(json.dumps({"model_type": "qwen2", "_name_or_path": f"{PRIVATE}/base"}))
    (merged / "model.safetensors").write_bytes(safetensors(byte=b"\x02"))
    if report:
        (merged / "merge_report.json").write_text(json.dumps(report))
    return merged


def card_of(folder, kind, name="me/trained"):
    files, _, text = prepare(folder, kind, name)
    card = ModelCard(text)
    by_name = {file.name: file for file in files}
    assert by_name[CARD].content == text.encode()
    return card.data.to_dict(), card.text, by_name


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


# What it says


def test_the_front_matter_is_what_the_hub_reads(run, tmp_path):
    data, _, files = card_of(run / "adapter", "adapter")
    (tmp_path / "README.md").write_bytes(files[CARD].content)
    assert ModelCard.load(tmp_path / "README.md").data.to_dict() == data
    assert (data["base_model"], data["base_model_relation"]) == (BASE, "adapter")
    assert (data["library_name"], data["pipeline_tag"]) == ("peft", "text-generation")
    assert data["tags"] == ["grpo", "lora", "trl", "unsloth", "gsm8k"]
    assert data["datasets"] == ["openai/gsm8k"]
    (index,) = data["model-index"]
    assert index["name"] == "trained"
    assert [(m["name"], m["value"]) for m in index["results"][0]["metrics"]] == [
        ("pass@1, 4 samples at temperature 1, 30 rows", 45.5),
        ("pass@1, greedy, 30 rows", 60.0),
    ]


def test_the_table_is_the_reports_own_with_its_protocol(run):
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "| pass@1 | 31.7 [21.7, 41.7] | 45.5 [35.5, 55.5] | +13.8 [+8.8, +18.8] | 0.021 |" in text
    assert "| greedy | 50.0 [40.0, 60.0] | 60.0 [50.0, 70.0] | +10.0 [+5.0, +15.0] | 0.250 |" in text
    assert "- greedy: no significant difference, +10.0 points (p 0.250, exact McNemar)" in text
    assert f"- rows: 30 of `gsm8k`, SHA-256 `{'c' * 64}`" in text
    assert "- samples: 4 a row, temperature 1, top-p 1, at most 64 tokens, seed 0" in text
    assert "| correct_answer | 2 |" in text and "| mine.py:brief | 0.25 |" in text
    assert "| learning rate | 2e-05 |" in text and "| LoRA rank | 16 |" in text
    assert f"| train | openai/gsm8k | 7473 | `{'b' * 64}` |" in text
    assert f"| eval | held out.jsonl | 30 | `{'c' * 64}` |" in text


def test_it_is_loaded_by_what_is_true_of_it(run):
    _, text, _ = card_of(run / "adapter", "adapter")
    assert (
        f'AutoModelForCausalLM.from_pretrained("{BASE}", revision="{COMMIT}", dtype="auto", device_map="auto")' in text
    )
    longest = RunConfig(output_dir="x").sampling.max_completion_tokens
    assert f"max_new_tokens={longest})" in text and "What is 12 times 7?" in text
    assert 'PeftModel.from_pretrained(base, "me/trained")' in text
    vllm = f"vllm serve {BASE} --revision {COMMIT} --enable-lora --max-lora-rank 16 --lora-modules trained=me/trained"
    assert vllm in text
    assert 'FastLanguageModel.from_pretrained("me/trained", max_seq_length=1024, load_in_4bit=True)' in text
    assert '{"role": "system", "content": "Respond in the following format:\\n<reasoning>' in text
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    for block in blocks:
        compile(block, "snippet", "exec")
    assert len(blocks) == 2


def test_an_adapter_that_vllm_does_not_serve_is_not_said_to_be(run, capsys):
    path = run / "adapter" / "adapter_config.json"
    write_adapter(run, path.name, json.dumps(json.loads(path.read_text()) | {"use_dora": True}).encode())
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "vllm serve" not in text and "| DoRA | True |" in text
    assert "the card names no vLLM" in capsys.readouterr().err


def test_remote_code_is_recorded(tmp_path):
    run = make_run(tmp_path / "run", record__policy__trust_remote_code=True)
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "**Code that comes with the base's repository was run**" in text
    loading = [line for line in text.splitlines() if ".from_pretrained(" in line and "PeftModel" not in line]
    assert len(loading) == 3 and all("trust_remote_code=True" in line for line in loading)
    assert "--trust-remote-code" in text
    _, text, _ = card_of(make_merged(run), "merged")
    assert '"me/trained", dtype="auto", device_map="auto", trust_remote_code=True)' in text


def test_a_model_that_writes_programs_is_asked_for_one(tmp_path):
    run = make_run(tmp_path / "run", record__data__task="mbpp", record__config__sampling__max_completion_tokens=333)
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "Write a function" in text and "12 times 7" not in text and "max_new_tokens=333)" in text


@pytest.mark.parametrize("copy", ["unsloth/Qwen2.5-0.5B-bnb-4bit", "unsloth/Qwen2.5-0.5B-unsloth-bnb-4bit"])
def test_a_4_bit_copy_is_the_base_only_where_no_other_is_known(tmp_path, copy):
    run = make_run(tmp_path / "copied", record__policy__base_model=copy)
    data, text, _ = card_of(run / "adapter", "adapter")
    assert data["base_model"] == copy and ", a 4-bit copy of a model that is not named here" in text
    named = {"name": BASE, "revision": COMMIT, "fingerprint": "f" * 64}
    data, text, _ = card_of(make_merged(run, base=named), "merged")
    assert data["base_model"] == BASE and "4-bit copy" not in text
    run = make_run(tmp_path / "run")
    data, text, _ = card_of(make_merged(run, base=named | {"name": copy}), "merged")
    assert data["base_model"] == BASE and "4-bit copy" not in text


LINK = "https://example.com/terms"
LICENCES = {
    "license: apache-2.0": {"license": "apache-2.0"},
    "license: other": {},
    f"license: other\nlicense_name: terms-1.0\nlicense_link: {LINK}": {
        "license": "other", "license_name": "terms-1.0", "license_link": LINK,
    },
    "license: other\nlicense_name: terms-1.0\nlicense_link: LICENSE": {
        "license": "other", "license_name": "terms-1.0",
        "license_link": f"https://huggingface.co/{BASE}/blob/main/LICENSE",
    },
    "license: other\nlicense_name: terms-1.0\nlicense_link: javascript:x": {},
    "license: other\nlicense_name: My Terms": {},
    "license: 'My own: words'": {},
    "license: [mit]": {},
}  # fmt: skip


@pytest.mark.parametrize("front", LICENCES)
def test_a_licence_is_told_as_the_bases_card_tells_it(run, tmp_path, monkeypatch, front):
    cached = tmp_path / "cached"
    cached.mkdir()
    (cached / "README.md").write_text(f"---\n{front}\n---\n# Base\n")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda _, name, revision: str(cached / name))
    data, text, _ = card_of(run / "adapter", "adapter")
    assert {key: value for key, value in data.items() if key.startswith("license")} == LICENCES[front]
    assert ("licence was not found" in text) == (not LICENCES[front])


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("\n    Apache License\n    Version 2.0, January 2004\n    http", "apache-2.0"),
        ("MIT License\n\nCopyright (c) 2026", "mit"),
        ("Not the Apache License, Version 2.0 but mine", None),
        ("MIT License with a clause\nCopyright", None),
    ],
)
def test_a_licence_is_told_by_how_its_text_begins(run, tmp_path, monkeypatch, text, licence):
    cached = tmp_path / "cached"
    cached.mkdir()
    (cached / "LICENSE").write_text(text)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda _, name, revision: str(cached / name))
    assert card_of(run / "adapter", "adapter")[0].get("license") == licence


def test_the_embedded_base_is_named_and_not_linked(tmp_path):
    run = make_run(
        tmp_path / "run",
        record__policy__base_model="starter",
        record__policy__revision=None,
        record__policy__fingerprint="f" * 64,
    )
    data, text, files = card_of(run / "adapter", "adapter")
    assert "base_model" not in data and data["license"] == "apache-2.0"
    assert json.loads(files["adapter_config.json"].content)["base_model_name_or_path"] == "starter"
    assert "from lora_grpo import starter" in text and "vllm serve" not in text


def test_a_base_in_a_folder_is_called_by_its_last_name(tmp_path):
    base = shutil.copytree(starter.model_path(), tmp_path / "my base")
    run = make_run(
        tmp_path / "run",
        record__policy__base_model=str(base),
        record__policy__revision=None,
        record__policy__fingerprint="f" * 64,
    )
    data, text, files = card_of(run / "adapter", "adapter")
    assert "base_model" not in data and data["license"] == "apache-2.0"
    assert "a model in a folder called my base, which has no name on the Hub" in text
    assert json.loads(files["adapter_config.json"].content)["base_model_name_or_path"] == "my base"
    assert str(tmp_path) not in text and "AutoModelForCausalLM" not in text


def test_a_folder_that_is_called_as_a_repository_could_be_is_none(tmp_path):
    where = {"base_model": "models/mine", "revision": None, "fingerprint": "f" * 64}
    run = make_run(tmp_path / "run", **{f"record__policy__{key}": value for key, value in where.items()})
    data, text, _ = card_of(run / "adapter", "adapter")
    assert "base_model" not in data and "a model in a folder called mine, which has no name on the Hub" in text


def test_a_card_says_whose_it_is(run):
    assert prepare(run / "adapter", "adapter", "me/trained")[2].endswith(f"\n{CARD_MARK}\n")


# What is not known is not there


def test_an_adapter_alone_has_no_figures_and_no_placeholders(tmp_path, run):
    folder = shutil.copytree(run / "adapter", tmp_path / "alone" / "adapter")
    data, text, _ = card_of(folder, "adapter")
    assert not {"model-index", "datasets", "license", "base_model"} & data.keys()
    assert data["tags"] == ["lora"]
    for absent in ("Measured", "## Rewards", "## Data", "## Versions", "None", "nan", "GRPO"):
        assert absent not in text, absent
    assert "licence was not found" in text and "| LoRA rank | 16 |" in text


def test_another_adapter_in_the_runs_folder_has_none_of_its_figures(run):
    folder = shutil.copytree(run / "adapter", run / "older")
    data, text, _ = card_of(folder, "adapter")
    assert "model-index" not in data and "250" not in text


def test_an_unfinished_run_is_marked(tmp_path):
    run = make_run(tmp_path / "run", record__status="running")
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "**The run was not finished:**" in text


def test_figures_of_an_adapter_that_was_changed_are_left_out(run, capsys):
    merged = make_merged(run)
    (run / "adapter" / "adapter_model.safetensors").write_bytes(safetensors(byte=b"\x03"))
    os.utime(run / "adapter" / "adapter_model.safetensors", (0, 0))
    data, text, _ = card_of(merged, "merged")
    assert "model-index" not in data and "## Measured" not in text
    assert "is of other weights" in capsys.readouterr().err


def test_a_report_of_another_version_is_left_out(tmp_path, capsys):
    run = make_run(tmp_path / "run", report__evaluated={"pass@1": 0.455})
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "## Measured" not in text and "is not an evaluation report" in capsys.readouterr().err


def test_what_is_merged_bears_the_adapters_figures_as_such(run):
    report = {
        "onto": "full", "dtype": "bfloat16", "base": {"name": BASE, "revision": COMMIT, "fingerprint": "f" * 64},
        "retained": {"overall": 0.9993, "worst": 0.97, "worst_layer": "layers.0.q_proj"},
        "kl": {"adapter_merged": 0.00012},
    }  # fmt: skip
    merged = make_merged(run, **report)
    data, text, files = card_of(merged, "merged")
    assert (data["base_model"], data["base_model_relation"]) == (BASE, "finetune")
    assert data["library_name"] == "transformers" and "model-index" not in data
    assert "These are figures of the adapter on its base as it was trained." in text and "| pass@1 | 31.7" in text
    assert "| merged into | the base in full precision |" in text
    assert "| share of the adapter's update that rounding left | 0.9993 |" in text
    assert "| KL divergence, adapter from merged, nats a token | 0.00012 |" in text and "adapter from base" not in text
    assert json.loads(files["config.json"].content) == {"model_type": "qwen2"}
    assert "vllm serve me/trained" in text and "merge_report.json" not in files


def test_what_was_measured_itself_is_in_the_front_matter_and_the_results(tmp_path):
    run = make_run(tmp_path / "run", record__data__eval__source=None)
    merged = make_merged(run)
    write_asked(run, "merged", merged)
    data, _, files = card_of(merged, "merged")
    assert data["model-index"][0]["results"][0]["metrics"][0]["value"] == 54.3
    assert yaml.safe_load(files[".eval_results/lora-grpo-gsm8k.yaml"].content) == [
        {"dataset": {"id": "openai/gsm8k", "task_id": "gsm8k"}, "value": 54.3,
         "notes": "0-shot, greedy, xml answer format"}
    ]  # fmt: skip


def test_a_merge_of_another_adapter_bears_no_figures(run, capsys):
    merged = make_merged(run, base={"name": BASE, "revision": COMMIT}, adapter={"sha256": "0" * 64})
    _, text, _ = card_of(merged, "merged")
    assert "## Measured" not in text and "was made of another adapter" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [{"rows": 500}, {"contaminated": ["trained"]}, {"left_out_as_trained_on": 3}, {"data_source": "mine.jsonl"}],
)
def test_a_part_of_a_benchmark_is_no_entry_of_a_leaderboard(tmp_path, change):
    run = make_run(tmp_path / "run", record__data__eval__source=None)
    write_asked(run, "adapter", run / "adapter", **change)
    data, _, files = card_of(run / "adapter", "adapter")
    assert [name for name in files if name.startswith(".eval_results")] == []
    assert len(data["model-index"][0]["results"]) >= 1


def test_an_evaluation_of_an_earlier_merge_is_left_out(run, capsys):
    merged = make_merged(run)
    write_asked(run, "merged", merged)
    (merged / "model.safetensors").write_bytes(safetensors(byte=b"\x09"))
    data, text, _ = card_of(merged, "merged")
    assert "54.3" not in text and "model-index" not in data and "is of other weights" in capsys.readouterr().err


def test_an_evaluation_of_other_weights_is_left_out(run, tmp_path, capsys):
    other = make_run(tmp_path / "other", adapter_bytes=7)
    write_asked(run, "adapter", other / "adapter")
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "54.3" not in text and "is of other weights" in capsys.readouterr().err


def test_gguf_files_are_named_as_they_are(run):
    gguf = run / "gguf"
    gguf.mkdir()
    (gguf / "trained-Q4_K_M.gguf").write_bytes(b"GGUF")
    data, text, _ = card_of(gguf, "gguf")
    assert (data["library_name"], data["base_model_relation"]) == ("gguf", "finetune")
    assert "llama-cli --hf-repo me/trained --hf-file trained-Q4_K_M.gguf" in text
    assert "ollama run hf.co/me/trained:Q4_K_M" in text and "Modelfile" not in text
    assert "These are figures of the adapter on its base" in text and "model-index" not in data
    (gguf / "trained.Modelfile").write_text("FROM ./trained-Q4_K_M.gguf\n")
    _, text, files = card_of(gguf, "gguf")
    assert "ollama create trained -f trained/trained.Modelfile" in text and "trained.Modelfile" in files


def test_a_gguf_file_of_before_the_adapter_bears_no_figures(run, capsys):
    gguf = run / "gguf"
    gguf.mkdir()
    (gguf / "trained.gguf").write_bytes(b"GGUF")
    os.utime(gguf / "trained.gguf", (0, 0))
    _, text, _ = card_of(gguf, "gguf")
    assert "## Measured" not in text and "is older than the run's adapter" in capsys.readouterr().err


# What is damaged does not go up


def test_an_adapter_that_is_not_as_training_wrote_it_is_refused(run):
    path = run / "adapter" / "adapter_model.safetensors"
    path.write_bytes(safetensors(byte=b"\x03"))
    with pytest.raises(UserError, match=r"adapter_model.safetensors has changed since it was written; restore"):
        prepare(run / "adapter", "adapter", "me/trained")
    (run / "adapter" / "manifest.json").unlink()
    prepare(run / "adapter", "adapter", "me/trained")


def noted(merged):
    names = [path.name for path in sorted(merged.glob("*.safetensors"))]
    return {
        "lora_grpo_merge": 1,
        **dict.fromkeys(("asked", "dtype", "reason", "onto", "base", "retained", "kl", "untied")),
        "identity": {"adapter_sha256": "0" * 64},
        "shards": [
            {"file": name, "bytes": (merged / name).stat().st_size, "sha256": atomic.sha256(merged / name)}
            for name in names
        ],
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (safetensors()[:50], "is not a complete safetensors file"),
        (safetensors(byte=b"\x07"), "is missing or not as merging wrote it"),
        (safetensors(size=7), "is missing or not as merging wrote it"),
        (None, "is missing or not as"),
        (b"\x80\x04pickled.....", "is not a complete safetensors file"),
    ],
)
def test_a_merged_model_that_is_not_as_the_merge_wrote_it_is_refused(run, content, said):
    merged = make_merged(run)
    (merged / "more.safetensors").write_bytes(safetensors())
    (merged / "merge_report.json").write_text(json.dumps(noted(merged)))
    prepare(merged, "merged", "me/trained")
    if content is None:
        (merged / "model.safetensors").unlink()
    else:
        (merged / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=rf"model.safetensors {said}"):
        prepare(merged, "merged", "me/trained")


def test_an_index_names_only_what_is_there(run):
    merged = make_merged(run)
    (merged / "model.safetensors").rename(merged / "model-00001-of-00002.safetensors")
    where = {"lora_A.weight": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (merged / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(UserError, match=r"lacks model-00002-of-00002.safetensors of its index"):
        prepare(merged, "merged", "me/trained")


SECRET = "hf_" + "AbCdEfGhIj" * 3


@pytest.mark.parametrize("secret", [SECRET, "an-odd-token-of-mine"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"])
def test_a_token_in_a_file_ends_the_push(run, monkeypatch, name, secret):
    monkeypatch.setenv("HF_TOKEN", "an-odd-token-of-mine")
    write_adapter(run, name, json.dumps({"x": f"key={secret}"}).encode())
    with pytest.raises(UserError, match=rf"^{name} holds a Hub token or something like one") as caught:
        prepare(run / "adapter", "adapter", "me/trained")
    assert secret not in str(caught.value)


def test_a_token_in_the_card_ends_the_push(tmp_path):
    run = make_run(tmp_path / "run", record__config__grpo=[f"hub_token={SECRET}"])
    with pytest.raises(
        UserError, match=r"^README.md \(the card, from run.json and reports\) holds a Hub token"
    ) as caught:
        prepare(run / "adapter", "adapter", "me/trained")
    assert SECRET not in str(caught.value)


def test_what_is_no_token_is_none(run):
    write_adapter(
        run, "tokenizer.json", b'{"hf_transfer": 1, "tf_hf_model_of_a_name": 2, "shf_AbCdEfGhIjAbCdEfGhIj": 3}'
    )
    prepare(run / "adapter", "adapter", "me/trained")


# What comes from files cannot break out


def test_no_path_of_this_machine_is_in_anything_that_goes_up(tmp_path):
    run = make_run(tmp_path / "run", record__config__train__optimizer=f"{PRIVATE}/optimizer")
    make_merged(run, base={"name": f"{PRIVATE}/base"}, onto="full")
    for kind in ("adapter", "merged"):
        files, _, text = prepare(run / kind, kind, "me/trained")
        for file in files:
            content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
            for private in (PRIVATE, "somebody", str(run.parent)):
                assert private.encode() not in content, (kind, file.name, private)
        assert "](/" not in text


HOSTILE = 'x"\n---\nlicense: mit\n---\n# Owned | `a` <script>alert(1)</script> [l](http://evil) {{ 7*7 }} *b* _c_'


@pytest.mark.parametrize(
    "path",
    [
        "record__data__task", "record__recipe", "record__policy__engine", "record__config__train__optimizer",
        "record__config__data__prompt_style", "record__data__eval__source", "record__data__train__sha256",
        "report__protocol__task", "report__protocol__sampling__prompt_style", "report__protocol__sandbox",
        "record__policy__base_model", "report__evaluated__source__device", "record__status",
    ],
)  # fmt: skip
def test_text_from_files_is_text(tmp_path, path):
    run = make_run(tmp_path / "run", **{path: HOSTILE})
    _, _, text = prepare(run / "adapter", "adapter", "me/trained")
    card = RepoCard(text)
    assert "license" not in card.data.to_dict()
    assert yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))["library_name"] == "peft"
    assert [line for line in text.splitlines() if line.startswith("# ")] == ["# trained"]
    assert "<script" not in text.replace("\\<script", "") and "](http://evil)" not in text.replace("\\]", "")


@pytest.mark.parametrize("key", ["rows", "num_samples", "max_completion_tokens", "seed", "few_shot", "temperature"])
@pytest.mark.parametrize("value", [HOSTILE, None, float("nan"), float("inf"), [], True])
def test_a_figure_of_a_report_is_a_number_or_the_report_is_left_out(tmp_path, capsys, key, value):
    run = make_run(tmp_path / "run")
    path = run / "evaluation" / "report.json"
    report = json.loads(path.read_text())
    protocol = report["protocol"]
    (protocol if key in protocol else protocol["sampling"])[key] = value
    path.write_text(json.dumps(report))
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "Owned" not in text and "## Measured" not in text
    said = capsys.readouterr().err
    assert "is not an evaluation report: protocol." in said and key in said and said.count("\n") == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"protocol": 1}', "null", "\xff"])
def test_a_broken_report_is_left_out(run, capsys, content):
    (run / "evaluation" / "report.json").write_bytes(content.encode("latin1"))
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "## Measured" not in text and capsys.readouterr().err.count("the card leaves it out\n") == 1


WRONG = [None, [], {}, "x", -1, True, float("nan"), float("inf"), "\ud800"]


def places(value, place=()):
    yield place
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*place, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*place, 0))


@pytest.mark.parametrize(
    "name", ["run.json", "evaluation/report.json", "evaluation/gsm8k/report.json", "adapter/adapter_config.json"]
)
def test_whatever_stands_in_a_record_there_is_a_card_or_one_line(run, monkeypatch, name):
    """Every entry is replaced by values of wrong types: no traceback, no figure that is none."""
    write_asked(run, "adapter", run / "adapter")
    (run / "adapter" / "manifest.json").unlink()
    monkeypatch.setattr(atomic, "damage", lambda folder: None)
    path = run / name
    right = json.loads(path.read_text())
    prepare(run / "adapter", "adapter", "me/trained")
    cards = 0
    read = [place for place in places(right) if place and place[0] not in ("command", "results")]
    for number, (*keys, last) in enumerate(read):
        # Two of them each, in turn: all would take a minute.
        for value in (WRONG[number % len(WRONG)], WRONG[(number + 4) % len(WRONG)]):
            changed = json.loads(json.dumps(right))
            target = changed
            for key in keys:
                target = target[key]
            target[last] = value
            path.write_text(json.dumps(changed))
            try:
                _, _, text = prepare(run / "adapter", "adapter", "me/trained")
            except UserError as error:
                assert "\n" not in str(error)
            else:
                text.encode()
                assert not re.search(r"\b(nan|inf|None)\b", text), (keys, last, value)
                cards += 1
    assert cards > 2


def test_a_local_name_is_not_taken_for_a_data_set_of_the_hub(tmp_path):
    run = make_run(tmp_path / "run", record__data__train__source="private/customers")
    data, text, _ = card_of(run / "adapter", "adapter")
    assert "datasets" not in data and "private/customers" not in text and "| train | customers |" in text
    run = make_run(tmp_path / "named", record__data__train__source="openai/gsm8k")
    assert card_of(run / "adapter", "adapter")[0]["datasets"] == ["openai/gsm8k"]


def test_a_tasks_name_cannot_break_a_table(tmp_path):
    moved = [{"task_id": "a|b`c<d>\n# e", "before": [0, 1], "after": [1, 1]}]
    run = make_run(tmp_path / "run", report__fixed=moved)
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "1 fixed: a\\|b\\`c\\<d\\> \\# e (0/1 to 1/1)" in text


def test_escaped_text_reads_as_it_is():
    assert escape("correct_answer 0.1.0 +3.2") == "correct_answer 0.1.0 +3.2"
    assert escape("_a_ *b* [c](d) <e>\n- f") == "\\_a\\_ \\*b\\* \\[c\\](d) \\<e\\> - f"
    assert escape("a\x1b[31mb\u202ec\u2028d") == "a \\[31mb c d"
    assert escape("1. one") == "1\\. one" and escape("- one") == "\\- one"


def test_a_record_that_lacks_something_is_told_in_one_line(run):
    record = json.loads((run / "run.json").read_text())
    record["config"].pop("train")
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"run.json cannot be read: config.train is missing"):
        prepare(run / "adapter", "adapter", "me/trained")


def test_the_same_files_have_the_same_card(run):
    first, second = (prepare(run / "adapter", "adapter", "me/trained") for _ in range(2))
    assert first[2] == second[2] and first[0] == second[0]
    assert Path(run / "adapter" / CARD).exists() is False
