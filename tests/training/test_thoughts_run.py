"""A model whose template opens a thought, through the command line: SFT, then GRPO, with the same texts everywhere."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from helpers.tiny_runs import begin_tiny, run_tiny
from helpers.warm_process import finish

from lora_grpo import starter
from lora_grpo.config import RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.errors import UserError
from lora_grpo.evaluation import evaluate
from lora_grpo.prompts import chat, thoughts
from lora_grpo.sampling import Sampler, build_sampler
from lora_grpo.tasks import grade_all
from lora_grpo.training.sft import sft_examples

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("--model.name", "thinker", "--model.engine", "peft", "--data.eval-limit", "24", "--data.train-limit", "400"),
    *("--eval.num-samples", "1", "--eval.k", "1", "--monitor.rows", "0"),
)
REWARD = """
import json
def seen(completions, **columns):
    texts = [completion[-1]["content"] for completion in completions]
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps(texts) + "\\n")
    return [float(len(text)) for text in texts]
"""


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A folder with the bundled model, whose prompts end with an opened thought."""
    folder = tmp_path_factory.mktemp("thinks")
    shutil.copytree(starter.model_path(), folder / "thinker")
    template = folder / "thinker" / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}")
    (folder / "my_rewards.py").write_text(REWARD)
    return folder


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_same_text_is_trained_graded_rewarded_and_written(warm, thinker):
    def run(script, *arguments):
        return finish(warm.start(ROOT / script, *arguments, cwd=thinker))

    sft = ("--output-dir", "sft", "--task", "starter", "--train.max-steps", "40", "--train.checkpoint-steps", "40")
    run("recipes/sft_lora.py", *sft, *SMALL)

    # The base answers inside the thought, which it does not close. SFT teaches it to close the thought.
    samples_before = lines(thinker / "sft" / "evaluation" / "base.samples.jsonl")
    for sample in samples_before:
        assert sample["completion"].startswith("<think>\n")
        assert sample["status"] == "unfinished_thought"
        assert not sample["passed"]
    samples_after = lines(thinker / "sft" / "evaluation" / "trained.samples.jsonl")
    assert all(sample["completion"].startswith("<think>\n") for sample in samples_after)
    passed = [sample["completion"] for sample in samples_after if sample["passed"]]
    assert len(passed) >= 8
    for completion in passed:
        assert "</think>" in completion
        assert completion.count("<think>") == 1

    # GRPO's rewards get the texts that are logged, with the opened thought.
    grpo = shlex.split(
        "--output-dir grpo --task starter --lora.from sft --train.max-steps 2 --train.completions-steps 1 "
        "--train.prompts-per-step 4 --train.micro-batch-size 16 --sampling.num-generations 4 "
        "--rewards correct_answer=1.0 strict_xml_format=1.0 my_rewards.py:seen=0.001"
    )
    run("recipes/gsm8k_lora.py", *grpo, *SMALL)
    first_step = lines(thinker / "grpo" / "completions" / "step-00001.jsonl")
    second_step = lines(thinker / "grpo" / "completions" / "step-00002.jsonl")
    texts_of_first = [line["completion"] for line in first_step]
    texts_of_second = [line["completion"] for line in second_step]
    assert lines(thinker / "seen.jsonl") == [texts_of_first, texts_of_second]
    for line in first_step + second_step:
        assert line["completion"].startswith("<think>\n")
        answer = thoughts.answer_of(line["completion"])
        assert (line["status"] == "unfinished_thought") == (answer is None)
        assert line["rewards"]["correct_answer"] == float(line["passed"])
        assert line["rewards"]["seen"] == len(line["completion"])
        assert line["rewards"]["strict_xml_format"] <= float(answer is not None)
    assert any(line["passed"] for line in first_step + second_step)

    # Samples are graded from their texts alone, here and by others.
    config = replace(RunConfig(), {"data": {"task": "starter", "eval_limit": 24, "train_limit": 8}})
    rows = {row["id"]: row for row in load_data(config).eval}
    for sample in samples_after:
        [verdict] = grade_all("starter", [sample["completion"]], [rows[sample["task_id"]]])
        assert verdict.passed == sample["passed"]
        assert verdict.rules == {name: sample[name] for name in verdict.rules}


PREFILLED = """
def load(split):
    first = 0 if split == "train" else 40
    steps = {"role": "assistant", "content": "Let me solve it.\\n<think>"}
    numbers = range(first, first + 40)
    return [{"prompt": [{"role": "user", "content": f"{n} + 1 = ?"}, steps], "answer": str(n + 1)} for n in numbers]
def check(completion, row): return completion.strip() == row["answer"]
def gold(row): return f"One more.</think>{row['answer']}"
"""


def test_a_last_message_of_the_assistant_is_continued_in_training_and_evaluation(tmp_path):
    (tmp_path / "prefilled.py").write_text(PREFILLED)
    changes = {"data": {"task": str(tmp_path / "prefilled.py")}, "rewards": ("correct_answer=1.0", "near_length:60")}
    run, policy = run_tiny(tmp_path / "run", **changes, eval={"num_samples": 1, "k": (1,)})
    for line in lines(run.completions / "step-00001.jsonl"):
        assert line["completion"].startswith("<think>")
        assert line["status"] == "unfinished_thought"
    rows = load_data(run.config).eval
    sampler = build_sampler(policy, run.config)
    prompts = [chat.render_row(sampler.tokenizer, row) for row in rows]
    assert all(prompt.endswith("<|im_start|>assistant\nLet me solve it.\n<think>") for prompt in prompts)
    for sample in evaluate(run, sampler, rows, "trained"):
        assert sample["completion"].startswith("<think>")
    for example, prompt, row in zip(sft_examples(rows, sampler), prompts, rows, strict=True):
        text = sampler.tokenizer.decode(example["input_ids"])
        assert text == f"{prompt}One more.</think>{row['answer']}<|im_end|>"


def test_a_trainer_that_would_close_a_last_message_of_the_assistant_refuses_it(tmp_path, monkeypatch):
    (tmp_path / "prefilled.py").write_text(PREFILLED)
    monkeypatch.setattr(Sampler, "serves_training", False)  # as Unsloth's trainer, which renders prompts itself
    with pytest.raises(UserError, match=r"pass --model\.engine peft"):
        begin_tiny(tmp_path / "run", data={"task": str(tmp_path / "prefilled.py")})
