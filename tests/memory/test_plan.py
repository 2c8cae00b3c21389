"""The plan of a run on the machine at hand: what it settles, says, records and refuses."""

import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import psutil
import pytest
from helpers.fresh_imports import HEAVY, RECIPES, run_recipe
from helpers.model_configs import LLAMA_ONE, QWEN25_HALF

from lora_grpo import starter
from lora_grpo.cli.arguments import parse
from lora_grpo.config import LAPTOP_FOLDER, replace
from lora_grpo.config.batch import micro_batches
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.data import fit_data, load_data
from lora_grpo.errors import UserError
from lora_grpo.memory import KNOWN_MODELS, RowLengths, complete_plan, draft_plan, make_plan, show_plan, summary
from lora_grpo.memory.advice import memory_saving_options
from lora_grpo.memory.estimate import GIB
from lora_grpo.runs import check_settings

[GSM8K] = [path for path in RECIPES if path.stem == "gsm8k_lora"]


def planned(config):
    """The configuration that a run gets, and what its run.json says of the memory."""
    config, plan = make_plan(config, Invocation())
    return config, plan.record()["memory"]


def start_lines(config):
    """The lines that a run prints at the start."""
    return list(summary(make_plan(config, Invocation())[1]))


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """The memory of the machine, which other programs also use."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=24 * GIB, available=22 * GIB))


@pytest.fixture
def model(tmp_path):
    """A folder with a model's configuration and nothing else."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN25_HALF))
    return folder


def config_for(model, **changes):
    settings = {"model": {"name": str(model), "engine": "peft"}, "train": {"gradient_checkpointing": True}}
    settings["sampling"] = {"backend": "transformers"}
    return replace(replace(RunConfig(output_dir="out"), settings), changes)


@pytest.mark.parametrize("target", [".*", "norm", "input_layernorm", "proj"])
def test_a_target_that_is_no_linear_layer_is_refused_without_weights(machine, model, target):
    for targets in ((target,), ("q_proj", target)):
        with pytest.raises(UserError, match=f"^--lora.targets {re.escape(target)} names no linear layer of this model"):
            make_plan(config_for(model, lora={"targets": targets}), Invocation(dry_run=True))
    make_plan(config_for(model, lora={"targets": ("q_proj", "mlp.down_proj", "lm_head")}), Invocation(dry_run=True))


def test_without_a_gpu_a_configuration_stays_as_it_is(machine, model):
    config = config_for(model)
    resolved, record = planned(config)
    assert resolved == replace(config, {"model": {"bits": 4}})
    assert record["derived"] == ["model.bits"] and record["gpu"] == "this machine"
    lines = start_lines(config)
    assert [line.split()[0] for line in lines] == ["micro-batch", "sampling", "memory", "length", "work", "disk"]
    assert lines[0] == "micro-batch 8 completions"
    assert lines[4] == "work        200 steps x 64 = 12,800 completions, at most 13.1 million tokens"


def test_several_processes_share_the_memory_of_a_machine_without_a_gpu(machine, model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, record = planned(config_for(model))
    assert record["total_gib"] == record["free_gib"] == 12


def test_on_a_gpu_what_is_open_is_settled_said_and_recorded(machine, model, monkeypatch):
    machine(8188)
    config, record = planned(config_for(model))
    assert config.train.micro_batch_size in micro_batches(config)
    assert config.train.micro_batch_size > 1
    base, *lines = start_lines(config_for(model))
    assert base == f"base        {record['choice']}" and config.model.bits == 4
    assert lines[0] == f"micro-batch {config.train.micro_batch_size} completions"
    assert lines[1].startswith("sampling    64 completions in parallel, with the built-in sampler")
    assert lines[2].endswith("; 7.51 GiB are free on Card 0")
    assert record["derived"] == ["model.bits", "train.micro_batch_size"]
    assert record["planned_gib"]["weights"] == pytest.approx(0.43, abs=0.01)
    assert set(record["planned_phases_gib"]) == {"sampling", "loss", "backward"}
    assert json.loads(json.dumps(record)) == record
    monkeypatch.setenv("WORLD_SIZE", "2")  # each process sees other free memory, and must plan the same
    _, record = planned(config_for(model))
    assert record["free_gib"] == record["total_gib"]
    _, plan = make_plan(config_for(model), Invocation())
    assert plan.estimate.device.host == psutil.virtual_memory().total // 2


def test_the_plan_names_the_vllm_server_that_samples(machine, model):
    machine(8188)
    server = {"backend": "vllm", "server_url": "http://gpu2:8000"}
    [line] = [line for line in start_lines(config_for(model, sampling=server)) if line.startswith("sampling ")]
    assert line == "sampling    by the vLLM server at http://gpu2:8000"


def test_a_run_that_samples_on_a_server_plans_no_memory_for_that(machine, model):
    config = config_for(model, sampling={"backend": "auto", "server_url": "http://gpu2:8000"})
    for gpus in ((), (8192,)):
        if gpus:
            machine(*gpus)
        _, plan = make_plan(config, Invocation())
        assert not {"kv_cache", "token_selection", "merged_copy"} & plan.estimate.phases["sampling"].keys()
        assert "sampling    by the vLLM server at http://gpu2:8000" in summary(plan)
        assert not {"model.gpu_memory_share", "sampling.engine_sleep"} & set(plan.derived)


def test_memory_that_other_programs_use_is_said_if_it_is_much(machine, model):
    for used, is_said in ((500, False), (2048, True)):
        machine(script=f"echo '0, GPU-0, Card 0, 8192, {8192 - used}, 580.65.06, 8.9'")
        [line] = [line for line in start_lines(config_for(model)) if line.startswith("memory ")]
        assert line.endswith(", 2.00 GiB are used by other programs and the driver") is is_said


def test_a_model_that_cannot_be_planned_wants_the_numbers_named(machine, model):
    machine(8188)
    (model / "config.json").write_text(json.dumps({**LLAMA_ONE, "model_type": "olmo"}))
    with pytest.raises(UserError, match=r"a model of type olmo cannot be planned; .*; pass --train\.micro-batch-size$"):
        planned(config_for(model))
    named = replace(config_for(model), {"train": {"micro_batch_size": 2}, "model": {"gpu_memory_share": 0.4}})
    named = replace(named, {"train": {"gradient_checkpointing": None}})
    resolved, record = planned(named)
    least = {"model": {"bits": 4}, "train": {"gradient_checkpointing": True}}
    assert resolved == replace(named, least)
    assert record["derived"] == ["model.bits", "train.gradient_checkpointing"]
    assert "of type olmo" in record["not_planned"]
    assert start_lines(named)[0].startswith("memory      not planned: the memory of a model of type olmo")
    assert "pass" not in start_lines(named)[0]
    (model / "config.json").unlink()
    with pytest.raises(UserError, match=f"^{model}/config.json cannot be read"):
        planned(config_for(model))


def test_a_record_taken_to_another_card_is_planned_anew(machine, model, tmp_path):
    machine(8188)
    (model / "model.safetensors").write_bytes(b"")
    config, record = planned(config_for(model))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"lora_grpo_run": 1, "config": config.to_dict(), "memory": record}))
    flags = ["--config", str(path), "--preset", "starter"]
    reread, _ = parse(flags, recipe="x", description="", presets={"starter": {}})
    assert config.train.micro_batch_size and reread.train.micro_batch_size is None
    assert reread.model.gpu_memory_share is None
    assert (config.model.bits, reread.model.bits) == (4, "auto")


def test_a_resumed_run_keeps_the_bits_that_its_plan_chose_and_plans_the_rest_anew(machine, model, tmp_path):
    machine(81559)
    open_settings = {"train": {"gradient_checkpointing": None}, "output_dir": str(tmp_path / "run")}
    config, record = planned(config_for(model, preset="starter", **open_settings))
    assert (config.model.bits, config.train.gradient_checkpointing) == (16, False)
    assert record["derived"] == ["model.bits", "train.gradient_checkpointing", "train.micro_batch_size"]
    begin_run(tmp_path / "run", config, memory=record)
    machine(8188)  # another card
    flags = ["--resume", "--plan", "--output-dir", str(tmp_path / "run"), "--preset", "starter"]
    resumed, invocation = parse(flags, recipe="x", description="", presets={"starter": {}})
    assert (resumed.model.bits, resumed.train.gradient_checkpointing) == (16, None)
    check_settings(resumed)
    resumed, plan = make_plan(resumed, invocation)
    assert (resumed.model.bits, resumed.train.gradient_checkpointing) == (16, True)
    assert plan.record()["memory"]["derived"] == record["derived"]


def test_a_resumed_run_that_no_longer_fits_is_told_only_what_a_resume_accepts(machine, model, tmp_path):
    config = config_for(model, output_dir=str(tmp_path / "run"), train={"micro_batch_size": 64})
    config = replace(config, {"model": {"bits": 16}})
    begin_run(tmp_path / "run", config)
    advice = []
    for mebibytes, is_resumed in itertools.product((3000, 2600), (False, True)):
        machine(mebibytes)
        told = refused_plan(config, Invocation(plan=True, resume=is_resumed))
        advice.append(told.rpartition("pass ")[2].partition(" (needs ")[0])
    assert advice[:2] == ["--train.micro-batch-size 2", "--train.micro-batch-size 2"]
    assert advice[2:] == [
        "--train.micro-batch-size 4 --model.bits 4",
        "another --output-dir, with settings that need less memory",
    ]


def refused_plan(config, invocation):
    """The message with which a plan says that it does not fit."""
    try:
        return make_plan(config, invocation)[1].too_large or ""
    except UserError as error:
        return str(error)


# What --plan says


def plan_recipe(*flags):
    """What a recipe's command line comes to, with `--plan`."""
    presets = runpy.run_path(str(GSM8K))["PRESETS"]
    return make_plan(*parse(["--plan", *flags], recipe="gsm8k_lora", description="", presets=presets))


def folder_of(tmp_path, config):
    """A model's folder with a configuration and no weights."""
    folder = tmp_path / "no-weights"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_gpu_preset_is_planned_without_a_gpu_and_says_so(machine, tmp_path, capsys):
    flags = ["--model.name", folder_of(tmp_path, QWEN25_HALF), "--preset", "16gb"]
    _, plan = plan_recipe(*flags)
    assert "planned for a GPU with 16 GB: none found" in capsys.readouterr().err
    assert plan.estimate.device.total == plan.estimate.device.free == 16 * GIB
    assert (plan.engine, plan.estimate.sampler) == ("unsloth", "shared")
    assert plan.assumptions[0].startswith("the GPU has 16 GiB, all of it free; no GPU was found")
    presets = {"16gb": {}, "starter": {}}
    with pytest.raises(UserError, match="needs a GPU with 16 GB"):
        parse(flags, recipe="gsm8k_lora", description="", presets=presets)


def test_the_longest_context_is_accepted_and_one_token_more_is_not(machine, tmp_path):
    flags = ["--model.name", folder_of(tmp_path, QWEN25_HALF), "--preset", "8gb"]
    flags += ["--model.engine", "unsloth", "--sampling.backend", "vllm"]  # `auto` takes what needs less memory
    longest = ["--sampling.max-completion-tokens", "512", "--model.max-sequence-tokens"]
    context = plan_recipe(*flags)[1].longest_context
    assert plan_recipe(*flags, *longest, str(context))[1].estimate.micro_batch_size == 1
    with pytest.raises(UserError, match="does not fit on a GPU with 8 GB"):
        plan_recipe(*flags, *longest, str(context + 1))


LARGE = {
    "3B": {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 36, "intermediate_size": 11008},
    "7B": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
           "intermediate_size": 18944, "tie_word_embeddings": False},
    "32B": {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8, "num_hidden_layers": 64,
            "intermediate_size": 27648, "tie_word_embeddings": False},
}  # fmt: skip
REFUSED = [
    (8, "3B", "3B", "--train.no-gradient-checkpointing --model.max-sequence-tokens 8192"),
    (12, "7B", "7B", "--model.max-sequence-tokens 65536 --train.optimizer adamw_torch"),
    (24, "7B", "32B", "--lora.rank 256"),
]


@pytest.mark.parametrize(("size", "fits", "refused", "changes"), REFUSED)
def test_what_cannot_fit_is_refused_with_a_change_that_is_then_accepted(
    machine, gpu_packages, tmp_path, size, fits, refused, changes
):
    machine(1024 * size)
    of = {name: {**QWEN25_HALF, "vocab_size": 152064, **LARGE[name]} for name in (fits, refused)}
    preset_flags = ["--preset", f"{size}gb", "--model.name", folder_of(tmp_path, of[fits])]
    settings = ["--sampling.backend", "vllm", "--model.engine", "unsloth", *changes.split()]
    assert plan_recipe(*preset_flags, *settings[:4])[1].estimate.fits
    folder_of(tmp_path, of[refused])
    with pytest.raises(UserError) as error:
        plan_recipe(*preset_flags, *settings)
    message = str(error.value)
    assert "\n" not in message and " does not fit on Card 0: " in message
    [flags] = re.findall(r" are free\); (?:close .*, or )?pass (--.*) \(needs [\d.]+ GiB\)$", message)
    assert plan_recipe(*preset_flags, *settings, *flags.split())[1].estimate.fits
    advised = re.split(r" (?=--)", flags)
    if len(advised) == 1:
        return
    for flag in advised:  # none of several is superfluous
        if "tokens" not in flag:
            without_flag = " ".join(other for other in advised if other != flag)
            with pytest.raises(UserError, match="does not fit"):
                plan_recipe(*preset_flags, *settings, *without_flag.split())


@pytest.mark.parametrize("start", [None, "outputs/sft_lora"])
def test_another_rank_is_advised_only_for_a_new_adapter(machine, model, start):
    machine(8188)
    config = config_for(model, lora={"from": start})
    planner = draft_plan(config, Invocation()).planner
    advised = {name for changes in memory_saving_options(planner, config) for change in changes for name in change}
    assert "model.max_sequence_tokens" in advised
    assert ("lora.rank" in advised) is (start is None)


def test_the_starter_beside_an_old_driver_is_planned_for_the_cpu(machine, model, monkeypatch):
    machine(24564, driver="550.54.14")
    monkeypatch.setattr("lora_grpo.hardware.nvidia._torch_build", lambda: ("2.13.0+cu130", 13))
    for preset, on_cpu in (("starter", True), ("24gb", False)):
        _, plan = make_plan(replace(config_for(model), {"preset": preset}), Invocation(plan=True))
        assert plan.estimate.device.on_cpu is on_cpu


def test_a_named_micro_batch_that_is_too_much_is_refused_by_the_plan_and_tried_by_a_run(
    machine,
    model,
    capsys,
):
    machine(8192)
    named = replace(config_for(model), {"train": {"micro_batch_size": 64, "gradient_checkpointing": False}})
    _, plan = make_plan(named, Invocation(plan=True))
    with pytest.raises(UserError, match=r" pass --train\.micro-batch-size 8 \(needs "):
        show_plan(plan)
    printed = capsys.readouterr().out
    assert "\ntotal " in printed and "\ncontext     at most " in printed
    assert planned(named)[0].train.micro_batch_size == 64
    warning = start_lines(named)[-1]
    assert warning.startswith("warning: ") and " pass --train.micro-batch-size 8 (" in warning


def test_a_model_of_the_hub_is_read_from_the_cache_or_refused_at_once(machine, tmp_path):
    # A process of its own: huggingface_hub reads the environment when it is imported.
    snapshot = tmp_path / "cache" / "models--owner--cached" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN25_HALF))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    away = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}

    def planned_for(name):
        command = [sys.executable, str(GSM8K), "--preset", "8gb", "--plan", "--model.name", name]
        return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **away})

    cached = planned_for("owner/cached")
    assert cached.returncode == 0
    assert "owner/cached: 494 million parameters" in cached.stdout
    missing = planned_for("owner/missing")
    assert missing.returncode == 2
    assert "Retrying" not in missing.stderr
    assert "owner/missing is not a folder" in missing.stderr
    assert "(it is not cached, and the Hub is unreachable (" in missing.stderr


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_preset_is_planned_without_weights_data_network_or_heavy_packages(path, machine, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    presets = runpy.run_path(str(path))["PRESETS"]
    command_lines = [["--plan", "--preset", name, "--output-dir", str(tmp_path / "run")] for name in presets]
    command_lines[-1] += ["--data.train", "none.jsonl", "--data.eval", "none.jsonl"]
    if path == GSM8K:
        command_lines += [["--plan", "--preset", "24gb", "--model.name", name] for name in KNOWN_MODELS]
    result = run_recipe(path, *command_lines, heavy=(*HEAVY, "matplotlib"))
    *plans, after_last = result.stdout.split("loaded [] code 0\n")
    assert (len(plans), after_last) == (len(command_lines), ""), result.stderr
    for plan, arguments in zip(plans, command_lines, strict=True):
        for word in ("weights", "logits", "kv cache", "micro-batch", "context", "work", "disk", "Assumptions:"):
            assert f"\n{word}" in plan
        on_gpu = arguments[2] not in ("starter", "laptop")
        assert bool(re.search(r"^vLLM +(keeps|gives) its memory", plan, re.MULTILINE)) is on_gpu
        assert ("\nbase " in plan) is on_gpu
        has_host_memory = bool(re.search(r"^host memory +[\d.]+ GiB", plan, re.MULTILINE))
        assert has_host_memory is (", gradient checkpointing: " in plan)
        is_local = arguments[2] == "starter" or f"{LAPTOP_FOLDER}: " in plan  # after `make laptop-model`
        assert ("come from lora_grpo: " in plan) is not is_local
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_use_the_shipped_dimensions(machine, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = replace(config_for("Qwen/Qwen2.5-0.5B-Instruct"), {"model": {"bits": 16}})
    _, plan = make_plan(config, Invocation(plan=True))
    assert plan.shape.parameters == 494_032_768
    with pytest.raises(UserError, match=r"it is not cached, and HF_HUB_OFFLINE is set\); "):
        make_plan(config, Invocation())


def test_a_gated_model_is_planned_if_it_is_listed(tmp_path, machine, monkeypatch):
    class Gated(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Gated) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        away = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        for name, value in (away | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}).items():
            monkeypatch.setenv(name, value)
        names = ("meta-llama/Llama-3.2-1B-Instruct", "owner/gated")
        ended = run_recipe(GSM8K, *(["--preset", "8gb", "--plan", "--model.name", name] for name in names))
        server.shutdown()
    assert [line[-6:] for line in ended.stdout.splitlines() if line.startswith("loaded")] == ["code 0", "code 2"]
    for name, printed in zip(names, (ended.stdout, ended.stderr), strict=True):
        assert f"the model is gated; accept its license at huggingface.co/{name}, then run hf auth login" in printed


def test_the_machines_own_memory_is_planned_with_where_there_is_no_gpu(machine, monkeypatch, capsys):
    config, plan = plan_recipe()
    assert plan.estimate.device.on_cpu and plan.estimate.sampler == "merged"
    assert {"merged_copy", "libraries"} <= plan.estimate.phases["sampling"].keys()
    assert plan.estimate.max_num_seqs == 256  # in an evaluation
    assert plan_recipe("--data.eval-limit", "1")[1].estimate.max_num_seqs == 128  # in a step
    assert not {"context", "workspace"} & plan.estimate.phases["loss"].keys()
    assert "fragmentation" in plan.estimate.phases["loss"] and "fragmentation" not in plan.estimate.phases["sampling"]
    assert (plan.work.steps, plan.work.completions_per_step, plan.work.completions_per_evaluation) == (60, 128, 2000)
    monkeypatch.setattr("lora_grpo.hardware.machine.machine_memory", lambda: (GIB, GIB // 2))
    with pytest.raises(UserError, match=r"starter does not fit on this machine: .* libraries 0\.50"):
        make_plan(replace(config, {"train": {"micro_batch_size": None}}), Invocation())


# What a run knows of its rows


def planned_for(config, row_lengths):
    """The plan of a run with these rows."""
    return complete_plan(draft_plan(config, Invocation()), row_lengths)


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_a_token_without_an_embedding_is_refused_before_weights_are_loaded(machine, model, tmp_path, method):
    """Only tokens that rows contain: Gemma 3's tokenizer has one for images, and its text models none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(starter.model_path())
    count = len(tokenizer)
    tokenizer.add_tokens(["<new>"], special_tokens=True)
    (model / "config.json").write_text(json.dumps({**QWEN25_HALF, "vocab_size": count}))
    answer = {"grpo": "b", "sft": "<new>"}[method]
    texts = {"fits": ("a", "b"), "not": ("<new>" if method == "grpo" else "a", answer)}
    for name, (question, gold) in texts.items():
        rows = f"def load(split): return [{{'question': f'{{split}} {{n}} {question}'}} for n in range(8)]\n"
        (tmp_path / f"{name}.py").write_text(f"{rows}check = print\ndef gold(row): return {gold!r}\n")
    config = replace(config_for(model, data={"task": str(tmp_path / "fits.py")}), {"method": method})

    def complete(task):
        changed = replace(config, {"data": {"task": str(tmp_path / task)}})
        data = fit_data(load_data(changed), tokenizer, changed)
        return complete_plan(draft_plan(changed, Invocation()), data.row_lengths)

    assert complete("fits.py")[1].estimate.fits
    message = rf"uses token {count}, but the model has embeddings of 0 to {count - 1} only"
    with pytest.raises(UserError, match=message):
        complete("not.py")
    tokenizer.pad_token = "<new>"  # TRL pads with it
    with pytest.raises(UserError, match=message):
        complete("fits.py")


def test_the_memory_is_that_of_the_longest_prompt_and_at_most_that_of_the_limit(machine, model):
    config = config_for(model)  # 256 of 1,024 tokens for the completion
    at_limit = make_plan(config, Invocation())[1]
    plans = [planned_for(config, RowLengths(640, prompt))[1] for prompt in (61, 200, 768, 4000)]
    needed = [plan.estimate.training for plan in plans]
    assert needed[0] < needed[1] < needed[2] == needed[3] == at_limit.estimate.training
    records = [plan.record()["memory"] for plan in (*plans, at_limit)]
    assert [record["length"] for record in records] == [317, 456, 1024, 1024, 1024]
    assert json.loads(json.dumps(records)) == records
    assert [plan.longest_context for plan in plans] == [at_limit.longest_context] * 4
    [length_line] = [line for line in summary(plans[0]) if line.startswith("length ")]
    assert all(number in length_line for number in ("317 tokens", "640", "61"))


def test_the_built_in_sampler_needs_two_caches_for_a_conversation(machine, gpu_packages, model):
    def cache_of_a_sequence(backend, *, has_conversations):
        machine(8192)
        config = replace(config_for(model), {"sampling": {"backend": backend}, "train": {"micro_batch_size": 1}})
        _, plan = planned_for(config, RowLengths(640, 61, has_conversations=has_conversations))
        return plan.estimate.parts["kv_cache"] / plan.estimate.max_num_seqs

    for backend, factor in (("transformers", 2), ("vllm", 1)):
        of_a_question = cache_of_a_sequence(backend, has_conversations=False)
        assert cache_of_a_sequence(backend, has_conversations=True) == factor * of_a_question, backend


def test_on_a_gpu_short_prompts_allow_larger_micro_batches_and_leave_vllm_room_for_its_context(
    machine, gpu_packages, model
):
    machine(8192)
    config = replace(config_for(model), {"model": {"max_sequence_tokens": 4096}, "sampling": {"backend": "vllm"}})
    (short, _), (limit, _) = planned_for(config, RowLengths(640, 61)), make_plan(config, Invocation())
    assert short.train.micro_batch_size > limit.train.micro_batch_size
    assert short.model.max_sequence_tokens == 4096
    small = replace(config, {"train": {"prompts_per_step": 1}, "sampling": {"num_generations": 2}})
    fits = [planned_for(small, lengths)[1].estimate for lengths in (RowLengths(640, 61), RowLengths(640, 3840))]
    assert fits[0].parts["kv_cache"] == fits[1].parts["kv_cache"] / 2  # of one sequence of the maximum length


def test_a_run_that_does_not_fit_with_the_longest_rows_is_planned_with_its_own(machine, model):
    machine(4096)
    config = replace(config_for(model), {"model": {"max_sequence_tokens": 65536}})
    assert planned_for(config, RowLengths(640, 61))[1].estimate.fits
    with pytest.raises(UserError, match="does not fit on Card 0"):
        planned_for(config, RowLengths(640, 65024))


def test_sft_trains_on_prompts_with_their_reference_answers_and_samples_whole_completions(machine, model):
    config = replace(config_for(model), {"method": "sft"})
    plans = [planned_for(config, RowLengths(640, 61, answered))[1] for answered in (70, 150, 317)]
    assert [plan.length for plan in plans] == [70, 150, 317]
    assert plans[0].estimate.training < plans[1].estimate.training < plans[2].estimate.training
    assert len({plan.estimate.parts["kv_cache"] for plan in plans}) == 1
    assert make_plan(config, Invocation())[1].length == 1024


def test_a_dry_run_reads_its_rows_and_plans_the_same_when_it_is_resumed(machine, tmp_path):
    flags = ["--dry-run", "--output-dir", str(tmp_path / "run"), "--data.eval-limit", "8", "--preset", "starter"]
    begin_run(tmp_path / "run", plan_recipe(*flags[1:])[0])
    ended = run_recipe(GSM8K, flags, [*flags, "--resume"], [*flags, "--data.few-shot", "2"])
    assert ended.stdout.count(" code 0\n") == 3, ended.stderr
    lines = {name: re.findall(rf"^{name} +([\d.]+)", ended.stderr, re.MULTILINE) for name in ("length", "memory")}
    for fresh, resumed, longer in lines.values():
        assert fresh == resumed and float(fresh) < float(longer)
    assert float(lines["memory"][2]) < plan_recipe(*flags[1:])[1].estimate.training / GIB


# The work of a run that resumes, or has hours


def begin_run(folder, config, **record):
    """A run's folder as a killed process leaves it."""
    folder.mkdir(exist_ok=True)
    record = {"lora_grpo_run": 1, "config": config.to_dict(), "versions": {}, "data": {}, **record}
    (folder / "run.json").write_text(json.dumps(record | {"policy": {"base_model": "starter"}}))


def summary_text(config, **actions):
    return "\n".join(summary(make_plan(config, Invocation(**actions))[1]))


def test_hours_are_planned_as_the_steps_that_fit(machine, tmp_path):
    flags = ["--output-dir", str(tmp_path / "run"), "--hours", "0.5"]
    config, _ = plan_recipe(*flags)
    assert "as many steps x 128 completions as fit in 30 min 0 s" in summary_text(config)
    limited, _ = plan_recipe(*flags, "--train.max-steps", "40")
    assert "40 steps x 128 = 5,120 completions" in summary_text(limited)
    begin_run(tmp_path / "run", config, seconds_worked=600.0)
    assert "fit in 20 min 0 s" in summary_text(config, plan=True, resume=True)
    begin_run(tmp_path / "run", config, seconds_worked=1800.0)
    assert "no steps are left" in summary_text(config, plan=True, resume=True)


def test_a_resumed_run_plans_the_steps_that_are_left(machine, tmp_path):
    config, fresh = plan_recipe("--output-dir", str(tmp_path / "run"))
    begin_run(tmp_path / "run", config)
    (tmp_path / "run" / "checkpoints" / "checkpoint-20").mkdir(parents=True)
    _, plan = make_plan(config, Invocation(plan=True, resume=True))
    assert (fresh.work.steps, plan.work.steps) == (60, 40)
