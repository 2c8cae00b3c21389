"""The samples of a model: which ones are missing, and loading the model to sample them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import sandbox
from lora_grpo.evaluation import folder as evaluation_folder
from lora_grpo.evaluation.folder import Request
from lora_grpo.evaluation.options import Plan
from lora_grpo.evaluation.report import Graded, Protocol, make_protocol
from lora_grpo.evaluation.results import task_id
from lora_grpo.evaluation.run import finished_samples, sample_and_grade
from lora_grpo.models import BASE, ModelSpec
from lora_grpo.sampling import Sampler, build
from lora_grpo.tasks import CODE_TASKS, Data, Row, chat, fingerprint


class Loader:
    """Loads models to sample from, one at a time. The base of the loaded adapter is not loaded again."""

    def __init__(self, backend: str, seed: int) -> None:
        self.backend, self.seed = backend, seed
        self._model: ModelSpec | None = None
        self._sampler: Sampler | None = None

    def load(self, model: ModelSpec, rows: list[Row], max_tokens: int) -> tuple[Sampler, dict[str, Any]]:
        """Return a sampler of a model, and a record of its prompts, versions and hardware."""
        tokenizer = build.load_tokenizer(model)
        sequence_tokens = build.check_context(model, tokenizer, rows, max_tokens)
        is_base = self._model and model == dataclasses.replace(self._model, label=BASE, adapter=None)
        if self._sampler is None or not is_base:
            if self._sampler:
                self._sampler.close()
            self._sampler = None  # frees its memory before the next model is loaded
            self._sampler = build.load_sampler(model, self.backend, tokenizer, sequence_tokens, self.seed)
            self._model = model
        prompts = [chat.render_row(tokenizer, row) for row in rows]
        digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
        return self._sampler, {"prompts_sha256": digest, **build.describe(model, self.backend, self._sampler)}


@dataclass(frozen=True)
class ModelSamples:
    """A model to sample and grade on evaluation rows."""

    label: str
    model: ModelSpec
    plan: Plan
    data: Data
    limits: sandbox.Settings
    loader: Loader

    @property
    def task(self) -> str:
        return self.plan.task

    @property
    def tasks(self) -> set[str]:
        return {task_id(row) for row in self.data.eval}

    @property
    def fewest(self) -> int:
        return self.plan.sampling.num_samples

    @property
    def protocol(self) -> Protocol:
        """The settings that a compared model must share."""
        plan, rows = self.plan, len(self.data.eval)
        run = self.model.run if self.model.adapter else None
        trained_on = run["data"].get("trained_on_benchmark") if run else None
        # Of the run that the settings come from, the rows that it trained on are left out.
        labels = [self.label] if trained_on == plan.task and run is not plan.trained else []
        return make_protocol(plan.data, self.data.record, plan.sampling, rows, plan.seed, labels)

    @functools.cached_property
    def request(self) -> Request:
        """Everything that determines the samples and verdicts."""
        programs = self.task in CODE_TASKS
        return {
            "task": self.task,
            "rows_sha256": fingerprint(self.data.eval),  # including prompts and worked examples
            "seed": self.plan.seed,
            "backend": self.loader.backend,
            "program_seconds": self.limits.timeout_seconds if programs else None,
            "program_mb": self.limits.memory_mb if programs else None,
            "prompt_style": self.plan.data.prompt_style,
            "few_shot": self.plan.data.few_shot,
            **dataclasses.asdict(self.plan.sampling),
            **self.model.identity,
        }

    def grade(self, folder: Path, name: str) -> Graded:
        """Sample and grade the missing results.

        Raises:
            UserError: the model cannot be loaded, or its context is too short.
            RunError: out of memory, or programs cannot be run.
        """
        path, rows, plan = folder / name, self.data.eval, self.plan
        environment = evaluation_folder.environment(folder, name)
        results = finished_samples(path, rows, plan.sampling)
        if environment is None or results is None:
            sampler, environment = self.loader.load(self.model, rows, plan.sampling.max_tokens)
            evaluation_folder.start(folder, name, self.request, environment)
            adapted = self.model.adapter is not None
            results = sample_and_grade(
                path, sampler, rows, plan.task, plan.sampling, plan.seed, self.label, adapter=adapted
            )
        return Graded(self.label, results, {**self.model.identity, **environment}, self.protocol)
