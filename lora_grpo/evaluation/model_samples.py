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
from lora_grpo.evaluation import folder as evaluation_folder
from lora_grpo.evaluation.folder import Request
from lora_grpo.evaluation.options import Plan
from lora_grpo.evaluation.report import Graded, make_protocol
from lora_grpo.evaluation.results import task_id
from lora_grpo.evaluation.run import finished_samples, sample_and_grade
from lora_grpo.models import BASE, ModelSpec
from lora_grpo.sampling import GgufModel, Sampler, build
from lora_grpo.sampling import load_sampler as load_gguf
from lora_grpo.tasks import CODE_TASKS, Data, Row, chat, fingerprint, task_sha256, task_title


class Loader:
    """Loads models to sample from, one at a time. The base of the loaded adapter is not loaded again."""

    def __init__(self, backend: str, seed: int, *, is_auto: bool = False) -> None:
        self.backend, self.seed, self._is_auto = backend, seed, is_auto
        self._model: ModelSpec | None = None
        self._sampler: Sampler | None = None

    def load(self, model: ModelSpec | GgufModel, rows: list[Row], plan: Plan) -> tuple[Sampler, dict[str, Any]]:
        """Return a sampler of a model, and a record of its prompts, versions and hardware."""
        if isinstance(model, GgufModel):
            sampler, tokenizer, described = self._load_gguf(model, rows, plan)
        else:
            sampler, tokenizer, described = self._load_model(model, rows, plan)
        prompts = [chat.render_row(tokenizer, row) for row in rows]
        return sampler, {"prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(), **described}

    def _load_model(self, model: ModelSpec, rows: list[Row], plan: Plan) -> tuple[Sampler, Any, dict[str, Any]]:
        tokenizer, max_tokens = build.load_tokenizer(model), plan.sampling.max_tokens
        if model.run is None:  # the tokenizer of a run's adapter has the variables of its training
            chat.set_variables(tokenizer, plan.chat_template_kwargs, max_tokens)
        sequence_tokens = build.check_context(model, tokenizer, rows, max_tokens)
        is_base = self._model and model == dataclasses.replace(self._model, label=BASE, adapter=None)
        if self._sampler is None or not is_base:
            self._close()
            self._sampler = build.load_sampler(
                model, self.backend, tokenizer, sequence_tokens, self.seed, is_auto=self._is_auto
            )
            self._model = model
        return self._sampler, tokenizer, build.describe(model, self.backend, self._sampler)

    def _load_gguf(self, file: GgufModel, rows: list[Row], plan: Plan) -> tuple[Sampler, Any, dict[str, Any]]:
        self._close()
        self._sampler = sampler = load_gguf(file, rows, plan.sampling.max_tokens)
        if file.run is None:  # the template of an exported run has the variables of its training
            chat.set_variables(sampler.tokenizer, plan.chat_template_kwargs, plan.sampling.max_tokens)
        build.check_context(file, sampler.tokenizer, rows, plan.sampling.max_tokens)
        return sampler, sampler.tokenizer, sampler.describe()

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
    plan: Plan
    data: Data
    limits: sandbox.Settings
    loader: Loader

    @property
    def tasks(self) -> set[str]:
        return {task_id(row) for row in self.data.eval}

    @property
    def fewest(self) -> int:
        return self.plan.sampling.num_samples

    @functools.cached_property
    def request(self) -> Request:
        """Everything that determines the samples and verdicts."""
        limits = self.limits if self.plan.task in CODE_TASKS else None
        given = self.plan.chat_template_kwargs and self.model.run is None
        return {
            "kit": __version__,  # which grades the samples
            "task": task_title(self.plan.task),
            "task_sha256": task_sha256(self.plan.task),
            "rows_sha256": fingerprint(self.data.eval),  # including prompts and worked examples
            "seed": self.plan.seed,
            "backend": "llama.cpp" if isinstance(self.model, GgufModel) else self.loader.backend,
            "program_seconds": limits and limits.timeout_seconds,
            "program_mb": limits and limits.memory_mb,
            "prompt_style": self.plan.data.prompt_style,
            "few_shot": self.plan.data.few_shot,
            **dataclasses.asdict(self.plan.sampling),
            **({"chat_template_kwargs": self.plan.chat_template_kwargs} if given else {}),
            **self.model.identity,
        }

    def grade(self, folder: Path, name: str) -> Graded:
        """Sample and grade the missing results."""
        path, rows, plan = folder / name, self.data.eval, self.plan
        environment = evaluation_folder.environment(folder, name)
        results = finished_samples(path, rows, plan.sampling)
        adapted = self.model.adapter is not None or isinstance(self.model, GgufModel)
        if environment is None or results is None:
            sampler, environment = self.loader.load(self.model, rows, plan)
            evaluation_folder.start(folder, name, self.request, environment)
            results = sample_and_grade(
                path, sampler, rows, plan.task, plan.sampling, plan.seed, self.label, adapter=adapted
            )
        run = self.model.run if adapted else None
        # The rows that the run of the settings trained on are left out, so only another run contaminates the score.
        contaminated = run and run != plan.trained and run["data"].get("trained_on_benchmark") == plan.task
        labels = [self.label] if contaminated else []
        limit = plan.limit if plan.limit == len(rows) else None
        protocol = make_protocol(plan.data, self.data.record, plan.sampling, len(rows), plan.seed, labels, limit)
        return Graded(self.label, results, {**self.model.identity, **environment}, protocol)
