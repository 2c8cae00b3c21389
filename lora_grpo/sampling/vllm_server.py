"""Client of a vLLM server on this or another machine, used instead of an engine in this process."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.sampling.sampler import SamplingParams

_MAX_REQUESTS = 256
"""Maximum number of concurrent requests. The server batches them to fit its memory."""
_START = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE --enable-lora --max-lora-rank RANK --max-loras 1 "
    "--logprobs-mode processed_logprobs (and --quantization bitsandbytes for a base in 4 bits)"
)


class VllmServer:
    """Implements the interface of `VllmEngine` over HTTP.

    The adapter is passed in a folder that both machines can read. The base model is the one that the server has loaded.
    The logprob check detects a wrong base model.

    Args:
        url: URL of the server, such as `http://gpu2:8000`.
        folder: folder for adapters, shared by both machines under the same path. None uses a temporary folder, for a
            server on this machine.
        max_sequence_tokens: maximum length of a prompt and its completion, in tokens.

    Raises:
        UserError: the server does not respond or is not suitable, or the folder cannot be written.
    """

    def __init__(self, url: str, folder: str | None, *, max_sequence_tokens: int) -> None:
        import httpx

        self.url, self.max_sequence_tokens = _address(url), max_sequence_tokens
        self._run, self._number = uuid.uuid4().hex[:8], 0
        self._served: str | None = None
        self._base = find_base(url, max_sequence_tokens)
        limits = httpx.Limits(max_connections=_MAX_REQUESTS, max_keepalive_connections=_MAX_REQUESTS)
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(retries=5, limits=limits), timeout=httpx.Timeout(3600, connect=10)
        )
        parent = Path(folder).expanduser() if folder else None
        try:
            if parent:
                parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="lora_grpo-served-", dir=parent))
            self._folder.chmod(0o755)  # the server may run as another user
        except OSError as error:
            raise UserError(f"--sampling.server-folder {folder} cannot be written: {error.strerror}") from None
        atexit.register(self.close)

    def load_adapter(self, adapter: Path) -> str:
        """Make the server load an adapter in place of the previous one, and return its name on the server.

        All processes have equal adapters. The server loads the adapter of the main process.

        Args:
            adapter: folder of a PEFT adapter.

        Raises:
            UserError: the server does not support adapters, or cannot read this one.
        """
        return distributed.broadcast_from_main(lambda: self._load_adapter(adapter))

    def _load_adapter(self, adapter: Path) -> str:
        self._number += 1
        name = f"{self._run}-{self._number}"
        shared = Path(shutil.copytree(adapter, self._folder / name))
        shared.chmod(0o755)
        answer = self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(shared.resolve())})
        if answer.status_code == 404 and "No adapter found" in answer.text:
            raise UserError(
                f"the server at {self.url} cannot read {shared}; pass a folder that both machines have under the same "
                "path with --sampling.server-folder"
            )
        if answer.status_code in (404, 405):
            raise UserError(f"the server at {self.url} does not load adapters; start it with `{_START}`")
        if answer.status_code != 200:
            raise UserError(f"the server at {self.url} cannot read the adapter: {_message(answer)}")
        self._unload()
        self._served = name
        return name

    def stream(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        eos_token_ids: list[int],
        request: str | None,
        *,
        logprobs: bool,
    ) -> Iterator[tuple[int, list[int], list[float] | None]]:
        """Yield completions. See `VllmEngine.stream`.

        Raises:
            RunError: the server failed.
        """
        # Set everything that vLLM would otherwise read from the model's generation_config.json.
        shared = {
            "model": request or self._base,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": eos_token_ids,
            "logprobs": 0 if logprobs else None,
            "return_token_ids": True,
        }

        def complete(index: int) -> tuple[int, list[int], list[float] | None]:
            body = {**shared, "prompt": prompts[index], "seed": seeds[index] % 2**63}
            answer = self._post("/v1/completions", body)
            if answer.status_code != 200:
                raise RunError(f"the server at {self.url} failed on a completion: {_message(answer)}")
            [choice] = answer.json()["choices"]
            if choice["finish_reason"] not in ("stop", "length"):
                raise RunError(f"the server at {self.url} aborted a completion ({choice['finish_reason']})")
            return index, choice["token_ids"], choice["logprobs"]["token_logprobs"] if logprobs else None

        with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
            pending = [pool.submit(complete, index) for index in range(len(prompts))]
            try:
                for done in as_completed(pending):
                    yield done.result()
            finally:
                for each in pending:
                    each.cancel()

    def sleep(self) -> None:
        """Do nothing, because the server manages its own memory."""

    wake_up = sleep

    def close(self) -> None:
        """Make the server unload the adapter of this run."""
        with contextlib.suppress(RunError):  # the server may be gone
            self._unload()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._client.close()
        atexit.unregister(self.close)

    def _unload(self) -> None:
        if self._served is not None:
            self._post("/v1/unload_lora_adapter", {"lora_name": self._served})
            shutil.rmtree(self._folder / self._served, ignore_errors=True)
            self._served = None

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        import httpx

        try:
            return self._client.post(self.url + path, json=body)
        except httpx.HTTPError as error:
            raise RunError(
                f"the server at {self.url} no longer answers ({first_line(error)}); start it again and continue with "
                "--resume"
            ) from error


def find_base(url: str, max_sequence_tokens: int) -> str:
    """Return the name of the server's base model, without loading anything.

    Args:
        url: URL of the server, such as `http://gpu2:8000`.
        max_sequence_tokens: maximum length of a prompt and its completion, in tokens.

    Raises:
        UserError: the server does not respond, is not a vLLM server, or has too short a context.
    """
    import httpx

    try:
        answer = httpx.get(f"{_address(url)}/v1/models", timeout=10, trust_env=False)
        answer.raise_for_status()
        base = next(model for model in answer.json()["data"] if not model.get("parent"))
        name, context = str(base["id"]), base["max_model_len"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, StopIteration) as error:
        raise UserError(
            f"--sampling.server-url {url} is not a vLLM server ({first_line(error)}); start one there with `{_START}`"
        ) from None
    if context < max_sequence_tokens:
        raise UserError(
            f"the server at {url} takes {context} tokens, --model.max-sequence-tokens is {max_sequence_tokens}; "
            f"start it with --max-model-len {max_sequence_tokens}"
        )
    return name


def _address(url: str) -> str:
    """Return the root URL of the server. URLs for OpenAI clients end in `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def _message(answer: Any) -> str:
    """Return the server's error message."""
    try:
        return first_line(ValueError(answer.json()["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"
