"""Completions are graded once, and rewards get what TRL would pass."""

import asyncio

import pytest

from lora_grpo import rewards
from lora_grpo.rewards import Reward, RewardError, Scorer, parse_reward_specs, resolve, scoring, training_set
from lora_grpo.rewards.guard import GuardedReward

ROWS = [
    {"id": "a", "task": "gsm8k", "answer": "18", "prompt": [{"role": "user", "content": "9 + 9?"}], "hint": [1, "x"]},
    {"id": "b", "task": "gsm8k", "answer": "3", "prompt": [{"role": "user", "content": "1 + 2?"}], "level": {"n": 1}},
]


class Tokenizer:
    def __init__(self, chat_template):
        self.chat_template = chat_template


def scorer(*rewards):
    return Scorer(resolve(parse_reward_specs(rewards)), Tokenizer("{{ messages }}"), ROWS)


@pytest.fixture
def graded(monkeypatch):
    """The completions that were graded."""
    graded_texts = []
    grade_all = scoring.grade_all

    def recording_grade_all(task, texts, rows):
        graded_texts.extend(texts)
        return grade_all(task, texts, rows)

    monkeypatch.setattr(scoring, "grade_all", recording_grade_all)
    return graded_texts


def test_values_are_unweighted_and_rewards_are_their_weighted_sums(graded):
    batch = scorer("correct_answer=2.0", "integer_answer=-0.5").score(["b", "a"], ["#### 3", "#### x"], [[1], [2]])
    assert batch.values == [{"correct_answer": 1, "integer_answer": 1}, {"correct_answer": 0, "integer_answer": 0}]
    assert batch.rewards == [1.5, 0.0]
    assert [verdict.passed for verdict in batch.verdicts] == [True, False]
    assert [row["id"] for row in batch.rows] == ["b", "a"]
    assert graded == ["#### 3", "#### x"]


def test_a_users_function_gets_columns_messages_and_verdicts(tmp_path, graded):
    (tmp_path / "mine.py").write_text(
        "seen = []\n"
        "def mine(completions, verdicts, **columns):\n"
        "    seen.append({'completions': completions, **columns})\n"
        "    return [None if verdict.passed else 0.25 for verdict in verdicts]\n"
    )
    users_scorer = scorer(f"{tmp_path}/mine.py:mine", "correct_answer")
    batch = users_scorer.score(["a", "b"], ["#### 18", "#### 4"], [[1], [2]], trainer_state="state")
    assert batch.rewards == [2.0, 0.25] and len(graded) == 2
    (seen,) = users_scorer.rewards[0].function.__wrapped__.__globals__["seen"]
    assert seen["completions"][0] == [{"role": "assistant", "content": "#### 18"}]
    assert seen["prompts"] == [row["prompt"] for row in ROWS] and "prompt" not in seen
    assert (seen["hint"], seen["level"]) == ([[1, "x"], None], [None, {"n": 1}])
    assert (seen["completion_ids"], seen["trainer_state"]) == ([[1], [2]], "state")
    seen["log_metric"]("name", 1.0)
    seen["log_extra"]("column", [1])


def test_a_base_model_has_texts_for_prompts_and_completions(monkeypatch):
    monkeypatch.setattr(scoring.chat, "render_row", lambda tokenizer, row: row["prompt"][0]["content"])
    seen = []
    reward = Reward("mine", 1.0, GuardedReward(lambda **columns: seen.append(columns) or [0.0], "mine"))
    Scorer([reward], Tokenizer(None), ROWS).score(["a"], ["text"], [[1]])
    assert (seen[0]["prompts"], seen[0]["completions"]) == (["9 + 9?"], ["text"])
    dataset = training_set(Tokenizer(None), ROWS, [1, 0, 1])
    assert [row["prompt"] for row in dataset] == ["1 + 2?", "9 + 9?", "1 + 2?"]


def test_the_trainers_dataset_has_ids_and_prompts_alone():
    dataset = training_set(Tokenizer("{{ messages }}"), ROWS, [1, 0])
    assert list(dataset) == [{"id": row["id"], "prompt": row["prompt"]} for row in ROWS[::-1]]


def test_prompts_reach_the_trainer_unchanged_whatever_their_arguments():
    """Arrow has no column for these, and the same rows pass `--dry-run`."""
    calls = [{"items": ["a"]}, {"items": "a"}, {"items": {"b": 1}}, {"items": None}, {}, {"other": 2**70}]
    rows = []
    for number, arguments in enumerate(calls):
        call = {"type": "function", "function": {"name": "buy", "arguments": arguments}}
        prompt = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "?"}]
        rows.append({"id": str(number), "prompt": prompt})
    dataset = training_set(Tokenizer("{{ messages }}"), rows, [5, 0, 1, 2, 3, 4])
    assert [row["prompt"] for row in dataset] == [rows[index]["prompt"] for index in (5, 0, 1, 2, 3, 4)]
    assert len(dataset) == 6 and dataset[0]["id"] == "5"


def test_a_task_s_check_is_a_reward_for_a_trl_script():
    check = rewards.graded("gsm8k", ROWS)
    chats = [[{"role": "assistant", "content": text}] for text in ("#### 3", "#### 3")]
    assert check(prompts=None, completions=chats, id=["a", "b"], trainer_state=None) == [0.0, 1.0]
    assert check(completions=["#### 18", "x"], id=["a", "a"]) == [1.0, 0.0]
    assert check.__name__ == "correct_answer"
    (integers,) = resolve(parse_reward_specs(["integer_answer"]))
    assert rewards.graded("gsm8k", ROWS, integers.function)(completions=["#### 5"], id=["a"]) == [1.0]


def test_a_base_model_s_next_question_is_not_graded_in_a_trl_script():
    completions = ["#### 18\nQuestion: 1 + 2?\nAnswer: #### 3", "#### 3\n\nQuestion: 9 + 9?\nAnswer: #### 18"]
    assert rewards.graded("gsm8k", ROWS)(completions=completions, id=["a", "a"]) == [1.0, 0.0]
    seen = rewards.graded("gsm8k", ROWS, lambda completions, **columns: completions)
    assert seen(completions=completions, id=["a", "a"]) == ["#### 18\n", "#### 3\n\n"]
    chats = [[{"role": "assistant", "content": text}] for text in completions]
    assert rewards.graded("gsm8k", ROWS)(completions=chats, id=["a", "a"]) == [0.0, 1.0]


ASYNC = """
import asyncio, functools

started = []
event = []  # of the loop in which the first call ran

async def waits(completions, **columns):
    started.append("waits")
    if not event:
        event.append(asyncio.Event())
    await asyncio.wait_for(event[0].wait(), 5)  # set by the other reward, which runs meanwhile
    event[0].clear()
    return [len(text[0]["content"]) for text in completions]

async def weighted(completions, factor, **columns):
    started.append("weighted")
    while "waits" not in started:
        await asyncio.sleep(0)
    event[0].set()
    return (None if factor is None else factor for _ in completions)

doubled = functools.partial(weighted, factor=2)

class Judge:
    async def __call__(self, completions, **columns):
        return [1.0] * len(completions)

judge = Judge()

async def breaks(completions, id, **columns):
    await asyncio.sleep(0)
    return [1 / (name != "b") for name in id]
"""


def test_async_rewards_run_at_the_same_time_and_keep_their_event_loop(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ASYNC)
    users_scorer = scorer(f"{path}:waits", f"{path}:doubled", f"{path}:judge", "correct_answer")
    for _ in range(2):
        batch = users_scorer.score(["a", "b"], ["#### 18", "#### 4"], [[1], [2]])
        assert [[*values.values()] for values in batch.values] == [[7, 2, 1, 1], [6, 2, 1, 0]]

    async def notebook():  # its event loop runs in this thread
        return scorer(f"{path}:judge").score(["a"], ["#### 18"], [[1]]).rewards

    assert asyncio.run(notebook()) == [1.0]


def test_an_async_reward_that_raises_names_its_line_and_row(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ASYNC)
    line = ASYNC.splitlines().index('    return [1 / (name != "b") for name in id]') + 1
    with pytest.raises(RewardError, match=rf"^{path}:{line}: reward 'breaks' raised ZeroDivisionError: .*; row b"):
        scorer(f"{path}:judge", f"{path}:breaks").score(["a", "b"], ["1", "2"], [[1], [2]])


def test_a_script_can_pass_an_async_reward_to_graded():
    async def half(completions, verdicts, **columns):
        return [verdict.value / 2 for verdict in verdicts]

    assert rewards.graded("gsm8k", ROWS, half)(completions=["#### 18"], id=["a"], prompts=["?"]) == [0.5]
