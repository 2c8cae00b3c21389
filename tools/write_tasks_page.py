"""Write docs/tasks.md from the table of `lora-grpo tasks`.

python tools/write_tasks_page.py
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tasks.md"
TASKS = tomllib.loads((ROOT / "lora_grpo" / "cli" / "tasks.toml").read_text(encoding="utf-8"))


def page() -> str:
    """Return the page."""
    rows = [
        f"|`{name}`|{task['about']}|{task['example']}|{task['model']}|`{task['start']}`|"
        for name, task in TASKS.items()
    ]
    return "\n".join(
        [
            "# Built-in tasks",
            "",
            "Train and evaluate on these tasks, or on [your own](your-task.md). RUN is a run, an adapter or a model.",
            "This command prints the check and the data of a task:",
            "",
            "```",
            "lora-grpo tasks gsm8k",
            "```",
            "",
            "|task|problems|example|model|command|",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
