"""What a llama.cpp server is asked, and the errors without one; a stand-in on the PATH answers."""

import json
import sys
from dataclasses import replace

import pytest
from helpers.gguf_files import write_header

from lora_grpo.errors import RunError, UserError
from lora_grpo.evaluation import EvaluateOptions, evaluate_and_report
from lora_grpo.sampling import GgufSampler, SamplingParams, read_gguf

STAND_IN = """#!{python}
import http.server, json, os, sys

arguments = iter(sys.argv[1:])
flags = {{name: (True if name == "--jinja" else next(arguments)) for name in arguments}}
mode = open({mode!r}).read()
if mode == "refuses":
    print("loading")
    print("E error loading model: it is odd")
    sys.exit(1)


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({{"status": "ok", "model_path": flags["--model"], "build_info": "b9999"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open({log!r}, "a") as log:
            log.write(json.dumps([self.path, body, flags]) + "\\n")
        if mode == "dies" and self.path == "/completion":
            print("ggml: error: no more memory", flush=True)
            os._exit(9)
        if self.path == "/apply-template":
            return self.answer({{"prompt": "".join(message["content"] for message in body["messages"])}})
        if self.path == "/tokenize":
            return self.answer({{"tokens": [*body["content"].encode()]}})
        tokens = 3 if mode == "full" else body["n_predict"]
        self.answer({{"content": "<answer>1</answer>", "tokens": [1] * tokens, "stop_type": "limit"}})


http.server.ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def llama(tmp_path, monkeypatch):
    """A function that sets how the stand-in for llama-server behaves; the file has what it was asked."""
    log = tmp_path / "log"
    mode = tmp_path / "mode"
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable, log=str(log), mode=str(mode)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))

    def behave(behavior):
        mode.write_text(behavior)
        return log

    behave("well")
    return behave


@pytest.fixture
def file(tmp_path):
    return write_header(tmp_path / "mine.gguf")


def evaluate(file, tmp_path, **options):
    options = EvaluateOptions(str(file), task="starter", limit=3, output_dir=tmp_path / "out", **options)
    return evaluate_and_report(options)[0]


def asked(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_only_temperature_and_top_p_change_the_logits(llama, file, tmp_path):
    log = llama("well")
    report = evaluate(file, tmp_path, num_samples=2, temperature=0.7, top_p=0.9, max_completion_tokens=20)
    bodies = [body for route, body, _ in asked(log) if route == "/completion"]
    assert len(bodies) == 6 and len({body["seed"] for body in bodies}) == 6
    for body in bodies:
        assert body["samplers"] == ["temperature", "top_p"] and body["mirostat"] == 0
        assert (body["temperature"], body["top_p"], body["n_predict"]) == (0.7, 0.9, 20)
    [flags] = {json.dumps(flags) for *_, flags in asked(log)}
    assert json.loads(flags)["--model"] == str(file)
    assert report.evaluated.label == "q4_0" and report.evaluated.source["engine"] == "llama.cpp b9999"
    assert report.evaluated.sample_stats["sampled"]["truncated"] == 6


def test_messages_are_rendered_by_the_server(llama, file, tmp_path):
    log = llama("well")
    evaluate(file, tmp_path)
    messages = [body["messages"] for route, body, _ in asked(log) if route == "/apply-template"]
    assert len(messages) == 3  # once a row
    assert [message["role"] for message in messages[0]] == ["system", "user"]
    assert "<reasoning>" in messages[0][0]["content"]


@pytest.mark.parametrize(
    ("behavior", "error", "message"),
    [
        ("refuses", UserError, "code 1: E error loading model: it is odd"),
        ("dies", RunError, "code 9: ggml: error: no more memory"),
        ("full", RunError, "--max-completion-tokens"),
    ],
)
def test_a_server_that_fails_is_one_line(llama, file, tmp_path, behavior, error, message):
    llama(behavior)
    with pytest.raises(error, match=message) as raised:
        evaluate(file, tmp_path)
    assert "\n" not in str(raised.value)


def test_without_llama_cpp_the_extra_is_named(file, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"\[llama-cpp\].*llama-server"):
        evaluate(file, tmp_path)


def test_a_server_ends_with_its_sampler(llama, file):
    sampler = GgufSampler(read_gguf(file), [{"prompt": [{"role": "user", "content": "hi"}]}], max_tokens=4)
    process = sampler._server.process
    [(_, [sample])] = sampler.stream(["hi"], SamplingParams(1, 0.0, 1.0, 4), [0])
    assert sample.truncated and len(sample.token_ids) == 4
    sampler.close()
    assert process.poll() is not None


TOOLS = [
    {"type": "function", "function": {"name": f"tool_{number}", "description": "a tool " * 20, "parameters": {}}}
    for number in range(20)
]


@pytest.mark.parametrize(
    ("entries", "tokens"),
    [({"tools": TOOLS}, len(json.dumps(TOOLS))), ({"prompt_tokens": 3000}, 3000)],
    ids=["tools", "the prompts of an agent"],
)
def test_the_server_has_room_for_what_is_in_a_prompt_besides_the_question(llama, file, entries, tokens):
    log = llama("well")
    row = {"prompt": [{"role": "user", "content": "hi"}], **entries}
    sampler = GgufSampler(replace(read_gguf(file), context_tokens=None), [row], max_tokens=4)
    list(sampler.stream(["hi"], SamplingParams(1, 0.0, 1.0, 4), [0]))
    sampler.close()
    [(_, _, flags)] = asked(log)
    slot_tokens = int(flags["--ctx-size"]) // int(flags["--parallel"])
    assert slot_tokens >= tokens + 4


def test_files_that_are_no_whole_model_are_refused(llama, file, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-200])

    for path, reason in (
        (cut, "not a complete GGUF"),
        (tmp_path / "none.gguf", "not exist"),
    ):
        with pytest.raises(UserError, match=reason):
            evaluate(path, tmp_path)
    assert not (tmp_path / "out").exists()
