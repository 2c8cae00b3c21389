"""Client of a vLLM server on this or another machine, used instead of an engine in this process."""

import atexit
import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.sampling.requests import Request, RequestQueue, serve_in_threads
from lora_grpo.sampling.samples import Decoded, SampledTokens
from lora_grpo.sampling.streams import in_threads

_MAX_REQUESTS = 256
"""Maximum number of concurrent requests. The server batches them to fit its memory."""
_START = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE --enable-lora --max-lora-rank RANK --max-loras 1 "
    "--logprobs-mode processed_logprobs (and --quantization bitsandbytes for a base in 4 bits)"
)


class VllmServer:
    """Implements the interface of `VllmEngine` over HTTP. The logprob check detects a server with another base.

    Args:
        url: URL of the server, such as `http://gpu2:8000`.
        folder: folder for adapters, shared by both machines under the same path. None uses a temporary folder, for a
            server on this machine.
        max_sequence_tokens: longest prompt plus completion; see `find_base`.
    """

    def __init__(self, url: str, folder: str | None, *, max_sequence_tokens: int) -> None:
        import httpx2

        self.url = url.rstrip("/")
        self._base = find_base(url, max_sequence_tokens)
        self._loaded_adapter: Path | None = None

        # A completion may wait long until the server has decoded those before it, up to an hour.
        limits = httpx2.Limits(max_connections=_MAX_REQUESTS, max_keepalive_connections=_MAX_REQUESTS)
        transport = httpx2.HTTPTransport(retries=5, limits=limits)
        self._client = httpx2.Client(transport=transport, timeout=httpx2.Timeout(3600, connect=10))

        parent = Path(folder or tempfile.gettempdir()).expanduser()
        parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="lora_grpo-served-", dir=parent))
        self._folder.chmod(0o755)  # the server may run as another user
        atexit.register(self.close)

    @property
    def adapter_dtype(self) -> Any:
        """The dtype of adapters: the trained one, because a server does not tell its own."""
        import torch

        return torch.float32

    def load_adapter(self, adapter: Path) -> str:
        """Make the server replace its adapter, and return the name of the new one on the server."""
        return distributed.once(lambda: self._load_adapter(adapter))

    def _load_adapter(self, adapter: Path) -> str:
        # Each adapter gets a new name, because vLLM caches prompts by the name of the adapter.
        name = uuid.uuid4().hex
        shared_copy = Path(shutil.copytree(adapter, self._folder / name))
        shared_copy.chmod(0o755)
        answer = self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(shared_copy.resolve())})
        if answer.status_code != 200:
            raise UserError(
                f"the server at {self.url} does not load adapters from {shared_copy} ({_message(answer)}); start it "
                f"with `{_START}`, and pass a folder that both machines have under the same path with "
                "--sampling.server-folder"
            )
        self._unload()
        self._loaded_adapter = shared_copy
        return name

    def stream(
        self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]], adapter: str | None
    ) -> Iterator[tuple[int, Decoded]]:
        """Return an iterator over completions. See `VllmEngine.stream`."""

        def complete(index: int) -> Decoded:
            return self._complete(prompts[index], options[index], adapter)

        return in_threads(complete, len(prompts), _MAX_REQUESTS)

    def serve(
        self,
        queue: RequestQueue,
        task_of: Callable[[Request], tuple[dict[str, Any], str | None]],
        sample_of: Callable[[Request, Decoded], SampledTokens],
    ) -> None:
        """Decode requests as they come, each in a thread of its own. See `VllmEngine.serve`."""

        def complete(request: Request) -> SampledTokens:
            options, adapter = task_of(request)
            # The server ends at stop strings too, so that it samples few tokens that `sample_of` cuts.
            decoded = self._complete(request.prompt_ids, {**options, "stop": list(request.stop)}, adapter)
            return sample_of(request, decoded)

        serve_in_threads(queue, complete, _MAX_REQUESTS)

    def _complete(self, prompt: list[int], options: dict[str, Any], adapter: str | None) -> Decoded:
        body = {
            **options,
            "prompt": prompt,
            "model": adapter or self._base,
            "return_token_ids": True,
        }
        answer = self._post("/v1/completions", body)
        if answer.status_code != 200:
            raise RunError(f"the server at {self.url} failed on a completion: {_message(answer)}")
        [choice] = answer.json()["choices"]
        if choice["finish_reason"] not in ("stop", "length"):
            raise RunError(f"the server at {self.url} aborted a completion ({choice['finish_reason']})")
        logprobs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else None
        return Decoded(choice["token_ids"], logprobs)

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
        if self._loaded_adapter is not None:
            self._post("/v1/unload_lora_adapter", {"lora_name": self._loaded_adapter.name})
            shutil.rmtree(self._loaded_adapter, ignore_errors=True)
            self._loaded_adapter = None

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        import httpx2

        try:
            return self._client.post(self.url + path, json=body)
        except httpx2.HTTPError as error:
            raise RunError(
                f"the server at {self.url} no longer answers ({first_line(error)}); start it again and continue with "
                "--resume"
            ) from error


def find_base(url: str, max_sequence_tokens: int) -> str:
    """Return the name of the server's base model, or raise a UserError if the server is not suitable."""
    import httpx2

    try:
        answer = httpx2.get(f"{url.rstrip('/')}/v1/models", timeout=10, trust_env=False)
        answer.raise_for_status()
        base = next(model for model in answer.json()["data"] if not model.get("parent"))
        name = str(base["id"])
        context_tokens = base["max_model_len"]
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError, StopIteration) as error:
        raise UserError(
            f"--sampling.server-url {url} is not a vLLM server ({first_line(error)}); start one there with `{_START}`"
        ) from None
    if context_tokens < max_sequence_tokens:
        raise UserError(
            f"the server at {url} takes {context_tokens} tokens, --model.max-sequence-tokens is {max_sequence_tokens}; "
            f"start it with --max-model-len {max_sequence_tokens}"
        )
    return name


def _message(answer: Any) -> str:
    text = " ".join(answer.text.split())
    return f"HTTP {answer.status_code}: {text[:500]}"
