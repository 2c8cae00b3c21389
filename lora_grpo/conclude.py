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


def conclude(run: Run, before: Sequence[Result] = (), after: Sequence[Result] = ()) -> None:
    """Close run.json, write the report, and print the table, the reward's change and what to do next.

    Args:
        run: the trained run.
        before: the base's graded samples; none where nothing is right or wrong.
        after: those of the trained model.
    """
    if not ranks.is_main():
        return
    page, steps = _evaluation(run, before, after) if before else None, run.config.train.max_steps
    reward = reward_curve(run)
    run.finish({"table": page.table if page else [], "reward": reward})
    if page:
        page.show()
    print(f"reward: {reward['first']:.2f} in step 1, {reward['last']:.2f} in step {reward['steps']}")
    if best := run.record.get("best"):
        print(f"held-out reward: {best['reward']:.2f} at its best, after step {best['step']}")
    more = "--watch.early-stopping 0" if "stopped_early" in run.record else f"--train.max-steps {2 * steps}"
    lines: list[tuple[str, object]] = (
        [("adapter", run.adapter), ("best", run.best)] if best else [("adapter", run.adapter)]
    )
    lines += [("samples", f"{run.evaluation}/*.samples.jsonl")] if page else []
    lines += [("evaluate", f"python scripts/evaluate.py {run.folder} --compare base")] if page else []
    lines += [
        ("merge", f"python scripts/merge.py {run.folder}"),
        ("share", f"python scripts/push.py {run.folder} YOU/NAME --dry-run"),
        ("longer", f"the same command with --resume {more}"),
    ]
    print("\n".join(["", report_line(run.folder), *(f"{name:9} {value}" for name, value in lines)]))


def _evaluation(run: Run, before: Sequence[Result], after: Sequence[Result]) -> Page:
    """Compare base and trained, and write both reports of the evaluation."""
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
    return page


def reward_curve(run: Run) -> dict[str, float]:
    """Return the mean reward of the first and of the last step, and the number of steps."""
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if "reward" in line]  # rollouts used twice are rewarded once
    return {"first": lines[0]["reward"], "last": lines[-1]["reward"], "steps": lines[-1]["step"]}
