"""A push is one visible change, goes on after whatever ended it, sends nothing twice, and leaks nothing."""

import io
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.utils._http
import pytest
from helpers.hub_stand_in import TOKEN, USER, Change, HubStandIn
from huggingface_hub import constants

from lora_grpo.errors import RunError, UserError
from lora_grpo.hub import push, upload_files
from lora_grpo.hub import token as hub_token
from lora_grpo.hub.upload_files import CARD_MARK, UploadFile

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "push.py"
NAME = f"{USER}/trained"
SIGNATURE = "signed-and-secret"


@pytest.fixture
def server():
    standing = HubStandIn()
    yield standing
    standing.close()


@pytest.fixture
def client(monkeypatch):
    """Let this process's huggingface_hub reach a server, over HTTP alone; what it would sleep is noted instead."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    slept = []
    clock = SimpleNamespace(sleep=slept.append)
    monkeypatch.setattr(huggingface_hub.utils._http, "time", clock)
    yield slept
    huggingface_hub.close_session()


@pytest.fixture
def environment(server, tmp_path):
    """What a person's shell would have, with the Hub's address."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTEST"))}
    return known | {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "hf_home"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def weights(count=2, size=50_000, seed=0):
    return [
        UploadFile(f"model-{n + 1:05}-of-{count:05}.safetensors", bytes([n + 1, seed]) * (size // 2))
        for n in range(count)
    ]


def files(count=2, seed=0):
    return [
        *weights(count, seed=seed),
        UploadFile("config.json", b"{}"),
        UploadFile("README.md", f"# card\n{CARD_MARK}\n".encode()),
    ]


def asked(server, public=False, files=None, kind="merged"):
    return push.Push(NAME, kind, files if files is not None else FILES, public, server.url)


FILES = files()


def pushed(server, **how):
    waited = []
    return push.push(asked(server, **how), wait=waited.append), waited


def assert_whole(server, wanted=FILES, name=NAME):
    assert {file.name: file.content for file in wanted} == {
        path: server.content(name, path) for path in server.repositories[name].names()
    }


def assert_one_change(server, name=NAME):
    """Main was empty, then everything: nobody saw anything between, and no commit went there."""
    repository = server.repositories[name]
    assert len(repository.mains) == 2 and list(repository.mains[0]) == [".gitattributes"]
    assert {ref for ref, _ in repository.commits} == {"refs/pr/1"} and len(repository.changes) == 1


def assert_sent_once(server):
    assert set(server.completed.values()) <= {1}, server.completed
    sizes = {oid: len(content) for oid, content in server.objects.items()}
    assert {oid: server.received[oid] for oid in sizes} == sizes


def assert_nothing_leaked(*texts):
    for text in texts:
        assert TOKEN not in text and TOKEN[3:20] not in text and SIGNATURE not in text


# What arrives


def test_a_fresh_push_is_private_and_one_change(server, client):
    address, waited = pushed(server)
    assert address == f"{server.url}/{NAME}" and waited == client == []
    assert server.repositories[NAME].private
    assert_whole(server)
    assert_one_change(server)
    assert_sent_once(server)
    messages = [message for _, message in server.repositories[NAME].commits]
    assert messages == [*(f"Add {file.name}" for file in FILES[:2]), "Add card, configuration and tokenizer"]


def test_what_is_there_is_not_sent_again(server, client, capsys):
    pushed(server)
    before = len(server.requests)
    pushed(server)
    asked_again = [(method, path) for method, path in server.requests[before:] if method != "GET"]
    assert asked_again == [] and len(server.repositories[NAME].mains) == 2
    assert "holds all 4 files as they are here" in capsys.readouterr().out


def test_another_push_sends_what_changed_and_deletes_what_an_earlier_one_left(server, client, capsys):
    pushed(server)
    repository = server.repositories[NAME]
    repository.refs["main"]["notes.txt"] = b"the user's own"
    repository.refs["main"]["other.safetensors"] = b"the user's own"
    repository.refs["main"][".eval_results/theirs.yaml"] = b"the user's own"
    repository.refs["main"][".eval_results/lora-grpo-gsm8k.yaml"] = b"of the old weights"
    new = [
        *weights(1, seed=5),
        UploadFile("config.json", b"{}"),
        UploadFile("README.md", f"# other card\n{CARD_MARK}\n".encode()),
    ]
    first_bytes = sum(server.received.values())
    pushed(server, files=new)
    assert repository.names() == sorted(
        [file.name for file in new] + ["notes.txt", "other.safetensors", ".eval_results/theirs.yaml"]
    )
    assert sum(server.received.values()) == first_bytes + new[0].size
    said = capsys.readouterr().out
    assert "deleting model-00001-of-00002.safetensors" in said and "replacing README.md" in said


def test_weights_that_are_left_over_are_a_change_too(server, client):
    pushed(server)
    repository = server.repositories[NAME]
    repository.set("main", {**repository.refs["main"], "model-00003-of-00003.safetensors": FILES[0].sha256})
    pushed(server)
    assert_whole(server)


OF_EACH_KIND = {
    "adapter": [
        UploadFile("adapter_config.json", b"{}"), UploadFile("adapter_model.safetensors", b"adapter" * 9), FILES[-1],
    ],
    "merged": FILES,
    "gguf": [UploadFile("model.gguf", b"GGUF" * 9), FILES[-1]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "holds"),
    [("adapter", "merged", r"an adapter \(adapter_config"), ("merged", "adapter", r"a whole model \(config")],
)
def test_an_adapter_and_a_merged_model_do_not_share_a_repository(server, client, first, second, holds):
    """Loaded from there, the merged model would have the adapter applied a second time."""
    pushed(server, files=OF_EACH_KIND[first], kind=first)
    before = len(server.requests)
    with pytest.raises(UserError, match=rf"{NAME} holds {holds}.*; push the .* to a repository of its own"):
        pushed(server, files=OF_EACH_KIND[second], kind=second)
    assert {method for method, _ in server.requests[before:]} == {"GET"}
    assert_whole(server, OF_EACH_KIND[first])


def test_nor_a_pull_request(server, client):
    wanted = asked(server)
    server.make(NAME)
    repository = server.repositories[NAME]
    repository.changes.append(Change(1, wanted.title, USER, repository.refs["main"]))
    repository.refs["refs/pr/1"] = {**repository.refs["main"], "adapter_config.json": b"{}"}
    with pytest.raises(UserError, match="holds an adapter"):
        push.push(wanted)
    assert not server.received


@pytest.mark.parametrize("other", ["adapter", "merged"])
def test_gguf_files_may_lie_beside_anything(server, client, other):
    pushed(server, files=OF_EACH_KIND[other], kind=other)
    pushed(server, files=OF_EACH_KIND["gguf"], kind="gguf")
    pushed(server, files=OF_EACH_KIND[other], kind=other)
    assert_whole(server, [*OF_EACH_KIND[other], OF_EACH_KIND["gguf"][0]])


def test_a_card_that_the_kit_did_not_write_is_not_replaced(server, client):
    server.make(NAME)
    server.repositories[NAME].refs["main"]["README.md"] = b"# My own words\n"
    before = len(server.requests)
    with pytest.raises(UserError, match=r"has a README.md that lora_grpo did not write; delete it there first, or"):
        pushed(server)
    assert {method for method, _ in server.requests[before:]} == {"GET"}
    assert server.content(NAME, "README.md") == b"# My own words\n"


def test_large_files_in_parts_arrive_whole(client):
    server = HubStandIn(part_bytes=20_000)
    try:
        pushed(server)
        assert_whole(server)
        assert_sent_once(server)
    finally:
        server.close()


# Who sees it


def test_a_public_repository_is_refused_until_it_is_asked_for(server, client):
    server.make(NAME, private=False)
    with pytest.raises(UserError, match="can be seen by everybody; pass --public"):
        pushed(server)
    assert server.repositories[NAME].commits == [] and not server.received
    pushed(server, public=True)
    assert_whole(server)


def test_a_private_repository_stays_private(server, client, capsys):
    server.make(NAME, private=True)
    pushed(server, public=True)
    assert server.repositories[NAME].private
    assert "is private and stays private" in capsys.readouterr().err
    assert_whole(server)


def test_public_makes_a_public_repository(server, client):
    pushed(server, public=True)
    assert not server.repositories[NAME].private


# What goes wrong on the way

BUSY = {"status": 429, "headers": {"Retry-After": "7"}}
LIMITED = {"status": 429, "headers": {"RateLimit": '"api";r=0;t=120', "RateLimit-Policy": '"w";"api";q=5;w=300'}}
PASSING = {
    "the batch is answered 503": ("POST", "lfs/objects/batch", {}),
    "a commit is answered 500": ("POST", "/commit/", {"status": 500}),
    "too many requests at a commit": ("POST", "/commit/", BUSY),
    "too many requests for the tree": ("GET", "/tree/", BUSY),
    "the rate limit is used up": ("POST", "/discussions$", LIMITED),
    "a commit takes too long": ("POST", "/commit/", {"status": 408}),
    "a commit meets another": ("POST", "/commit/", {"status": 412}),
    "a merge meets another": ("POST", "/merge$", {"status": 409}),
    "a file is cut off": ("PUT", "/lfs/", {"do": "cut"}),
    "storage answers 500": ("PUT", "/lfs/", {"status": 500}),
    "the repository is made and the answer lost": ("POST", "repos/create", {"do": "lose"}),
    "a pull request is made and the answer lost": ("POST", "/discussions$", {"do": "lose"}),
    "a file comes in and the answer is lost": ("PUT", "/lfs/", {"do": "lose"}),
    "three commits are made and the answers lost": ("POST", "/commit/", {"do": "lose", "times": 3}),
    "the draft is published and the answer lost": ("POST", "/status$", {"do": "lose"}),
    "the merge is made and the answer lost": ("POST", "/merge$", {"do": "lose"}),
}


@pytest.mark.parametrize(("method", "path", "how"), PASSING.values(), ids=PASSING)
def test_what_passes_is_tried_again(server, client, capsys, method, path, how):
    fault = server.fail(method, path, **how)
    _, waited = pushed(server)
    assert fault.times == 0 and len(waited) + len(client) >= 1  # the kit's attempts, or the client's own
    assert_whole(server)
    assert_one_change(server)
    if how is BUSY:
        assert waited == [7.0]
        assert "the Hub answered 429 (no luck); trying again in 7 s (1 of 5)" in capsys.readouterr().err
    if how is LIMITED:
        assert waited == [120.0]
    # The client cannot know that a file came in whose answer was lost, and sends that one again.
    again = 1 if (method, how.get("do")) == ("PUT", "lose") else 0
    assert sum(server.completed.values()) == 2 + again


LASTING = {
    "every file is cut off": ("PUT", "/lfs/", {"do": "cut"}),
    "storage answers 503": ("PUT", "/lfs/", {}),
    "every commit is answered 502": ("POST", "/commit/", {"status": 502}),
    "too many requests": ("POST", "/discussions$", BUSY),
    "every merge is answered 500": ("POST", "/merge$", {"status": 500}),
    "the token is echoed": ("POST", "/commit/", {"status": 500, "message": f"bad Bearer {TOKEN} {TOKEN}"}),
}


@pytest.mark.parametrize(("method", "path", "how"), LASTING.values(), ids=LASTING)
def test_what_lasts_ends_in_one_line_and_the_same_command_goes_on(server, client, capsys, method, path, how):
    server.fail(method, path, times=1000, **how)
    logged = logging.StreamHandler(io.StringIO())
    logging.getLogger("huggingface_hub").addHandler(logged)
    with pytest.raises(RunError, match=r"run the same command again: \d of 4 files are there already") as caught:
        pushed(server)
    assert "\n" not in str(caught.value)
    # Not in the error, nor in one that it was raised from.
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    logging.getLogger("huggingface_hub").removeHandler(logged)
    shown = "".join(traceback.format_exception(caught.value))
    assert_nothing_leaked(*capsys.readouterr(), str(caught.value), shown, logged.stream.getvalue())
    assert [list(main) for main in server.repositories[NAME].mains] == [[".gitattributes"]]
    server.faults.clear()
    pushed(server)
    assert_whole(server)
    assert_one_change(server)
    assert set(server.completed.values()) == {1}


@pytest.mark.parametrize("headers", [{"Retry-After": "86400"}, {"RateLimit": '"api";r=0;t=86400'}])
def test_a_wait_of_a_day_ends_it(server, client, headers):
    server.fail("POST", "/discussions$", status=429, headers=headers)
    until = time.strftime("%Y-%m-%d", time.localtime(time.time() + 86400))
    with pytest.raises(
        RunError, match=rf"is to wait until {until} \d\d:\d\d: the Hub answered 429.*; then run the same"
    ):
        pushed(server)
    pushed(server)
    assert_whole(server)


def test_a_day_is_not_slept_by_the_client_either(server, client):
    server.fail("PUT", "/lfs/", status=429, headers={"Retry-After": "86400"})
    with pytest.raises(RunError, match="is to wait until"):
        pushed(server)
    assert client == []
    pushed(server)
    assert_whole(server)


def test_attempts_begin_anew_when_a_file_more_has_arrived(server, client):
    """Every commit fails three times: many more failures than end a push, and never as many without a step ahead."""
    many = files(count=4)
    server.fail("POST", "/commit/", times=_ThreeOfFour())
    _, waited = pushed(server, files=many)
    assert_whole(server, many)
    assert waited == [1.0, 2.0, 4.0] * 5 and len(waited) > push.ATTEMPTS


class _ThreeOfFour:
    """True three times of four."""

    def __init__(self):
        self.turn = 0

    def __bool__(self):
        self.turn += 1
        return self.turn % 4 != 0

    def __isub__(self, _):
        return self


def test_stopped_by_hand_it_says_how_to_go_on(server, client, capsys):
    server.fail("POST", "/commit/", status=503)

    def stop(seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push.push(asked(server), wait=stop)
    assert capsys.readouterr().err.endswith("stopped; the same command goes on\n")
    pushed(server)
    assert_whole(server)
    assert_sent_once(server)


def test_a_merge_that_brought_something_else_is_noticed(server, client, monkeypatch):
    whole = server.merge

    def merge(repository, change):
        whole(repository, change)
        repository.refs["main"].pop("config.json")

    monkeypatch.setattr(server, "merge", merge)
    with pytest.raises(RunError, match=r"was merged, and config.json is not in tester/trained as it is here"):
        pushed(server)


def test_a_conflict_is_left_behind(server, client):
    """The repository changed where an interrupted push writes: a new pull request takes over, and sends no weights."""
    server.fail("POST", "/merge$", status=500, times=1000)
    with pytest.raises(RunError):
        pushed(server)
    repository = server.repositories[NAME]
    repository.set("main", {**repository.refs["main"], "README.md": f"an older card\n{CARD_MARK}".encode()})
    server.faults.clear()
    pushed(server)
    assert_whole(server)
    assert_sent_once(server)
    assert [change.status for change in repository.changes] == ["closed", "merged"]


def test_a_strangers_pull_request_is_not_gone_on_with(server, client):
    server.make(NAME, private=False)
    wanted = asked(server, public=True)
    repository = server.repositories[NAME]
    repository.changes.append(Change(1, wanted.title, "stranger", repository.refs["main"]))
    repository.refs["refs/pr/1"] = {**repository.refs["main"], "modeling.py": b"import os"}
    push.push(wanted)
    assert_whole(server)
    assert [change.status for change in repository.changes] == ["draft", "merged"]


def test_a_refusal_is_told_at_once(server, client):
    server.fail("POST", "repos/create", status=403, message="You don't have the rights to create a model")
    with pytest.raises(UserError, match=r"the token may not do that in tester/trained.*rights to create"):
        pushed(server)
    server.fail("GET", "/api/models", status=401, message="Invalid credentials in Authorization header", times=9)
    with pytest.raises(UserError, match=r"the Hub refuses the token; run `hf auth login`"):
        pushed(server)


def test_a_refusal_of_the_xet_storage_is_told_as_such(server, client, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    server.fail("GET", "/xet-write-token/refs/pr/1$", status=403, message=f"not with {TOKEN}")
    with pytest.raises(UserError, match=r"the token may not do that in tester/trained: .*\(403 Forbidden\)") as caught:
        pushed(server)
    assert server.faults[0].times == 0
    assert_nothing_leaked(str(caught.value))


def test_what_a_gitignore_keeps_out_is_noticed(server, client):
    server.ignored = ("config.json",)
    with pytest.raises(RunError, match=r"does not have it as it is here; a \.gitignore"):
        pushed(server)
    assert len(server.repositories[NAME].mains) == 1


# The command


def push_script(fresh, environment, *arguments):
    return fresh.start(SCRIPT, *arguments, env=environment, cwd=ROOT)


def wait_for(held, process):
    while not held.reached.wait(0.02):
        assert process.wait(0) is None, process.said()


@pytest.fixture
def run(tmp_path):
    """A run's folder with an adapter that is large enough to be interrupted, and a record."""
    from helpers.pushed_runs import make_run

    return make_run(tmp_path / "run", adapter_bytes=3_000_000)


def test_killed_in_the_middle_of_a_file_and_given_again(server, environment, fresh, run):
    held = server.fail("PUT", "/lfs/", do="hold")
    process = push_script(fresh, environment, run, NAME)
    wait_for(held, process)
    process.kill()
    held.released.set()
    assert [list(main) for main in server.repositories[NAME].mains] == [[".gitattributes"]]
    done = push_script(fresh, environment, run, NAME).end()
    assert done.returncode == 0, done.stderr
    assert_one_change(server)
    assert set(server.completed.values()) == {1}
    local = {path.name: path.read_bytes() for path in (run / "adapter").iterdir()}
    assert server.content(NAME, "adapter_model.safetensors") == local["adapter_model.safetensors"]
    assert server.repositories[NAME].names() == [
        "README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert_nothing_leaked(*process.said(), done.stdout, done.stderr)
    again = push_script(fresh, environment, run, NAME).end()
    assert again.returncode == 0 and "holds all 6 files" in again.stdout
    assert set(server.completed.values()) == {1}


def test_killed_before_the_merge_and_given_again(server, environment, fresh, run):
    held = server.fail("POST", "/merge$", do="hold")
    process = push_script(fresh, environment, run, NAME)
    wait_for(held, process)
    process.kill()
    sent = sum(server.received.values())
    done = push_script(fresh, environment, run, NAME).end()
    assert done.returncode == 0, done.stderr
    assert "6 of 6 files are there already" in done.stdout
    assert sum(server.received.values()) == sent
    assert_one_change(server)


def test_a_dry_run_sends_nothing_and_needs_no_token(server, environment, fresh, run):
    del environment["HF_TOKEN"]
    done = push_script(fresh, environment, run, NAME, "--dry-run").end()
    assert done.returncode == 0 and done.stderr == ""
    assert server.requests == []
    assert "3.0 MB  adapter_model.safetensors" in done.stdout and "in 6 files" in done.stdout
    assert f"{NAME} would be made, private, where there is none; nothing was sent\n\n---\n" in done.stdout
    real = push_script(fresh, environment, run, NAME).end()
    assert real.returncode == 2 and real.stderr == (
        "error: there is no token for the Hub; run `hf auth login` or set HF_TOKEN\n"
    )
    assert server.requests == []


HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "bitsandbytes", "huggingface_hub")
MISTAKES = {
    "--help": 0,
    "": 2,
    "RUN me/name --whta adapter": 2,
    "RUN me/name --token verysecret": 2,
    f"RUN me/name --revision={TOKEN}": 2,
    f"{TOKEN} me/name": 2,
    f"RUN me/{TOKEN}": 2,
}


def test_arguments_are_told_of_before_anything_is_loaded(run):
    code = (
        "import runpy, sys\n"
        "script, heavy = sys.argv[1], sys.argv[2].split(',')\n"
        "for words in sys.argv[3:]:\n"
        "    sys.argv = [script, *words.split()]\n"
        "    try:\n        runpy.run_path(script, run_name='__main__')\n"
        "    except SystemExit as ended:\n        print('loaded', [n for n in heavy if n in sys.modules], ended.code)\n"
    )
    commands = [words.replace("RUN", str(run)) for words in MISTAKES]
    done = subprocess.run(
        [sys.executable, "-c", code, str(SCRIPT), ",".join(HEAVY), *commands], capture_output=True, text=True, cwd=ROOT
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert ends == [f"loaded [] {code}" for code in MISTAKES.values()], done.stderr
    assert [line[:40] for line in done.stderr.splitlines() if "token" in line] == [
        "error: a token is never an argument: it "
    ] * 4
    assert "verysecret" not in done.stderr
    assert_nothing_leaked(done.stdout, done.stderr)


@pytest.mark.parametrize("name", ["noowner", "a/b/c", "me/--x", "me/na me", "me/x.git", ""])
def test_no_repository_has_such_a_name(name):
    with pytest.raises(UserError, match=r"repository|owner"):
        push.check_repo_id(name)


def test_offline_is_told(monkeypatch, server):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        pushed(server)


@pytest.mark.parametrize("token", ["hf_with space", "hf_tök", "hf_a\tb"])
def test_what_cannot_be_a_token_is_told_without_showing_it(monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match="holds characters that no token has") as caught:
        hub_token.find()
    assert token not in str(caught.value)


def test_what_the_client_logs_reaches_no_other_log(capsys):
    """A log of the whole process would have the address that is signed."""
    everything = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(everything)
    try:
        with hub_token.scrubbed(TOKEN):
            logging.getLogger("huggingface_hub.utils").warning("PUT https://s3/x?X=%s by %s", SIGNATURE, TOKEN)
    finally:
        logging.getLogger().removeHandler(everything)
    assert everything.stream.getvalue() == "" and capsys.readouterr().err == "PUT https://s3/x by ***\n"


def test_an_address_that_is_none_is_not_tried_again(client):
    waited = []
    with pytest.raises(RunError, match=r"failed: .*protocol"):
        push.push(push.Push(NAME, "merged", FILES, False, "no.scheme"), wait=waited.append)
    assert waited == []


def test_texts_are_scrubbed():
    line = f"PUT https://s3/x?X-Amz-Signature={SIGNATURE}&y=1 with 'Bearer abc'\n{TOKEN} hf_AnotherOfSomebody"
    assert hub_token.scrub(line, TOKEN) == "PUT https://s3/x with '*** *** ***"
    assert hub_token.scrub("my secret is odd", "secret") == "my *** is odd"


# What goes up


def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/home/me/models/base", "r": 2}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


def test_only_files_of_known_kinds_go_up(tmp_path):
    folder = adapter(tmp_path)
    for name in ("LICENSE", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    for name in (
        ".lock",
        ".adapter.partial",
        "manifest.json",
        "README.md",
        "trainer_state.json",
        "secrets.json",
        "a.py",
    ):
        (folder / name).write_text("{}")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "config.json").write_text("{}")
    found, left = upload_files.collect(folder, "adapter", None)
    assert [file.name for file in found] == [
        "LICENSE", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.json",
    ]  # fmt: skip
    assert left == ["a.py", "deeper/config.json", "secrets.json", "trainer_state.json"]


def test_papers_are_texts_of_known_names(tmp_path):
    folder = adapter(tmp_path)
    good = ["COPYING", "LICENCE.rst", "LICENSE", "LICENSE-APACHE", "LICENSE-MIT.txt", "NOTICE.md", "USE_POLICY.md"]
    bad = ["LICENSE_KEY.env", "LICENSE.py", "NOTICE.py", "LICENSES.json", "LICENSE-key.env", "NOTICES"]
    for name in good + bad:
        (folder / name).write_text("text")
    found, left = upload_files.collect(folder, "adapter", None)
    assert [file.name for file in found] == [*good, "adapter_config.json", "adapter_model.safetensors"]
    assert left == sorted(bad)
    for content in (b"\x80\x04\x95", b"a\0b"):
        (folder / "LICENSE").write_bytes(content)
        with pytest.raises(UserError, match="LICENSE is no text"):
            upload_files.collect(folder, "adapter", None)


@pytest.mark.parametrize("name", ["training_args.bin", "optimizer.pt", "x.pkl", "deeper/rng_state.pth"])
def test_a_pickle_is_refused(tmp_path, name):
    folder = adapter(tmp_path)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"")
    with pytest.raises(UserError, match="it is a pickle, and reading a pickle runs whatever code is in it"):
        upload_files.collect(folder, "adapter", None)


def test_a_link_to_outside_is_refused(tmp_path):
    folder = adapter(tmp_path)
    (tmp_path / "private.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to(tmp_path / "private.json")
    with pytest.raises(UserError, match="is a link to outside"):
        upload_files.collect(folder, "adapter", None)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to("vocab.json")
    assert "tokenizer.json" in [file.name for file in upload_files.collect(folder, "adapter", None)[0]]


def test_paths_of_this_machine_stay_here(tmp_path):
    folder = adapter(tmp_path)
    for base, expected in ((None, "base"), ("owner/base", "owner/base")):
        found, _ = upload_files.collect(folder, "adapter", base)
        settings = json.loads(found[0].content)
        assert settings == {"base_model_name_or_path": expected, "r": 2}
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "/home/me/models/base"
    gguf = tmp_path / "gguf"
    gguf.mkdir()
    (gguf / "x.gguf").write_bytes(b"GGUF")
    (gguf / "Modelfile").write_text(f"FROM {gguf}/x.gguf\n")
    with pytest.raises(UserError, match=r"Modelfile holds a path of this machine"):
        upload_files.collect(gguf, "gguf", None)
    (gguf / "Modelfile").write_text("FROM ./x.gguf\n")
    assert len(upload_files.collect(gguf, "gguf", None)[0]) == 2


def test_the_home_of_whoever_pushes_stays_here(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/somebody"))
    folder = adapter(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"vocab_file": "/home/somebody/.cache/vocab.txt"}')
    with pytest.raises(UserError, match=r"tokenizer_config.json holds a path of this machine"):
        upload_files.collect(folder, "adapter", None)


def test_what_is_pushed_is_found_out_or_refused(tmp_path, run):
    assert upload_files.find(str(run), None) == (run / "adapter", "adapter")
    folder = adapter(tmp_path)
    assert upload_files.find(str(folder), None) == (folder, "adapter")
    with pytest.raises(UserError, match=r"--what gguf was asked for, and .* holds adapter_config.json"):
        upload_files.find(str(folder), "gguf")
    with pytest.raises(UserError, match=r"has no merged/ with config.json and .safetensors weights; make it"):
        upload_files.find(str(run), "merged")
    with pytest.raises(UserError, match=r"^'' is no folder"):
        upload_files.find("", None)
    with pytest.raises(UserError, match="is no folder"):
        upload_files.find(str(tmp_path / "missing"), None)
    with pytest.raises(UserError, match=r"holds no run.json, no adapter_config.json"):
        upload_files.find(str(tmp_path), None)
    (run / "gguf").mkdir()
    (run / "gguf" / "x.gguf").write_bytes(b"GGUF")
    assert upload_files.find(str(run), "gguf") == (run / "gguf", "gguf")
    shutil.copytree(run / "adapter", run / "merged")
    with pytest.raises(UserError, match=r"has no merged/ with config.json"):
        upload_files.find(str(run), "merged")
