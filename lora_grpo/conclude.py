"""The end of a run: the table of base against trained, `evaluation/report.json`, and what to do next."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lora_grpo import atomic, ranks
from lora_grpo.comparison import compare, shifts
from lora_grpo.evaluation_report import Page, measure, run_title
from lora_grpo.report.writing import report_line
from lora_grpo.results import Result
from lora_grpo.run_record import Run


def conclude(run: Run, before: Sequence[Result], after: Sequence[Result]) -> None:
    """Write the report, close run.json, and print the table, the reward's change and what to do next."""
    if not ranks.is_main():
        return
    settings, seed = run.config.eval, run.config.seed
    ks = settings.k if settings.num_samples else ()
    table = compare(before, after, ks, seed)
    protocol = {
        "task": run.config.data.held_out_task,
        "rows": len({sample["task_id"] for sample in before}),
        "data_sha256": run.record["data"]["eval"]["sha256"],
        "left_out_as_trained_on": run.record["data"].get("left_out_as_trained_on", 0),
        "sandbox": run.record["data"].get("sandbox"),
        "prompt_style": run.config.data.prompt_style,
        "few_shot": run.config.data.few_shot,
        "num_samples": settings.num_samples,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_completion_tokens": run.config.sampling.max_completion_tokens,
        "seed": seed,
        "policy": run.record["policy"],
    }
    sides = {"base": measure(before, ks, seed), "trained": measure(after, ks, seed)}
    moved = shifts(before, after)
    page = Page(run_title(protocol), sides, protocol, table, moved)
    atomic.write_json(run.evaluation / "report.json", {"protocol": protocol, "table": table, **sides, **moved})
    atomic.write_text(run.evaluation / "report.md", page.markdown())
    reward = reward_curve(run)
    run.finish({"table": table, "reward": reward})
    page.show()
    print(f"reward: {reward['first']:.2f} in step 1, {reward['last']:.2f} in step {reward['steps']}")
    print(
        f"\n{report_line(run.folder)}\nadapter   {run.adapter}\n"
        f"curves    {run.metrics}\nsamples   {run.evaluation}/*.samples.jsonl\n\n"
        f"evaluate  python scripts/evaluate.py {run.folder} --compare base\n"
        f"merge     python scripts/merge.py {run.folder}\n"
        f"share     python scripts/push.py {run.folder} YOU/NAME --dry-run\n"
        f"longer    the same command with --resume --train.max-steps {2 * run.config.train.max_steps}"
    )


def reward_curve(run: Run) -> dict[str, float]:
    """Return the mean reward of the first and of the last step, and the number of steps."""
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if "reward" in line]  # rollouts used twice are rewarded once
    return {"first": lines[0]["reward"], "last": lines[-1]["reward"], "steps": lines[-1]["step"]}
