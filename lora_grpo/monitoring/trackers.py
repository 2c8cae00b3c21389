"""`--train.report-to`: send the metrics of every step, rollouts, the final table and the report to trackers."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lora_grpo import console, distributed
from lora_grpo.errors import first_line
from lora_grpo.evaluation import read_report
from lora_grpo.files import markdown_table
from lora_grpo.runs import Line, Run, last_completions

_ROLLOUT_COLUMNS = ("step", "id", "question", "completion", "passed", "num_tokens", "reward")
"""The columns of a table of rollouts. One for each reward follows."""
_ROLLOUTS_IN_TENSORBOARD = 16
"""TensorBoard shows a table as a text, which is not for reading hundreds of rows."""


class Trackers:
    """Calls transformers' callbacks of the trackers of a run.

    A tracker that fails gets nothing more and does not end the run; in transformers, its exception does. All metrics
    are in metrics.jsonl. TRL's `report_to` stays empty, because TRL also logs durations, outside of the callbacks.

    Args:
        trainer: transformers' trainer, whose arguments name the run for the trackers.
    """

    def __init__(self, run: Run, trainer: Any) -> None:
        from transformers.integrations import get_reporting_integration_callbacks

        self.run = run
        self.trainer = trainer
        # transformers has no argument for this folder. By default it writes the events into the checkpoints folder.
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.folder / "tensorboard")
        # With the time of the first start, so that a resumed run has the same name and continues the tracker's run.
        run_name = f"{run.config.folder.resolve().name} {run.record['started']}"
        trainer.args.run_name = trainer.args.run_name or run_name
        names = run.config.train.report_to
        classes = get_reporting_integration_callbacks(list(names))
        self._callbacks = {name: callback_class() for name, callback_class in zip(names, classes, strict=True)}
        self._step_of_rollouts = 0
        """The last step whose rollouts were sent."""

    def forward(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Pass an event of the trainer, such as `on_log`, on to every tracker."""
        if event == "on_train_begin" and self.run.is_resumed and distributed.is_main():
            self._call_each(self._hide_steps_that_run_again)
        self._call_each(lambda name, callback: getattr(callback, event)(*args, **kwargs))
        if event == "on_log" and self._callbacks:
            self._send_rollouts(self.trainer.state.global_step)

    def _hide_steps_that_run_again(self, name: str, callback: Any) -> None:
        """Have TensorBoard hide the steps that a killed run has logged after the checkpoint it continues from."""
        if name != "tensorboard":
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # transformers then writes with tensorboardX
            return
        first_step = self.trainer.state.global_step + 1
        callback.tb_writer = SummaryWriter(log_dir=callback.logging_dir, purge_step=first_step)

    def _send_rollouts(self, step: int) -> None:
        """Send the completions of a step as a table, if the run has written them (`--train.completions-steps`)."""
        lines = [line for line in last_completions(self.run.folder, 1) if line["step"] == step]
        if not lines or step == self._step_of_rollouts:
            return
        self._step_of_rollouts = step
        rewards = list(lines[0]["rewards"])
        columns = [*_ROLLOUT_COLUMNS, *rewards]
        rows = [_rollout_row(line, rewards) for line in lines]

        def send(name: str, callback: Any) -> None:
            if name == "tensorboard":
                cells = [[str(value) for value in row] for row in rows[:_ROLLOUTS_IN_TENSORBOARD]]
                text = "\n".join(markdown_table(columns, cells, left=4))
                callback.tb_writer.add_text("rollouts", text, step)
            else:
                tracker = sys.modules[name]
                tracker.log({"rollouts": tracker.Table(columns=columns, data=rows), "train/global_step": step})

        self._call_each(send)

    def finish(self) -> None:
        """Send the table of the evaluation and the report, when both are written."""
        report = read_report(self.run.evaluation)
        page = self.run.folder / "report" / "report.html"
        trainer = self.trainer
        if report is None:
            return
        headings, rows = report.scores_table()
        columns = ["metric", *headings[1:]]
        cells = [list(row) for row in rows]

        def send(name: str, callback: Any) -> None:
            # The end of training has closed the tracker. This opens it again.
            callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
            if name == "tensorboard":  # it shows no pages
                callback.tb_writer.add_text("evaluation", "\n".join(markdown_table(columns, cells)))
            else:
                tracker = sys.modules[name]
                tracker.log({"evaluation": tracker.Table(columns=columns, data=cells)})
                if page.is_file():
                    tracker.log({"report": tracker.Html(str(page))})
            callback.on_train_end(trainer.args, trainer.state, trainer.control, model=trainer.model)

        self._call_each(send)

    def _call_each(self, call: Callable[[str, Any], object]) -> None:
        for name, callback in list(self._callbacks.items()):
            try:
                call(name, callback)
            except Exception as error:  # noqa: BLE001 - of a server, a disk or a package that is not this run's
                del self._callbacks[name]
                reason = f"{type(error).__name__}: {first_line(error)}"
                console.note(f"{name} failed ({reason}); the run goes on without it, see metrics.jsonl")


def _rollout_row(line: Line, rewards: Sequence[str]) -> list[Any]:
    """Return the values of a completion's line in the order of the columns."""
    return [*(line[column] for column in _ROLLOUT_COLUMNS), *(line["rewards"].get(reward) for reward in rewards)]
