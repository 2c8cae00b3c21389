"""The folder of a run: one process writes it during training, and the other commands read it.

    run = open_run(config, invocation, "gsm8k_lora", data.record)    # creates the folder or resumes the run
    run.begin(policy.record)                                         # writes run.json
    run.append_metrics({"step": 1, "reward": 0.5})
    run.finish({"reward": ...})

run.py          the open run: creates, resumes and closes its folder
checkpoints.py  writes training checkpoints that are complete or absent; finds the newest complete one
failure.py      errors of the disk as errors of this package
reader.py       the schema of run.json, and the versions in it; reads the folder of a run in any state
"""

from lora_grpo.runs.checkpoints import AtomicCheckpoints, newest_complete, newest_step, saved_bytes
from lora_grpo.runs.failure import known_error
from lora_grpo.runs.reader import (
    Line,
    RunFiles,
    duration,
    flat,
    git_revision,
    now,
    read_metrics,
    read_record,
    read_run,
    system_prompt,
    versions,
)
from lora_grpo.runs.run import Run, begun_run, check_resume, check_settings, close_run, leave_run, open_run
