"""The log of completions, and how often a completion is graded."""

from helpers.tiny_runs import run_tiny

from lora_grpo.config import RunConfig, replace
from lora_grpo.rewards import Scorer, parse_reward_specs, resolve
from lora_grpo.tasks import code_grading, start_sandbox
from lora_grpo.training.completion_log import completion_lines

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


def test_a_completion_is_graded_once(tmp_path, monkeypatch):
    """By both rewards of a code task, the log of every step, and validation."""
    graded, run_tests = [], code_grading.run_tests
    monkeypatch.setattr(code_grading, "run_tests", lambda texts, rows: graded.extend(texts) or run_tests(texts, rows))
    data = {"task": "starter-code", "train_limit": 160, "eval_limit": 4}
    config = replace(RunConfig(), {"data": data})
    start_sandbox(config.data, config.sandbox)
    run, _ = run_tiny(
        tmp_path / "out",
        validates=True,
        data=data,
        rewards=("passes_tests", "share_of_tests_passed", "correct_answer"),
        monitor={"rows": 16, "every_steps": 2},
        train={"max_steps": 2, "completions_steps": 1},
    )
    assert len([*run.completions.iterdir()]) == 2 and len([*run.validation.iterdir()]) == 2
    assert len(graded) == 2 * 8 + 2 * 16
