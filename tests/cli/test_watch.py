"""`lora-grpo watch`: the report in a browser while a run trains, what it keeps, mistakes, and how it ends."""

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers.report_runs import HOSTILE, completion, metrics, write_run
from helpers.warm_process import finish, wait_for

from lora_grpo.cli import verbs
from lora_grpo.files import lock

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gsm8k_lora.py"
TINY = shlex.split(
    "--preset starter --model.engine peft --sampling.num-generations 2 --sampling.max-completion-tokens 8 "
    "--train.max-steps 3 --train.prompts-per-step 2 --train.micro-batch-size 4 --train.completions-steps 1 "
    "--data.eval-limit 4 --eval.num-samples 2 --eval.k 1 2 --monitor.rows 0"
)
COMMAND = """
import signal, sys
from lora_grpo.cli import run_front_door
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it as ignored
sys.exit(run_front_door(sys.argv[1:]))
"""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome here")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def watch(warm, tmp_path):
    """Return a function that starts `lora-grpo watch` with arguments. What still runs at the end is killed."""
    script = tmp_path / "lora_grpo_command.py"
    script.write_text(COMMAND)
    servers = []

    def start(*arguments):
        server = warm.start(script, "watch", *arguments, "--port", "0", cwd=tmp_path)
        servers.append(server)
        return server

    yield start
    for server in servers:
        if server.wait(0) is None:
            server.kill()


@pytest.fixture
def running(tmp_path):
    """The folder of a run that a process, this one, is training."""
    folder = write_run(tmp_path / "my_run", status="running", evaluated=False, completions=[completion(1, "one", 0.0)])
    with lock.holding(folder):
        yield folder


def address_of(server):
    """Wait until a server is ready, and return its address."""
    wait_for(server, lambda: "Ctrl-C ends" in server.said()[0])
    return re.search(r"http://[\d.:]+", server.said()[0])[0]


def expect(page, selector):
    """Wait until the element is as the assertion that follows says; a busy machine takes long to draw a page."""
    sync_api.expect.set_options(timeout=300_000)
    return sync_api.expect(page.locator(selector))


def train_step(folder, step):
    """Write what a step writes."""
    line = {**metrics(step)[-1], "step_time": 60.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    text = json.dumps(completion(step, f"the text of step {step}", 1.0))
    (folder / "completions" / f"step-{step:05d}.jsonl").write_text(text + "\n")


def visit(browser, address, errors, **context):
    page = browser.new_context(**context).new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    expect(page, "#list li").not_to_have_count(0)
    # The first answer replaces the page, perhaps in the middle of a click; later ones do so only if the run has more.
    expect(page, "#live").to_have_text(re.compile("^Live, "))
    return page


def test_the_page_follows_the_run_and_keeps_what_is_read(browser, watch, running):
    errors = []
    train_step(running, 2)
    server = watch(running)
    page = visit(browser, address_of(server), errors, viewport={"width": 380, "height": 800})
    assert "Still running." in page.locator(".state").inner_text()
    page.locator("summary", has_text="All settings").click()
    page.fill("[name=text]", "one")
    expect(page, "#count").to_have_text("1 of 2 completions")  # the search begins when the typing pauses
    page.locator("#list li").click()
    # The reading position, and a mark on what is not replaced.
    page.evaluate("document.querySelector('#detail pre').dataset.mark = 'kept'")

    train_step(running, 4)
    expect(page, "header").to_contain_text("4 of 200")
    assert "about 3 h 16 min left" in page.locator("header").inner_text()
    expect(page, "#count").to_have_text("1 of 3 completions")
    assert page.evaluate("document.querySelector('#detail pre').dataset.mark") == "kept"
    assert page.locator("details[open] summary", has_text="All settings").count() == 1
    # Without a search, the newest completion is the first.
    page.click("text=Clear")
    expect(page, "#detail").to_contain_text("the text of step 4")
    train_step(running, 5)
    expect(page, "#detail").to_contain_text("the text of step 5")
    assert page.locator("select[name=step] option").all_inner_texts() == ["all", "1", "2", "4", "5"]

    assert page.evaluate("document.documentElement.scrollWidth") == 380
    assert page.evaluate("document.querySelector('#live').className") == ""
    server.interrupt()
    expect(page, "#live").to_have_class("lost")
    assert "5 of 200" in page.locator("header").inner_text()
    ended = server.end()
    assert (ended.returncode, ended.stderr.splitlines()) == (128 + signal.SIGINT, ["interrupted"])
    assert errors == []
    assert not (running / "report").exists()


def test_the_first_completions_appear(browser, watch, running):
    errors = []
    (running / "completions" / "step-00001.jsonl").unlink()
    page = browser.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address_of(watch(running)))
    assert page.locator("#list").count() == 0
    train_step(running, 4)
    expect(page, "#list li").to_have_count(1)
    train_step(running, 5)
    expect(page, "#list li").to_have_count(2)
    assert errors == []


def test_a_run_that_starts_again_in_its_folder_is_shown_from_its_start(browser, watch, running):
    errors = []
    page = visit(browser, address_of(watch(running)), errors)
    # While it is prepared, there is no run.json.
    record = (running / "run.json").read_text()
    (running / "run.json").unlink()
    expect(page, "#live").to_contain_text("run.json does not exist")
    shutil.rmtree(running / "completions")
    (running / "metrics.jsonl").unlink()
    (running / "run.json").write_text(record)
    expect(page, "#browser").to_contain_text("No completions yet")
    expect(page, "#live").to_have_text(re.compile("^Live, "))
    assert page.locator("main > section").count() == 4

    (running / "completions").mkdir()
    train_step(running, 1)
    expect(page, "#count").to_have_text("1 of 1 completions")
    train_step(running, 2)
    expect(page, "#count").to_have_text("2 of 2 completions")
    assert "All 2 completions" in page.locator("#browser > p.quiet").inner_text()
    assert errors == []


def test_keys_in_an_empty_list_do_not_end_the_updates(browser, watch, running):
    errors = []
    page = visit(browser, address_of(watch(running)), errors)
    page.fill("[name=text]", "in no completion")
    expect(page, "#count").to_have_text("0 of 1 completions")
    page.press("#list", "ArrowDown")
    train_step(running, 2)
    expect(page, "#count").to_have_text("0 of 2 completions")
    assert errors == []


def test_what_a_model_wrote_stays_text_when_the_page_is_renewed(browser, watch, running):
    errors = []
    page = visit(browser, address_of(watch(running)), errors)
    lines = [completion(4, text, 0.0, question=text) for text in HOSTILE]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (running / "completions" / "step-00004.jsonl").write_text(text)
    expect(page, "#list li").to_have_count(1 + len(HOSTILE))
    page.focus("#list")
    for _ in HOSTILE:
        page.keyboard.press("ArrowDown")
    assert page.evaluate("window.hacked") is None
    assert errors == []


def test_a_run_is_watched_from_its_start_to_its_end(browser, warm, watch, tmp_path):
    folder = tmp_path / "trained"
    training = warm.start(RECIPE, *TINY, "--output-dir", folder, cwd=tmp_path)
    wait_for(training, lambda: lock.is_held(folder))
    page = browser.new_page()
    page.goto(address_of(watch(folder)))
    finish(training)
    expect(page, ".state").to_have_text("Complete.")
    assert "3 of 3" in page.locator("header").inner_text()
    assert page.locator("table.figures", has_text="pass@1").count() > 0


def test_the_address_is_told_at_once_also_to_a_pipe(running):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "lora_grpo", "watch", str(running), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        line = server.stdout.readline()
        server.terminate()
    assert "http://127.0.0.1:" in line


def test_a_page_that_has_not_changed_is_not_sent_again(watch, running):
    address = address_of(watch(running))
    with urllib.request.urlopen(address) as response:
        etag = response.headers["ETag"]
        assert response.status == 200
    request = urllib.request.Request(address, headers={"If-None-Match": etag})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request)
    assert raised.value.code == 304


def test_a_run_that_can_no_longer_be_read_is_one_line(watch, running):
    address = address_of(watch(running))
    (running / "run.json").unlink()
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(address)
    assert raised.value.code == 503
    text = raised.value.read().decode()
    assert "run.json" in text and "\n" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "RUN"),
        (["missing", "--port", "0"], "missing/run.json does not exist"),
        ([".", "--port", "0"], "run.json does not exist"),
        (["starter", "--port", "70000"], "--port is '70000'"),
        (["starter", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8008"),
    ],
)
def test_mistakes_end_with_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert verbs.run_front_door(["watch", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "host", "code"),
    [
        ([], "127.0.0.1", 200),
        ([], "localhost:1234", 200),  # of an ssh tunnel
        ([], "attacker.example:8008", 400),
        ([], "127.0.0.1.attacker.example", 400),
        (["--host", "0.0.0.0"], "gpu-box:8008", 200),
    ],
)
def test_a_web_site_whose_name_leads_here_gets_nothing(flags, host, code, watch, running):
    address = address_of(watch(running, *flags)).replace("0.0.0.0", "127.0.0.1")
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    with contextlib.closing(connection):
        connection.request("GET", "/", headers={"Host": host})
        response = connection.getresponse()
        assert response.status == code
        assert (b"my_run" in response.read()) is (code == 200)


def test_a_port_in_use_is_one_line(running, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert verbs.run_front_door(["watch", str(running), "--port", str(port)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
