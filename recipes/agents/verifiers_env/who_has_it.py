"""An environment in the form of the Environments Hub: a module with `load_environment`."""

import random

import verifiers as vf

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Julia", "Laura", "Oscar", "Peter"]
THINGS = ["ball", "book", "clock", "coin", "drum", "hat", "kite", "lamp", "map", "ring", "shell", "spoon"]


def load_environment(num_train_rows=600, num_eval_rows=200):
    """Return an environment that asks which of three people has a thing."""
    from datasets import Dataset

    rows = make_rows(num_train_rows + num_eval_rows)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows[:num_train_rows]),
        eval_dataset=Dataset.from_list(rows[num_train_rows:]),
        system_prompt="Reply with one name.",
        rubric=vf.Rubric(funcs=[right_name]),
    )


def make_rows(num_rows):
    """Return rows with different questions, and their answers."""
    generator = random.Random(0)
    answers = {}
    while len(answers) < num_rows:
        names = generator.sample(NAMES, 3)
        things = generator.sample(THINGS, 3)
        facts = [f"{name} has the {thing}." for name, thing in zip(names, things, strict=True)]
        wanted = generator.randrange(3)
        answers[f"{' '.join(facts)} Who has the {things[wanted]}?"] = names[wanted]
    return [{"question": question, "answer": answer} for question, answer in answers.items()]


def right_name(completion, answer):
    """Return 1.0 if the reply names the right person and nobody else, else 0.0."""
    reply = completion[-1]["content"]
    return float([name for name in NAMES if name in reply] == [answer])
