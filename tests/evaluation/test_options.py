import json
from pathlib import Path

import pytest

from lora_grpo.config import RunConfig, replace
from lora_grpo.data import load_evaluation_rows
from lora_grpo.errors import UserError
from lora_grpo.evaluation.options import EvaluateOptions, choose_settings
from lora_grpo.flags import convert, read_flags

TRAINED = {"data": {"task": "gsm8k", "train": "a.csv", "eval": "b.csv", "columns": ["question=problem"]}}


def columns(*names, run=None, **options):
    config = replace(RunConfig(), run).to_dict() if run else None
    settings = choose_settings(
        EvaluateOptions("x", task="gsm8k", columns=names, **options), config and {"config": config}
    )
    return tuple(settings.data.columns)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--data.train", ""], "--data.train is empty; "),
        (["x", "--data.eval="], "--data is empty; "),
        ([""], "RUN|ADAPTER|MODEL|GGUF|SAMPLES is empty; "),
        (["x", "--limit", "0"], "--limit is '0'; "),
    ],
)
def test_a_message_names_the_flag(arguments, message):
    with pytest.raises(UserError) as error:
        read_flags(EvaluateOptions, arguments, None)
    assert str(error.value).startswith(message)


def test_a_value_of_python_code_is_refused_with_its_flag():
    with pytest.raises(UserError, match=r"^--data\.columns is 5; "):
        convert(EvaluateOptions, {"source": "x", "columns": 5})


def test_the_columns_of_a_run_apply_to_its_own_data():
    assert columns(run=TRAINED) == columns(run=TRAINED, data="b.csv") == ("question=problem",)
    assert columns(run=TRAINED, data="c.csv") == ()
    assert columns("answer=solution", run=TRAINED, data="c.csv") == ("answer=solution",)


def test_worked_examples_are_those_of_the_given_training_rows(tmp_path):
    rows = [json.dumps({"question": f"{number} + 1?", "answer": number + 1}) + "\n" for number in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(rows[:4]))
    (tmp_path / "eval.jsonl").write_text("".join(rows[4:]))
    files = {"train": str(tmp_path / "train.jsonl"), "data": str(tmp_path / "eval.jsonl")}
    chosen = choose_settings(EvaluateOptions("x", task="gsm8k", few_shot=2, **files), None)
    evaluated = load_evaluation_rows(chosen.data, chosen.seed, chosen.train_seed).eval
    asked = [message["content"] for message in evaluated[0]["prompt"] if message["role"] == "user"]
    assert asked == ["0 + 1?", "1 + 1?", "4 + 1?"]
    shot = {"config": replace(RunConfig(), TRAINED | {"data": {**TRAINED["data"], "few_shot": 1}}).to_dict()}
    assert choose_settings(EvaluateOptions("x", train="c.csv"), shot).data.train == "c.csv"
    assert choose_settings(EvaluateOptions("x"), shot).data.train == "a.csv"
    for options in ({}, {"few_shot": 0}):
        with pytest.raises(UserError, match=r"--data\.train .*--few-shot"):
            choose_settings(EvaluateOptions("x", task="gsm8k", **files, **options), None)
    with pytest.raises(UserError, match=r"--data\.train does not apply"):
        EvaluateOptions(samples=Path("x.jsonl"), train="c.csv").check_used(has_model=False, has_weights=False)


def test_the_settings_of_a_run_are_the_defaults():
    cooler = replace(RunConfig(), {"eval": {"temperature": 0.5, "top_p": 0.9}}).to_dict()

    def sampling(**options):
        chosen = choose_settings(EvaluateOptions("x", **options), {"config": cooler}).sampling
        return chosen.temperature, chosen.top_p, chosen.num_samples

    assert sampling(k=(1, 2)) == (0.5, 0.9, 2)
    assert sampling(k=(1, 2), temperature=0.7, top_p=1.0) == (0.7, 1.0, 2)
    temperature, _, num_samples = sampling()
    assert (temperature, num_samples) == (0.0, 1)  # one sample is greedy


def test_a_flag_without_effect_is_refused():
    with pytest.raises(UserError, match=r"--top-p has no effect on greedy samples"):
        choose_settings(EvaluateOptions("x", task="gsm8k", top_p=0.9), None)
    assert choose_settings(EvaluateOptions("x", task="gsm8k", top_p=0.9, temperature=1.0), None).sampling.top_p == 0.9
    with pytest.raises(UserError, match=r"--style has no effect on the prompts of code-with-feedback"):
        choose_settings(EvaluateOptions("x", task="code-with-feedback", style="xml"), None)


def test_other_rows_of_the_task_are_asked_as_in_training():
    changes = {"seed": 3, "eval": {"temperature": 0.5, "top_p": 0.9}}
    data = TRAINED["data"] | {"few_shot": 4, "train_limit": 50, "eval_limit": 20, "prompt_style": "hashes"}
    run = {"config": replace(RunConfig(), changes | {"data": data}).to_dict()}
    chosen = choose_settings(EvaluateOptions("x", task="gsm8k", data="c.csv", k=(1, 2)), run)
    for name in ("train", "few_shot", "train_limit", "prompt_style"):
        assert getattr(chosen.data, name) == data[name]
    assert (chosen.data.eval, chosen.data.columns, chosen.data.eval_limit) == ("c.csv", (), None)
    assert (chosen.sampling.temperature, chosen.sampling.top_p) == (0.5, 0.9)
    assert (chosen.train_seed, chosen.limit) == (3, None)
    assert choose_settings(EvaluateOptions("x", task="gsm8k", data="c.csv", limit=40), run).limit == 40

    of_another_task = choose_settings(EvaluateOptions("x", task="starter", k=(1, 2)), run)
    assert (of_another_task.data.few_shot, of_another_task.data.train) == (0, None)
    assert of_another_task.sampling.temperature == 1.0


def test_fewer_rows_than_the_run_evaluated_on_are_a_quick_look():
    def limit(requested, usual):
        config = replace(RunConfig(), {"data": {"task": "gsm8k", "eval_limit": usual}}).to_dict()
        return choose_settings(EvaluateOptions("x", limit=requested), {"config": config}).limit

    assert (limit(40, 500), limit(40, None)) == (40, 40)
    assert (limit(None, 500), limit(500, 500), limit(1000, 500)) == (None, None, None)
