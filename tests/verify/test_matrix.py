"""Real engines with the right adapter, and with every wrong one: each is called by its name.

Three adapters of the starter model are trained: one that moves its prompts much, one that hardly moves them, and one by
SFT. Targets use the adapter, the base alone, another adapter, the adapter at half and at twice its scale, or as it was
some steps before.
"""

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
from helpers.tiny_runs import run_tiny
from helpers.vllm_servers import running_vllm

from lora_grpo import starter
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.hardware import vllm_available
from lora_grpo.merging import MergeOptions, merge, merge_model
from lora_grpo.merging.report import Divergences
from lora_grpo.models import ModelFlags, resolve, tokenizer_of
from lora_grpo.sampling import LlamaServer, build
from lora_grpo.verify import VerifyOptions, verify
from lora_grpo.verify.compare import compare
from lora_grpo.verify.local import LocalTarget, open_local
from lora_grpo.verify.observe import observe, training_of
from lora_grpo.verify.probes import choose_prompts
from lora_grpo.verify.reference import Reference

ADAPTERS = ("strong", "weak", "sft")
MOST_LATER = [
    "strong",
    *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for name in ADAPTERS[1:]),
]
"""Two of the adapters are compared with files and servers only in the exhaustive tests."""
FINDINGS = {
    "adapter": "the adapter",
    "base": "the base",
    "other": "neither",
    "half": "neither",
    "double": "neither",
    "earlier": "neither",
}
"""What a target is, by what it uses."""
GGUF_TYPES = ("f16", pytest.param("q8_0", marks=pytest.mark.exhaustive), "q4_0")
"""CI tests files of the two that round least and most, and the one between them on a server."""
SETTINGS = {
    "strong": {"train": {"max_steps": 12, "learning_rate": 1e-2, "checkpoint_steps": 6}},
    "weak": {"train": {"max_steps": 4, "learning_rate": 3e-4, "checkpoint_steps": 2}},
    "sft": {
        "method": "sft",
        "sampling": {"max_completion_tokens": 64},
        "train": {"max_steps": 8, "learning_rate": 5e-3, "micro_batch_size": 2, "checkpoint_steps": 4},
    },
}

with_vllm = pytest.mark.skipif(not vllm_available(), reason="vllm is not installed: make engines")
with_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed: make engines"
)


class Variants:
    """The folders of an adapter's variants, and the models that are made of them."""

    def __init__(self, folder):
        self.folder = folder
        self.runs = {name: folder / name for name in ADAPTERS}
        for name, settings in SETTINGS.items():
            run_tiny(self.runs[name], **settings)

    def adapter(self, name, variant="adapter"):
        """Return the folder of a variant of an adapter."""
        run = self.runs[name]
        if variant == "adapter":
            return run / "adapter"
        if variant == "other":
            return self.adapter("sft" if name == "strong" else "strong")
        copy = self.folder / f"{name}-{variant}"
        if not copy.exists():
            source = run / "adapter"
            if variant == "earlier":
                source = min(run.glob("checkpoints/checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
            shutil.copytree(run / "adapter", copy)
            shutil.copy(source / "adapter_model.safetensors", copy)
            config = json.loads((copy / "adapter_config.json").read_text())
            config["lora_alpha"] *= {"half": 0.5, "double": 2}.get(variant, 1)
            (copy / "adapter_config.json").write_text(json.dumps(config))
        return copy

    def merged(self, name, variant):
        """Return the folder of a merged model."""
        if variant == "base":
            return starter.model_path()
        folder = self.folder / "merged" / f"{name}-{variant}"
        if not folder.exists():
            merge(MergeOptions(str(self.adapter(name, variant)), base=str(starter.model_path()), output=folder))
        return folder

    def gguf(self, name, variant, file_type):
        """Return a GGUF file of a merged model."""
        folder = self.folder / "gguf" / f"{name}-{variant}"
        [path] = export(ExportOptions(self.merged(name, variant), type=(file_type,), output_dir=folder))
        return path


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    return Variants(tmp_path_factory.mktemp("verify"))


@pytest.fixture(autouse=True)
def quick_merges(monkeypatch):
    """Merge without measuring KL divergences."""
    monkeypatch.setattr(merge_model, "measure_divergences", lambda *arguments: Divergences(not_measured="in a test"))


def report_on(variants, name, target, **options):
    """Return the report on one target."""
    [report] = verify(VerifyOptions(str(variants.runs[name]), against=(str(target),), **options)).targets
    return report


def check(report, name, variant, *, may_be_unknown=False):
    """Check that a target is called by its name. Only rounding may hide what it is, and never with another name."""
    finding = report.result.finding
    assert finding == FINDINGS[variant] or (may_be_unknown and finding == "cannot tell"), report.summary
    assert report.uses_adapter == (finding == "the adapter")
    if variant == "half" and finding == "neither":
        assert report.result.closest in (None, "the adapter at half of its scale")


# In this process


@pytest.mark.engines
@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=with_vllm)])
def test_engines_in_this_process(variants, backend):
    """A sampler of vLLM starts once, and loads every variant, as a wrong adapter would be loaded."""
    first = resolve(str(variants.adapter("strong")), ModelFlags(base=str(starter.model_path())), bits=16)
    engine = build.load_sampler(first, backend, tokenizer_of(first), 256, seed=0) if backend == "vllm" else None
    try:
        for name in ADAPTERS:
            spec = resolve(str(variants.runs[name]), ModelFlags(), bits=16)
            prompts, _ = choose_prompts(None, spec, 16)
            training = training_of(spec, prompts)
            reference = Reference(spec, training.end_token_ids)
            for variant in FINDINGS:
                target = local_target(variants, name, variant, backend, engine)
                report = compare(observe(target, training, 32), training, reference, {})
                check(report, name, variant)
                if engine is None:
                    target.close()
    finally:
        if engine is not None:
            engine.close()


def local_target(variants, name, variant, backend, vllm_sampler):
    """Return a target in this process that uses a variant."""
    if variant == "base":
        spec = resolve("starter", ModelFlags(), bits=16)
    else:
        spec = resolve(str(variants.adapter(name, variant)), ModelFlags(base=str(starter.model_path())), bits=16)
    if vllm_sampler is None:
        return open_local(variant, spec, backend, 256)
    vllm_sampler._saved_adapter = None if variant == "base" else vllm_sampler.engine.load_adapter(spec.adapter)
    return LocalTarget(variant, spec, backend, vllm_sampler)


# Files


@pytest.mark.parametrize("variant", FINDINGS)
@pytest.mark.parametrize("name", MOST_LATER)
def test_merged_models(variants, name, variant):
    check(report_on(variants, name, variants.merged(name, variant)), name, variant)


@pytest.mark.engines
@with_llama_cpp
@pytest.mark.parametrize("file_type", GGUF_TYPES)
@pytest.mark.parametrize("variant", FINDINGS)
@pytest.mark.parametrize("name", MOST_LATER)
def test_gguf_files(variants, name, variant, file_type):
    report = report_on(variants, name, variants.gguf(name, variant, file_type))
    check(report, name, variant, may_be_unknown=name == "weak" or file_type == "q4_0")


# Servers


@pytest.fixture(scope="module")
def vllm_url(variants, tmp_path_factory):
    adapters = {
        f"{name}-{variant}": variants.adapter(name, variant)
        for name in ADAPTERS
        for variant in FINDINGS
        if variant != "base"
    }
    log_path = tmp_path_factory.mktemp("vllm") / "log"
    with running_vllm(starter.model_path(), log_path, adapter_folders=adapters) as url:
        yield url


@pytest.mark.engines
@with_vllm
@pytest.mark.parametrize("variant", FINDINGS)
@pytest.mark.parametrize("name", MOST_LATER)
def test_a_server_of_vllm(variants, vllm_url, name, variant):
    model = "base" if variant == "base" else f"{name}-{variant}"
    check(report_on(variants, name, f"{vllm_url}#{model}", weight_bits=32), name, variant)  # vLLM does not tell it


@pytest.mark.engines
@with_llama_cpp
@pytest.mark.parametrize("variant", FINDINGS)
def test_a_server_of_llama_cpp(variants, variant):
    server = LlamaServer(variants.gguf("strong", variant, "q8_0"), slots=4, slot_tokens=512)
    try:
        check(report_on(variants, "strong", server.address), "strong", variant)
    finally:
        server.close()


# Settings that were lost, with the right weights


@pytest.fixture(scope="module")
def with_lost(variants):
    """Return a function that copies the merged model without its EOS token or its chat template, or without both."""

    def copy(*lost):
        folder = variants.folder / f"lost-{'-'.join(lost)}"
        if folder.exists():
            return folder
        shutil.copytree(variants.merged("strong", "adapter"), folder)
        if "template" in lost:
            (folder / "chat_template.jinja").write_text(OTHER_TEMPLATE)
        if "eos" in lost:
            for name in ("config.json", "generation_config.json"):
                set_value(folder / name, "eos_token_id", 0)
            set_value(folder / "tokenizer_config.json", "eos_token", "<|endoftext|>")
        return folder

    return copy


OTHER_TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
KINDS = {"eos": "EOS", "template": "chat template"}


def set_value(path, name, value):
    settings = json.loads(path.read_text())
    settings[name] = value
    path.write_text(json.dumps(settings))


def check_lost(report, *lost):
    """Check that the weights are the adapter's, and that the report names what was lost and nothing else."""
    assert report.result.finding == "the adapter", report.summary
    found = {difference.kind for difference in report.differences if difference.changes_answers}
    assert found == {KINDS[name] for name in lost}
    assert report.uses_adapter == (not lost)


LOST = [(), ("eos",), ("template",), ("eos", "template")]
LOST_GGUF = [
    *((lost, False) for lost in LOST),
    *(pytest.param(lost, True, marks=pytest.mark.exhaustive) for lost in LOST[:-1]),
    (LOST[-1], True),
]
"""llama.cpp serves a file in the same way, whether `verify` or a user starts the server: one case shows that."""


@pytest.mark.parametrize("lost", LOST)
def test_a_merged_model_with_lost_settings(variants, with_lost, lost):
    check_lost(report_on(variants, "strong", with_lost(*lost)), *lost)


@pytest.mark.engines
@with_llama_cpp
@pytest.mark.parametrize(("lost", "is_server"), LOST_GGUF)
def test_a_gguf_file_with_lost_settings(variants, with_lost, lost, is_server):
    """llama.cpp ends at <|im_end|> by its text, whatever the file says, so that no answer goes on."""
    folder = with_lost(*lost)
    [path] = export(ExportOptions(folder, type=("f16",), output_dir=variants.folder / f"{folder.name}-gguf"))
    changing = [name for name in lost if name != "eos"]
    if not is_server:
        check_lost(report_on(variants, "strong", path), *changing)
        return
    server = LlamaServer(path, slots=4, slot_tokens=512)
    try:
        check_lost(report_on(variants, "strong", server.address), *changing)
    finally:
        server.close()


@pytest.mark.engines
@with_vllm
def test_a_server_of_vllm_with_lost_settings(variants, with_lost, tmp_path):
    lost = ("eos", "template")
    with running_vllm(with_lost(*lost), tmp_path / "log") as url:
        check_lost(report_on(variants, "strong", url), *lost)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [("eos",), ("template",)])
def test_our_own_server_with_lost_settings(variants, with_lost, lost, serving):
    with serving(with_lost(*lost)) as url:
        check_lost(report_on(variants, "strong", url), *lost)


@pytest.mark.slow
def test_our_own_server(variants, serving):
    """It serves an adapter and its base."""
    with serving(variants.runs["strong"], "--bits", "16") as url:
        check(report_on(variants, "strong", f"{url}#strong"), "strong", "adapter")
        check(report_on(variants, "strong", f"{url}#base"), "strong", "base")
        for variant in ("other", "half", "earlier"):
            seen_from_it = report_on_folder(variants.adapter("strong", variant), f"{url}#strong")
            assert seen_from_it.result.finding == "neither", seen_from_it.summary


@pytest.fixture
def serving():
    """Return a context manager that serves a model with `lora-grpo serve`, and yields the address."""

    @contextlib.contextmanager
    def serve(source, *flags):
        command = [sys.executable, "-m", "lora_grpo", "serve", str(source), "--port", "0", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = ""
                while "Ctrl-C ends" not in line:
                    line = process.stdout.readline()
                    assert line, "the server has ended"
                yield line.partition(" at ")[2].partition(";")[0]
            finally:
                process.terminate()

    return serve


def report_on_folder(adapter, target):
    """Return the report on a target, seen from a variant of the adapter that it uses."""
    options = VerifyOptions(str(adapter), base=str(starter.model_path()), against=(target,))
    return verify(options).targets[0]
