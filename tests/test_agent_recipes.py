"""recipes/agents: each folder is complete, and its agent gives points to a model that plays well and to no cheat."""

import contextlib
import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
import time
import tomllib
from pathlib import Path

import pytest

from lora_grpo.audit import audit_agents
from lora_grpo.audit.audit_tasks import audit_task
from lora_grpo.audit.stand_ins import TEMPLATE, StandIn
from lora_grpo.cli.arguments import parse
from lora_grpo.config import ModelConfig, RunConfig, SamplingConfig, replace
from lora_grpo.data import gold_episodes, load_data
from lora_grpo.models import base_model, prepare_tokenizer
from lora_grpo.tasks import get_task

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "agents"
FOLDERS = sorted(path.parent for path in RECIPES.glob("*/task.py"))
ROWS_OF_AUDIT = 6
every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def task_of(folder):
    return get_task(str(folder / "task.py"))


@every_folder
def test_a_folder_is_complete(folder):
    """It is copied alone, and its command runs in it."""
    task = task_of(folder)
    for argument in task.agent.command:
        assert "/" not in argument
        assert not argument.endswith(".py") or (folder / argument).is_file()
    requirements = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [line for line in requirements if "==" not in line] == []
    assert folder.name in (folder.parent / "README.md").read_text()


@every_folder
def test_the_preset_of_a_folder_fits_its_rows(folder):
    presets = task_of(folder).module.PRESETS
    config, _ = parse(["--preset", "laptop"], recipe=folder.name, description="", presets=presets)
    data = load_data(config)
    assert len(data.train) >= config.train.max_steps * config.train.prompts_per_step
    assert len(data.eval) >= 150
    tokens = task_of(folder).agent.prompt_tokens + config.sampling.max_completion_tokens
    assert tokens <= config.model.max_sequence_tokens


# What needs the library


def halve(messages):
    """Return the middle of the numbers that the hints of GuessTheNumber leave."""
    lowest, highest = 0, 0
    for message in messages:
        if message["role"] != "user":
            continue
        # The last game of the conversation counts; the first one is an example.
        if between := re.search(r"between (\d+) and (\d+)", message["content"]):
            lowest, highest = int(between[1]), int(between[2])
        if hint := re.search(r"higher than (\d+)", message["content"]):
            lowest = int(hint[1]) + 1
        if hint := re.search(r"lower than (\d+)", message["content"]):
            highest = int(hint[1]) - 1
    return str((lowest + highest) // 2)


QUESTION_OF_GEM = 5
"""The index of the message with the range of a game, after those of the example."""


def named_door(messages):
    """Return the door that the sign of the last room names."""
    return re.search(r"The sign says (\w+)", messages[-1]["content"])[1]


def with_commas(messages):
    """Return the words of the last message with commas between them."""
    return ", ".join(messages[-1]["content"].partition(": ")[2].split())


GOOD_MODELS = {"gem_game": halve, "openenv_env": named_door, "verifiers_env": with_commas}
"""By folder: the answer of a model that plays well, to the messages of a request."""


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers chat completions with a function of their messages."""

    def __init__(self, answer, *arguments):
        self.answer = answer
        super().__init__(*arguments)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": self.answer(request["messages"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "a", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128


@contextlib.contextmanager
def answering(answer):
    """Yield the address of a model that answers with a function of the messages."""
    handler = functools.partial(Answers, answer)
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def scores(folder, rows, answer, *, options=()):
    """Return what the agent in a folder says about a model on rows, which it plays side by side."""
    with answering(answer) as address:
        lines = []
        for number, row in enumerate(rows):
            lines.append(json.dumps({"id": number, "seed": number, "row": row, "base_url": address}) + "\n")
        command = [*task_of(folder).agent.command, *options]
        ended = subprocess.run(
            command, cwd=folder, input="".join(lines), capture_output=True, text=True, check=True, timeout=300
        )
    results = {}
    for line in ended.stdout.splitlines():
        if not line.startswith("{"):
            continue  # a server writes there, too
        result = json.loads(line)
        results[result["id"]] = result.get("score", result.get("error"))
    return [results[number] for number in range(len(rows))]


@pytest.fixture(scope="session", params=[folder.name for folder in FOLDERS])
def copied_folder(request, tmp_path_factory):
    """Return a copy of a folder alone, with its environment. Skip the test if it cannot be installed here."""
    if shutil.which("uv") is None:
        pytest.skip("needs uv")
    folder = tmp_path_factory.mktemp("copy") / request.param
    shutil.copytree(RECIPES / request.param, folder, ignore=shutil.ignore_patterns(".venv", "uv.lock", "outputs"))
    ended = subprocess.run(["uv", "sync"], cwd=folder, capture_output=True, text=True, check=False)
    if "error sending request" in ended.stderr or "Failed to fetch" in ended.stderr:
        pytest.skip(f"the registry cannot be reached: {ended.stderr.splitlines()[0]}")
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.registry
def test_no_model_that_cheats_passes(copied_folder):
    task = task_of(copied_folder)
    path = str(copied_folder / "task.py")
    rows = [{**row, "task": path} for row in task.load("train")]
    assert audit_task(path, rows[:ROWS_OF_AUDIT]).problems == {}


@pytest.mark.registry
def test_a_model_that_plays_well_passes_on_every_row(copied_folder):
    answer = GOOD_MODELS.get(copied_folder.name)
    if answer is None:
        pytest.skip("no model of this file plays it well")
    rows = task_of(copied_folder).module.load("eval")[:8]
    assert scores(copied_folder, rows, answer) == [1.0] * 8


@pytest.mark.registry
@pytest.mark.parametrize("copied_folder", ["gem_game"], indirect=True)
def test_a_game_of_gem_that_is_almost_won_scores_nothing(copied_folder):
    """gem itself rewards a last guess that is close, also one that was made before."""
    rows = task_of(copied_folder).module.load("eval")[:24]
    middle = scores(copied_folder, rows, lambda messages: str(halve([messages[QUESTION_OF_GEM]])))
    assert 3 <= sum(middle) <= 13
    assert set(middle) == {0.0, 1.0}


@pytest.mark.registry
@pytest.mark.parametrize("copied_folder", ["gem_game"], indirect=True)
def test_the_range_of_a_game_of_gem_does_not_tell_its_number(copied_folder):
    program = """
import json, sys
import gem
places = []
for row in json.load(sys.stdin):
    env = gem.make("game:GuessTheNumber-v0-easy", **row["settings"])
    env.reset(seed=row["seed"])
    places.append(env.game_number - env.min_number)
print(json.dumps(places))
"""
    rows = task_of(copied_folder).module.load("train")
    command = ["uv", "run", "python", "-c", program]
    ended = subprocess.run(
        command, cwd=copied_folder, input=json.dumps(rows), capture_output=True, text=True, check=True, timeout=300
    )
    places = json.loads(ended.stdout)
    for first, last in ((1, 32), (33, 64), (65, 97)):
        counts = [0, 0, 0]
        for row, place in zip(rows, places, strict=True):
            if first <= row["settings"]["min_number"] <= last:
                counts[place] += 1
        assert min(counts) > 0.25 * sum(counts), f"ranges from {first} to {last}: {counts}"


@pytest.mark.registry
@pytest.mark.parametrize("copied_folder", ["openenv_env"], indirect=True)
@pytest.mark.parametrize("options", [(), ("--server",)])
def test_the_doors_of_openenv_are_the_same_with_and_without_a_server(copied_folder, options):
    rows = [{"seed": seed} for seed in range(8)]
    all_doors = scores(copied_folder, rows, lambda messages: messages[-1]["content"], options=options)
    assert all_doors == [0.0] * 8
    first_door = scores(copied_folder, rows, lambda messages: messages[-1]["content"].split()[3], options=options)
    rooms_passed = [0, 0, 0, 1, 1, 1, 0, 1]  # by seed
    assert first_door == pytest.approx([rooms / 2 for rooms in rooms_passed])


@pytest.mark.registry
@pytest.mark.parametrize("copied_folder", ["verifiers_env"], indirect=True)
def test_verifiers_rewards_the_words_at_their_places(copied_folder):
    task = task_of(copied_folder)
    rows = [*task.load("train")[:4], *task.load("eval")[:4]]
    questions = []

    def first_word(messages):
        questions.append(messages[-1]["content"])
        return with_commas(messages).split(", ")[0]

    assert scores(copied_folder, rows, first_word) == pytest.approx([1 / 3] * 8)
    assert len(set(questions)) == 8
    assert scores(copied_folder, rows, lambda messages: f"{with_commas(messages)}, tree") == [0.75] * 8
    assert scores(copied_folder, rows, lambda messages: messages[-1]["content"]) == [0.0] * 8
    assert scores(copied_folder, rows, lambda messages: messages[-2]["content"]) == [0.0] * 8  # of the example
    assert scores(copied_folder, rows, lambda messages: "") == [0.0] * 8


@pytest.mark.registry
@pytest.mark.parametrize("copied_folder", ["mcp_tools", "sqlite_tools"], indirect=True)
def test_sft_has_the_tokens_of_the_agent(copied_folder, tmp_path):
    """A model that says what the reference conversations say passes, and it has read what SFT trains on."""
    sft_path, task_path = str(copied_folder / "sft.py"), str(copied_folder / "task.py")
    config = replace(RunConfig(), {"data": {"task": sft_path}, "model": {"chat_template": TEMPLATE}})
    tokenizer = base_model.load_tokenizer(ModelConfig())
    prepare_tokenizer(tokenizer, config, None)
    references = gold_episodes(tokenizer, load_data(config).train[:20])

    gold = get_task(sft_path).module.gold
    model = StandIn("reference", "", lambda asked: text_of(gold(asked.row)[asked.call_number]))
    task = get_task(task_path)
    rows = [{**row, "task": task_path} for row in task.load("train")[:20]]
    stage = audit_agents._Stage(task.agent, SamplingConfig(), tmp_path / "agent.log")
    try:
        episodes = stage.play(model, rows, time.monotonic() + 300)
    finally:
        stage.pool.close()

    for episode, reference in zip(episodes, references, strict=True):
        assert not episode.played.failure
        assert episode.played.verdict.passed
        conversation = tokenizer.decode(episode.played.calls[-1].all_ids)
        assert conversation == tokenizer.decode(reference.prompt_ids + reference.token_ids)


def text_of(message):
    """Return a turn as the model writes it."""
    for call in message.get("tool_calls", ()):
        return f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
    return message["content"]
