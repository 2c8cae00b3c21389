"""Sample a GGUF file with llama.cpp, and render its prompts with its own template.

llama.cpp runs in a process of its own, so that its crashes become error messages.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NoReturn

from lora_grpo import sandbox
from lora_grpo.commands import command
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.files import atomic
from lora_grpo.grading import Row
from lora_grpo.prompts import thoughts
from lora_grpo.runs import read_record
from lora_grpo.sampling.sampler import (
    Prompts,
    SampledTokens,
    Sampler,
    SamplingParams,
    by_prompt,
    end_at_question,
    in_threads,
)

_SLOTS = 8
"""Number of completions that are decoded at once."""
_TEMPLATE_TOKENS = 1024
"""More tokens than any chat template adds to the messages of a row."""
_ONLY_TEMPERATURE_AND_TOP_P = {"samplers": ["temperature", "top_p"], "mirostat": 0}
"""Turns off all other samplers of llama.cpp: penalties, DRY, XTC, top-k, min-p, typical-p, and what a GGUF's metadata
set. In this order as in `sampling.select_tokens`; llama.cpp's own order applies top-p before the temperature."""


@dataclass(frozen=True)
class GgufModel:
    """A model in a GGUF file. In evaluations, it takes the place of a `models.ModelSpec`."""

    path: Path
    label: str
    """Its type, such as `q4_0`, or its name."""
    context_tokens: int | None
    """Maximum length of a prompt and its completion in tokens."""
    chat_template: str | None
    run_folder: Path | None
    """The run, if the file is in one of its folders, as `lora-grpo export-gguf` writes it."""
    run: Mapping[str, Any] | None
    """Its run.json."""
    adapter: None = None

    @property
    def base_name(self) -> str:
        return str(self.path)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """The digest that identifies the model, and its type."""
        return {"model": self.path.name, "gguf_sha256": atomic.sha256(self.path), "quantization": self.label}

    def without_adapter(self) -> NoReturn:
        """Raise UserError, because the adapter is merged."""
        raise UserError(
            f"--compare base needs an adapter, which is merged in {self.path}; pass --compare RUN/merged, or RUN"
        )


def read_header(path: Path) -> Any:
    """Return the `gguf.GGUFReader` of a file, which maps its tensors and reads none. UserError if it is truncated."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, LookupError, OSError, OverflowError) as error:
        raise UserError(f"{path} is not a complete GGUF file ({first_line(error)}); export it again") from None


def read_gguf(path: Path) -> GgufModel:
    """Read the header of a GGUF file, or raise a UserError if it is incomplete or llama.cpp is not installed."""
    from gguf import LlamaFileType

    if not path.is_file():
        raise UserError(f"{path} does not exist; write it with {command('export-gguf')}")
    header = read_header(path)
    _program(path)

    def value(name: str) -> Any:
        field = header.get_field(name)
        return field.contents() if field else None

    try:
        label = LlamaFileType(value("general.file_type")).name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
    except ValueError:
        label = path.stem
    above = path.resolve().parent.parent
    run = above if (above / "run.json").is_file() else None
    return GgufModel(
        path=path,
        label=label,
        context_tokens=value(f"{value('general.architecture')}.context_length"),
        chat_template=value("tokenizer.chat_template"),
        run_folder=run,
        run=read_record(run) if run else None,
    )


def _program(path: Path) -> list[str]:
    """Return the command of a llama.cpp server that can run a GGUF file, or raise a UserError if there is none."""
    if program := shutil.which("llama-server"):
        return [program]
    if importlib.util.find_spec("xllamacpp"):
        # As a script, without this package, which would take seconds to import.
        return [sys.executable, "-P", str(Path(__file__).with_name("xllamacpp_server.py"))]
    raise UserError(
        f"{path} needs llama.cpp, which is not installed; run `pip install 'lora-grpo[llama-cpp]'`, or put its "
        "llama-server on the PATH"
    )


class GgufTokenizer:
    """The part of a transformers tokenizer that `lora_grpo.prompts.chat` uses, on the tokenizer in a GGUF file."""

    def __init__(self, sampler: GgufSampler, chat_template: str | None) -> None:
        self._sampler, self.chat_template = weakref.proxy(sampler), chat_template
        self._rendered: dict[str, str] = {}

    def get_chat_template(self) -> str | None:
        return self.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        **variables: Any,
    ) -> str:
        """Return the prompt of messages, without the BOS token that the server adds itself."""
        assert not tokenize and add_generation_prompt
        body = {"messages": list(messages), "chat_template_kwargs": variables}
        body |= {"tools": list(tools)} if tools else {}
        key = json.dumps(body)
        if key not in self._rendered:
            self._rendered[key] = str(self._sampler.post("/apply-template", body)["prompt"])
        return self._rendered[key]

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        bodies = ({"content": text, "add_special": add_special_tokens, "parse_special": True} for text in texts)
        return {"input_ids": [self._sampler.post("/tokenize", body)["tokens"] for body in bodies]}

    def batch_decode(self, batch: Sequence[Sequence[int]], **_: Any) -> list[str]:
        return [self.decode(ids) for ids in batch]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return str(self._sampler.post("/detokenize", {"tokens": list(ids)})["content"])


class GgufSampler(Sampler):
    """Samples with a llama.cpp server of its own, which ends with this object and with this process.

    The random numbers of a completion depend only on its seed. They are not those of the other samplers, and logits may
    differ by rounding, depending on what else is decoded. The server has room for the prompts of `rows` with
    completions of `max_tokens`. UserError if llama.cpp cannot load the file.
    """

    serves_training = False
    streams = True
    adds_bos = True

    def __init__(self, model: GgufModel, rows: Sequence[Row], max_tokens: int) -> None:
        import httpx2

        super().__init__(None, GgufTokenizer(self, model.chat_template), ())
        self._kept_tokens = thoughts.marker_tokens(model.chat_template or "")
        # A token has at least one byte.
        longest = max(sum(len(message["content"].encode()) for message in row["prompt"]) for row in rows)
        slot_tokens = longest + _TEMPLATE_TOKENS + max_tokens
        slot_tokens = min(slot_tokens, model.context_tokens or slot_tokens)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        program = _program(model.path)
        arguments = [*program, "--model", str(model.path), "--host", "127.0.0.1", "--port", str(port), "--jinja"]
        arguments += ["--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * slot_tokens)]
        if threads := os.environ.get("OMP_NUM_THREADS"):  # PyTorch uses as many
            arguments += ["--threads", threads]
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            # Each row is sampled once, so a copy of each finished prompt would only fill the memory.
            env=os.environ | {"LLAMA_ARG_CACHE_RAM": "0"},
            preexec_fn=functools.partial(sandbox.die_with_parent, os.getpid()),
        )
        self._stop = weakref.finalize(self, self._process.kill)
        timeout = httpx2.Timeout(3600, connect=10)
        self._client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout, trust_env=False)
        properties: Mapping[str, Any] = {}
        while properties.get("model_path") != str(model.path):  # another program may have taken the port
            if self._process.poll() is not None:
                raise UserError(
                    f"llama.cpp cannot load {model.path} ({self._why_ended()}); export it again, or update llama.cpp"
                )
            time.sleep(0.05)
            with contextlib.suppress(httpx2.HTTPError):  # not yet listening
                properties = self._client.get("/props").json() if self._client.get("/health").is_success else {}
        of_user = str(properties.get("build_info"))
        self._build = of_user if len(program) == 1 else f"of xllamacpp {metadata.version('xllamacpp')}"

    def describe(self) -> dict[str, Any]:
        """Describe how completions are sampled, for the report."""
        return {"engine": f"llama.cpp {self._build}"}

    def stream(
        self, prompts: Prompts, params: SamplingParams, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """Return an iterator over (index of the prompt, its completions). See `Sampler.stream`."""

        def complete(index: int) -> SampledTokens:
            limit = params.limit(index)
            prompt = prompts[index // params.num_samples]
            body = {"prompt": prompt, "n_predict": limit, "seed": seeds[index], "return_tokens": True}
            chosen = {"temperature": params.temperature, "top_p": params.top_p, **_ONLY_TEMPERATURE_AND_TOP_P}
            # llama.cpp's text has no special tokens but these.
            answer = self.post("/completion", {**body, **chosen, "preserved_tokens": self._kept_tokens})
            tokens, truncated = answer["tokens"], answer["stop_type"] == "limit"
            if truncated and len(tokens) < limit:
                raise RunError("the context of llama.cpp is full; pass a smaller --max-completion-tokens")
            sample = SampledTokens(tokens, answer["content"], truncated)
            return end_at_question(self.tokenizer, sample) if params.ends_at_next_question else sample

        return by_prompt(in_threads(complete, len(seeds), _SLOTS), params.num_samples)

    def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's answer, or raise a RunError if it has ended or rejects the request."""
        import httpx2

        try:
            answer = self._client.post(route, json=body)
        except httpx2.HTTPError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the connection closes before the process ends
                self._process.wait(1)
            reason = first_line(error) if self._process.poll() is None else self._why_ended()
            raise RunError(f"llama.cpp no longer answers ({reason}); run the command again to continue") from error
        if not answer.is_success:  # 404 for a route that this llama.cpp does not have
            raise RunError(f"llama.cpp rejects {route} ({' '.join(answer.text.split())[:500]}); update llama.cpp")
        return dict(answer.json())

    def _why_ended(self) -> str:
        """Return the exit code, and the first line of the server's output that mentions an error."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        found = [line.strip()[-300:] for line in lines if re.search("error|assert|abort", line, re.IGNORECASE)]
        return ": ".join([f"code {self._process.wait()}", *found[:1]])

    def close(self) -> None:
        """End the server."""
        self._stop()
        self._process.wait()
