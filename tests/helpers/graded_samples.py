"""Graded samples, as an evaluation leaves them."""


def samples(greedy, sampled=None):
    """Return samples of tasks t0, t1, ... in which + stands for a pass and - for a failure.

    Args:
        greedy: the greedy sample of each task: "+-" for two tasks.
        sampled: the sampled ones of each task: ["++", "+-"].
    """
    lines = []
    for number, greedy_result in enumerate(greedy):
        results = {"greedy": greedy_result}
        if sampled:
            results |= dict(enumerate(sampled[number]))
        for index, result in results.items():
            lines.append(sample(f"t{number}", index, passed=result == "+"))
    return lines


def sample(task_id, index, *, passed):
    return {
        "task_id": task_id,
        "sample_index": index,
        "completion": "...",
        "passed": passed,
        "status": "passed" if passed else "wrong_answer",
        "strict": False,
        "robust": passed,
        "num_tokens": 10 if passed else 20,
        "truncated": not passed,
    }
