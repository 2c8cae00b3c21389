"""Graded samples, as an evaluation leaves them."""


def samples(greedy, others=None):
    """Samples of tasks t0, t1, ...: `greedy` and each task's `others` as strings of + and -."""
    made = []
    for place, first in enumerate(greedy):
        for index, passed in [("greedy", first), *enumerate(others[place] if others else "")]:
            made.append(
                {
                    "task_id": f"t{place}",
                    "sample_index": index,
                    "completion": "...",
                    "passed": passed == "+",
                    "status": "passed" if passed == "+" else "wrong_answer",
                    "strict": False,
                    "robust": passed == "+",
                    "num_tokens": 10 if passed == "+" else 20,
                    "truncated": passed != "+",
                }
            )
    return made
