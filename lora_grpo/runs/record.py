"""A run's folder and its run.json: what was asked, on what, with what, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from lora_grpo import __version__, distributed
from lora_grpo.config import Invocation, RunConfig
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, lock
from lora_grpo.rewards import parse_reward_specs

FORMAT = 1
_PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "datasets", "accelerate", "unsloth", "vllm")
_ENTRIES = (
    *("adapter", "best", "checkpoints", "completions", "evaluation", "filter", "validation"),
    *("merged", ".merged.partial", "gguf", "report", ".report.partial", "tensorboard", "metrics.jsonl", "run.json"),
)
_MAY_CHANGE = (
    "output_dir",
    "train.max_steps",
    "train.micro_batch_size",
    "model.gpu_memory_share",
    "train.checkpoint_steps",
    "train.keep_checkpoints",
    "train.report_to",
    "sampling.server_url",
    "sampling.server_folder",
    "sandbox.workers",
    "monitor.stop_on",
    "monitor.early_stopping",
)
"""Settings a resumed run may have other values of: they change no step, or (as the micro-batch) its rounding."""


class Planned(Protocol):
    """What is known of a run before it begins, `plan.Plan`."""

    def record(self) -> dict[str, Any]:
        """Return the entries of run.json."""
        ...

    def lines(self) -> list[str]:
        """Say it in a few lines."""
        ...


@dataclass
class Run:
    """An open run folder. Everything that lasts is written through it."""

    folder: Path
    config: RunConfig
    record: dict[str, Any] = field(default_factory=dict)
    begun: bool = False
    """True once this process has written run.json."""

    @property
    def adapter(self) -> Path:
        """The trained adapter; there only when training is finished."""
        return self.folder / "adapter"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def completions(self) -> Path:
        return self.folder / "completions"

    @property
    def best(self) -> Path:
        """The adapter of the step that earned most on the held-out rows."""
        return self.folder / "best"

    @property
    def validation(self) -> Path:
        return self.folder / "validation"

    @property
    def evaluation(self) -> Path:
        return self.folder / "evaluation"

    @property
    def filter(self) -> Path:
        """Samples of the training rows that say how difficult they are; there only where the run filters them."""
        return self.folder / "filter"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def begin(self, policy_record: dict[str, Any]) -> None:
        """Write the first run.json, now that everything that can be refused was loaded; a new run deletes the old one.

        Raises:
            UserError: a resumed run's base model is no longer the one it began with.
        """
        if "policy" not in self.record:
            for name in _ENTRIES if distributed.is_main() else ():
                _delete(self.folder / name)
        else:
            for name in ("base_model", "revision", "fingerprint", "engine", "bits"):
                if self.record["policy"][name] != policy_record[name]:
                    raise UserError(
                        f"the run in {self.folder} began with {name} {self.record['policy'][name]!r}, now it is "
                        f"{policy_record[name]!r}; restore it, or give another --output-dir"
                    )
        self.begun = True
        self.update(status="running", policy=policy_record, seed=self.config.seed, processes=distributed.world_size())
        distributed.barrier()

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Close run.json with what came out, and return it."""
        self.update(status="complete", ended=now(), results=results)
        return results

    def update(self, **entries: Any) -> None:
        """Add entries to run.json and write it."""
        self.record.update(entries)
        if distributed.is_main():
            atomic.write_json(self.folder / "run.json", self.record)


def open_run(
    config: RunConfig,
    how: Invocation,
    recipe: str,
    data_record: dict[str, Any],
    plan: Planned | None = None,
) -> Run:
    """Create the run's folder, or go on in it.

    Args:
        config: the checked configuration.
        how: resume, overwrite, or neither.
        recipe: the recipe's name.
        data_record: what is known of the rows, `Data.record`.
        plan: of `make_plan`; said in a few lines once nothing is refused any more.

    Raises:
        UserError: the folder holds a run (or anything else) and neither flag was given; a resumed run was asked for
            something else; another process works in the folder.
    """
    folder, planned = config.folder, plan.record() if plan else {"memory": None, "plan": None}
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output-dir {folder} is a file; give a folder")
    held = sorted(entry.name for entry in folder.iterdir() if entry.name != ".lock") if folder.is_dir() else []
    is_run = (folder / "run.json").is_file()
    if is_run and not (how.resume or how.overwrite):
        raise UserError(
            f"{folder} already holds a run; pass --resume to go on with it, --overwrite to delete it, or another "
            "--output-dir"
        )
    # Without a run.json nothing here is ours, a folder called `adapter` neither: `begin` deletes the old run.json last
    # and writes the new one first. What a kill in between leaves are dot-files of the atomic writer.
    foreign = [name for name in held if not name.startswith(".")]
    if not is_run and foreign:
        raise UserError(f"{folder} holds other files ({', '.join(foreign[:3])}); give an empty or new --output-dir")
    if distributed.is_main():
        lock.claim(folder)

    if how.resume and not is_run:
        print(f"nothing to resume in {folder}: the run starts at step 0", file=sys.stderr)
    run = Run(folder, config)
    _opened[:] = [run]
    if how.resume and is_run:
        run.record = read_record(folder)
        _compare(run, data_record)
        before, now_isolated = run.record["data"].get("sandbox"), data_record.get("sandbox")
        if before and now_isolated and now_isolated not in before:
            run.record["data"]["sandbox"] = f"{before}; resumed with {now_isolated}"
        run.record.update(config=config.to_dict(), **planned, resumed=[*run.record.get("resumed", []), now()])
    else:
        run.record = {
            "lora_grpo_run": FORMAT,
            "recipe": recipe,
            "started": now(),
            "command": sys.argv,
            "config": config.to_dict(),
            "data": data_record,
            **planned,
            "reward_files": _reward_files(config),
            "versions": versions(),
            "git_revision": git_revision(),
            "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        }
    if plan:
        print("\n".join(plan.lines()), file=sys.stderr)
    return run


def close_run(status: str, error: str | None = None) -> str | None:
    """Say in run.json how the run that this process opened has ended.

    A run that was not begun leaves its folder as it was found.

    Args:
        status: `failed` or `interrupted`; a complete run stays complete.
        error: what went wrong.

    Returns:
        The command that goes on with the run; None where there is nothing to go on with.
    """
    if not _opened:
        return None
    run = _opened.pop()
    if run.begun:
        if run.record["status"] != "complete":
            run.update(status=status, ended=now(), error=error)
        launcher = distributed.launcher(distributed.world_size()) if distributed.world_size() > 1 else []
        return shlex.join([sys.executable, *launcher, sys.argv[0], "--resume", "--output-dir", str(run.folder)])
    if not distributed.is_main():
        return None
    with contextlib.suppress(OSError):  # not empty: there was something before
        run.checkpoints.rmdir()
    if not (run.folder / "run.json").exists():
        (run.folder / ".lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            run.folder.rmdir()
    return None


def read_record(folder: Path) -> dict[str, Any]:
    """Read the run.json of a run's folder.

    Raises:
        UserError: it is missing or is not a record that this version reads.
    """
    path = folder / "run.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the folder of a run") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    needed = {"config", "data", "policy", "versions"}
    if not isinstance(record, dict) or record.get("lora_grpo_run") != FORMAT or needed - record.keys():
        raise UserError(f"{path} is not a run record of format {FORMAT}")
    return record


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Python and of every package that takes part and is installed."""
    found = {"python": platform.python_version(), "lora_grpo": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Return the commit of the checkout this package runs from, with `+changes` where the tree differs from it."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False).stdout

    return (
        git("rev-parse", "HEAD").strip() + ("+changes" if git("status", "--porcelain", "-uno").strip() else "")
    ) or None


def _compare(run: Run, data_record: dict[str, Any]) -> None:
    """Refuse to go on with another run's settings or rows."""
    steps, asked = run.record["config"]["train"]["max_steps"], run.config.train.max_steps
    if asked < (done := run.record.get("trained_steps", 0)):
        raise UserError(
            f"the run in {run.folder} is at step {done} already; pass --train.max-steps {done} or more, or another "
            "--output-dir"
        )
    if steps != asked and not run.config.train.lr_scheduler.startswith("constant"):
        raise UserError(
            f"--train.max-steps {asked} cannot follow {steps}: {run.config.train.lr_scheduler} is laid out over "
            "the whole run; give another --output-dir"
        )
    default, after = (flat(json.loads(json.dumps(one.to_dict()))) for one in (RunConfig(), run.config))
    # A setting that is younger than the run had its default; there was a time before rows were held out.
    before = default | {"monitor.rows": 0} | flat(run.record["config"])
    for name in sorted(before.keys() | after.keys()):
        if name not in _MAY_CHANGE and before.get(name) != after.get(name):
            raise UserError(
                f"the run in {run.folder} has {name}={before.get(name)!r}, this command asks for {after.get(name)!r}; "
                "leave the flag out to go on, or give another --output-dir"
            )
    for split in ("train", "eval"):
        if run.record["data"][split]["sha256"] != data_record[split]["sha256"]:
            raise UserError(
                f"the {split} rows are no longer those that the run in {run.folder} began with; "
                "restore the file, or give another --output-dir"
            )
    for path, digest in _reward_files(run.config).items():
        if run.record.get("reward_files", {}).get(path) != digest:
            raise UserError(
                f"{path} is no longer the file of rewards that the run in {run.folder} began with; restore it, or give "
                "another --output-dir"
            )
    changed = [
        f"{name} {old} -> {versions().get(name)}"
        for name, old in run.record["versions"].items()
        if versions().get(name) != old
    ]
    if changed:
        print(f"versions changed since the run began: {', '.join(changed)}", file=sys.stderr)


def _reward_files(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of every user's file that a reward comes from."""
    names = [spec.name.rpartition(":")[0] for spec in parse_reward_specs(config.rewards)]
    return {name: atomic.sha256(Path(name).expanduser()) for name in names if name.endswith(".py")}


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names, as flags and messages spell them."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return found


def begun_run() -> Run | None:
    """Return the run that this process works on and has written of."""
    return _opened[0] if _opened and _opened[0].begun else None


_opened: list[Run] = []
"""The run that this process works on, for `close_run`."""


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
