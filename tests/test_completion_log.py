import json

import pytest

from lora_grpo.completion_log import CompletionLog


def longer(completions, **columns):
    return [float(len(completion)) for completion in completions]


def ungradable(completions, **columns):
    return [None for _ in completions]


@pytest.fixture
def log(tmp_path):
    return CompletionLog(tmp_path, every=3, weights={"longer": 2.0, "ungradable": 1.0})


def step(log, number, *completions, rewards=(longer, ungradable)):
    columns = {
        "id": [f"t{place}" for place in range(len(completions))],
        "question": [f"q{place}" for place in range(len(completions))],
    }
    for reward in rewards:
        log.watch(reward)(completions=list(completions), **columns)
    log.write(number)


def lines(log, number):
    # Not splitlines(): a completion may hold U+2028.
    text = (log.folder / f"step-{number:05d}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def written(log):
    return sorted(path.name for path in log.folder.iterdir())


def test_a_line_holds_a_completion_and_what_it_earned(log):
    step(log, 1, "ab", "abc ü")
    assert lines(log, 1) == [
        {
            "step": 1,
            "id": "t0",
            "question": "q0",
            "completion": "ab",
            "rewards": {"longer": 2.0, "ungradable": None},
            "reward": 4.0,
        },
        {
            "step": 1,
            "id": "t1",
            "question": "q1",
            "completion": "abc ü",
            "rewards": {"longer": 5.0, "ungradable": None},
            "reward": 10.0,
        },
    ]


def test_the_first_step_and_every_third_are_written(log):
    for number in range(1, 8):
        step(log, number, f"completion {number}")
    assert written(log) == ["step-00001.jsonl", "step-00003.jsonl", "step-00006.jsonl"]
    assert lines(log, 6)[0]["completion"] == "completion 6"


def test_a_resumed_run_goes_on_counting(log):
    log.resumed_at(5)
    for number in (6, 7, 8):
        step(log, number, f"completion {number}")
    assert written(log) == ["step-00006.jsonl"]


def test_watching_changes_neither_the_values_nor_the_name(log):
    watched = log.watch(longer)
    assert watched.__name__ == "longer"
    assert watched(completions=["ab", ""], id=["a", "b"], question=["", ""]) == [2.0, 0.0]


def test_messages_are_written_as_their_text(log):
    def short(completions, **columns):
        return [1.0] * len(completions)

    log.weights["short"] = 1.0
    step(log, 1, [{"role": "assistant", "content": "said"}], rewards=[short])
    assert lines(log, 1)[0]["completion"] == "said"


def test_a_step_shows_a_few_of_many(log):
    step(log, 1, *("x" * length for length in range(100)))
    assert len(lines(log, 1)) == 16
    assert [line["reward"] for line in lines(log, 1)] == [2.0 * length for length in range(16)]


def test_of_two_batches_in_one_step_the_last_is_shown(log):
    columns = {"id": ["t"], "question": ["q"]}
    for completion in ("first", "second!"):
        log.watch(longer)(completions=[completion], **columns)
        log.watch(ungradable)(completions=[completion], **columns)
    log.write(1)
    (line,) = lines(log, 1)
    assert (line["completion"], line["rewards"]["longer"]) == ("second!", 7.0)


def test_a_step_without_completions_writes_nothing(log):
    log.write(1)
    assert written(log) == []
