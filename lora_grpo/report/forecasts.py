"""The forecast of a run beside its outcome."""

from __future__ import annotations

import statistics

from lora_grpo.evaluation import Report
from lora_grpo.forecast import LAST, Range, Sample, make_forecast, no_forecast
from lora_grpo.report.plots import is_number
from lora_grpo.rewards import RIGHT_REWARDS
from lora_grpo.runs import RunFiles

_METRICS = ("reward", "frac_reward_zero_std", "learning_rate")


def forecast_table(run: RunFiles, evaluation: Report | None) -> tuple[list[str], list[tuple[str, str, str]]] | None:
    """Return a table of the forecasts and outcomes of a run; None if there is no forecast."""
    rows = []
    for name, (forecast, outcome) in forecasts(run, evaluation).items():
        unit = "" if name.startswith("reward") else "%"
        rows.append((name, forecast.text(unit), f"{100 * outcome:.0f}%" if unit else f"{outcome:.2f}"))
    return (["", "forecast [90% interval]", "outcome"], rows) if rows else None


def forecasts(run: RunFiles, evaluation: Report | None) -> dict[str, tuple[Range, float]]:
    """Return what the first step's completions, which the base sampled, promised, and what became of it.

    The forecast is that of `--preview` for the number of steps that were trained. Empty if there is none, or as long as
    the run is not evaluated.
    """
    config, first = run.record["config"], [line for line in run.completions if line["step"] == 1]
    size = config["sampling"]["num_generations"]
    # Steps that reuse rollouts have no reward.
    lines = [line for line in run.metrics if all(is_number(line.get(name)) for name in _METRICS)]
    if evaluation is None or not evaluation.table or no_forecast(config) or not lines or not first or len(first) % size:
        return {}
    if not all(line.keys() >= {"passed", "truncated"} for line in first):  # of an older version
        return {}
    samples = [Sample(line["passed"], line["reward"] or 0.0, line["truncated"]) for line in first]
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    rate = statistics.fmean(line["learning_rate"] for line in lines)
    forecast = make_forecast(groups, rate, run.steps, config["train"]["prompts_per_step"])
    if forecast is None:
        return {}
    taught = 1 - statistics.fmean(line["frac_reward_zero_std"] for line in lines)
    reward = statistics.fmean(line["reward"] for line in lines[-LAST:])
    found = {
        "groups with different rewards, all steps": (forecast.teaching, taught),
        f"reward, last {min(LAST, len(lines))} steps": (forecast.reward, reward),
    }
    same_task = config["data"]["eval_task"] in (None, config["data"]["task"])
    scores = [row for row in evaluation.table if row.metric == "pass@1"]
    if scores and same_task and set(RIGHT_REWARDS) & first[0]["rewards"].keys():
        found["pass@1 on the evaluation set"] = (forecast.pass_rate, scores[0].after)
    return found
