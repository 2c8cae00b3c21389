"""A finished run with everything a model card tells."""

import json

from lora_grpo.config.schema import RunConfig
from lora_grpo.files import atomic
from lora_grpo.models import adapter_sha256, model_files
from lora_grpo.prompts.styles import SYSTEM_PROMPTS

COMMIT = "a" * 40

BASE = "Qwen/Qwen2.5-0.5B-Instruct"

PRIVATE = "/home/somebody/secret place"


def row(metric, before, after, p):
    return {
        "metric": metric,
        "before": before,
        "before_interval": [before - 0.1, before + 0.1],
        "after": after,
        "after_interval": [after - 0.1, after + 0.1],
        "difference": after - before,
        "difference_interval": [after - before - 0.05, after - before + 0.05],
        "p_value": p,
        "test": "exact McNemar",
        "detectable": 0.1,
    }


def measured(label, source, **scores):
    """One model's entry of report.json."""
    return {
        "label": label,
        "scores": scores,
        "intervals": {name: [value - 0.1, value + 0.1] for name, value in scores.items()},
        "curve": [],
        "tasks": 30,
        "samples": 30,
        "sample_stats": {"sampled": {"samples": 30, "passed": 18, "wrong_answer": 12, "strict rule": 17}},
        "source": source,
    }


def report_of(evaluated, baseline=None, *, table=(), **protocol):
    """The content of report.json."""
    names = ("prompt_style", "few_shot", "num_samples", "temperature", "top_p", "max_completion_tokens")
    sampling = {"prompt_style": "xml", "few_shot": 0, "top_p": 1.0} | {
        name: protocol.pop(name) for name in names if name in protocol
    }
    protocol = {
        "task": "gsm8k", "data_source": None, "sampling": sampling,
        "grading": "the last `####`", "sandbox": None, "seed": 0, "version": "0.1.0", **protocol,
    }  # fmt: skip
    return {
        **evaluated["scores"], "protocol": protocol, "evaluated": evaluated, "baseline": baseline,
        "table": list(table), "fixed": [], "regressed": [],
    }  # fmt: skip


def safetensors(size=100, byte=b"\x01"):
    """Return a whole file of weights, of one tensor."""
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"base_model.model.q_proj.lora_A.weight": entry}).encode()
    return len(header).to_bytes(8, "little") + header + byte * size


def make_run(folder, adapter_bytes=1000, **changes):
    """Write the folder of a finished run: of a Hub's base, with rows from a file of this machine."""
    adapter = folder / "adapter"
    with atomic.new_folder(adapter) as staging:
        (staging / "adapter_model.safetensors").write_bytes(safetensors(adapter_bytes))
        settings = {
            "peft_type": "LORA", "r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "bias": "none",
            "base_model_name_or_path": f"{PRIVATE}/cache/snapshots/{COMMIT}", "target_modules": ["q_proj", "v_proj"],
        }  # fmt: skip
        (staging / "adapter_config.json").write_text(json.dumps(settings))
        (staging / "chat_template.jinja").write_text("{{ messages }}")
        (staging / "tokenizer.json").write_text("{}")
        (staging / "tokenizer_config.json").write_text("{}")
    config = RunConfig(output_dir=f"{PRIVATE}/run").to_dict()
    config["model"]["name"] = BASE
    config["data"] |= {"task": "gsm8k", "train": None, "eval": f"{PRIVATE}/held out.jsonl"}
    config["rewards"] = ["correct_answer=2.0", f"{PRIVATE}/mine.py:brief=0.25"]
    table = [row("pass@1", 0.317, 0.455, 0.021), row("greedy", 0.5, 0.6, 0.25)]
    record = {
        "lora_grpo_run": 1,
        "recipe": "gsm8k_lora",
        "command": [f"{PRIVATE}/recipes/gsm8k_lora.py"],
        "config": config,
        "data": {
            "task": "gsm8k",
            "eval_task": "gsm8k",
            "train": {"source": None, "rows": 7473, "sha256": "b" * 64},
            "eval": {"source": f"{PRIVATE}/held out.jsonl", "rows": 30, "sha256": "c" * 64},
            "sandbox": None,
            "system_prompt": SYSTEM_PROMPTS["xml"],
        },
        "user_files": {f"{PRIVATE}/mine.py": "d" * 64},
        "versions": {"python": "3.11.7", "lora_grpo": "0.1.0", "trl": "1.14.2"},
        "status": "complete",
        "policy": {
            "base_model": BASE, "revision": COMMIT, "fingerprint": None, "engine": "unsloth", "bits": 4,
            "device": "NVIDIA T4", "trust_remote_code": False, "trainable_parameters": 1,
        },
        "seed": 0,
        "trained_steps": 250,
        "results": {"table": table, "reward": {"first": 1.0, "last": 2.0, "steps": 250}},
    }  # fmt: skip
    source = {"model": BASE, "revision": COMMIT, "weights_sha256": None} | record["policy"]
    report = report_of(
        measured("trained", source | {"adapter_sha256": adapter_sha256(adapter)}, **{"pass@1": 0.455, "greedy": 0.6}),
        measured("base", source, **{"pass@1": 0.317, "greedy": 0.5}),
        table=table, rows=30, data_sha256="c" * 64, num_samples=4, temperature=1.0, max_completion_tokens=64,
        data_source=f"{PRIVATE}/held out.jsonl",
    )  # fmt: skip
    for path, value in changes.items():
        place, *keys = path.split("__")
        target = {"record": record, "report": report}[place]
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = value
    (folder / "evaluation").mkdir()
    atomic.write_json(folder / "run.json", record)
    atomic.write_json(folder / "evaluation" / "report.json", report)
    return folder


def make_merged(run):
    """Write the merged model of a run's adapter, with its report."""
    merged = run / "merged"
    merged.mkdir()
    (merged / "config.json").write_text(json.dumps({"model_type": "qwen2", "_name_or_path": f"{PRIVATE}/base"}))
    (merged / "model.safetensors").write_bytes(safetensors(byte=b"\x02"))
    for name in ("chat_template.jinja", "tokenizer.json"):
        (merged / name).write_bytes((run / "adapter" / name).read_bytes())
    adapter = adapter_sha256(run / "adapter")
    report = {
        "identity": {"adapter_sha256": adapter}, "requested_dtype": "auto", "dtype": "bf16", "reason": "",
        "onto": "full", "untied": False, "vocab_size": None, "shards": [],
        "base": {"name": BASE, "revision": COMMIT, "fingerprint": "f" * 64, "checked": True},
        "adapter": "run",
        "retained": {"overall": 0.9993, "error": 0.1, "worst": 0.97, "worst_layer": "layers.0.q_proj"},
        "kl": {"adapter_merged": 0.00012, "adapter_base": 0.03},
    }  # fmt: skip
    atomic.write_json(merged / "merge_report.json", report)
    return merged


def write_evaluation(run, folder, baseline=None, table=(), **changes):
    """Write what scripts/evaluate.py leaves in a run's folder after evaluating an adapter or a merged model."""
    if (folder / "adapter_config.json").is_file():
        source = {"model": BASE, "revision": COMMIT, "adapter_sha256": adapter_sha256(folder)}
    else:
        source = {"weights_sha256": model_files.weights_fingerprint(folder)}
    protocol = {"rows": 1319, "data_sha256": "e" * 64, "num_samples": 1, "temperature": 0.0} | changes
    protocol = {"max_completion_tokens": 512} | protocol
    base = measured("base", source, **baseline) if baseline else None
    report = report_of(measured("trained", source, **{"pass@1": 0.543}), base, table=table, **protocol)
    (run / "evaluation" / "gsm8k").mkdir()
    atomic.write_json(run / "evaluation" / "gsm8k" / "report.json", report)
