"""The folder of a run: one process writes it during training, and the other commands read it.

    claim_run(config, invocation)                                    # locks the folder, before anything takes long
    run = open_run(config, invocation, "gsm8k_lora", data.record)    # a new run, or the one in the folder
    run.begin(policy.record)                                         # writes run.json
    run.append_metrics({"step": 1, "reward": 0.5})
    run.finish({"reward": ...})
    leave_run()                                                      # another run may use the folder and the process

run.py          the life of a run's folder: claim, open, begin, update, finish, close, leave
resuming.py     which settings, rows and files may differ when a run is resumed
checkpoints.py  writes training checkpoints that are complete or absent; finds the newest complete one
failure.py      how a run ends that does not finish: the error in run.json, told by one process
reader.py       the schema of run.json, and the versions in it; reads the folder of a run in any state
"""

from lora_grpo.runs.checkpoints import AtomicCheckpoints, checkpoints_in, newest_complete, newest_step, saved_bytes
from lora_grpo.runs.failure import FailedElsewhere, end_run
from lora_grpo.runs.reader import (
    Line,
    RunFiles,
    flatten,
    git_revision,
    last_completions,
    now,
    planned_settings,
    read_metrics,
    read_record,
    read_run,
    system_prompt,
    versions,
)
from lora_grpo.runs.resuming import check_resume, check_settings, may_change, resumes
from lora_grpo.runs.run import Run, begun_run, claim_run, leave_run, open_run
