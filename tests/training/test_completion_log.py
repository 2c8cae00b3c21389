import json
from types import SimpleNamespace

import pytest

from lora_grpo.training.completion_log import CompletionLog


def longer(completions, **columns):
    return [float(len(completion)) for completion in completions]


def ungradable(completions, **columns):
    return [None for _ in completions]


@pytest.fixture
def log(tmp_path):
    return CompletionLog(tmp_path, every=3, weights={"longer": 2.0, "ungradable": 1.0}, eos_token_ids=[0])


def trainer_state(number):
    """Return the state that TRL passes to rewards while it prepares a step."""
    return SimpleNamespace(global_step=number - 1)


def step(log, number, *completions, rewards=(longer, ungradable), task="starter"):
    columns = {
        "id": [f"t{place}" for place in range(len(completions))],
        "question": [f"q{place}" for place in range(len(completions))],
        "answer": ["#### 3"] * len(completions),
        "task": [task] * len(completions),
        "completion_ids": [[7] * place + [0] for place in range(len(completions))],
        "log_extra": None,
        "trainer_state": trainer_state(number),
    }
    for reward in rewards:
        log.wrap(reward)(completions=list(completions), **columns)


def lines(log, number):
    # Not splitlines(), because a completion may contain U+2028.
    text = (log.folder / f"step-{number:05d}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def written(log):
    return sorted(path.name for path in log.folder.iterdir())


def test_a_line_holds_a_completion_its_verdict_and_what_it_earned(log):
    step(log, 1, "ab", "<answer>3</answer> ü")
    assert lines(log, 1) == [
        {
            "step": 1,
            "id": "t0",
            "question": "q0",
            "answer": "#### 3",
            "completion": "ab",
            "extracted": None,
            "passed": False,
            "status": "no_answer",
            "num_tokens": 1,
            "truncated": False,
            "rewards": {"longer": 2.0, "ungradable": None},
            "reward": 4.0,
        },
        {
            "step": 1,
            "id": "t1",
            "question": "q1",
            "answer": "#### 3",
            "completion": "<answer>3</answer> ü",
            "extracted": "3",
            "passed": True,
            "status": "passed",
            "num_tokens": 2,
            "truncated": False,
            "rewards": {"longer": 20.0, "ungradable": None},
            "reward": 40.0,
        },
    ]


def test_a_completion_without_an_end_is_truncated(log):
    log.weights = {"longer": 1.0}
    columns = {"id": ["t"], "question": ["q"], "task": ["gsm8k"], "answer": ["3"], "completion_ids": [[5, 6]]}
    log.wrap(longer)(completions=["ab"], trainer_state=trainer_state(1), **columns)
    assert lines(log, 1)[0]["truncated"] is True


def test_half_of_a_surrogate_pair_can_be_written(log):
    step(log, 1, "a\ud83d")
    assert lines(log, 1)[0]["completion"] == "a\ud83d"


def test_the_first_step_and_every_third_are_written(log):
    for number in range(1, 8):
        step(log, number, f"completion {number}")
    assert written(log) == ["step-00001.jsonl", "step-00003.jsonl", "step-00006.jsonl"]
    assert lines(log, 6)[0]["completion"] == "completion 6"


def test_watching_changes_neither_the_values_nor_the_name(log):
    recorded = log.wrap(longer)
    assert recorded.__name__ == "longer"
    assert recorded(completions=["ab", ""], trainer_state=trainer_state(2)) == [2.0, 0.0]


def test_messages_are_written_as_their_text(log):
    def short(completions, **columns):
        return [1.0] * len(completions)

    log.weights = {"short": 1.0}
    step(log, 1, [{"role": "assistant", "content": "said"}], rewards=[short])
    assert lines(log, 1)[0]["completion"] == "said"


def test_of_two_batches_in_one_step_the_last_is_shown(log):
    columns = {"id": ["t"], "question": ["q"], "task": ["gsm8k"], "answer": ["3"], "completion_ids": [[0]]}
    columns["trainer_state"] = trainer_state(1)
    for completion in ("first", "second!"):
        log.wrap(longer)(completions=[completion], **columns)
        log.wrap(ungradable)(completions=[completion], **columns)
    (line,) = lines(log, 1)
    assert (line["completion"], line["rewards"]["longer"]) == ("second!", 7.0)
