"""The log of completions."""

from lora_grpo.monitoring.completion_log import completion_lines
from lora_grpo.rewards import Scorer, parse_reward_specs, resolve

ROW = {"id": "t0", "question": "1 + 2?", "answer": "#### 3", "task": "gsm8k", "prompt": []}


class Chat:
    """A tokenizer with a chat template."""

    chat_template = "{{ messages }}"


def line(completion, token_ids):
    scorer = Scorer(resolve(parse_reward_specs(["correct_answer=2.0", "integer_answer"])), Chat(), [ROW])
    return completion_lines(scorer.score(["t0"], [completion], [token_ids]), [0])[0]


def test_a_line_holds_a_completion_its_verdict_and_what_it_earned():
    assert line("<answer>3</answer> ü", [7, 0]) == {
        "id": "t0",
        "question": "1 + 2?",
        "answer": "#### 3",
        "completion": "<answer>3</answer> ü",
        "extracted": "3",
        "passed": True,
        "status": "passed",
        "num_tokens": 2,
        "truncated": False,
        "rewards": {"correct_answer": 1.0, "integer_answer": 1.0},
        "reward": 2.5,
    }
    failed = line([{"role": "assistant", "content": "ab"}], [5, 6])
    assert (failed["completion"], failed["status"], failed["truncated"]) == ("ab", "no_answer", True)
