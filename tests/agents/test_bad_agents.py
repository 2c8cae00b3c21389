"""Agents that fail in every way: one line each, nothing left running, and the other episodes as they were."""

import os
import sys
import time
from pathlib import Path

import pytest
from helpers.agent_files import play, rows_of

from lora_grpo import agents, starter
from lora_grpo.agents import pool
from lora_grpo.agents.processes import MARK
from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.evaluation import sample_and_grade
from lora_grpo.evaluation.shares import drop_failed
from lora_grpo.models import base_model, stop_tokens
from lora_grpo.rollouts import play_all
from lora_grpo.sampling import Sampler, SamplingParams

AGENTS = '''
import asyncio, json, os, signal, socket, subprocess, sys, threading, time, urllib.request
from lora_grpo.grading import Verdict

SECONDS_PER_CALL = 8
MAX_FAILED = 1.0

def post(url, data, seconds=30):
    """Send a body without OpenAI's client, and raise what the server answers."""
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=seconds).read()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code} {error.read().decode()}") from None

def chat(base_url, **fields):
    body = {"messages": asks("Hi"), "max_tokens": 4, **fields}
    return post(base_url + "/chat/completions", json.dumps(body).encode())

def good(base_url):
    chat(base_url)
    return 1.0

def raises(base_url):
    raise KeyError("x")

def exits(base_url):
    sys.exit(3)

def exits_at_once(base_url):
    os._exit(7)

def crashes(base_url):
    os.kill(os.getpid(), signal.SIGSEGV)

def kills_its_group(base_url):
    os.killpg(0, signal.SIGKILL)

def interrupts(base_url):
    raise KeyboardInterrupt

def recurses(base_url):
    return recurses(base_url)

def sleeps(base_url):
    chat(base_url)
    time.sleep(1000)

def spins(base_url):
    chat(base_url)
    while True:
        pass

async def blocks(base_url):
    time.sleep(1000)

def leaves_a_child(base_url):
    subprocess.Popen(["sleep", "1000"])
    return good(base_url)

def leaves_a_daemon(base_url):
    subprocess.Popen(["setsid", "sleep", "1000"], start_new_session=True)
    return good(base_url)

def forks_and_hangs(base_url):
    for _ in range(5):
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)

def floods_output(base_url):
    print("x" * 3_000_000)
    return good(base_url)

def floods_errors(base_url):
    print("x" * 3_000_000, file=sys.stderr)
    return good(base_url)

def closes_everything(base_url):
    os.closerange(0, 100)
    os._exit(0)

def scores_two(base_url):
    return 2 * good(base_url)

def scores_nan(base_url):
    return float("nan") * good(base_url)

def scores_text(base_url):
    good(base_url)
    return "yes"

def scores_nothing(base_url):
    good(base_url)

def scores_wrong_verdict(base_url):
    good(base_url)
    return Verdict(True, "correct", score=5.0)

def never_asks(base_url):
    return 1.0

def returns_while_asking(base_url):
    good(base_url)
    threading.Thread(target=chat, args=(base_url,), kwargs={"max_tokens": 100}, daemon=True).start()
    time.sleep(0.05)
    return 1.0

def sends_ten_megabytes(base_url):
    return chat(base_url, messages=asks("x" * 10_000_000))

def asks_a_wrong_path(base_url):
    return post(base_url + "/embeddings", b"{}")

def guesses_a_secret(base_url):
    return chat("/".join(base_url.split("/")[:3]) + "/" + "A" * 22 + "/v1")

def has_no_secret(base_url):
    return chat("/".join(base_url.split("/")[:3]) + "/v1")

def sends_no_json(base_url):
    return post(base_url + "/chat/completions", b"{" * 100_000)

def wants_temperature(base_url):
    return chat(base_url, temperature=0.3)

def wants_an_image(base_url):
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    return chat(base_url, messages=[{"role": "user", "content": [part]}])

def wants_a_call(base_url):
    return chat(base_url, tool_choice="required")

def wants_many(base_url):
    return chat(base_url, n=1000)

def sends_no_messages(base_url):
    return chat(base_url, messages=[])

def sends_a_long_prompt(base_url):
    return chat(base_url, messages=asks("plum " * 2000))

def asks_forever(base_url):
    messages = asks("Hi")
    while True:
        answer = json.loads(post(base_url + "/chat/completions", json.dumps({"messages": messages}).encode()))
        messages += [answer["choices"][0]["message"], *asks("Go on.")]

async def hangs_up(base_url):
    client = CLIENT.with_options(base_url=base_url, timeout=0.01)
    try:
        await reply(client, asks("Hi"), max_tokens=200)
    except Exception as error:
        assert "timed out" in str(error), error
    return await asyncio.to_thread(good, base_url)

async def closes_streams(base_url):
    client = CLIENT.with_options(base_url=base_url)
    stream = await reply(client, asks("Hi"), max_tokens=4, stream=True)
    await stream.close()
    return 1.0

def sends_half_a_request(base_url):
    host, port = base_url.split("/")[2].split(":")
    for text in (b"POST /x HTTP/1.1\\r\\nContent-Length: 100\\r\\n\\r\\nabc", b"nonsense\\r\\n\\r\\n", b""):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(text)
        connection.close()
    return good(base_url)

def is_kind(value):
    code = getattr(value, "__code__", None)
    takes_others = code is not None and code.co_flags & 0x0C
    return code is not None and not takes_others and code.co_varnames[: code.co_argcount] == ("base_url",)

KINDS = list(filter(is_kind, list(globals().values())))

def agent(row, base_url):
    return KINDS[row["number"]](base_url)
'''
GOOD = "good"
UNHARMED = {
    *("good", "leaves_a_child", "leaves_a_daemon", "floods_output", "floods_errors", "returns_while_asking"),
    *("hangs_up", "closes_streams", "sends_half_a_request"),
}
"""Those that get the score that they return."""
OUT_OF_TOKENS = {"asks_forever"}
"""Those in which the model has had all its tokens: the episode fails, not the agent."""
FAILURES = {
    "sends_a_long_prompt": "the first prompt exceeds the maximum context length",
    "raises": "agent raised KeyError: 'x'",
    "exits": "agent raised SystemExit: 3",
    "exits_at_once": "the agent's process ended with exit code 7 before agent returned",
    "crashes": "the agent's process was ended by SIGSEGV",
    "kills_its_group": "the agent's process was ended by SIGKILL",
    "interrupts": "the agent's process ended with exit code 1",
    "recurses": "agent raised RecursionError",
    "sleeps": "the agent took more than 8 s without a call of the model (SECONDS_PER_CALL)",
    "spins": "the agent took more than 8 s without a call",
    "blocks": "the agent took more than 8 s without a call",
    "forks_and_hangs": "the agent took more than 8 s without a call",
    "closes_everything": "the agent's process ended with exit code 0 before agent returned",
    "scores_two": "the agent returned 2.0; expected a score from 0 to 1",
    "scores_nan": "the agent returned nan; expected",
    "scores_text": "the agent returned [\"'yes'\"]; expected",
    "scores_nothing": "the agent returned ['None']; expected",
    "scores_wrong_verdict": "'score': 5.0",
    "never_asks": "the agent returned without a call of the model",
    "sends_ten_megabytes": "413",
    "asks_a_wrong_path": "expected POST .../v1/chat/completions",
    "guesses_a_secret": "no episode is running at this address",
    "has_no_secret": "no episode is running at this address",
    "sends_no_json": "the body is not JSON",
    "wants_temperature": "temperature is 0.3, but this run samples with 1",
    "wants_an_image": "only text is supported",
    "wants_a_call": "tool_choice is 'required'; expected 'auto' or 'none'",
    "wants_many": "n is 1000",
    "sends_no_messages": "messages is []",
}


def marked_processes():
    """Return the numbers of the processes that agents of this process have started."""
    numbers = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={os.getpid()}-".encode() in (folder / "environ").read_bytes():
                numbers.append(int(folder.name))
        except OSError:
            continue
    return numbers


@pytest.fixture(scope="module")
def sampler():
    settings = ModelConfig(name=str(starter.model_path()), bits=16)
    tokenizer = base_model.load_tokenizer(settings)
    model = base_model.load_base(settings).eval()
    return Sampler(model, tokenizer, stop_tokens.eos_token_ids(settings, tokenizer, "starter"))


@pytest.fixture(scope="module")
def episodes(sampler, tmp_path_factory):
    """One episode of each kind of agent, all played together, by name; and one of the good agent alone."""
    folder = tmp_path_factory.mktemp("bad")
    rows = rows_of(folder, AGENTS)
    sys.path.append(str(folder))
    names = [name for name in AGENTS.split("def ")[1:] if name.partition("(")[2].startswith("base_url)")]
    names = [name.partition("(")[0] for name in names]
    assert set(names) == UNHARMED | OUT_OF_TOKENS | set(FAILURES)
    agents.keep_logs_in(folder)
    before = marked_processes()
    played = play(sampler, rows[: len(names)], group_size=1, budget=300)
    assert set(marked_processes()) <= set(before), "a process is left"
    [alone] = play(sampler, rows[:1], group_size=1, budget=300)
    yield {**dict(zip(names, played, strict=True)), "alone": alone}
    sys.path.remove(str(folder))


@pytest.mark.parametrize("name", sorted(FAILURES))
def test_a_bad_agent_is_one_line(episodes, name):
    episode = episodes[name]
    assert FAILURES[name] in episode.agent.failure
    assert "\n" not in episode.agent.failure
    assert len(episode.agent.failure) < 2500
    assert (episode.verdict.reason, episode.verdict.value) == (agents.FAILED, 0.0)
    assert episode.ended_by == "failure"
    assert episode.token_ids  # a row for TRL, with or without sampled tokens


@pytest.mark.parametrize("name", sorted(UNHARMED))
def test_what_an_agent_may_do_is_no_failure(episodes, name):
    assert not episodes[name].agent.failure
    assert episodes[name].verdict.value == 1.0


@pytest.mark.parametrize("name", sorted(OUT_OF_TOKENS))
def test_a_model_that_has_had_all_its_tokens_is_no_failure_of_the_agent(episodes, name):
    assert not episodes[name].agent.failure
    assert episodes[name].verdict.reason == "token_limit"
    assert "maximum context length" in episodes[name].verdict.detail  # frameworks know the error by these words
    assert len(episodes[name].token_ids) <= 300


def test_other_episodes_are_as_they_are_alone(episodes):
    assert episodes[GOOD].token_ids == episodes["alone"].token_ids
    assert episodes[GOOD].logprobs == pytest.approx(episodes["alone"].logprobs, abs=1e-5)


def test_more_failures_than_allowed_end_the_run(sampler, tmp_path):
    rows = rows_of(tmp_path, "def agent(row, base_url):\n    raise ValueError('no database')\n")
    with pytest.raises(RunError, match=r"64 of 64 episodes failed, more than MAX_FAILED 0.1 .*no database.*[.]log"):
        play(sampler, rows * 2, group_size=1)
    assert not marked_processes()


def test_episodes_that_fail_again_do_not_end_an_evaluation(sampler, tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "streams", True)  # as with vLLM, only those that failed are played again
    text = """
def agent(row, base_url):
    reply(OpenAI(base_url=base_url, api_key="-", max_retries=0), asks("Hi"), max_tokens=4)
    if row["number"] in (0, 10, 20):
        raise ValueError("no database")
    return 1.0
"""
    rows = rows_of(tmp_path, text)
    path = tmp_path / "results.jsonl"
    params = SamplingParams(1, 1.0, 1.0, 100)
    for _ in range(2):
        drop_failed(path)
        try:
            results = sample_and_grade(path, sampler, rows, rows[0]["task"], params, 0, "it", adapter=True)
        finally:
            agents.close_all()  # the second evaluation is in another process
        assert sum("failure" in result for result in results) == 3
        assert len(results) == len(rows) == 40


def test_a_proxy_of_the_environment_is_not_asked(sampler, tmp_path, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.com")
    text = """
import os
def agent(row, base_url):
    reply(OpenAI(base_url=base_url, api_key="-", max_retries=0), asks("Hi"), max_tokens=4)
    return float(os.environ["no_proxy"].startswith("example.com"))
"""
    [episode] = play(sampler, rows_of(tmp_path, text)[:1], group_size=1)
    assert (episode.agent.failure, episode.verdict.value) == ("", 1.0)


def test_sets_have_the_same_order_in_every_process(sampler, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    text = """
def agent(row, base_url):
    reply(OpenAI(base_url=base_url, api_key="-", max_retries=0), asks("Hi"), max_tokens=4)
    with open("hashes", "a") as file:
        print(hash("plum"), file=file)
    return 1.0
"""
    rows = rows_of(tmp_path, text)[:1]
    for _ in range(2):
        play(sampler, rows, group_size=1)
    first, second = (tmp_path / "hashes").read_text().splitlines()
    assert first == second


def test_a_file_that_cannot_be_imported_by_its_processes_is_one_line(sampler, tmp_path):
    rows = rows_of(tmp_path, "import os\nif 'LORA_GRPO_AGENT' in os.environ: raise ValueError('x')\nagent = print\n")
    with pytest.raises(UserError, match=r"task.py:\d+: importing this file raised ValueError: x"):
        play(sampler, rows, group_size=1)


# Commands

SCRIPT = """
import json, os, sys, time, urllib.request

def chat(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 4}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

print("starting", flush=True)
for line in sys.stdin:
    row = json.loads(line)["row"]
    answer = {"score": 0.5}
    if row["number"] == 1: sys.exit(4)
    if row["number"] == 2: print("x" * 2_000_000, flush=True)
    if row["number"] == 3: answer = {"score": "high"}
    if row["number"] == 4: answer = {"error": "no network"}
    if row["number"] == 5: print("[1]\\\\n{}\\\\n{\\"id\\": 99, \\"score\\": 1}", flush=True)
    if row["number"] == 6: time.sleep(1000)
    if row["number"] == 7: answer = {"score": 0.5, "id": "7"}
    chat(str(row["number"]))
    print(json.dumps(answer), flush=True)
"""


def test_a_command_plays_one_row_after_the_other(sampler, tmp_path):
    (tmp_path / "agent.py").write_text(SCRIPT.replace("\\\\", "\\"))
    constants = "PROCESSES = 3\nMAX_FAILED = 1.0\nSECONDS_PER_CALL = 30\n"
    rows = rows_of(tmp_path, f"AGENT = [{sys.executable!r}, 'agent.py']\n{constants}")[:12]
    agents.keep_logs_in(tmp_path)
    played = play(sampler, rows, group_size=1)
    failures = {number: episode.agent.failure for number, episode in enumerate(played) if episode.agent.failure}
    assert sorted(failures) == [1, 2, 3, 4, 6, 7], failures
    assert failures[1] == "the agent's process ended with exit code 4 before it wrote a score"
    assert failures[2] == "the agent's process wrote a line of more than 1 MiB to standard output"
    assert "returned {'score': 'high'}; expected a score from 0 to 1" in failures[3]
    assert failures[4] == "no network"
    assert "SECONDS_PER_CALL" in failures[6]
    assert "answered with the id '7'; expected the number that it was sent" in failures[7]
    assert all(episode.verdict.value == 0.5 for episode in played if not episode.agent.failure)
    assert not marked_processes()


TOGETHER_SCRIPT = """
import json, os, sys, time, urllib.request

for line in sys.stdin:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})).read()
    time.sleep(-time.time() % 0.25)
    print(json.dumps({"score": 1.0}), flush=True)
"""


def test_processes_that_answer_at_the_same_time_get_their_next_episodes(sampler, tmp_path):
    (tmp_path / "agent.py").write_text(TOGETHER_SCRIPT)
    rows = rows_of(tmp_path, f"AGENT = [{sys.executable!r}, 'agent.py']\nPROCESSES = 6\nMAX_FAILED = 1.0\n")
    played = play(sampler, rows, group_size=2)
    assert not [episode.agent.failure for episode in played if episode.agent.failure]


IDS_SCRIPT = """
import json, pathlib, sys, urllib.request

for line in sys.stdin:
    request = json.loads(line)
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
    url = request["base_url"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})).read()
    with pathlib.Path("ids").open("a") as ids: ids.write(f"{request['id']}\\n")
    print(json.dumps({"id": request["id"], "score": 1.0}), flush=True)
"""


def test_an_id_is_never_used_again(sampler, tmp_path):
    """What an episode that was ended still writes would be taken for the answer of another one."""
    (tmp_path / "agent.py").write_text(IDS_SCRIPT.replace("\\\\", "\\"))
    rows = rows_of(tmp_path, f"AGENT = [{sys.executable!r}, 'agent.py']\nPROCESSES = 2\n")
    try:
        for _ in range(2):
            play_all(sampler, rows[:3], SamplingParams(1, 1.0, 1.0, 100), [1, 2, 3])
    finally:
        agents.close_all()
    ids = (tmp_path / "ids").read_text().splitlines()
    assert len(set(ids)) == len(ids) == 6


DYING_SCRIPT = """
import json, os, sys, threading, time, urllib.request

def play(request):
    if request["row"]["number"] == 0:
        time.sleep(1000)
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
    url = request["base_url"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})).read()
    with LOCK: print(json.dumps({"id": request["id"], "score": 1.0}), flush=True)

LOCK = threading.Lock()  # print writes a line in two parts, between which another thread may write
for line in sys.stdin:
    threading.Thread(target=play, args=(json.loads(line),), daemon=True).start()
"""


def test_a_process_that_is_being_ended_gets_no_more_episodes(sampler, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_SECONDS_TO_IMPORT", 10.0)  # the hanging episode is the first of its process
    (tmp_path / "agent.py").write_text(DYING_SCRIPT)
    constants = "PROCESSES = 1\nEPISODES_PER_PROCESS = 2\nMAX_FAILED = 1.0\nSECONDS_PER_CALL = 4\n"
    rows = rows_of(tmp_path, f"AGENT = [{sys.executable!r}, 'agent.py']\n{constants}")
    rows = [rows[1], rows[0], *rows[2:8]]
    played = play(sampler, rows, group_size=1)
    failures = [episode.agent.failure for episode in played]
    assert "SECONDS_PER_CALL" in failures[1]
    # One that was played side by side with it may fail for this, but none that came afterwards.
    assert sum(bool(failure) for failure in failures) <= 2
    assert [failure for failure in failures if "SIGKILL" in failure] == []


SIDE_BY_SIDE_SCRIPT = """
import json, os, pathlib, sys, threading, urllib.request

pathlib.Path(f"{os.getpid()}.started").touch()

def play(request):
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
    url = request["base_url"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})).read()
    with LOCK: print(json.dumps({"id": request["id"], "score": 1.0}), flush=True)

LOCK = threading.Lock()  # print writes a line in two parts, between which another thread may write
for line in sys.stdin:
    threading.Thread(target=play, args=(json.loads(line),)).start()
"""


def test_a_command_plays_several_rows_side_by_side_in_as_many_processes_as_it_needs(sampler, tmp_path):
    (tmp_path / "agent.py").write_text(SIDE_BY_SIDE_SCRIPT)
    constants = "PROCESSES = 2\nEPISODES_PER_PROCESS = 4\n"
    rows = rows_of(tmp_path, f"AGENT = [{sys.executable!r}, 'agent.py']\n{constants}")[:12]
    played = play(sampler, rows, group_size=1)
    assert [episode.verdict.value for episode in played] == [1.0] * 12
    assert len(list(tmp_path.glob("*.started"))) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("AGENT = ['no-such-program']", "AGENT starts 'no-such-program', which is not installed"),
        ("AGENT = 'python agent.py'", "AGENT is 'python agent.py'; expected a program and its arguments"),
        ("AGENT = ['x']\ndef check(completion, row): return 1.0", "defines both check and AGENT"),
    ],
)
def test_a_wrong_command_is_one_line(sampler, tmp_path, text, problem):
    with pytest.raises(UserError, match=problem):
        play(sampler, rows_of(tmp_path, text), group_size=1)


def test_an_agent_that_hangs_holds_the_others_once(sampler, tmp_path):
    """The others wait for it for `_PATIENCE`, and then go on without it: their turns do not add up to its time."""
    text = """
import time
SECONDS_PER_CALL = 60
MAX_FAILED = 1.0
def agent(row, base_url):
    client = OpenAI(base_url=base_url, api_key="-", max_retries=0)
    for turn in range(6):
        reply(client, asks(str(turn)), max_tokens=4)
        if row["number"] == 0 and turn == 0:
            time.sleep(20)
    with open(f"{row['number']}.txt", "w") as file:
        file.write(str(time.time()))
    return 1.0
"""
    rows = rows_of(tmp_path, text)[:4]
    started = time.time()
    play(sampler, rows, group_size=1)
    ends = [float((tmp_path / f"{number}.txt").read_text()) - started for number in range(4)]
    assert max(ends[1:]) < ends[0] - 5
