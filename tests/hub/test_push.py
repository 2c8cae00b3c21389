"""A push is a single commit, can be repeated after any failure, uploads nothing twice, and leaks no secrets."""

import itertools
import os
import re
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.utils._http
import pytest
from helpers.gguf_files import write_header
from helpers.hub_stand_in import SIGNATURE, TOKEN, USER, HubStandIn, Repository
from helpers.pushed_runs import BASE, COMMIT, make_run
from huggingface_hub import constants
from huggingface_hub.repocard import RepoCard

from lora_grpo.errors import RunError, UserError
from lora_grpo.hub import push
from lora_grpo.hub.uploads import CARD_MARK, UploadFile

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "push.py"
NAME = f"{USER}/trained"
CARD = UploadFile("README.md", f"# card\n{CARD_MARK}\n".encode())
FILES = {
    "adapter": [UploadFile("adapter_config.json", b"{}"), UploadFile("adapter_model.safetensors", b"a" * 99), CARD],
    "merged": [
        UploadFile("model-00001-of-00002.safetensors", b"1" * 50_000),
        UploadFile("model-00002-of-00002.safetensors", b"2" * 50_000),
        UploadFile("config.json", b"{}"),
        CARD,
    ],
    "gguf": [UploadFile("model.gguf", b"GGUF" * 9), CARD],
}
MERGED = FILES["merged"]


@pytest.fixture
def server():
    stand_in = HubStandIn()
    yield stand_in
    stand_in.close()


@pytest.fixture
def client(monkeypatch, server, tmp_path):
    """Connect huggingface_hub in this process to the test server, and skip the delays between retries."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.utils._http, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield
    huggingface_hub.close_session()


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", adapter_bytes=3_000_000)


def assert_holds(server, files):
    assert {file.name: file.content for file in files}.items() <= server.repositories[NAME].files.items()


def assert_nothing_leaked(*texts):
    for text in texts:
        assert TOKEN not in text and TOKEN[3:20] not in text and SIGNATURE not in text


# Uploads


def test_a_push_creates_a_private_repository_with_one_commit(server, client):
    assert push.send(NAME, "merged", MERGED) == f"{server.url}/{NAME}"
    repository = server.repositories[NAME]
    assert repository.private and repository.commits == ["Upload merged with lora_grpo"]
    assert_holds(server, MERGED)


def test_the_same_push_again_sends_nothing(server, client):
    push.send(NAME, "merged", MERGED)
    push.send(NAME, "merged", MERGED)
    assert len(server.repositories[NAME].commits) == 1 and set(server.uploads.values()) == {1}


def test_another_push_deletes_the_weights_of_an_earlier_one_only(server, client, capsys):
    push.send(NAME, "merged", MERGED)
    repository = server.repositories[NAME]
    users = {"notes.txt": b"", "other.safetensors": b""}
    repository.files |= users
    new = [UploadFile("model.safetensors", b"3" * 50_000), *MERGED[2:]]
    push.send(NAME, "merged", new)
    assert repository.files.keys() - {".gitattributes"} == {file.name for file in new} | users.keys()
    assert "deleting model-00001-of-00002.safetensors" in capsys.readouterr().out
    assert len(repository.commits) == 2


SETTINGS = [("adapter", "chat_template.jinja"), ("adapter", "tokenizer.json"), ("merged", "generation_config.json")]
SETTINGS += [("merged", "chat_template.jinja"), ("merged", "additional_chat_templates/tool_use.jinja")]
SETTINGS += [("gguf", name) for name in ("template", "system", "params", "model.Modelfile")]


@pytest.mark.parametrize(("kind", "name"), SETTINGS)
def test_settings_of_an_earlier_push_do_not_act_on_the_weights_of_another_one(server, client, kind, name):
    server.repositories[NAME] = Repository(True, {name: b"{}"})
    with pytest.raises(UserError, match=f"{NAME} has no card and contains {re.escape(name)}, which would act"):
        push.send(NAME, kind, FILES[kind])
    repository = server.repositories[NAME]
    assert repository.files == {name: b"{}"}  # of the user: there was no earlier push
    push.send(NAME, kind, [*FILES[kind], UploadFile(name, b"[]")])
    assert repository.files[name] == b"[]"
    push.send(NAME, kind, FILES[kind])
    assert repository.files.keys() == {file.name for file in FILES[kind]}


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(FILES, 2)])
def test_two_kinds_of_models_do_not_share_a_repository(server, client, first, second):
    """Otherwise, loading the merged model would apply the adapter twice, and the card would describe only one."""
    push.send(NAME, first, FILES[first])
    with pytest.raises(UserError, match=rf"{NAME} already contains a model of kind '{first}'"):
        push.send(NAME, second, FILES[second])
    assert len(server.repositories[NAME].commits) == 1
    push.send(NAME, first, FILES[first])
    assert_holds(server, FILES[first])


def test_a_card_that_the_kit_did_not_write_is_not_replaced(server, client):
    server.repositories[NAME] = Repository(True, {"README.md": b"# My own words\n"})
    with pytest.raises(UserError, match=r"README.md that lora_grpo did not write"):
        push.send(NAME, "merged", MERGED)
    assert server.repositories[NAME].files == {"README.md": b"# My own words\n"}


def test_a_public_repository_needs_public_and_a_private_one_stays_private(server, client, capsys):
    server.repositories[NAME] = Repository(private=False)
    with pytest.raises(UserError, match="is public; pass --public"):
        push.send(NAME, "merged", MERGED)
    assert server.repositories[NAME].commits == [] and not server.uploads
    push.send(NAME, "merged", MERGED, public=True)
    assert_holds(server, MERGED)
    server.repositories[NAME].private = True
    push.send(NAME, "merged", MERGED, public=True)
    assert server.repositories[NAME].private and "stays private" in capsys.readouterr().err


# Failures during a push


LASTING = {
    "every upload is cut off": ("PUT", "/lfs/.*", {"status": None}),
    "the commit is rejected with the token": ("POST", "/commit/", {"status": 500, "message": f"Bearer {TOKEN} bad"}),
    "the connection breaks at the start": ("POST", "repos/create", {"status": None}),
}


@pytest.mark.parametrize(("method", "path", "failure"), LASTING.values(), ids=LASTING)
def test_a_lasting_failure_is_one_line_and_the_same_push_goes_on(server, client, capfd, method, path, failure):
    server.fail(method, path, times=1000, **failure)
    with pytest.raises(RunError, match=r"the push to tester/trained failed: .*; run the same command again") as caught:
        push.send(NAME, "merged", MERGED)
    assert "\n" not in str(caught.value) and caught.value.__cause__ is None
    assert_nothing_leaked(str(caught.value), *capfd.readouterr())
    assert not any(repository.commits for repository in server.repositories.values())
    server.faults.clear()
    push.send(NAME, "merged", MERGED)
    assert_holds(server, MERGED)
    assert set(server.uploads.values()) == {1}


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("repos/create", 403, r"the token may not write to tester/trained: .*no rights"),
        ("/commit/", 403, r"the token may not write to tester/trained: .*no rights"),
    ],
)
def test_a_missing_permission_is_the_users_to_fix(server, client, path, status, message):
    server.fail("POST", path, status=status, message="no rights", times=9)
    with pytest.raises(UserError, match=message):
        push.send(NAME, "merged", MERGED)


# The license of the base


def license_of(run):
    files, *_ = push.prepare(run / "adapter", "adapter", NAME)
    data = RepoCard(files[-1].content.decode()).data.to_dict()
    return {key: value for key, value in data.items() if key.startswith("license")}


@pytest.mark.parametrize("card", [{}, {"license_name": "terms", "license_link": "LICENSE"}])
def test_the_license_is_asked_of_the_hub_once(server, client, run, card, capsys):
    server.repositories[BASE] = Repository(private=False, card_data={"license": "other", "language": ["zh"], **card})
    expected = {"license": "other", **card}
    if card:
        expected["license_link"] = f"https://huggingface.co/{BASE}/blob/main/LICENSE"
    assert license_of(run) == expected and capsys.readouterr().err == ""
    assert server.requests == [("GET", f"/api/models/{BASE}/revision/{COMMIT}")]


@pytest.mark.parametrize("status", [500, None, 200])
def test_a_hub_that_does_not_tell_the_license_is_a_note(server, client, run, capsys, status):
    server.fail("GET", "/api/models/", status=status, message=f"Bearer {TOKEN}\nbad", times=99)  # 200: not a model
    assert license_of(run) == {}
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith(f"note: the card has no license, because {BASE} was not read: ")
    assert_nothing_leaked(note)


# The command


@pytest.fixture
def push_script(server, tmp_path, fresh):
    """Run scripts/push.py in a shell's environment with the server's address."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTEST"))}
    environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1"}

    def start(*arguments, token=TOKEN):
        return fresh.start(SCRIPT, *arguments, env=environment | ({"HF_TOKEN": token} if token else {}), cwd=ROOT).end()

    return start


def test_the_command_uploads_a_run_and_prints_no_token(server, push_script, run):
    done = push_script(run, NAME)
    assert done.returncode == 0, done.stderr
    repository = server.repositories[NAME]
    assert repository.private and repository.files.keys() - {".gitattributes"} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert repository.files["adapter_model.safetensors"] == (run / "adapter/adapter_model.safetensors").read_bytes()
    assert_nothing_leaked(done.stdout, done.stderr, *(str(content) for content in repository.files.values()))


def test_the_command_that_verifies_a_gguf_file_names_the_one_that_the_card_runs(server, client, tmp_path, capsys):
    (tmp_path / "files").mkdir()
    for name in ("mine.F16.gguf", "mine.Q8_0.gguf"):
        write_header(tmp_path / "files" / name)
    pushed = push.push_to_hub(push.PushOptions(str(tmp_path / "files"), NAME))
    assert f"ollama run hf.co/{NAME}:F16\n" in pushed.card
    assert f"--against 'http://127.0.0.1:11434#hf.co/{NAME}:F16'" in capsys.readouterr().out


@pytest.mark.parametrize(("trust", "flags"), [(True, "--trust-remote-code "), (False, "")])
def test_the_command_that_verifies_an_adapter_runs_the_code_of_its_base(server, client, tmp_path, capsys, trust, flags):
    run = make_run(tmp_path / "run", record__policy__trust_remote_code=trust)
    push.push_to_hub(push.PushOptions(str(run), NAME))
    expected = f" {run / 'adapter'} {flags}--against 'http://127.0.0.1:8000#trained'\n"
    assert expected in capsys.readouterr().out


def test_a_dry_run_asks_only_for_the_bases_license_and_needs_no_token(server, push_script, run):
    server.repositories[BASE] = Repository(private=False, card_data={"license": "apache-2.0"})
    done = push_script(run, NAME, "--dry-run", token=None)
    assert done.returncode == 0 and done.stderr == ""
    assert "3.0 MB  adapter_model.safetensors" in done.stdout and "6 files" in done.stdout
    assert (
        "\n\n---\n" in done.stdout
        and "\nlicense: apache-2.0\n" in done.stdout
        and done.stdout.endswith(f"{CARD_MARK}\n")
    )
    real = push_script(run, NAME, token=None)
    assert real.returncode == 2 and re.fullmatch("error: no Hub token found.*\n", real.stderr)
    assert server.requests == [("GET", f"/api/models/{BASE}/revision/{COMMIT}")] * 2


def test_a_token_in_the_arguments_is_refused_and_not_repeated(push_script, run):
    for words in (["me/name", "--token", "verysecret"], ["me/name", f"--revision={TOKEN}"], [f"me/{TOKEN}"]):
        done = push_script(run, *words)
        assert done.returncode == 2 and "a token must not be an argument" in done.stderr
        assert "verysecret" not in done.stderr
        assert_nothing_leaked(done.stdout, done.stderr)
