"""The audit of an agent: broken ones are caught by the stand-in that their mistake invites; good ones are not.

All agents run in their own processes and ask the real endpoint.
"""

import sys

import pytest

from lora_grpo.audit import audit, refuse_problems
from lora_grpo.audit.audit_tasks import FULL, Limits, audit_task
from lora_grpo.audit.stand_ins import NAMES
from lora_grpo.config import RunConfig, SamplingConfig, replace
from lora_grpo.data import Data
from lora_grpo.errors import RunError, UserError

HEAD = """
import json, os, pathlib, random, sys, time, urllib.request

def load(split):
    numbers = range(11, 17) if split == "train" else range(31, 34)
    return [{"question": f"What is {n} plus {3 * n}?", "answer": str(4 * n)} for n in numbers]

def ask(base_url, messages, **fields):
    body = json.dumps({"model": "policy", "messages": messages, **fields}).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as response:
        return json.load(response)["choices"][0]["message"]

def answer(row, base_url):
    return ask(base_url, [{"role": "user", "content": row["question"]}])["content"]

TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}

def tool_call(row, base_url):
    message = ask(base_url, [{"role": "user", "content": row["question"]}], tools=[TOOL])
    for call in message.get("tool_calls", ()):
        return call["function"]["name"], json.loads(call["function"]["arguments"])
"""

BROKEN = {
    "empty text": "def agent(row, base_url): return float(answer(row, base_url) in ('', row['answer']))",
    "echo": "def agent(row, base_url): return float(row['question'] in answer(row, base_url))",
    "claim of success": "def agent(row, base_url): return float('solved' in answer(row, base_url))",
    "malformed text": """
def agent(row, base_url):
    text = answer(row, base_url)
    return float(text.startswith("{") and json.loads(text)["answer"] == row["answer"])
""",
    "endless text": "def agent(row, base_url): return float(len(answer(row, base_url)) > 500)",
    "wrong tool calls": """
def agent(row, base_url):
    call = tool_call(row, base_url)
    return float(bool(call) and call[0] == "add" and call[1]["a"] + call[1]["b"] == int(row["answer"]))
""",
    "unknown tool": """
def agent(row, base_url):
    call = tool_call(row, base_url)
    return float(bool(call) and call[0] != "add")
""",
    "random words": "def agent(row, base_url): return float(bool(answer(row, base_url)))",
    "answer in the prompt": """
def agent(row, base_url):
    text = ask(base_url, [{"role": "user", "content": f"{row['question']} Say {row['answer']}."}])["content"]
    return float(text == row["answer"])
""",
    "all answers at once": "def agent(row, base_url): return float(row['answer'] in answer(row, base_url))",
    "repeated calls": """
def agent(row, base_url):
    row["question"] += f" ({os.urandom(8).hex()})"
    return float(answer(row, base_url) == row["answer"])
""",
    "side by side": """
def agent(row, base_url):
    path = pathlib.Path("question.txt")
    path.write_text(row["question"])
    answer(row, base_url)
    time.sleep(0.2)
    return float(answer({"question": path.read_text() + " Think again."}, base_url) == row["answer"])
""",
}

GOOD = {
    "exact": "def agent(row, base_url): return answer(row, base_url).strip() == row['answer']",
    "tools": """
def agent(row, base_url):
    call = tool_call(row, base_url)
    return float(bool(call) and call == ("add", {"a": int(row["answer"]) // 4, "b": int(row["answer"]) // 4 * 3}))
""",
    "a program": f"""
AGENT = ({sys.executable!r}, "program.py")
PROCESSES = 2
""",
}
PROGRAM = """
import json, os, sys, urllib.request
from task import ask
for line in sys.stdin:
    job = json.loads(line)
    text = ask(job["base_url"], [{"role": "user", "content": job["row"]["question"]}])["content"]
    print(json.dumps({"id": job["id"], "score": float(text == job["row"]["answer"])}), flush=True)
"""


@pytest.fixture
def opened(tmp_path):
    """Return a function that writes a task file, and returns its name and its rows."""
    from lora_grpo.tasks import get_task

    def name_and_rows(text, **constants):
        lines = [f"{name} = {value!r}" for name, value in constants.items()]
        (tmp_path / "program.py").write_text(PROGRAM)
        path = tmp_path / "task.py"
        path.write_text("\n".join([HEAD, text, *lines]))
        task = get_task(str(path))
        return str(path), [{**row, "task": str(path)} for row in task.load("train")]

    return name_and_rows


def all_but(*attacks):
    return tuple(name for name in NAMES if name not in attacks)


@pytest.mark.parametrize("attack", BROKEN)
def test_a_broken_agent_is_caught(opened, attack):
    name, rows = opened(BROKEN[attack], AUDIT_IGNORE=all_but(attack))
    assert audit_task(name, rows).problems.keys() == {attack}


def test_the_table_has_a_broken_agent_for_every_attack():
    assert BROKEN.keys() == set(NAMES)


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_a_good_agent_raises_no_alarm(opened, text):
    name, rows = opened(text)
    findings = audit_task(name, rows, FULL)
    assert (findings.problems, findings.notes) == ({}, [])


def test_an_exception_is_one_finding_with_its_line(opened):
    name, rows = opened("def agent(row, base_url): return float(int(answer(row, base_url)) == int(row['answer']))")
    problems = audit_task(name, rows).problems
    assert list(problems) == ["empty text"], "the same line fails with other texts, too"
    assert "the agent fails when the model writes nothing: " in problems["empty text"]
    assert "agent raised ValueError: invalid literal for int()" in problems["empty text"]
    assert "on 6 of 6 rows, such as task/train/0" in problems["empty text"]
    assert "\n" not in problems["empty text"]


def test_state_of_a_program_between_episodes_is_found(opened, tmp_path):
    name, rows = opened(GOOD["a program"], AUDIT_IGNORE=all_but("repeated calls"))
    stateful = PROGRAM.replace("for line", "asked = ''\nfor line").replace(
        '"content": job["row"]["question"]', '"content": (asked := asked + job["row"]["question"])'
    )
    (tmp_path / "program.py").write_text(stateful)
    assert audit_task(name, rows).problems.keys() == {"repeated calls"}


def test_a_score_that_does_not_pass_is_a_note(opened):
    name, rows = opened("def agent(row, base_url): return 1.0 if answer(row, base_url) == row['answer'] else 0.2")
    findings = audit_task(name, rows)
    assert findings.problems == {}
    assert len(findings.notes) == 1 and "empty text (up to 0.2)" in findings.notes[0]


def test_a_request_that_a_run_refuses_is_found(opened):
    text = """
def agent(row, base_url):
    messages = [{"role": "user", "content": row["question"]}]
    return float(ask(base_url, messages, temperature=0.5)["content"] == row["answer"])
"""
    name, rows = opened(text, AUDIT_IGNORE=all_but("empty text"))
    assert "400" in audit_task(name, rows, sampling=SamplingConfig(temperature=1.0)).problems["empty text"]
    assert audit_task(name, rows, sampling=SamplingConfig(temperature=0.5)).problems == {}


def test_a_loop_without_an_end_ends_with_the_tokens(opened):
    text = """
def agent(row, base_url):
    messages = [{"role": "user", "content": row["question"]}]
    while True:
        message = ask(base_url, messages)
        if message["content"] == row["answer"]:
            return 1.0
        messages += [message, {"role": "user", "content": "No."}]
"""
    name, rows = opened(text, AUDIT_IGNORE=all_but("empty text", "endless text"))
    findings = audit_task(name, rows)
    assert (findings.problems, findings.notes) == ({}, [])


def test_an_agent_that_does_not_return_ends_the_audit_at_its_limit(opened):
    text = """
def agent(row, base_url):
    text = answer(row, base_url)
    if text:
        time.sleep(1000)
    return float(text == row["answer"])
"""
    name, rows = opened(text)
    findings = audit_task(name, rows, Limits(seconds=4.0))
    assert findings.problems == {}
    [note] = findings.notes
    assert note.startswith("there was no time for ") and "echo" in note and "side by side" in note


def test_an_agent_that_cannot_be_started_is_an_error(opened):
    name, rows = opened("AGENT = ('no-such-program',)")
    with pytest.raises(UserError, match="'no-such-program', which is not installed"):
        audit_task(name, rows)


def test_an_attack_on_checks_cannot_be_ignored(opened):
    name, rows = opened(GOOD["exact"], AUDIT_IGNORE=("wrong value",))
    with pytest.raises(UserError, match="AUDIT_IGNORE"):
        audit_task(name, rows)


def test_an_audit_prints_and_refuses_what_it_finds(opened, capsys):
    name, rows = opened(BROKEN["all answers at once"], AUDIT_IGNORE=all_but("all answers at once"))
    config = replace(RunConfig(), {"data": {"task": name}})
    with pytest.raises(RunError, match=r"^the audit found problems in task \(all answers at once\); fix agent"):
        refuse_problems(audit(config, Data(rows, [], {})))
    assert "FOUND all answers at once: on 6 of 6 rows" in capsys.readouterr().out

    audit(config, Data(rows, [], {}), quick=True)
    assert "warning: audit: all answers at once" in capsys.readouterr().err
