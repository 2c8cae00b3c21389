"""A task whose `check` accepts every text with the answer in it."""


def load(split):
    numbers = range(10, 22) if split == "train" else range(30, 42)
    return [{"question": f"What is {number} plus 50?", "sum": number + 50} for number in numbers]


def gold(row):
    return str(row["sum"])


def check(completion, row):
    return str(row["sum"]) in completion
