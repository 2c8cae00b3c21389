"""SmolLM2-135M, which `make laptop-model` writes: the first commands of docs/laptop.md, shortened, and their results.

The commands run once, two at a time. The details of each are tested elsewhere on the bundled model; here, a published
tokenizer, chat template and architecture go through all of them.
"""

import functools
import importlib.util
import json
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.warm_process import wait_for
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_grpo import sandbox
from lora_grpo.config import LAPTOP_FOLDER, DataConfig
from lora_grpo.data import load_evaluation_rows, start_sandbox
from lora_grpo.evaluation import wilson_interval
from lora_grpo.hardware import vllm_available
from lora_grpo.models import ModelFlags, resolve
from lora_grpo.prompts import chat
from lora_grpo.runs import read_metrics
from lora_grpo.sampling import GgufSampler, Sampler, SamplingParams, build, read_gguf
from lora_grpo.tasks import get_task, grade_all

pytestmark = pytest.mark.real_model

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / LAPTOP_FOLDER
TASK = str(ROOT / "recipes" / "laptop_lora.py")
FEW = "--data.eval-limit 2 --eval.num-samples 0"
EACH_STEP = "--train.checkpoint-steps 1 --train.completions-steps 1"
LIMITS = {
    "preview": "--sampling.max-completion-tokens 8",
    "sft": f"{FEW} --train.max-steps 4 --train.prompts-per-step 8 --train.micro-batch-size 8",
    "grpo": f"{FEW} --train.max-steps 2 --train.prompts-per-step 2 {EACH_STEP}",
    "evaluate": "",
    "merge": "",
    "export": "--type q8_0 f16",
}
GREEDY = SamplingParams(1, 0.0, 1.0, 40)


class Page:
    """The commands of docs/laptop.md, started in a folder that is not the checkout."""

    def __init__(self, fresh, folder):
        self.fresh = fresh
        self.folder = folder
        self.sft = folder / "outputs" / "sft_lora"
        self.run = folder / "outputs" / "laptop_lora"
        self.killed = folder / "outputs" / "killed"
        self.ended = {}  # by name
        (folder / "models").symlink_to(MODEL.parent)
        first_block = (ROOT / "docs" / "laptop.md").read_text().split("```")[1]
        lines = first_block.replace("\\\n", " ").strip().splitlines()  # a command may take several lines
        commands = [line.partition("#")[0] for line in lines]
        self.commands = dict(zip(LIMITS, commands, strict=True))

    def start(self, name, *flags):
        # The merged model is compared with the adapter on its 16-bit base.
        command = self.commands[name].replace("--limit 400", "--limit 8").replace("--onto dequantized", "")
        _, *words = shlex.split(f"{command} {LIMITS[name]}")
        words = [str(ROOT / word) if word.startswith(("recipes/", "scripts/")) else word for word in words]
        return self.fresh.start(*words, *flags, cwd=self.folder)

    def end(self, name, started=None):
        """Wait for a command of the page, or for another one that was started, to end well."""
        self.ended[name] = (started or self.start(name)).end()
        assert self.ended[name].returncode == 0, (name, self.ended[name].stderr)

    def kill_and_resume(self):
        """Kill a second GRPO run with the same settings after its first step, and resume it."""
        flags = ("--output-dir", self.killed)
        process = self.start("grpo", *flags)
        wait_for(process, (self.killed / "checkpoints" / "checkpoint-1").exists)
        process.kill()
        assert not (self.killed / "adapter").exists()
        self.end("resume", self.start("grpo", *flags, "--resume"))

    def command(self, name, *words):
        """Run another command of lora-grpo on the finished run."""
        self.end(name, self.fresh.start("-m", "lora_grpo", name, self.run, *words, cwd=self.folder))


@pytest.fixture(scope="module")
def page(request, fresh, tmp_path_factory):
    if not MODEL.is_dir():
        pytest.skip(f"no {MODEL}: make laptop-model")
    page = Page(fresh, tmp_path_factory.mktemp("page"))
    items = [item for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(1) as pool:  # one thread for the second core
        on_second_core = [pool.submit(page.end, "preview")]
        page.end("sft")
        if any(item.originalname == "test_a_killed_run_ends_in_the_same_bits" for item in items):
            on_second_core.append(pool.submit(page.kill_and_resume))
        page.end("grpo")
        on_second_core.append(pool.submit(page.command, "push", "me/orders", "--dry-run"))
        on_second_core.append(pool.submit(page.command, "chat", "Anna in Oslo ordered four mugs."))
        for name in ("merge", "export", "evaluate"):
            page.end(name)
        for future in on_second_core:
            future.result()
    return page


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def regraded(result):
    """Return the score of a logged completion, graded again."""
    split, number = (result.get("id") or result["task_id"]).split("/")[1:]
    return get_task(TASK).check(result["completion"], get_task(TASK).load(split)[int(number)]).score


def test_no_command_warns(page):
    for name, ended in page.ended.items():
        assert "warn" not in ended.stderr.lower(), (name, ended.stderr)
        for words in ("clean_up_tokenization_spaces", "KernelPreference", "Loading weights"):
            assert words not in ended.stdout + ended.stderr, name


def test_the_preview_says_that_the_base_cannot_learn_yet(page):
    assert "cannot learn" in page.ended["preview"].stdout
    assert "passed" in page.ended["sft"].stderr.partition("audit of laptop_lora: ")[2].splitlines()[0]


def test_sft_lowers_its_loss(page):
    losses = [line["loss"] for line in read_metrics(page.sft)]
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]


def test_grpo_learns_from_rewards_that_differ_and_raises_no_alarm(page):
    record = json.loads((page.run / "run.json").read_text())
    assert record["alarms"] == [] and record["status"] == "complete"
    check = record["logprob_check"]
    assert check["difference"] < check["tolerance"] < check["moved"]
    for step, metrics in enumerate(read_metrics(page.run), 1):
        completions = lines(page.run / "completions" / f"step-{step:05}.jsonl")
        assert len(completions) == 16 and all(line["reward"] == regraded(line) for line in completions)
        assert metrics["reward"] == pytest.approx(sum(line["reward"] for line in completions) / 16)
        assert metrics["reward_std"] > 0 and metrics["frac_reward_zero_std"] < 1 and metrics["grad_norm"] > 0
        truncated = sum(line["truncated"] for line in completions) / 16
        assert metrics["completions/clipped_ratio"] == pytest.approx(truncated) and truncated < 1
        assert metrics["sampling/sampling_logp_difference/mean"] < 1e-3


@pytest.mark.exhaustive  # training/test_resume.py kills runs of the bundled model
def test_a_killed_run_ends_in_the_same_bits(page):
    assert "resuming from" in page.ended["resume"].stderr
    for name in ("adapter/adapter_model.safetensors", "evaluation/trained.samples.jsonl"):
        assert (page.killed / name).read_bytes() == (page.run / name).read_bytes()


def test_the_reported_scores_are_those_of_the_samples(page):
    [report] = page.run.glob("evaluation/*/report.json")
    evaluated = json.loads(report.read_text())["evaluated"]
    results = lines(report.with_name("results.jsonl"))
    assert len(results) == 8 and all(result["score"] == regraded(result) for result in results)
    passed = sum(result["score"] == 1 for result in results)
    mean_score = sum(result["score"] for result in results) / 8
    assert evaluated["scores"] == {"pass@1": passed / 8, "mean score": mean_score}
    assert evaluated["intervals"]["pass@1"] == pytest.approx(wilson_interval(passed, 8))
    assert evaluated["sample_stats"]["sampled"]["truncated"] == sum(result["truncated"] for result in results)


def test_the_report_page_and_the_push_are_prepared(page):
    assert (page.run / "report" / "report.html").stat().st_size > 10_000
    assert "adapter_model.safetensors" in page.ended["push"].stdout


def test_chat_answers_before_and_after_training(page):
    answers = page.ended["chat"].stdout
    assert answers.startswith("base: ") and "\ntrained: {" in answers


@functools.cache
def evaluation_rows(task, number=8):
    return load_evaluation_rows(DataConfig(task=task, eval_limit=number), 0, 0).eval


@pytest.fixture(scope="module")
def models(page):
    """Samplers of the adapter on its 16-bit base, and of the merged model, and the greedy answers of both."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, page.run / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(page.run / "merged", dtype=torch.float32).eval()
    samplers = [Sampler(model, tokenizer, [tokenizer.eos_token_id]) for model in (adapted, merged)]
    rows = evaluation_rows(TASK)
    prompts = [chat.render_row(tokenizer, row) for row in rows]
    answers = [greedy(sampler, prompts) for sampler in samplers]
    return SimpleNamespace(adapter=samplers[0], merged=samplers[1], prompts=prompts, rows=rows, answers=answers)


def greedy(sampler, prompts):
    return [group[0].token_ids for group in sampler.sample(prompts, GREEDY, range(len(prompts)))]


def num_same(first, second):
    return sum(one == other for one, other in zip(first, second, strict=True))


def test_the_merged_model_answers_as_the_adapter(page, models):
    report = json.loads((page.run / "merged" / "merge_report.json").read_text())
    assert report["kl"]["adapter_merged"] < 1e-4 < report["kl"]["adapter_base"] and report["base"]["checked"]
    assert num_same(*models.answers) >= 7
    ids = torch.tensor(models.merged.encode(models.prompts[:1]))
    with torch.no_grad():
        first, second = (sampler.model(ids).logits for sampler in (models.adapter, models.merged))
    assert 0 < (first - second).abs().max() < 0.1


@pytest.mark.parametrize("task", [TASK, "starter", "starter-code"])
def test_what_the_base_answers_is_rendered_ended_and_graded(models, task):
    tokenizer, rows = models.adapter.tokenizer, evaluation_rows(task)
    start_sandbox(DataConfig(task=task), sandbox.Settings())
    prompts = [chat.render_row(tokenizer, row) for row in rows]
    for prompt, ids in zip(prompts, models.adapter.encode(prompts), strict=True):
        assert prompt.startswith("<|im_start|>system\n") and prompt.endswith("<|im_start|>assistant\n")
        assert ids.count(tokenizer.bos_token_id) == 3 and tokenizer.decode(ids) == prompt
    params = SamplingParams(2, 1.0, 1.0, 40)
    groups = models.adapter.sample(prompts, params, range(16), adapter=False)
    samples = [(row, sample) for row, group in zip(rows, groups, strict=True) for sample in group]
    for _, sample in samples:
        assert sample.truncated == (sample.token_ids[-1] != tokenizer.eos_token_id)
        assert len(sample.token_ids) == 40 or not sample.truncated
        assert "<|im_end|>" not in sample.text
    assert {sample.truncated for _, sample in samples} == {True, False}
    verdicts = grade_all(task, [sample.text for _, sample in samples], [row for row, _ in samples])
    assert [verdict.passed for verdict in verdicts].count(False) > 8  # it is a small model


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed: make engines")
@pytest.mark.parametrize(("kind", "fewest"), [("F16", 7), ("Q8_0", 4)])
def test_llama_cpp_answers_as_the_merged_model(page, models, kind, fewest):
    file = page.run / "gguf" / f"laptop_lora.{kind}.gguf"
    sampler = GgufSampler(read_gguf(file), models.rows, 40)
    try:
        answers = greedy(sampler, models.prompts)
    finally:
        sampler.close()
    assert num_same(answers, models.answers[1]) >= fewest


@pytest.mark.skipif(not vllm_available(), reason="vllm is not installed: make engines")
def test_vllm_answers_as_the_adapter(page, models):
    spec = resolve(str(page.run), ModelFlags(base=str(MODEL)), bits=16)
    sampler = build.load_sampler(spec, "vllm", build.load_tokenizer(spec), 128, 0)
    try:
        answers = greedy(sampler, models.prompts)
    finally:
        sampler.close()
    assert num_same(answers, models.answers[0]) >= 6


def test_the_model_ends_its_answers_and_splits_numbers(models):
    tokenizer = models.adapter.tokenizer
    assert len(tokenizer("1234")["input_ids"]) == 4
    prompt = chat.render(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    [[sample]] = models.adapter.sample([prompt], GREEDY, [0], adapter=False)
    assert "Paris" in sample.text and not sample.truncated
