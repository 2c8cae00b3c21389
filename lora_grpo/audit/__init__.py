"""Audits a task's `check` before training: grades texts that a model could use to cheat, without a model.

    audit(config, data)          # --audit: all attacks on up to 16 rows; raises RunError if there are findings
    quick_audit(config, data)    # at the start of a run with a task file: a few rows and seconds; prints warnings

    rows, gold ──► attacks ──► texts ──► check, twice, in a child process with a time limit ──► findings

attacks.py   the attacks: what each writes for a row, and whether it must pass
child.py     calls `check` in a child process that can be killed
run.py       selects rows, compares the verdicts with what was expected, and prints the result
"""

from lora_grpo.audit.run import audit, quick_audit

__all__ = ["audit", "quick_audit"]
