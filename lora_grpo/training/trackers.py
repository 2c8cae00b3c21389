"""`--train.report-to`: send the metrics of every step, the final table and the report to trackers."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from lora_grpo import console, distributed
from lora_grpo.errors import first_line
from lora_grpo.evaluation import read_report
from lora_grpo.files import markdown_table
from lora_grpo.runs import Run


class Trackers:
    """Mixin that calls transformers' callbacks of the trackers. List it before TrainerCallback in the bases.

    A tracker that fails gets nothing more and does not end the run; in transformers, its exception does. All metrics
    are in metrics.jsonl. TRL's `report_to` stays empty, because TRL also logs durations, outside of the callbacks.
    """

    def __init__(self, run: Run, trainer: Any) -> None:
        from transformers.integrations import get_reporting_integration_callbacks

        self.run, self.trainer = run, trainer
        # transformers has no argument for this folder. By default it writes the events into the checkpoints folder.
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.folder / "tensorboard")
        # The same for a resumed run, which continues the tracker's.
        trainer.args.run_name = trainer.args.run_name or f"{run.config.folder.resolve().name} {run.record['started']}"
        names = run.config.train.report_to
        kinds = get_reporting_integration_callbacks([*names])
        self._callbacks = {name: kind() for name, kind in zip(names, kinds, strict=True)}

    def finish(self) -> None:
        """Send the table of the evaluation and the report, when both are written."""
        trainer = self.trainer
        report, page = read_report(self.run.evaluation), self.run.folder / "report" / "report.html"
        if not distributed.is_main() or report is None:
            return
        headings, rows = report.scores_table()
        columns, cells = ["metric", *headings[1:]], [[*row] for row in rows]

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

        self._each(send)

    def _each(self, call: Callable[[str, Any], object]) -> None:
        for name, callback in [*self._callbacks.items()]:
            try:
                call(name, callback)
            except Exception as error:  # noqa: BLE001 - of a server, a disk or a package that is not this run's
                del self._callbacks[name]
                reason = f"{type(error).__name__}: {first_line(error)}"
                console.note(f"{name} failed ({reason}); the run goes on without it, see metrics.jsonl")

    def _forward(self, event: str, *args: Any, **kwargs: Any) -> None:
        self._each(lambda name, callback: getattr(callback, event)(*args, **kwargs))

    on_train_begin = functools.partialmethod(_forward, "on_train_begin")
    on_log = functools.partialmethod(_forward, "on_log")
    on_save = functools.partialmethod(_forward, "on_save")
    on_train_end = functools.partialmethod(_forward, "on_train_end")
