"""A vLLM server on this or another machine in the place of an engine in this process."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.sampling.sampler import Draw

_AT_ONCE = 256
"""Requests under way; the server decodes them together as its memory allows."""
_START = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE --enable-lora --max-lora-rank RANK --max-loras 1 "
    "--logprobs-mode processed_logprobs (and --quantization bitsandbytes for a base in 4 bits)"
)


class VllmServer:
    """Answers as `VllmEngine` does, by HTTP.

    The adapter travels as a folder that both machines see, never through the base: the server reads it beside a base
    that it loaded itself. That it is the right base, the logprob_check check finds out.

    Args:
        url: e.g. `http://gpu2:8000`.
        folder: seen by both machines under this path; each step's adapter lies there while it is used. None takes a
            temporary one, for a server on this machine.
        max_sequence_tokens: the most that a prompt and its completion take.

    Raises:
        UserError: nothing answers there, or it is no server for this.
    """

    def __init__(self, url: str, folder: str | None, *, max_sequence_tokens: int) -> None:
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3.util.retry import Retry

        self.url, self.longest, self.most_at_once = _address(url), max_sequence_tokens, _AT_ONCE
        self._run, self._number = uuid.uuid4().hex[:8], 0
        self._served: str | None = None
        self._session = requests.Session()
        # The same seed gives the same completion, so that a request can be sent again.
        again = Retry(total=5, backoff_factor=1, status_forcelist=[502, 503], allowed_methods=None)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=again, pool_maxsize=_AT_ONCE))
        self._base = find_base(url, max_sequence_tokens)
        parent = Path(folder).expanduser() if folder else None
        try:
            if parent:
                parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="lora_grpo-served-", dir=parent))
            self._folder.chmod(0o755)  # the server may be another user's
        except OSError as error:
            raise UserError(f"--sampling.server-folder {folder} cannot be written: {error.strerror}") from None
        atexit.register(self.close)

    def hand_over(self, write: Callable[[Path], None]) -> str:
        """Have the server read an adapter in the place of the one before, and return its name there.

        Several ranks have equal adapters, and draw with that of rank 0.

        Args:
            write: fills a folder with it.

        Raises:
            UserError: the server does not take adapters, or cannot read this one.
        """
        return distributed.broadcast_from_main(lambda: self._hand_over(write))

    def _hand_over(self, write: Callable[[Path], None]) -> str:
        self._number += 1
        name = f"{self._run}-{self._number}"
        adapter = self._folder / name
        adapter.mkdir()
        write(adapter)
        answer = self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter.resolve())})
        if answer.status_code == 404 and "No adapter found" in answer.text:
            raise UserError(
                f"the server at {self.url} does not see {adapter}; give a folder that both machines have under one "
                "path with --sampling.server-folder"
            )
        if answer.status_code in (404, 405):
            raise UserError(f"the server at {self.url} takes no adapters; start it with `{_START}`")
        if answer.status_code != 200:
            raise UserError(f"the server at {self.url} cannot read the adapter: {_message(answer)}")
        self._unload()
        self._served = name
        return name

    def draw(
        self, prompts: Sequence[list[int]], draw: Draw, seeds: Sequence[int], ends: list[int], request: str | None, *,
        log_probs: bool,
    ) -> Iterator[tuple[int, list[int], list[float] | None]]:  # fmt: skip
        """Yield as `VllmEngine.draw` does.

        Raises:
            RunError: the server failed.
        """
        # All that vLLM would otherwise take from the model's generation_config.json is given.
        same = {
            "model": request or self._base,
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": ends,
            "logprobs": 0 if log_probs else None,
            "return_token_ids": True,
        }

        def ask(place: int) -> tuple[int, list[int], list[float] | None]:
            answer = self._post("/v1/completions", {**same, "prompt": prompts[place], "seed": seeds[place] % 2**63})
            if answer.status_code != 200:
                raise RunError(f"the server at {self.url} failed on a completion: {_message(answer)}")
            [choice] = answer.json()["choices"]
            if choice["finish_reason"] not in ("stop", "length"):
                raise RunError(f"the server at {self.url} gave up on a completion ({choice['finish_reason']})")
            told = choice["logprobs"]["token_logprobs"] if log_probs else None
            return place, choice["token_ids"], told

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            waiting = [pool.submit(ask, place) for place in range(len(prompts))]
            try:
                for done in as_completed(waiting):
                    yield done.result()
            finally:
                for each in waiting:
                    each.cancel()

    def sleep(self) -> None:
        """The server's memory is its own."""

    wake = sleep

    def close(self) -> None:
        """Have the server forget this run's adapter."""
        with contextlib.suppress(RunError):  # it may be gone already
            self._unload()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._session.close()
        atexit.unregister(self.close)

    def _unload(self) -> None:
        if self._served is not None:
            self._post("/v1/unload_lora_adapter", {"lora_name": self._served})
            shutil.rmtree(self._folder / self._served, ignore_errors=True)
            self._served = None

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            return self._session.post(self.url + path, json=body, timeout=(10, 3600))
        except OSError as error:
            raise RunError(
                f"the server at {self.url} no longer answers ({_reason(error)}); start it again and go on with --resume"
            ) from error


def find_base(url: str, max_sequence_tokens: int) -> str:
    """Return what a server calls its base; nothing else has to be loaded for it.

    Args:
        url: e.g. `http://gpu2:8000`.
        max_sequence_tokens: the most that a prompt and its completion take.

    Raises:
        UserError: nothing answers there, it is no vLLM server, or its context is shorter.
    """
    import requests

    try:
        # Once, without a retry: a server that is not there is told at once.
        answer = requests.get(f"{_address(url)}/v1/models", timeout=10)
        answer.raise_for_status()
        base = next(model for model in answer.json()["data"] if not model.get("parent"))
        name, context = str(base["id"]), base["max_model_len"]
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise UserError(
            f"--sampling.server-url {url} is no vLLM server ({_reason(error)}); start one there with `{_START}`"
        ) from None
    if context < max_sequence_tokens:
        raise UserError(
            f"the server at {url} takes {context} tokens, --model.max-sequence-tokens is {max_sequence_tokens}; "
            f"start it with --max-model-len {max_sequence_tokens}"
        )
    return name


def _address(url: str) -> str:
    """Return where the server's paths begin; OpenAI's clients are given it with `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def _message(answer: Any) -> str:
    """Return what the server says went wrong."""
    try:
        return first_line(ValueError(answer.json()["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


def _reason(error: Exception) -> str:
    """Return the innermost cause: requests wraps a refused connection four times."""
    said = str(error)
    for words in ("Connection refused", "Name or service not known", "timed out", "No route to host"):
        if words in said:
            return words.lower()
    return first_line(error)
