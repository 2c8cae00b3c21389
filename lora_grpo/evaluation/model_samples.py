"""A model as the target of an evaluation: it is loaded, sampled on rows and graded."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import __version__, sandbox
from lora_grpo.data import Data, fingerprint
from lora_grpo.evaluation import results as result_files
from lora_grpo.evaluation.options import EvaluationSettings
from lora_grpo.evaluation.protocol import Protocol, make_protocol
from lora_grpo.evaluation.report import Graded
from lora_grpo.evaluation.results import Request, problem_id
from lora_grpo.evaluation.sample_rows import finished_samples, sample_and_grade
from lora_grpo.evaluation.shares import drop_failed
from lora_grpo.grading import Row
from lora_grpo.models import BASE, ModelSpec
from lora_grpo.prompts import chat, template_variables
from lora_grpo.sampling import GgufModel, GgufSampler, Sampler, build
from lora_grpo.tasks import CODE_TASKS

Model = ModelSpec | GgufModel


@dataclass(frozen=True)
class ModelSamples:
    """A model to sample and grade on evaluation rows."""

    label: str
    """The name of the model in reports."""
    model: Model
    data: Data
    """Its evaluation rows are sampled."""
    settings: EvaluationSettings
    limits: sandbox.Settings
    """The limits of programs, if the task grades programs."""
    loader: Loader

    @property
    def problem_ids(self) -> set[str]:
        return {problem_id(row) for row in self.data.eval}

    @property
    def min_samples(self) -> int:
        """The smallest number of samples of a problem."""
        return self.settings.sampling.num_samples

    @functools.cached_property
    def protocol(self) -> Protocol:
        settings = self.settings
        num_rows = len(self.data.eval)
        protocol = make_protocol(
            settings.data,
            settings.sampling,
            num_rows,
            settings.seed,
            data_sha256=self.data.record["eval"]["sha256"],
            sandbox=self.data.record.get("sandbox"),
        )
        limit = settings.limit
        if limit is not None and num_rows < limit:  # there are fewer rows than the limit, so it has left out none
            limit = None
        return protocol.model_copy(update={"limit": limit})

    @functools.cached_property
    def request(self) -> Request:
        """Everything that determines the samples and verdicts."""
        protocol = self.protocol
        request: dict[str, Any] = {
            "kit": __version__,  # the verdicts depend on the version
            "task": protocol.task,
            "task_sha256": protocol.task_sha256,
            "seed": protocol.seed,
        }
        if protocol.sampling:
            request |= protocol.sampling.model_dump()
        request["rows_sha256"] = fingerprint(self.data.eval)  # including prompts and worked examples
        request["backend"] = "llama.cpp" if isinstance(self.model, GgufModel) else self.loader.backend
        runs_programs = self.settings.task in CODE_TASKS
        request["program_seconds"] = self.limits.timeout_seconds if runs_programs else None
        request["program_mb"] = self.limits.memory_mb if runs_programs else None
        if self.settings.chat_template_kwargs and self.model.run is None:
            request["chat_template_kwargs"] = self.settings.chat_template_kwargs
        return request | self.model.identity

    def grade(self, path: Path) -> Graded:
        """Sample and grade the results that a file does not have yet, and those whose agent failed."""
        settings = self.settings
        rows = self.data.eval
        drop_failed(path)
        environment = result_files.environment_of(path)
        results = finished_samples(path, rows, settings.sampling)
        if environment is None or results is None:
            loaded = self.loader.load(self.model, rows, settings)
            environment = loaded.environment
            result_files.start(path, self.request, environment)
            results = sample_and_grade(
                path,
                loaded.sampler,
                rows,
                settings.task,
                settings.sampling,
                settings.seed,
                title=f"{self.label} on {self.protocol.task}",
                adapter=self.model.adapter is not None,
            )
        return Graded(self.label, results, {**self.model.identity, **environment}, self.protocol)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to be sampled."""

    sampler: Sampler
    environment: dict[str, Any]
    """SHA-256 of the prompts, versions and hardware, for evaluation.json."""


class Loader:
    """Loads models to sample from, one at a time. The base of the loaded adapter is not loaded again.

    A model is loaded once for all tasks, with a context that is long enough for the rows of each. So `add_rows` is
    called for every task before the first `load`.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._rows_of_tasks: list[list[Row]] = []
        self._model: Model | None = None
        """The model that `_sampler` was last asked for: the loaded one, or the base of the loaded adapter."""
        self._sampler: Sampler | None = None
        """The sampler of the loaded model."""

    def add_rows(self, rows: list[Row]) -> None:
        """Add the rows of one more task."""
        self._rows_of_tasks.append(rows)

    def close(self) -> None:
        """Release the loaded model."""
        if self._sampler:
            self._sampler.close()
            self._sampler = None

    def load(self, model: Model, rows: list[Row], settings: EvaluationSettings) -> LoadedModel:
        """Return a sampler of a model, and a record of the prompts of `rows`, versions and hardware."""
        sampler = self._sampler_of(model, settings)
        prompts = [chat.render_row(sampler.tokenizer, row) for row in rows]
        environment: dict[str, Any] = {"prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()}
        if isinstance(model, ModelSpec):
            environment |= build.describe(model, self.backend, sampler)
        elif isinstance(sampler, GgufSampler):
            environment |= sampler.describe()
        return LoadedModel(sampler, environment)

    def _sampler_of(self, model: Model, settings: EvaluationSettings) -> Sampler:
        """Return the sampler in memory if it has this model, else a new one."""
        if not self._can_sample(model):
            self.close()  # frees the memory before the next model is loaded
        if self._sampler is None:
            self._sampler = self._start(model, settings)
        self._model = model
        return self._sampler

    def _can_sample(self, model: Model) -> bool:
        """Return whether the sampler in memory has a model: as it is loaded, or without its adapter."""
        if self._sampler is None or self._model is None:
            return False
        base_of_loaded = dataclasses.replace(self._model, label=BASE, adapter=None)
        return model in (self._model, base_of_loaded)

    def _start(self, model: Model, settings: EvaluationSettings) -> Sampler:
        """Load a model for the rows of all tasks. Their settings have the same seed, template variables and lengths."""
        if isinstance(model, GgufModel):
            all_rows = [row for rows in self._rows_of_tasks for row in rows]
            gguf_sampler = GgufSampler(model, all_rows, settings.sampling.max_tokens)
            self._prepare_prompts(model, gguf_sampler.tokenizer, settings)
            return gguf_sampler
        tokenizer = build.load_tokenizer(model)
        sequence_tokens = self._prepare_prompts(model, tokenizer, settings)
        return build.load_sampler(model, self.backend, tokenizer, sequence_tokens, settings.seed)

    def _prepare_prompts(self, model: Model, tokenizer: Any, settings: EvaluationSettings) -> int:
        """Set the variables of the chat template, and return the tokens of the longest prompt with a completion.

        Raises:
            UserError: the template does not render a prompt, or a prompt with a completion exceeds the model's context.
        """
        max_tokens = settings.sampling.max_tokens
        if model.run is None:  # the template of a run's model has the variables of its training
            template_variables.set_variables(tokenizer, settings.chat_template_kwargs, max_tokens)
        return max(build.check_context(model, tokenizer, rows, max_tokens) for rows in self._rows_of_tasks)
