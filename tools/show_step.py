"""Show what one GRPO step did to a group: rewards, advantages, and the change of each token's logprob.

    python recipes/gsm8k_lora.py --preset starter --train.max-steps 1 --train.completions-steps 1 \\
        --sampling.num-generations 8 --data.eval-limit 20 --eval.num-samples 0 --output-dir outputs/one_step
    python tools/show_step.py outputs/one_step --group 1

The run must have one step, so that its adapter is the policy after the step and its base the policy before.
"""

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path

from lora_grpo.config import RunConfig, replace
from lora_grpo.models import load_policy
from lora_grpo.tasks import chat, load_data

EPSILON = 1e-4
"""TRL adds this to the standard deviation."""
SHOWN = 0.005
"""Smallest change of a logprob to show, in nats."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--group", type=int, default=0, help="number of the group in the step (default: %(default)s)")
    arguments = parser.parse_args()
    steps = (arguments.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    if len(steps) != 1:
        parser.error(f"{arguments.run} has {len(steps)} steps; expected 1; train with --train.max-steps 1")
    record = json.loads((arguments.run / "run.json").read_text(encoding="utf-8"))
    config = replace(RunConfig(), record["config"])
    size = config.sampling.num_generations
    text = (arguments.run / "completions/step-00001.jsonl").read_text(encoding="utf-8")
    every = [json.loads(line) for line in text.splitlines()]
    groups = [every[start : start + size] for start in range(0, len(every), size)]
    advantages = [advantages_of([line["reward"] for line in group]) for group in groups]
    lengths = [[line["num_tokens"] for line in group] for group in groups]
    weighted = sum(a * n for group in zip(advantages, lengths, strict=True) for a, n in zip(*group, strict=True))
    print(f"loss by hand: -sum(advantage * tokens) / sum(tokens) = {-weighted / sum(map(sum, lengths)):.3f}")
    loss = json.loads(steps[0])["loss"]
    print(f"loss logged by TRL: {loss:.3f}\n\nquestion: {groups[arguments.group][0]['question']}")
    lines = zip(groups[arguments.group], advantages[arguments.group], strict=True)
    distinct = {line["completion"]: (line, advantage) for line, advantage in lines}
    tokens_of = moved(config, arguments.run / "adapter", [line for line, _ in distinct.values()])
    often = Counter(line["completion"] for line in groups[arguments.group])
    for (line, advantage), tokens in zip(distinct.values(), tokens_of, strict=True):
        print(f"\n{often[line['completion']]} x reward {line['reward']:g}, advantage {advantage:+.2f}")
        print("   ", " ".join(line["completion"].split()))
        changes = [f"{token.strip() or token!r} {change:+.3f}" for token, change in tokens if abs(change) >= SHOWN]
        print(f"    {', '.join(changes)}; {len(tokens) - len(changes)} tokens less than {SHOWN}")


def advantages_of(rewards: list[float]) -> list[float]:
    center, spread = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - center) / (spread + EPSILON) for reward in rewards]


def moved(config: RunConfig, adapter: Path, group: list[dict]) -> list[list[tuple[str, float]]]:
    """Return the tokens of each completion, with the change of their logprobs."""
    import torch

    policy = load_policy(replace(config, {"lora": {"from": str(adapter)}, "output_dir": ""}))
    (row,) = [row for row in load_data(config).train if row["id"] == group[0]["id"]]
    encode = policy.tokenizer.encode
    prompt = encode(chat.render_row(policy.tokenizer, row), add_special_tokens=False)
    found = []
    for line in group:
        ids = encode(line["completion"], add_special_tokens=False)
        if not line["truncated"]:
            ids.append(policy.tokenizer.eos_token_id)
        sides = []
        for disabled in (True, False):
            with torch.no_grad(), policy.model.disable_adapter() if disabled else torch.no_grad():
                logits = policy.model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits.float() / config.sampling.temperature, dim=-1)
            sides.append(logprobs.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1).tolist())
        changes = [after - before for before, after in zip(*sides, strict=True)]
        found.append(list(zip(map(policy.tokenizer.decode, ids), changes, strict=True)))
    return found


if __name__ == "__main__":
    main()
