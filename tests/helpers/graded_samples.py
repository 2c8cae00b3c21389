"""Graded samples, as an evaluation leaves them."""


def samples(greedy, drawn=None):
    """Samples of tasks t0, t1, ...: `greedy` and each task's `drawn` as strings of + and -."""
    made = []
    for place, first in enumerate(greedy):
        draws = [("greedy", first), *enumerate(drawn[place] if drawn else "")]
        for draw, passed in draws:
            made.append(
                {
                    "task_id": f"t{place}",
                    "draw": draw,
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
