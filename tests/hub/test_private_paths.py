"""Text with a path of this machine is not uploaded, and text that only looks like a path is."""

import json
from pathlib import Path

import pytest

from lora_grpo.errors import UserError
from lora_grpo.hub.private_paths import refuse_private_text
from lora_grpo.hub.uploads import UploadFile

ROOT = Path(__file__).resolve().parents[2]

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
            refuse_private_text([UploadFile(name, filled(text, places).encode())], places["folder"])
        assert "./NAME.gguf" in str(caught.value)


@pytest.mark.parametrize("text", OLLAMA_BESIDE.values(), ids=OLLAMA_BESIDE)
def test_a_modelfile_of_a_pushed_file_or_a_published_model_goes_through(places, text):
    refuse_private_text([UploadFile("Modelfile", text.encode())], places["folder"])


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
            refuse_private_text([file], places["folder"])


@pytest.mark.parametrize("text", PUBLIC_TEXTS)
def test_text_that_only_looks_like_a_path_is_not_refused(places, text):
    refuse_private_text(texts_of(text), places["folder"])


def test_licenses_and_chat_templates_of_published_models_are_not_refused(places):
    texts = [ROOT / "LICENSE", *(ROOT / "lora_grpo").rglob("*.jinja")]
    files = [UploadFile(path.name, path) for path in texts]
    refuse_private_text([file for file in files if file.name != "card.md.jinja"], places["folder"])


def test_vocabularies_may_have_any_text(places):
    pushed_files = [UploadFile(name, b'{"/home/alice": 1}') for name in ("vocab.json", "tokenizer.json", "vocab.txt")]
    pushed_files += [UploadFile(name, b"\0\xff /home/alice") for name in ("tokenizer.model", "reward.png")]
    refuse_private_text(pushed_files, places["folder"])
    with pytest.raises(UserError, match=r"^tokenizer.model contains a local path"):
        refuse_private_text([UploadFile("tokenizer.model", b"\0 /somewhere/deep/a.txt\0")], places["folder"])
