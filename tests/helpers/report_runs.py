"""Folders of runs for the tests of their report: small ones, large ones, and such as a hostile model would leave."""

import json

from helpers.graded_samples import samples

from lora_grpo.config.schema import EvalConfig, RunConfig
from lora_grpo.evaluation.protocol import Protocol, Sampling
from lora_grpo.evaluation.report import Graded, make_report, write_report

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</pre></script></textarea><script>window.hacked = 2</script>",
    "<img src=x onerror='window.hacked = 3'>",
    "\x1b[31mred\x1b[0m \x00 \x07 \x08 \x7f \x9b",
    "right \u202egnp.exe\u202c to left, \u2028 and \u2029, \ufeff, \u200b",
    "half a pair: \ud800 and \udc00",
    "{{ 7 * 7 }} ${7 * 7} <!-- --> ]]> &lt;b&gt; \" ' `",
)
"""What a model may write."""


def metrics(steps, every=False):
    """Return lines of metrics.jsonl, rising; with every metric that is plotted, or with rewards only."""
    rewards_only = ("step", "reward", "reward_std", "rewards/correct_answer/mean", "rewards/correct_answer/std")
    lines = [
        {
            "step": step,
            "loss": -0.1 / step,
            "grad_norm": 0.05,
            "learning_rate": 5e-4,
            "completions/mean_length": 20.0 + step,
            "completions/min_length": 7.0,
            "completions/max_length": 46.0,
            "completions/clipped_ratio": 0.0,
            "time/rollouts": 1.25,
            "time/rewards": 0.01,
            "time/training": 4.5,
            "rewards/correct_answer/mean": step / steps,
            "rewards/correct_answer/std": 0.5,
            "reward": 2 * step / steps,
            "reward_std": 1.0,
            "frac_reward_zero_std": 0.0,
            "entropy": 0.2,
        }
        for step in range(1, steps + 1)
    ]
    if every:
        return lines
    return [{name: line[name] for name in rewards_only} for line in lines]


def completion(step, text, reward, **more):
    """Return a line of completions/."""
    return {
        "step": step,
        "id": f"t/{step}",
        "question": f"What is {step}?",
        "completion": text,
        "rewards": {"correct_answer": reward / 2},
        "reward": reward,
        **more,
    }


def write_run(
    folder, *, steps=3, status="complete", completions=None, evaluated=True, config=None, every=False, **record
):
    """Write the folder of a run and return it."""
    config = config or RunConfig(output_dir=str(folder), eval=EvalConfig(num_samples=2, k=(1, 2)))
    (folder / "completions").mkdir(parents=True)
    (folder / "evaluation").mkdir()
    record = {
        "lora_grpo_run": 1,
        "recipe": "gsm8k_lora",
        "started": "2026-11-21T23:52:03+00:00",
        "command": ["recipes/gsm8k_lora.py", "--output-dir", str(folder)],
        "config": config.to_dict(),
        "data": {"train": {"rows": 8}, "eval": {"rows": 4}},
        "policy": {"base_model": "starter", "engine": "peft"},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "git_revision": None,
        "machine": {"platform": "Linux", "cores": 2},
        "status": status,
        "ended": "2026-11-22T00:00:34+00:00",
        "seconds_worked": 511.3,
        **record,
    }
    (folder / "run.json").write_text(json.dumps(record))
    write_lines(folder / "metrics.jsonl", metrics(steps, every))
    if completions is None:
        completions = [completion(step, f"the answer is {step}", step % 2 * 2.0) for step in range(1, steps + 1)]
    for step in {line["step"] for line in completions}:
        lines = [line for line in completions if line["step"] == step]
        write_lines(folder / "completions" / f"step-{step:05d}.jsonl", lines)
    if evaluated:
        write_evaluation(folder / "evaluation")
    return folder


def write_evaluation(folder):
    """Write what the evaluations before and after training leave: 1 of 8 and 3 of 8 sampled answers are right."""
    base = samples("----", ["+-", "--", "--", "--"])
    trained = samples("+---", ["++", "+-", "--", "--"])
    sampling = Sampling(
        prompt_style="xml", few_shot=0, num_samples=2, temperature=1.0, top_p=1.0, max_completion_tokens=64
    )
    protocol = Protocol(task="starter", rows=4, data_sha256="", sampling=sampling, grading="", seed=0)
    report = make_report((1, 2), Graded("trained", trained, {}, protocol), Graded("base", base, {}, protocol))
    write_report(folder, report)
    rows = [{"task_id": f"t{index}", "question": f"Question {index}?", "answer": f"{index}"} for index in range(4)]
    write_lines(folder / "base.samples.jsonl", base)
    write_lines(folder / "trained.samples.jsonl", trained)
    write_lines(folder / "rows.jsonl", rows)


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
