"""Tasks as the audit gets them."""

import pytest

from lora_grpo.tasks import get_task


@pytest.fixture
def opened(known_task):
    """Return a function that returns the name and the opened rows of a task: a class, or the path of a file."""

    def name_and_rows(task):
        name = known_task(task) if isinstance(task, type) else task
        task_file = get_task(name)
        return name, [task_file.with_opening({**row, "task": name}) for row in task_file.load("train")]

    return name_and_rows
