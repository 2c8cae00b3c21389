"""The samples of a model: which ones are missing, and loading the model to sample them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import __version__, sandbox
from lora_grpo.evaluation import results as result_files
from lora_grpo.evaluation.options import EvaluationSettings
from lora_grpo.evaluation.report import Graded, make_protocol
from lora_grpo.evaluation.results import Request, task_id
from lora_grpo.evaluation.run import finished_samples, sample_and_grade
from lora_grpo.models import BASE, ModelSpec
from lora_grpo.sampling import GgufModel, Sampler, build
from lora_grpo.sampling import load_sampler as load_gguf
from lora_grpo.tasks import CODE_TASKS, Data, Row, chat, fingerprint, task_sha256, task_title


class Loader:
    """Loads models to sample from, one at a time. The base of the loaded adapter is not loaded again."""

    def __init__(self, backend: str, settings: EvaluationSettings, *, is_auto: bool = False) -> None:
        self.backend, self.settings, self._is_auto = backend, settings, is_auto
        self._model: ModelSpec | None = None
        self._sampler: Sampler | None = None

    def load(self, model: ModelSpec | GgufModel, rows: list[Row]) -> tuple[Sampler, dict[str, Any]]:
        """Return a sampler of a model, and a record of its prompts, versions and hardware."""
        max_tokens, tokenizer = self.settings.sampling.max_tokens, None
        if isinstance(model, GgufModel):
            self._close()
            self._sampler = file_sampler = load_gguf(model, rows, max_tokens)
            tokenizer = file_sampler.tokenizer
        else:
            tokenizer = build.load_tokenizer(model)
        if model.run is None:  # the template of a run's model has the variables of its training
            chat.set_variables(tokenizer, self.settings.chat_template_kwargs, max_tokens)
        sequence_tokens = build.check_context(model, tokenizer, rows, max_tokens)
        if isinstance(model, GgufModel):
            described = file_sampler.describe()
        else:
            described = self._load_weights(model, tokenizer, sequence_tokens)
        prompts = [chat.render_row(tokenizer, row) for row in rows]
        prompts_sha256 = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
        assert self._sampler
        return self._sampler, {"prompts_sha256": prompts_sha256, **described}

    def _load_weights(self, model: ModelSpec, tokenizer: Any, sequence_tokens: int) -> dict[str, Any]:
        is_base = self._model and model == dataclasses.replace(self._model, label=BASE, adapter=None)
        if self._sampler is None or not is_base:
            self._close()
            seed = self.settings.seed
            self._sampler = build.load_sampler(
                model, self.backend, tokenizer, sequence_tokens, seed, is_auto=self._is_auto
            )
            self._model = model
        return build.describe(model, self.backend, self._sampler)

    def _close(self) -> None:
        """Free the memory of the loaded model before the next one is loaded."""
        if self._sampler:
            self._sampler.close()
        self._sampler = self._model = None


@dataclass(frozen=True)
class ModelSamples:
    """A model to sample and grade on evaluation rows."""

    label: str
    model: ModelSpec | GgufModel
    data: Data
    limits: sandbox.Settings
    loader: Loader

    @property
    def settings(self) -> EvaluationSettings:
        return self.loader.settings

    @property
    def tasks(self) -> set[str]:
        return {task_id(row) for row in self.data.eval}

    @property
    def min_samples(self) -> int:
        return self.settings.sampling.num_samples

    @functools.cached_property
    def request(self) -> Request:
        """Everything that determines the samples and verdicts."""
        limits = self.limits if self.settings.task in CODE_TASKS else None
        given = self.settings.chat_template_kwargs and self.model.run is None
        return {
            "kit": __version__,  # which grades the samples
            "task": task_title(self.settings.task),
            "task_sha256": task_sha256(self.settings.task),
            "rows_sha256": fingerprint(self.data.eval),  # including prompts and worked examples
            "seed": self.settings.seed,
            "backend": "llama.cpp" if isinstance(self.model, GgufModel) else self.loader.backend,
            "program_seconds": limits and limits.timeout_seconds,
            "program_mb": limits and limits.memory_mb,
            "prompt_style": self.settings.data.prompt_style,
            "few_shot": self.settings.data.few_shot,
            **dataclasses.asdict(self.settings.sampling),
            **({"chat_template_kwargs": self.settings.chat_template_kwargs} if given else {}),
            **self.model.identity,
        }

    def grade(self, path: Path) -> Graded:
        """Sample and grade the results that a file does not have yet, and append them to it."""
        rows, settings = self.data.eval, self.settings
        environment = result_files.environment_of(path)
        results = finished_samples(path, rows, settings.sampling)
        adapted = self.model.adapter is not None or isinstance(self.model, GgufModel)
        if environment is None or results is None:
            sampler, environment = self.loader.load(self.model, rows)
            result_files.start(path, self.request, environment)
            results = sample_and_grade(
                path, sampler, rows, settings.task, settings.sampling, settings.seed, self.label, adapter=adapted
            )
        run = self.model.run if adapted else None
        # The rows that the run of the settings trained on are left out, so only another run contaminates the score.
        contaminated = run and run != settings.trained and run["data"].get("trained_on_benchmark") == settings.task
        labels = [self.label] if contaminated else []
        limit = settings.limit if settings.limit == len(rows) else None
        protocol = make_protocol(
            settings.data, self.data.record, settings.sampling, len(rows), settings.seed, labels, limit
        )
        return Graded(self.label, results, {**self.model.identity, **environment}, protocol)
