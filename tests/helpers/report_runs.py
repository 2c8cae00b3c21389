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
    """Lines of metrics.jsonl, rising; with every metric that is plotted, or a few."""
    few = ("step", "reward", "reward_std", "rewards/correct_answer/mean", "rewards/correct_answer/std")
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
    return lines if every else [{name: line[name] for name in few} for line in lines]


def completion(step, text, reward, **more):
    """A line of completions/."""
    line = {"step": step, "id": f"t/{step}", "question": f"What is {step}?", "completion": text}
    return {**line, "rewards": {"correct_answer": reward / 2}, "reward": reward, **more}


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
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(steps, every)))
    if completions is None:
        completions = [completion(step, f"the answer is {step}", step % 2 * 2.0) for step in range(1, steps + 1)]
    for step in {line["step"] for line in completions}:
        lines = [json.dumps(line) + "\n" for line in completions if line["step"] == step]
        (folder / "completions" / f"step-{step:05d}.jsonl").write_text("".join(lines))
    if evaluated:
        before, after = samples("----", ["+-", "--", "--", "--"]), samples("+---", ["++", "+-", "--", "--"])
        protocol = Protocol(
            task="starter",
            rows=4,
            data_sha256="",
            sampling=Sampling(
                prompt_style="xml", few_shot=0, num_samples=2, temperature=1.0, top_p=1.0, max_completion_tokens=64
            ),
            grading="",
            seed=0,
        )
        report = make_report((1, 2), Graded("trained", after, {}, protocol), Graded("base", before, {}, protocol))
        write_report(folder / "evaluation", report)
        for name, results in (("base", before), ("trained", after)):
            path = folder / "evaluation" / f"{name}.samples.jsonl"
            path.write_text("".join(json.dumps(sample) + "\n" for sample in results))
        rows = [{"task_id": f"t{place}", "question": f"Question {place}?", "answer": f"{place}"} for place in range(4)]
        (folder / "evaluation" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
