"""The card is accurate: it includes all measured results, nothing that was not measured, and no local paths."""

import ast
import json
import re
import shlex
import shutil
from importlib import metadata

import gguf
import numpy as np
import pytest
import yaml
from helpers.gguf_models import published_template
from helpers.pushed_runs import (
    BASE,
    COMMIT,
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
from huggingface_hub.repocard import RepoCard

from lora_grpo import starter
from lora_grpo.config.schema import RunConfig
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, json_files
from lora_grpo.hub.card import escape
from lora_grpo.hub.files import CARD, CARD_MARK
from lora_grpo.hub.push import PushOptions, prepare, push_to_hub
from lora_grpo.merging import check_current
from lora_grpo.models import adapter_sha256
from lora_grpo.tasks.chat import SYSTEM_PROMPTS

LEFT_OUT = "measured other weights; it is left out"


def write_adapter(run, name, content):
    """Change a file in a run's adapter, as if training had written it."""
    with atomic.new_folder(run / "adapter") as staging:
        shutil.copytree(run / "adapter", staging, dirs_exist_ok=True)
        (staging / name).write_bytes(content)


def make_gguf(run, name="trained-Q4_K_M.gguf"):
    (run / "gguf").mkdir()
    writer = gguf.GGUFWriter(run / "gguf" / name, "qwen2")
    writer.add_tensor("output_norm.weight", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return run / "gguf"


def card_of(folder, kind):
    """Return a card's front matter, its text, and all uploaded files by name."""
    files, _ = prepare(folder, kind, "me/trained")
    by_name = {file.name: file for file in files}
    card = ModelCard(by_name[CARD].content.decode())
    return card.data.to_dict(), card.text, by_name


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


# Contents


def test_the_front_matter_is_what_the_hub_reads(run):
    data, _, _ = card_of(run / "adapter", "adapter")
    assert (data["base_model"], data["base_model_relation"]) == (BASE, "adapter")
    assert (data["library_name"], data["pipeline_tag"]) == ("peft", "text-generation")
    assert data["tags"] == ["grpo", "lora", "trl", "lora_grpo", "gsm8k"] and data["language"] == "en"
    assert data["datasets"] == ["openai/gsm8k"]
    (index,) = data["model-index"]
    assert index["name"] == "trained"
    assert {(m["name"], m["value"]) for m in index["results"][0]["metrics"]} == {
        ("pass@1, 4 samples at temperature 1, 30 rows", 45.5),
        ("pass@1, greedy, 30 rows", 60.0),
    }


def test_the_card_has_the_scores_with_intervals_and_protocol_the_settings_and_the_data(run):
    _, text, _ = card_of(run / "adapter", "adapter")
    for part in (
        "| pass@1 | 31.7 \\[21.7, 41.7\\] | 45.5 \\[35.5, 55.5\\] | +13.8 \\[+8.8, +18.8\\] | 0.021 |",
        "| greedy | 50.0 \\[40.0, 60.0\\] | 60.0 \\[50.0, 70.0\\] | +10.0 \\[+5.0, +15.0\\] | 0.250 |",
        "- greedy: no significant difference",
        "Percent of 30 held-out problems solved, with 95% intervals. pass@1: mean of 4 samples at temperature 1. ",
        "at most 64 tokens, seed 0",
        "| rewards | correct_answer=2.0, mine.py:brief=0.25 |",
        "| train.learning_rate | 2e-05 |",
        "| r | 16 |",
        f"| train | openai/gsm8k | 7473 | `{'b' * 64}` |",
        f"| eval | held out.jsonl | 30 | `{'c' * 64}` |",
        "trained with GRPO on grade-school math word problems (`gsm8k`) for 250 steps by lora_grpo.",
        "- recipe: `gsm8k_lora`",
    ):
        assert part in text, part
    for once in (COMMIT, "b" * 64, "c" * 64, "trl 1.14.2", "gsm8k_lora", "learning_rate"):
        assert text.count(once) == 1 + (once == COMMIT), once  # the commit is in both commands that load the base
    assert text.endswith(f"\n{CARD_MARK}\n")
    assert card_of(run / "adapter", "adapter")[1] == text


def test_the_examples_load_this_model(run):
    _, text, _ = card_of(run / "adapter", "adapter")
    assert f'from_pretrained("{BASE}", revision="{COMMIT}", dtype="auto", device_map="auto")' in text
    longest = RunConfig(output_dir="x").sampling.max_completion_tokens
    assert f"max_new_tokens={longest}, do_sample=False)" in text and "What is 12 times 7?" in text
    assert 'PeftModel.from_pretrained(base, "me/trained")' in text
    assert '{"role": "system", "content": "Respond in the following format:\\n<reasoning>' in text
    vllm = f"vllm serve {BASE} --revision {COMMIT} --enable-lora --max-lora-rank 16 --lora-modules trained=me/trained"
    assert vllm in text
    (block,) = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    compile(block, "example", "exec")
    assert block.startswith("# pip install transformers peft accelerate\n")
    (served,) = [part.split("```")[0] for part in text.split("```bash\n")[1:]]
    assert served.startswith("#") and "system prompt" in served.splitlines()[0]


def test_an_adapter_that_vllm_cannot_serve_has_no_example_for_it(run, capsys):
    path = run / "adapter" / "adapter_config.json"
    write_adapter(run, path.name, json.dumps(json.loads(path.read_text()) | {"use_dora": True}).encode())
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "vllm serve" not in text and "| use_dora | True |" in text
    assert "the card does not mention vLLM" in capsys.readouterr().err


def test_the_example_gives_the_chat_template_the_variables_of_the_run(run):
    _, text, _ = card_of(run / "adapter", "adapter")
    assert 'return_tensors="pt"\n).to(model.device)' in text
    write_adapter(run, "chat_template.jinja", published_template("qwen3").encode())
    _, text, _ = card_of(run / "adapter", "adapter")
    assert 'return_tensors="pt", enable_thinking=False\n).to(model.device)' in text
    assert """ --default-chat-template-kwargs '{"enable_thinking": false}' --enable-lora""" in text
    thinks = "{% set enable_thinking = enable_thinking | default(true) %}\n" + published_template("qwen3")
    write_adapter(run, "chat_template.jinja", thinks.encode())
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "enable_thinking=True\n)" in text and '{"enable_thinking": true}' in text


def test_remote_code_is_mentioned(tmp_path):
    run = make_run(tmp_path / "run", record__policy__trust_remote_code=True)
    for kind in ("adapter", "merged"):
        _, text, _ = card_of(run / "adapter" if kind == "adapter" else make_merged(run), kind)
        assert "**The base needs code from its repository**" in text
        loading = [line for line in text.splitlines() if ".from_pretrained(" in line and "PeftModel" not in line]
        assert len(loading) == 2 and all("trust_remote_code=True" in line for line in loading)
        assert "--trust-remote-code" in text


def test_a_model_trained_on_programs_is_asked_for_one(tmp_path):
    run = make_run(tmp_path / "run", record__data__task="mbpp", record__config__sampling__max_completion_tokens=333)
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "Write a function" in text and "12 times 7" not in text and "max_new_tokens=333," in text


@pytest.mark.parametrize(
    ("front", "expected"),
    [
        ("license: apache-2.0", {"license": "apache-2.0"}),
        (
            "license: other\nlicense_name: terms-1.0\nlicense_link: LICENSE",
            {
                "license": "other",
                "license_name": "terms-1.0",
                "license_link": f"https://huggingface.co/{BASE}/blob/main/LICENSE",
            },
        ),
        ("license: [mit]", {}),
        ("license: Apache 2.0", {}),
    ],
)
def test_the_license_is_that_of_the_bases_card(run, tmp_path, monkeypatch, front, expected):
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# Base\n")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda _, name, revision: str(tmp_path / name))
    data, text, _ = card_of(run / "adapter", "adapter")
    assert {key: value for key, value in data.items() if key.startswith("license")} == expected
    assert ("license of the base model is not known" in text) == (not expected)


def test_a_base_that_is_not_on_the_hub_is_named_and_not_linked(tmp_path):
    folder = shutil.copytree(starter.model_path(), tmp_path / "my base")
    for base, name, shown in (
        ("starter", "starter", "the starter model, a toy with 2 million parameters"),
        (str(folder), "my base", "a model from a local folder named my base"),
        ("models/mine", "mine", "a model from a local folder named mine"),
    ):
        source = {"base_model": base, "revision": None, "fingerprint": "f" * 64}
        run = make_run(tmp_path / name, **{f"record__policy__{key}": value for key, value in source.items()})
        data, text, files = card_of(run / "adapter", "adapter")
        assert "base_model" not in data and (name == "mine") == ("license" not in data)
        assert json.loads(files["adapter_config.json"].content)["base_model_name_or_path"] == name
        loaded = {"starter": "from_pretrained(model_path(), "}.get(name, f'from_pretrained("path/to/{name}", ')
        assert loaded in text and 'PeftModel.from_pretrained(base, "me/trained")' in text
        assert shown in text and text.count("f" * 64) == 1 and "vllm serve" not in text and str(tmp_path) not in text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a b) c", "a model from a local folder named a b) c"),
        ("C:\\models\\qwen", "a model from a local folder named qwen"),
        (5, "an unknown base model"),
    ],
)
def test_a_base_name_that_the_hub_does_not_allow(tmp_path, name, shown):
    run = make_run(tmp_path / "run", record__policy__base_model=name)
    if name == 5:
        run = make_run(tmp_path / "other", record__policy={})
        settings = json.loads((run / "adapter" / "adapter_config.json").read_text())
        write_adapter(run, "adapter_config.json", json.dumps(settings | {"base_model_name_or_path": name}).encode())
    data, text, _ = card_of(run / "adapter", "adapter")
    assert "base_model" not in data and shown in text


def test_a_branch_is_not_called_a_commit(tmp_path):
    run = make_run(tmp_path / "run", record__policy__revision="main")
    for folder, kind in ((run / "adapter", "adapter"), (make_gguf(run), "gguf")):
        assert not {"revision", "commit"} & set(re.findall(r"\w+", card_of(folder, kind)[1]))


# The first screen


@pytest.fixture
def public_run(tmp_path):
    """A run that was evaluated on the rows of its task, which everybody can read."""
    return make_run(tmp_path / "public", report__protocol__data_source=None)


def test_the_first_screen_says_what_it_is_how_good_it_is_and_how_to_use_it(public_run):
    run = public_run
    make_plot(run)
    write_samples(run)
    _, text, files = card_of(run / "adapter", "adapter")
    order = ["A LoRA adapter for [", "| pass@1 |", "```python", '<img src="reward.png"', "## Before and after"]
    order += ["## Limits", "<details>"]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    assert files["reward.png"].read() == PLOT
    assert "<details>" not in text[: text.index("## Limits")] and text.count("<details>") == text.count("</details>")


def test_a_run_without_a_plot_has_none_and_sft_has_that_of_its_loss(run, tmp_path):
    assert "<img" not in card_of(run / "adapter", "adapter")[1]
    sft = make_run(tmp_path / "sft", record__config__method="sft")
    make_plot(sft)
    assert "<img" not in card_of(sft / "adapter", "adapter")[1]
    make_plot(sft, "sft-loss.png")
    _, text, files = card_of(sft / "adapter", "adapter")
    assert '<img src="sft-loss.png"' in text and "sft-loss.png" in files and "supervised fine-tuning" in text


def test_a_plot_elsewhere_is_not_uploaded(run, tmp_path):
    (tmp_path / "private.png").write_bytes(PLOT)
    (run / "report").mkdir()
    (run / "report" / "reward.png").symlink_to(tmp_path / "private.png")
    assert "reward.png" not in card_of(run / "adapter", "adapter")[2]


PLOT = b"\x89PNG plot"


def make_plot(run, name="reward.png"):
    (run / "report").mkdir(exist_ok=True)
    (run / "report" / name).write_bytes(PLOT)


def write_samples(run, question="How many?", answers=("<b>I guess 3</b>", "2 + 2 = 4"), folder="", draw="greedy"):
    """Write the samples of four problems in the order c, a, b, d: a stays right, b and c are fixed, d regresses."""
    evaluation = run / "evaluation"
    rows = [{"task_id": name, "question": f"{name}: {question}"} for name in "cabd"]
    atomic.write_text(evaluation / "rows.jsonl", json_files.dump_lines(rows))
    names = ("base.samples.jsonl", "trained.samples.jsonl")
    if folder:
        names = (f"{folder}/compared-0123abcd.results.jsonl", f"{folder}/results.jsonl")
    for name, solved, answer in zip(names, ("ad", "abc"), answers, strict=True):
        lines = [
            {"task_id": each, "draw": of, "completion": f"{answer} {of}", "passed": each in solved}
            for of in (0, draw)  # the other sample does not count
            for each in "abcd"
        ]
        atomic.write_text(evaluation / name, json_files.dump_lines(lines))


def test_the_example_is_the_first_fixed_problem_in_the_order_of_the_rows(public_run):
    run = public_run
    write_samples(run)
    _, text, _ = card_of(run / "adapter", "adapter")
    assert '{"role": "user", "content": "c: How many?"}' in text and "12 times 7" not in text
    before, after = text[text.index("## Before and after") :].split("After (right):")
    assert "```\nc: How many?\n```" in before and "```\n<b>I guess 3</b> greedy\n```" in before
    assert after.lstrip().startswith("```\n2 + 2 = 4 greedy\n```")
    assert "of 4 evaluation problems, the first row whose greedy answer" in before
    assert "2 went from wrong to right, 1 from right to wrong" in before


def test_an_evaluation_by_the_script_has_its_own_example(run):
    best = make_best(run)
    write_samples(run)
    assert "Before and after" not in card_of(best, "adapter")[1]
    row = {"metric": "pass@1", "before": 0.3, "before_interval": [0.2, 0.4], "after": 0.5, "after_interval": [0.4, 0.6]}
    row |= {"difference": 0.2, "difference_interval": [0.1, 0.3], "p_value": 0.01, "test": "exact McNemar"}
    write_evaluation(run, best, baseline={"pass@1": 0.3}, table=[row])
    write_samples(run, folder="gsm8k", answers=("first", "second"), draw=1)
    _, text, _ = card_of(best, "adapter")
    assert "whose greedy answer" in text and "```\nsecond 0\n```" in text and "+20.0 \\[+10.0, +30.0\\]" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"report__protocol__data_source": f"{PRIVATE}/held out.jsonl"},
        {"report__protocol__task": "my_task"},
        {"report__baseline": None, "report__table": []},
    ],
)
def test_a_row_of_a_users_file_or_without_a_base_is_not_shown(tmp_path, changes):
    run = make_run(tmp_path / "run", **{"report__protocol__data_source": None} | changes)
    write_samples(run)
    text = card_of(run / "adapter", "adapter")[1]
    assert "Before and after" not in text and "I guess" not in text and "c: How" not in text


def test_without_a_fixed_problem_there_is_no_example(public_run):
    run = public_run
    write_samples(run)
    shutil.copyfile(run / "evaluation" / "base.samples.jsonl", run / "evaluation" / "trained.samples.jsonl")
    assert "Before and after" not in card_of(run / "adapter", "adapter")[1]


INJECTED = "````\n# Owned\r# Owned\n</details><script>alert(1)</script> [l](http://evil)\n---\n\ud800\u202e\x1b[31m\x00"


def test_answers_and_questions_stay_text(public_run):
    """They are rendered only inside fences that are longer than any in them."""
    run = public_run
    write_samples(run, INJECTED, (INJECTED, INJECTED + "x" * 5000))
    files, _ = prepare(run / "adapter", "adapter", "me/trained")
    text = files[-1].content.decode()
    outside, fence = [], None
    for line in text.split("\n"):
        mark = re.match("(`{3,})", line)
        if fence is None and mark:
            fence = mark[1]
        elif fence is None:
            outside.append(line)
        elif mark and len(mark[1]) >= len(fence) and set(line.strip()) == {"`"}:
            fence = None
    assert fence is None
    rendered = "\n".join(outside)
    assert "Owned" not in rendered and "script" not in rendered and "evil" not in rendered
    assert rendered.count("</details>") == rendered.count("<details>")
    assert "# Owned" in text and len(text) < 12_000 and not {"\u202e", "\x1b", "\x00", "\r"} & {*text}
    code = text.split("```python\n")[1].split("\n```")[0]
    compile(code, "example", "exec")
    (asked,) = re.findall(r'"user", "content": (".*")}', code)
    assert ast.literal_eval(asked) == f"c: {INJECTED}"


def test_the_parts_of_the_gain_are_shown(tmp_path):
    part = {"value": 0.1, "interval": [0.0, 0.2]}
    gain = {
        "total": {"name": "gain in pass@1", **part}, "parts": [{"name": "format", **part}, {"name": "rest", **part}],
        "majority": {"name": "of which majority vote of 3", **part},
        "rest_by_k": [{"k": k, **part, "value": 0.4 / k} for k in (1, 2, 3)],
        "others": 3, "has_format": True, "reasons": [], "samples": [4, 4],
    }  # fmt: skip
    run = make_run(tmp_path / "run", report__gain=gain)
    text = card_of(run / "adapter", "adapter")[1]
    assert "| format | +10.0 \\[+0.0, +20.0\\] |" in text and "Majority vote:" in text
    assert "with 1, 2, 3 other samples" in text and "+40.0, +20.0, +13.3 points" in text


def test_an_evaluation_on_trained_problems_is_called_contaminated(tmp_path):
    run = make_run(tmp_path / "run", report__protocol__contaminated=["trained"])
    text = card_of(run / "adapter", "adapter")[1]
    assert text.index("**Contaminated:** trained was trained") < text.index("| pass@1 |") and "held-out" not in text


def test_the_language_is_that_of_the_tasks_own_rows(tmp_path):
    for name, source, language in (("own", None, "en"), ("file", f"{PRIVATE}/mine.jsonl", None)):
        run = make_run(tmp_path / name, record__data__train__source=source)
        assert card_of(run / "adapter", "adapter")[0].get("language") == language
    run = make_run(tmp_path / "task", record__data__task="my_task.py")
    assert "language" not in card_of(run / "adapter", "adapter")[0]


@pytest.mark.parametrize("url", ["https://example.org/kit", "javascript:alert(1)"])
def test_the_kit_is_a_link_if_its_metadata_have_an_address(run, monkeypatch, url):
    entries = metadata.metadata("lora-grpo")
    entries["Project-URL"] = f"Repository, {url}"
    monkeypatch.setattr(metadata, "metadata", lambda name: entries)
    assert (f"by [lora_grpo]({url})" in card_of(run / "adapter", "adapter")[1]) == url.startswith("https")


# Which merge


def test_of_two_merges_the_one_nearer_to_the_trained_model_is_recommended(run):
    merged = make_merged(run)
    assert "ecommended" not in card_of(merged, "merged")[1]
    report = json.loads((merged / "merge_report.json").read_text())
    shutil.copytree(merged, run / "merged-dequantized")
    other = report | {"onto": "dequantized", "kl": {"adapter_merged": 0.00002, "adapter_base": 0.03}}
    (run / "merged-dequantized" / "merge_report.json").write_text(json.dumps(other))
    assert "ecommended" not in card_of(merged, "merged")[1]  # not measured

    report["kl"]["trained_merged"] = 0.0032
    (merged / "merge_report.json").write_text(json.dumps(report))
    text = card_of(merged, "merged")[1]
    assert "the other merge of this run, into the dequantized 4-bit base" in text
    assert "by 0.00002 nats per token, this one by 0.0032" in text
    text = card_of(run / "merged-dequantized", "merged")[1]
    assert "this merge," in text and "by 0.00002 nats per token, the other one by 0.0032" in text
    text = card_of(run / "adapter", "adapter")[1]
    assert "by 0.0032 nats per token (KL divergence)" in text and "ecommended" not in text

    other["identity"] = {"adapter_sha256": "0" * 64}  # of another adapter
    (run / "merged-dequantized" / "merge_report.json").write_text(json.dumps(other))
    assert "ecommended" not in card_of(merged, "merged")[1]


# Unknown facts are omitted


def test_an_adapter_alone_has_no_scores_and_no_placeholders(tmp_path, run):
    for folder in (tmp_path / "alone" / "adapter", run / "older"):  # the second is not its run's adapter
        shutil.copytree(run / "adapter", folder)
        data, text, _ = card_of(folder, "adapter")
        assert not {"model-index", "datasets", "license", "base_model", "language"} & data.keys()
        assert data["tags"] == ["lora"]
        for absent in ("valuation", "rewards", "| data |", "versions", "None", "nan", "GRPO", "250"):
            assert absent not in text, absent
        assert "license of the base model is not known" in text and "| r | 16 |" in text


def test_a_merged_model_has_the_scores_of_its_adapter_as_such(run):
    data, text, files = card_of(make_merged(run), "merged")
    assert (data["base_model"], data["base_model_relation"]) == (BASE, "finetune")
    assert data["library_name"] == "transformers" and "model-index" not in data
    assert "not for the files in this repository" in text and "| pass@1 | 31.7" in text
    assert "merged into the base in full precision" in text
    assert (
        "99.9% of the adapter's update" in text
        and "by 0.00012 nats per token (KL divergence), training by 0.03." in text
    )
    assert json.loads(files["config.json"].content) == {"model_type": "qwen2"}
    assert "vllm serve me/trained" in text and "merge_report.json" not in files


def test_scores_of_the_uploaded_weights_are_in_the_front_matter(run):
    merged = make_merged(run)
    write_evaluation(run, merged)
    data, _, _ = card_of(merged, "merged")
    assert data["model-index"][0]["results"][0]["metrics"][0]["value"] == 54.3


def test_a_quick_look_stays_here_and_a_protocol_has_one_entry(run, capsys):
    own = {
        "pass@1, 4 samples at temperature 1, 30 rows": 45.5,
        "pass@1, greedy, 30 rows": 60.0,
    }

    def published():
        data, text, _ = card_of(run / "adapter", "adapter")
        metrics = [m for result in data["model-index"][0]["results"] for m in result["metrics"]]
        names = {metric["name"]: metric["value"] for metric in metrics}
        assert len(names) == len(metrics)
        shutil.rmtree(run / "evaluation" / "gsm8k")
        return names, text

    write_evaluation(run, run / "adapter", limit=40, rows=40)
    names, text = published()
    assert names == own and "54.3" not in text
    assert "gsm8k/report.json is of `evaluate --limit 40`; it is left out" in capsys.readouterr().err

    # The same greedy protocol as the run's own evaluation: its figure is published already.
    write_evaluation(run, run / "adapter", rows=30, data_sha256="c" * 64, max_completion_tokens=64)
    assert published()[0] == own

    write_evaluation(run, run / "adapter", few_shot=4)
    assert published()[0] == own | {"pass@1, greedy, 4-shot, 1319 rows": 54.3}


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

    write_adapter(run, "adapter_model.safetensors", safetensors(byte=b"\x03"))
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "| pass@1 |" not in text


def make_best(run):
    """Add the adapter of an earlier step, with the highest validation reward."""
    (run / "validation").mkdir()
    for step, passed in ((0, 1), (40, 2), (250, 1)):
        lines = [{"step": step, "reward": 2.75 if row < passed else 0.5, "passed": row < passed} for row in range(4)]
        atomic.write_text(run / "validation" / f"step-{step:05d}.jsonl", json_files.dump_lines(lines))
    with atomic.new_folder(run / "best") as staging:
        shutil.copytree(run / "adapter", staging, dirs_exist_ok=True)
        (staging / "adapter_model.safetensors").write_bytes(safetensors(byte=b"\x05"))
    record = json.loads((run / "run.json").read_text())
    record["best"] = {"step": 40, "reward": 2.75, "accuracy": 0.5}
    (run / "run.json").write_text(json.dumps(record))
    return run / "best"


def test_the_best_adapter_has_its_own_results_or_the_command_that_measures_them(run, capsys):
    best = make_best(run)
    data, text, _ = card_of(best, "adapter")
    assert "model-index" not in data and "45.5" not in text and "| pass@1 |" not in text
    assert "for 40 steps by lora_grpo" in text and "**Not evaluated:**" in text
    assert "| % correct | 25.0 | 50.0 |" in text and "| reward | 1.062 | 2.75 |" in text
    assert "4 validation rows" in text and "highest validation reward of 3 passes" in text
    assert "- step: 40 of 250, with the highest validation reward, 2.75" in text
    assert "| rewards | correct_answer=2.0" in text and str(run.parent) not in text
    notes = capsys.readouterr().err
    assert LEFT_OUT in notes and f"to measure it: lora-grpo evaluate {run} --what best --compare base" in notes

    write_evaluation(run, best)
    data, text, _ = card_of(best, "adapter")
    metrics = data["model-index"][0]["results"][0]["metrics"]
    assert [(m["name"], m["value"]) for m in metrics] == [("pass@1, greedy, 1319 rows", 54.3)]
    assert "31.7" not in text and "Not evaluated" not in text
    data, text, _ = card_of(run / "adapter", "adapter")
    assert "54.3" not in text and "for 250 steps" in text and "validation" not in text

    shutil.copytree(make_merged(run), run / "best-merged")
    report = json.loads((run / "merged" / "merge_report.json").read_text())
    report["identity"]["adapter_sha256"] = adapter_sha256(best)
    (run / "best-merged" / "merge_report.json").write_text(json.dumps(report))
    check_current(run / "best-merged")
    _, text, _ = card_of(run / "best-merged", "merged")
    assert "not for the files in this repository" in text and "54.3" in text and "31.7" not in text
    shutil.copyfile(run / "merged" / "merge_report.json", run / "best-merged" / "merge_report.json")
    with pytest.raises(UserError, match=r"older .*best; delete it and run lora-grpo merge .* --what best again"):
        check_current(run / "best-merged")


def test_the_command_that_measures_names_the_code_of_the_base(tmp_path, capsys):
    run = make_run(tmp_path / "run", record__config__model__trust_remote_code=True)
    card_of(make_best(run), "adapter")
    command = f"lora-grpo evaluate {run} --what best --compare base --trust-remote-code\n"
    assert command in capsys.readouterr().err


def test_what_best_pushes_the_best_adapter(run, capsys):
    make_best(run)
    push_to_hub(PushOptions(str(run), "me/trained", what="best", dry_run=True))
    said = capsys.readouterr().out
    assert f"{run / 'best'} (adapter) -> me/trained (private)" in said
    push_to_hub(PushOptions(str(run / "best"), "me/trained", dry_run=True))
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("content", ["{", "[]", '{"protocol": 1}', "\xff"])
def test_a_broken_report_is_left_out(run, capsys, content):
    (run / "evaluation" / "report.json").write_bytes(content.encode("latin1"))
    _, text, _ = card_of(run / "adapter", "adapter")
    assert "| pass@1 |" not in text and capsys.readouterr().err.count("it is left out\n") == 1


def test_an_unfinished_run_is_called_so(tmp_path):
    run = make_run(tmp_path / "run", record__status="interrupted")
    assert "**The run is not finished:** its status is interrupted." in card_of(run / "adapter", "adapter")[1]


def test_gguf_files_are_named(run):
    folder = make_gguf(run)
    data, text, _ = card_of(folder, "gguf")
    assert (data["library_name"], data["base_model_relation"]) == ("gguf", "finetune")
    assert shlex.split(text.split("For llama.cpp:\n\n```bash\n")[1].split("```")[0]) == [
        f"SYSTEM={SYSTEM_PROMPTS['xml']}", "llama-cli", "--hf-repo", "me/trained", "--hf-file", "trained-Q4_K_M.gguf",
        "-sys", "$SYSTEM",
    ]  # fmt: skip
    assert "ollama run hf.co/me/trained:Q4_K_M " in text and COMMIT in text
    assert "temperature" not in text[text.index("## How to use") : text.index("## Limits")]  # no file was evaluated
    (folder / "trained.Modelfile").write_text("FROM ./trained-Q4_K_M.gguf\n")
    _, text, files = card_of(folder, "gguf")
    assert "trained.Modelfile" in files and "ollama create trained -f trained.Modelfile" in text
    assert "ollama run hf.co" not in text


def test_ollama_gets_a_type_only_if_one_file_has_it(run):
    folder = make_gguf(run, "trained.Q8_0.gguf")
    shutil.copy(folder / "trained.Q8_0.gguf", folder / "other.q8_0.gguf")
    assert "ollama run hf.co/me/trained " in card_of(folder, "gguf")[1]
    (folder / "other.q8_0.gguf").rename(folder / "plain.gguf")  # the first, without a type
    assert "ollama run hf.co/me/trained " in card_of(folder, "gguf")[1]
    (folder / "plain.gguf").unlink()
    assert "ollama run hf.co/me/trained:Q8_0 " in card_of(folder, "gguf")[1]


def test_the_modelfile_is_that_of_the_file_that_the_commands_run(run):
    folder = make_gguf(run, "trained.F16.gguf")
    shutil.copy(folder / "trained.F16.gguf", folder / "trained.Q4_0.gguf")
    for name in ("F16", "Q4_0"):
        (folder / f"trained.{name}.Modelfile").write_text(f"FROM ./trained.{name}.gguf\n")
    assert "-f trained.F16.Modelfile" in card_of(folder, "gguf")[1]
    with (folder / "trained.F16.gguf").open("ab") as file:
        file.write(bytes(9))
    write_gguf_evaluation(run, folder / "trained.Q4_0.gguf", 0.488)
    text = card_of(folder, "gguf")[1]
    assert "-f trained.Q4_0.Modelfile" in text and "--hf-file trained.Q4_0.gguf" in text


def test_the_adapter_as_gguf_is_run_with_the_system_prompt_on_a_file_of_its_base(run):
    shutil.copy(make_gguf(run) / "trained-Q4_K_M.gguf", run / "other.gguf")
    (run / "adapter" / "adapter_model.gguf").write_bytes((run / "other.gguf").read_bytes())
    _, text, _ = card_of(run / "adapter", "adapter")
    (block,) = [part.split("```")[0] for part in text.split("```bash\n")[1:] if "llama-cli" in part.split("```")[0]]
    words = shlex.split(block, comments=True)
    assert words[0] == f"SYSTEM={SYSTEM_PROMPTS['xml']}" and words[-2:] == ["-sys", "$SYSTEM"]
    assert words[words.index("llama-cli") :][1:5] == ["-m", "base.gguf", "--lora", "adapter_model.gguf"]
    assert f"base.gguf: a GGUF file of {BASE} " in block


def test_scores_in_4_bits_are_called_so(tmp_path):
    run = make_run(tmp_path / "run")
    path = run / "evaluation" / "report.json"
    report = json.loads(path.read_text())
    for bits in (16, 4):
        report["evaluated"]["source"]["bits"] = bits
        path.write_text(json.dumps(report))
        first = card_of(run / "adapter", "adapter")[1].split("## How to use")[0]
        assert ("in 4 bits" in first) == (bits == 4)


def write_gguf_evaluation(run, file, score, merged=0.5, **protocol):
    """Write what `evaluate.py FILE --compare RUN/merged` leaves, with the cost of the file's type."""
    label = file.stem.rpartition("-")[2].lower()
    source = {"gguf_sha256": atomic.sha256(file), "quantization": label, "engine": "llama.cpp b1"}
    report = report_of(
        measured(label, source, **{"pass@1": score}),
        measured("merged", {"weights_sha256": "a" * 64, "bits": 16, "quantization": "none"}, **{"pass@1": merged}),
        table=[row("pass@1", merged, score, 0.01)],
        **{"rows": 200, "data_sha256": "c" * 64, "num_samples": 1, "temperature": 0.0, "max_completion_tokens": 64},
    )
    report["protocol"] |= protocol
    (run / "evaluation" / f"gguf-{label}").mkdir()
    atomic.write_json(run / "evaluation" / f"gguf-{label}" / "report.json", report)


def test_the_card_of_gguf_files_has_their_sizes_and_what_their_types_cost(run, capsys):
    folder = make_gguf(run, "trained-Q4_0.gguf")
    for name in ("trained-Q8_0.gguf", "trained-Q5_0.gguf"):
        shutil.copy(folder / "trained-Q4_0.gguf", folder / name)
        with (folder / name).open("ab") as file:
            file.write(bytes(name, "ascii") * 100_000)
    write_gguf_evaluation(run, folder / "trained-Q4_0.gguf", 0.488)
    write_gguf_evaluation(run, folder / "trained-Q8_0.gguf", 0.5)
    data, text, _ = card_of(folder, "gguf")
    size = (folder / "trained-Q4_0.gguf").stat().st_size / 1e3
    table = [line for line in text.splitlines() if line.startswith(("| merged", "| trained"))]
    assert table == [
        "| merged, 16 bits |  | 50.0 \\[40.0, 60.0\\] |  |",
        "| trained-Q5_0.gguf | 1.7 MB | – | – |",
        "| trained-Q8_0.gguf | 1.7 MB | 50.0 \\[40.0, 60.0\\] | +0.0 \\[-5.0, +5.0\\] |",
        f"| trained-Q4_0.gguf | {size:.1f} kB | 48.8 \\[38.8, 58.8\\] | -1.2 \\[-6.2, +3.8\\] |",
    ]
    assert "q4_0 costs 1.2 points of pass@1 \\[-3.8, 6.2\\] against merged" in text
    assert "- model: llama.cpp b1" in text and "Greedy pass@1: percent of 200 problems" in text
    assert "| file | size | greedy pass@1 | difference |" in text and "–: not measured." in text
    (command,) = re.findall("^llama-cli .*", text, re.MULTILINE)
    assert shlex.split(command)[3:] == ["--hf-file", "trained-Q4_0.gguf", "-sys", "$SYSTEM", "--temp", "0"]
    assert "\n# Other files: trained-Q5_0.gguf, trained-Q8_0.gguf\n" in text
    assert "ollama run hf.co/me/trained:Q4_0 " in text and "`/set parameter temperature 0`" in text
    order = ["| trained-Q4_0.gguf |", "Greedy pass@1:", "## How to use", "costs 1.2"]
    assert "Not evaluated" not in text and [text.index(part) for part in order] == sorted(map(text.index, order))
    (index,) = data["model-index"]
    names = {(m["name"], m["value"]) for result in index["results"] for m in result["metrics"]}
    assert ("pass@1, greedy, 200 rows, trained-Q4_0.gguf", 48.8) in names
    card_of(run / "adapter", "adapter")
    assert "gguf-q4_0" not in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "shown"), [(30, "the same 30 problems"), (200, " 200 problems")])
def test_files_are_measured_on_the_same_problems_only_if_they_are(run, rows, shown):
    folder = make_gguf(run, "trained-Q4_0.gguf")
    shutil.copy(make_merged(run) / "merge_report.json", folder)
    write_gguf_evaluation(run, folder / "trained-Q4_0.gguf", 0.488, rows=rows)
    first = card_of(folder, "gguf")[1].split("## How to use")[0]
    assert "on its base in 4 bits" in first and first.index("| greedy |") < first.index(shown)
    assert ("the same" in first) == (rows == 30) and first.count("95% intervals") == 1


def test_the_card_of_gguf_files_has_the_divergence_that_the_export_measured(run):
    folder = make_gguf(run, "trained-Q4_0.gguf")
    size = (folder / "trained-Q4_0.gguf").stat().st_size
    entry = {"type": "q4_0", "bytes": size, "kl": 0.0153, "texts": 8, "tokens": 256, "of_run": True}
    atomic.write_json(folder / "gguf_report.json", {"files": {"trained-Q4_0.gguf": entry}})
    _, text, _ = card_of(folder, "gguf")
    assert f"| trained-Q4_0.gguf | {size / 1e3:.1f} kB | 0.015 |" in text
    assert "nats per token." in text and "KL divergence: on 256 tokens of completions of the run" in text
    write_gguf_evaluation(run, folder / "trained-Q4_0.gguf", 0.488)
    _, text, _ = card_of(folder, "gguf")
    assert "48.8 \\[38.8, 58.8\\] | -1.2 \\[-6.2, +3.8\\] | 0.015 |" in text and "| merged, 16 bits |" in text
    atomic.write_json(folder / "gguf_report.json", {"files": {"trained-Q4_0.gguf": entry | {"bytes": size + 1}}})
    assert "256 tokens" not in card_of(folder, "gguf")[1]  # of an older export


def test_the_card_of_files_for_ollama_runs_them_from_the_hub(run):
    folder = make_gguf(run)
    (folder / "trained.Modelfile").write_text('FROM ./trained-Q4_K_M.gguf\nTEMPLATE """{{ .Prompt }}"""\n')
    (folder / "template").write_text("{{ .Prompt }}")
    _, text, files = card_of(folder, "gguf")
    assert "template" in files and "ollama run hf.co/me/trained:Q4_K_M\n" in text and "ollama create" not in text
    assert "the chat template and the stop tokens used in training" in text
    (folder / "trained.Modelfile").unlink()  # which would have to name the same system prompt
    (folder / "system").write_text("Be brief.")
    assert "the chat template, the stop tokens and the system prompt used in training" in card_of(folder, "gguf")[1]


@pytest.mark.parametrize("change", ["file", "limit", "protocol"])
def test_a_gguf_evaluation_of_another_file_or_protocol_is_left_out(run, change):
    folder = make_gguf(run, "trained-Q4_0.gguf")
    write_gguf_evaluation(run, folder / "trained-Q4_0.gguf", 0.488, **({"limit": 20} if change == "limit" else {}))
    if change == "file":
        with (folder / "trained-Q4_0.gguf").open("ab") as file:
            file.write(b"exported again")
    if change == "protocol":
        shutil.copy(folder / "trained-Q4_0.gguf", folder / "trained-Q8_0.gguf")
        with (folder / "trained-Q8_0.gguf").open("ab") as file:
            file.write(b"another file")
        write_gguf_evaluation(run, folder / "trained-Q8_0.gguf", 0.3, seed=7)
        assert card_of(folder, "gguf")[1].count("points of pass@1") == 1
    else:
        assert "points of pass@1" not in card_of(folder, "gguf")[1]


# Damaged files are not uploaded


def test_an_adapter_that_changed_since_training_is_refused(run):
    (run / "adapter" / "adapter_model.safetensors").write_bytes(safetensors(byte=b"\x03"))
    with pytest.raises(UserError, match=r"adapter_model.safetensors has changed since it was written; restore"):
        prepare(run / "adapter", "adapter", "me/trained")
    (run / "adapter" / "manifest.json").unlink()
    prepare(run / "adapter", "adapter", "me/trained")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (safetensors()[:50], "is not a complete safetensors file"),
        (b"\x80\x04pickled.....", "is not a complete safetensors file"),
        (safetensors(byte=b"\x07"), "is missing or not as merging wrote it"),
        (None, "is missing or not as merging wrote it"),
    ],
)
def test_a_merged_model_that_changed_since_merging_is_refused(run, content, message):
    merged = make_merged(run)
    weights = merged / "model.safetensors"
    shard = {"file": weights.name, "bytes": weights.stat().st_size, "sha256": atomic.sha256(weights)}
    report = json.loads((merged / "merge_report.json").read_text()) | {"shards": [shard]}
    (merged / "merge_report.json").write_text(json.dumps(report))
    prepare(merged, "merged", "me/trained")
    if content is None:
        weights.rename(merged / "other.safetensors")
    else:
        weights.write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare(merged, "merged", "me/trained")


def test_a_merge_without_an_identity_is_an_older_one(run):
    path = make_merged(run) / "merge_report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"identity": {}}))
    assert "model-index" not in card_of(path.parent, "merged")[0]
    with pytest.raises(UserError, match="was merged from an older"):
        check_current(path.parent)


def test_a_shard_of_the_index_that_is_missing_is_refused(run):
    merged = make_merged(run)
    (merged / "model.safetensors").rename(merged / "model-00001-of-00002.safetensors")
    where = {"lora_A.weight": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (merged / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(UserError, match=r"model-00002-of-00002.safetensors"):
        prepare(merged, "merged", "me/trained")


@pytest.mark.parametrize("kept", [0, 3, 100, -9])
def test_a_gguf_file_that_is_cut_off_is_not_uploaded(run, kept):
    folder = make_gguf(run)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"trained-Q4_K_M\.gguf is not a complete GGUF file \(.*\); export it again$"):
        prepare(folder, "gguf", "me/trained")


def test_a_tokenizer_that_is_cut_off_is_not_uploaded(run):
    merged = make_merged(run)
    (merged / "tokenizer.json").write_text('{"model": {"vocab"')
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        prepare(merged, "merged", "me/trained")


# No private data and no unescaped text

SECRET = "hf_" + "AbCdEfGhIj" * 3


@pytest.mark.parametrize("secret", [SECRET, "an-odd-token-of-mine"])
@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_token_in_a_file_is_refused(run, monkeypatch, name, secret):
    monkeypatch.setenv("HF_TOKEN", "an-odd-token-of-mine")
    write_adapter(run, name, json.dumps({"x": f"key={secret}"}).encode())
    with pytest.raises(UserError, match=rf"^{name} holds a Hub token or something like one") as caught:
        prepare(run / "adapter", "adapter", "me/trained")
    assert secret not in str(caught.value)


def test_a_token_in_the_card_is_refused(tmp_path):
    run = make_run(tmp_path / "run", record__config__grpo=[f"hub_token={SECRET}"])
    with pytest.raises(UserError, match=r"^README.md \(the card, from run.json and reports\) holds a Hub") as caught:
        prepare(run / "adapter", "adapter", "me/trained")
    assert SECRET not in str(caught.value)


def test_a_word_that_only_resembles_a_token_is_not_refused(run, monkeypatch):
    words = b'{"hf_transfer": 1, "tf_hf_model_of_a_name": 2, "shf_AbCdEfGhIjAbCdEfGhIj": 3}'
    write_adapter(run, "tokenizer.json", words)
    monkeypatch.setenv("HF_TOKEN", "x")  # a placeholder
    prepare(run / "adapter", "adapter", "me/trained")


def test_no_path_of_this_machine_is_uploaded(tmp_path):
    run = make_run(tmp_path / "run", record__config__grpo=[f"{PRIVATE}/grpo"])
    make_merged(run)
    for kind in ("adapter", "merged"):
        files, _ = prepare(run / kind, kind, "me/trained")
        for file in files:
            for private in (PRIVATE, "somebody", str(run.parent)):
                assert private.encode() not in file.read(), (kind, file.name, private)


def test_a_local_name_is_not_taken_for_a_dataset_on_the_hub(tmp_path):
    run = make_run(tmp_path / "run", record__data__train__source="private/customers")
    data, text, _ = card_of(run / "adapter", "adapter")
    assert "datasets" not in data and "private/customers" not in text and "| train | customers |" in text


HOSTILE = 'x"\n---\nlicense: mit\n---\n# Owned | `a` <script>alert(1)</script> [l](http://evil) {{ 7*7 }} *b* _c_'


@pytest.mark.parametrize(
    "path",
    [
        "record__data__task", "record__recipe",
        "record__config__data__prompt_style",
        "record__data__eval__source", "record__data__train__sha256", "record__policy__base_model",
        "report__protocol__task", "report__protocol__sampling__prompt_style", "report__protocol__sandbox",
        "report__protocol__grading", "report__evaluated__label", "report__evaluated__source__device",
    ],
)  # fmt: skip
def test_text_from_files_stays_text(tmp_path, path):
    run = make_run(tmp_path / "run", **{path: HOSTILE})
    files, _ = prepare(run / "adapter", "adapter", "me/trained")
    text = files[-1].content.decode()
    assert "license" not in RepoCard(text).data.to_dict()
    assert yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))["library_name"] == "peft"
    comments = ("# pip install ", "# The client must ")
    headings = [line for line in text.splitlines() if line.startswith("# ") and not line.startswith(comments)]
    assert headings == ["# trained"]
    assert "<script" not in text.replace("\\<script", "") and "](http://evil)" not in text.replace("\\]", "")


def test_the_system_prompt_of_a_task_file_is_shown_as_it_is(tmp_path):
    prompt = "Spell it.\n```\n---\nlicense: mit\n---\n{{ 7*7 }} */home/me*"
    run = make_run(tmp_path / "run", record__config__data__task="my_task.py", record__data__system_prompt=prompt)
    data, text, _ = card_of(make_gguf(run), "gguf")
    assert "license" not in data and f"````\n{prompt}\n````" in text and "reasoning" not in text


def test_escaped_text_reads_as_it_is():
    assert escape("correct_answer 0.1.0 +3.2") == "correct_answer 0.1.0 +3.2"
    assert escape("_a_ *b* [c](d) <e>\n- f") == "\\_a\\_ \\*b\\* \\[c\\](d) \\<e\\> - f"
    assert escape("a\x1b[31mb\u202ec\u2028d") == "a \\[31mb c d"
    assert escape("1. one") == "1\\. one" and escape("- one") == "\\- one"
