"""`--audit`: can a completion cheat the grader?

    findings = audit(config, data)       # tells what the grader wrongly accepts or rejects, by task
    refuse_problems(findings)            # RunError if there is anything

audit_tasks.py   tries what a model could use to cheat, and reports what passes
attacks.py       the attacks on a `check`: the texts of each for a row, and whether they must pass
policies.py      the attacks on an `Environment`: policies that play conversations
calls.py         makes the calls of an audit in a process that can be killed
audit_agents.py  the same for an agent, which plays episodes in its own processes
stand_ins.py     the attacks on an agent: models that take the place of the policy
findings.py      how much an audit tries, and what it finds
"""

from lora_grpo.audit.audit_tasks import audit, refuse_problems
from lora_grpo.audit.findings import Findings
