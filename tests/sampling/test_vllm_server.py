"""Rollouts from a vLLM server (a real one if vLLM is installed), and error messages without a server."""

import http.server
import json
import socket
import threading
import urllib.request

import pytest
from helpers.vllm_servers import ONE_ADAPTER, running_vllm

from lora_grpo.config import replace
from lora_grpo.config.schema import ModelConfig, RunConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.hardware import vllm_available
from lora_grpo.models import base_model
from lora_grpo.sampling.build import check_server
from lora_grpo.sampling.merged_copy import plain_copy
from lora_grpo.sampling.vllm_server import VllmServer


def with_vllm(test):
    """Mark a test that needs a real server."""
    here = pytest.mark.skipif(not vllm_available(), reason="vllm is not installed: make engines")
    return pytest.mark.engines(here(test))


GREEDY = {"temperature": 0.0, "max_tokens": 8, "stop_token_ids": [1], "logprobs": None}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with the dequantized 4-bit weights of the starter model, which is also the base in training."""
    folder = tmp_path_factory.mktemp("server")
    plain_copy(base_model.load_base(ModelConfig())).save_pretrained(folder / "base")
    base_model.load_tokenizer(ModelConfig()).save_pretrained(folder / "base")
    flags = (*ONE_ADAPTER, "--logprobs-mode", "processed_logprobs")
    with running_vllm(folder / "base", folder / "log", *flags) as url:
        yield url


def train(url, folder, warm, *more):
    return warm.start(
        "recipes/gsm8k_lora.py",
        *("--output-dir", folder, "--sampling.server-url", url, "--model.max-sequence-tokens", "256"),
        *("--train.max-steps", "2", "--train.prompts-per-step", "2", "--data.eval-limit", "4"),
        *("--eval.num-samples", "0", *more),
    ).end()


@with_vllm
def test_a_run_samples_from_the_server(server, tmp_path, warm):
    shared = tmp_path / "shared"
    done = train(server, tmp_path / "out", warm, "--sampling.server-folder", shared)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [step["sampling/sampling_logp_difference/mean"] < 1e-5 for step in steps] == [True, True]
    assert json.loads((tmp_path / "out" / "run.json").read_text())["logprob_check"]["difference"] < 1e-5
    assert list(shared.iterdir()) == []  # the adapter of each step is deleted
    models = json.load(urllib.request.urlopen(f"{server}/v1/models"))["data"]
    assert len(models) == 1  # on the server, too


@with_vllm
def test_a_server_with_another_base_is_refused_before_a_run_begins(server, tmp_path, warm):
    """The logprobs of the same model in 16 bits differ by 0.004 nats per token."""
    done = train(server, tmp_path / "out", warm, "--model.bits", "16")
    assert done.returncode == 1
    assert "other than the one being trained" in done.stderr and "same precision" in done.stderr
    assert not (tmp_path / "out").exists()


class Answers(http.server.BaseHTTPRequestHandler):
    """Responses of a server that was not started for training."""

    def do_GET(self):
        self.reply(200, {"data": [{"id": "base", "max_model_len": 512, "parent": None}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        answers = {"/v1/load_lora_adapter": (404, {"detail": "Not Found"}), "/v1/completions": (500, {})}
        self.reply(*answers[self.path])

    def reply(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture
def stand_in():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_a_server_without_adapters_is_refused(stand_in, tmp_path):
    engine = VllmServer(stand_in, str(tmp_path / "shared"), max_sequence_tokens=512)
    (tmp_path / "adapter").mkdir()
    with pytest.raises(UserError, match=r"does not load adapters.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve"):
        engine.load_adapter(tmp_path / "adapter")
    with pytest.raises(RunError, match="failed on a completion: HTTP 500"):
        list(engine.stream([[5]], [GREEDY], None))
    engine.close()
    assert list((tmp_path / "shared").iterdir()) == []


def test_no_server_is_an_error_in_one_line():
    url = f"http://127.0.0.1:{free_port()}"
    config = replace(RunConfig(), {"sampling": {"server_url": url}})
    with pytest.raises(UserError, match=r"is not a vLLM server \(.*[Cc]onnection refused\); start one there with"):
        check_server(config)


def test_a_server_that_goes_away_is_an_error_with_a_fix(stand_in, monkeypatch):
    engine = VllmServer(stand_in, None, max_sequence_tokens=512)
    engine.url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(RunError, match=r"no longer answers \(.*[Cc]onnection refused\); start it again.*--resume"):
        list(engine.stream([[5]], [GREEDY], None))
    engine.close()
