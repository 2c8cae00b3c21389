"""A push is a single commit, can be repeated after any failure, uploads nothing twice, and leaks no secrets."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.utils._http
import pytest
from helpers.hub_stand_in import SIGNATURE, TOKEN, USER, HubStandIn, Repository
from helpers.pushed_runs import BASE, COMMIT, make_run
from huggingface_hub import constants
from huggingface_hub.repocard import RepoCard

from lora_grpo.errors import RunError, UserError
from lora_grpo.hub import files as hub_files
from lora_grpo.hub import push
from lora_grpo.hub.files import CARD_MARK, UploadFile

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


@pytest.mark.parametrize(("first", "second"), [("adapter", "merged"), ("merged", "adapter")])
def test_an_adapter_and_a_merged_model_do_not_share_a_repository(server, client, first, second):
    """Otherwise, loading the merged model would apply the adapter twice."""
    push.send(NAME, first, FILES[first])
    with pytest.raises(UserError, match=rf"{NAME} already contains a model of kind '{first}'"):
        push.send(NAME, second, FILES[second])
    assert len(server.repositories[NAME].commits) == 1
    push.send(NAME, "gguf", FILES["gguf"])  # GGUF files are loaded by name, so they may share a repository with either
    push.send(NAME, first, FILES[first])
    assert_holds(server, [*FILES[first], *FILES["gguf"]])


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


@pytest.mark.parametrize(("method", "path", "how"), LASTING.values(), ids=LASTING)
def test_a_lasting_failure_is_one_line_and_the_same_push_goes_on(server, client, capfd, method, path, how):
    server.fail(method, path, times=1000, **how)
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
    files, _ = push.prepare(run / "adapter", "adapter", NAME)
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


# Selected files


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(make_run(tmp_path / "of") / "adapter", folder)
    (folder / "manifest.json").unlink()
    return folder


def names_in(folder, kind="adapter"):
    return [file.name for file in hub_files.collect(folder, kind, None)[0]]


def test_only_files_of_known_names_are_uploaded(adapter):
    for name in ("LICENSE", "NOTICE.md", "LICENSE.py", "LICENSE-key.env", ".lock", "manifest.json", "README.md"):
        (adapter / name).write_text("{}")
    for name in ("trainer_state.json", "secrets.json", "deeper/config.json", "training_args.bin"):
        (adapter / name).parent.mkdir(exist_ok=True)
        (adapter / name).write_text("{}")
    (adapter / "manifest.json").unlink()
    files, skipped = hub_files.collect(adapter, "adapter", None)
    assert [file.name for file in files] == [
        "LICENSE", "NOTICE.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert skipped == [
        "LICENSE-key.env",
        "LICENSE.py",
        "deeper/config.json",
        "secrets.json",
        "trainer_state.json",
        "training_args.bin",
    ]


def test_a_link_to_outside_the_folder_is_refused(tmp_path, adapter):
    (tmp_path / "private.json").write_text("{}")
    (adapter / "vocab.json").symlink_to(tmp_path / "private.json")
    with pytest.raises(UserError, match="links to outside"):
        names_in(adapter)
    (adapter / "vocab.json").unlink()
    (adapter / "vocab.json").symlink_to("tokenizer.json")
    assert "vocab.json" in names_in(adapter)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "adapter").symlink_to(adapter)
    with pytest.raises(UserError, match="links to outside"):
        names_in(tmp_path / "run" / "adapter")


def pushed(folder, name, base="owner/base"):
    """Return a file as it is uploaded."""
    kind = "adapter" if (folder / "adapter_config.json").is_file() else "merged"
    return next(file for file in hub_files.collect(folder, kind, base)[0] if file.name == name).read()


LOOK_LIKE_PATHS = {
    "eos_token": "/nothink", "pad_token": {"content": "~~", "special": True}, "unk_token": "./x", "bos_token": "/",
    "additional_special_tokens": ["/think", "../up", "~", r"\\server"], "chat_template": "/{{ messages }}/",
    "extra_special_tokens": {"image_token": "/img"}, "model_input_names": ["/a/b"], "added_tokens_decoder": {
        "0": {"content": "/nothink"}, "1": {"content": "C:/"},
    },
}  # fmt: skip


@pytest.mark.parametrize("extra", [{}, {"name_or_path": "/data/models/x"}], ids=["nothing to change", "a path too"])
def test_text_that_looks_like_a_path_is_uploaded_as_it_is(adapter, extra):
    text = json.dumps(LOOK_LIKE_PATHS | {"unk_token": "./é"} | extra, indent=5, ensure_ascii=False)
    (adapter / "tokenizer_config.json").write_text(text)
    uploaded = pushed(adapter, "tokenizer_config.json").decode()
    assert json.loads(uploaded) == LOOK_LIKE_PATHS | {"unk_token": "./é"}
    assert (uploaded == text) == (not extra) and "é" in uploaded
    for name in ("special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (adapter / name).parent.mkdir(exist_ok=True)
        (adapter / name).write_text('{"eos_token": "/nothink", "name": "~~"}')
        assert pushed(adapter, name) == (adapter / name).read_bytes()


PATHS = {
    "base_model_name_or_path": ("owner/base", "owner/base"),
    "target_modules": (r"/.*\.(q|v)_proj", r"/.*\.(q|v)_proj"),
    "exclude_modules": (r"~.*\b(vision)\..*", r"~.*\b(vision)\..*"),
    "vocab_file": ("/data/x/vocab.txt", "vocab.txt"),
    "tokenizer_file": (r"C:\Users\me\tokenizer.json", "tokenizer.json"),
    "special_tokens_map_file": (r"models\x\special.json", "special.json"),
    "cache_dir": ("~/cache", "cache"),
    "nested": ({"_name_or_path": "/data/x", "teacher_path": "../t"}, {"teacher_path": "t"}),
    "relative_file": ("vocab.txt", "vocab.txt"),
    "path": ("/data/x", "x"),
    "paths": (["/data/x", r"D:\y", "z"], ["x", "y", "z"]),
    "local_files": ({"train": ["~/a.json"], "url": "https://a/b"}, {"train": ["a.json"], "url": "https://a/b"}),
    "directory": ("/data/x", "x"),
    "output": ("/home/alice/out", "out"),
    "trained_on": (r"C:\Users\alice\rows.json", "rows.json"),
    "auto_map": (
        {
            "AutoConfig": "/home/alice/code--config.C",
            "AutoTokenizer": ["./code--t.T", None],
            "A": "o/n--m.M",
            "B": "m.M",
        },
        {"AutoConfig": "config.C", "AutoTokenizer": ["t.T", None], "A": "o/n--m.M", "B": "m.M"},
    ),
    "pathology": ("/nothing", "/nothing"),
    "extra_special_tokens": (["/usr/bin", "~/", "/home/alice"], ["/usr/bin", "~/", "/home/alice"]),
    "image_token": ("/etc/hosts", "/etc/hosts"),
    "pattern": ("/etc/hosts", "/etc/hosts"),
}


def test_only_settings_that_hold_paths_are_changed(adapter, tmp_path):
    before = json.loads((adapter / "adapter_config.json").read_text())
    here = tmp_path / "data"
    here.mkdir()
    values = {name: value for name, (value, _) in PATHS.items()} | {"teacher": str(here), "long": "/a/" + "b" * 9999}
    (adapter / "adapter_config.json").write_text(json.dumps(before | values))
    expected = {name: value for name, (_, value) in PATHS.items()} | {"teacher": "data", "long": "/a/" + "b" * 9999}
    assert json.loads(pushed(adapter, "adapter_config.json")) == before | expected
    (adapter / "preprocessor_config.json").write_text('{"_name_or_path": "/data/x", "size": 3}')
    assert json.loads(pushed(adapter, "preprocessor_config.json")) == {"size": 3}


@pytest.mark.parametrize("name", ["owner/base", "gpt2", ""])
def test_the_hub_id_that_a_model_was_loaded_from_is_kept(adapter, name):
    text = json.dumps({"_name_or_path": name, "text_config": {"name_or_path": name}}, indent=7)
    (adapter / "tokenizer_config.json").write_text(text)
    assert pushed(adapter, "tokenizer_config.json").decode() == text


@pytest.mark.parametrize("name", ["/data/base", "./base", "~/base", r"C:\base", "a/b/c", "models/base"])
def test_the_folder_that_a_model_was_loaded_from_is_left_out(adapter, tmp_path, monkeypatch, name):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    (adapter / "tokenizer_config.json").write_text(json.dumps({"_name_or_path": name, "size": 1}))
    assert json.loads(pushed(adapter, "tokenizer_config.json")) == {"size": 1}


def test_settings_with_a_lone_surrogate_are_uploaded(adapter):
    text = '{"eos_token": "\\ud800", "pad_token": "é", "vocab_file": "/data/x/vocab.txt"}'
    (adapter / "tokenizer_config.json").write_text(text, encoding="utf-8")
    uploaded = pushed(adapter, "tokenizer_config.json").decode()
    assert json.loads(uploaded) == {"eos_token": "\ud800", "pad_token": "é", "vocab_file": "vocab.txt"}
    assert "é" in uploaded


def test_paths_of_this_machine_are_not_uploaded(adapter):
    config = adapter / "adapter_config.json"
    before = config.read_bytes()
    files = hub_files.collect(adapter, "adapter", "owner/base")[0]
    assert json.loads(files[0].content)["base_model_name_or_path"] == "owner/base"
    assert config.read_bytes() == before
    (adapter / "tokenizer_config.json").write_text('{"vocab_file": "/home/me/vocab.txt", "name_or_path": "./models/x"}')
    (content,) = (file.content for file in hub_files.collect(adapter, "adapter", None)[0] if "_config" in file.name[9:])
    assert json.loads(content) == {"vocab_file": "vocab.txt"}


OLLAMA_ELSEWHERE = {
    "an absolute path": "FROM /models/run.gguf", "a file that exists": "FROM {exists}",
    "the folder": "FROM {folder}/x.gguf",
    "the home folder": "FROM {home}", "below the home folder": "FROM {home}/x.gguf", "a tilde": "FROM ~/x.gguf",
    "Windows": r"FROM C:\Users\alice\x.gguf", "Windows with slashes": "FROM D:/x.gguf", "a share": r"FROM \\nas\x.gguf",
    "a URL of a file": "FROM file:///tmp/x.gguf", "quotes": 'FROM "/data/a model.gguf"', "lower case": "from /x/y",
    "an adapter": "ADAPTER /home/alice/a.gguf", "a parent": "FROM ../x.gguf", "a subfolder": "FROM models/x.gguf",
    "CRLF": "FROM ./x.gguf\r\nADAPTER /x/a.gguf\r\n", "after a value of two lines": 'SYSTEM """a\nb"""\nFROM /x/y',
    "a variable": "FROM $HOME/model", "dots": "FROM ./../x",
}  # fmt: skip
OLLAMA_BESIDE = {
    "./": "FROM ./x.gguf\nADAPTER ./a.gguf", "a file": "FROM x.gguf", "a model": "FROM llama3.2:3b",
    "the folder": "FROM .",
    "the Hub": "FROM hf.co/owner/name:Q8_0", "a registry": "FROM https://registry.example:5000/library/x:latest",
    "a prompt": 'FROM ./x.gguf\nSYSTEM """Read.\nFrom the text in ./a/b, answer.\n"""\nPARAMETER stop "/think"',
}  # fmt: skip
PRIVATE_TEXTS = {
    "a path that exists": "{exists}", "the home folder": "at {home}.", "the home folder in quotes": "'{home}'",
    "the current folder": "see {cwd}", "the pushed folder": "in {folder}/x", "a parent of it": "in {parent}",
    "another home": "PATH=/usr/bin:/home/alice/bin", "on macOS": "(/Users/alice/x)",
    "after an escape": r"a\n/home/alice",
    "on Windows": r"C:\Users\alice\x", "with escapes": r"c:\\users\\alice", "in WSL": "/mnt/c/Users/alice/x",
    "with slashes": "C:/Users/alice", "a URL": "[x](file:///tmp/x)", "a URL with a host": "file://localhost/tmp/x",
}  # fmt: skip
PUBLIC_TEXTS = (
    "/usr/bin", "/usr/bin/env python", "/nothink", "~/", "and/or", "</think></root>", "#!/bin/sh", "/dev/null",
    "http://www.apache.org/licenses/LICENSE-2.0", "https://example.com/home/alice", "/home/user/file.txt", "/tmp",
    "{{ '/Users/' + name }}", "file:// URLs", "file:///path/to/x", r"\frac{a}{b}", "C:\\Windows", "GET /users/alice",
)  # fmt: skip


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The values of a table of private paths: a file that exists elsewhere, the home, and the folder to push."""
    monkeypatch.setattr(Path, "home", lambda: Path("/homes"))
    (tmp_path / "x.gguf").write_text("")
    folder = Path("/somewhere/deep/run/gguf")
    return {
        "exists": tmp_path / "x.gguf", "home": Path.home(), "cwd": Path.cwd(), "folder": folder,
        "parent": folder.parents[1],
    }  # fmt: skip


def filled(text, places):
    for name, path in places.items():
        text = text.replace(f"{{{name}}}", str(path))
    return text


@pytest.mark.parametrize("text", OLLAMA_ELSEWHERE.values(), ids=OLLAMA_ELSEWHERE)
def test_a_modelfile_of_a_file_elsewhere_is_refused(places, text):
    for name in ("Modelfile", "x.Modelfile"):
        with pytest.raises(UserError, match=rf"^{name} contains a local path: [^\n]*; ") as caught:
            hub_files.refuse_private_text([UploadFile(name, filled(text, places).encode())], places["folder"])
        assert "./NAME.gguf" in str(caught.value)


@pytest.mark.parametrize("text", OLLAMA_BESIDE.values(), ids=OLLAMA_BESIDE)
def test_a_modelfile_of_a_pushed_file_or_a_published_model_goes_through(places, text):
    hub_files.refuse_private_text([UploadFile("Modelfile", text.encode())], places["folder"])


def texts_of(text):
    """Return a text in every kind of file that is uploaded as it is."""
    settings = json.dumps({"note": text, "nested": {"a\n" + text: [text]}})
    modelfile = f'FROM ./x.gguf\nSYSTEM """{text}"""\n'
    contents = {"chat_template.jinja": text, "LICENSE": text, "system": text, "special_tokens_map.json": settings}
    contents |= {"Modelfile": modelfile, "README.md": f"see\n{text}"}
    return [UploadFile(name, content.encode()) for name, content in contents.items()]


@pytest.mark.parametrize("text", PRIVATE_TEXTS.values(), ids=PRIVATE_TEXTS)
def test_private_paths_in_text_are_refused(places, text):
    for file in texts_of(filled(text, places)):
        with pytest.raises(UserError, match=rf"^{file.name}.* contains a local path: '[^\n]+'; "):
            hub_files.refuse_private_text([file], places["folder"])


@pytest.mark.parametrize("text", PUBLIC_TEXTS)
def test_text_that_only_looks_like_a_path_is_not_refused(places, text):
    hub_files.refuse_private_text(texts_of(text), places["folder"])


def test_licenses_and_chat_templates_of_published_models_are_not_refused(places):
    texts = [ROOT / "LICENSE", *(ROOT / "lora_grpo").rglob("*.jinja")]
    files = [UploadFile(path.name, path) for path in texts]
    hub_files.refuse_private_text([file for file in files if file.name != "card.md.jinja"], places["folder"])


def test_vocabularies_may_have_any_text(places):
    pushed_files = [UploadFile(name, b'{"/home/alice": 1}') for name in ("vocab.json", "tokenizer.json", "vocab.txt")]
    pushed_files += [UploadFile(name, b"\0\xff /home/alice") for name in ("tokenizer.model", "reward.png")]
    hub_files.refuse_private_text(pushed_files, places["folder"])
    with pytest.raises(UserError, match=r"^tokenizer.model contains a local path"):
        hub_files.refuse_private_text([UploadFile("tokenizer.model", b"\0 /somewhere/deep/a.txt\0")], places["folder"])
