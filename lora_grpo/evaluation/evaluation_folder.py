"""The folder of an evaluation: whose samples are in it, and the answer where it is finished.

`evaluation.json` says of each file of samples what it is samples of. A file of something else is never appended to and
never deleted: it moves to `previous/`, and comes back when it is asked for again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.evaluation.report import REPORT, Report, read_report, write_report
from lora_grpo.files import atomic

FORMAT = 1
STATE, PAGE = "evaluation.json", "report.md"

Identity = Mapping[str, Any]
"""What tells one evaluation from another, as plain JSON values."""


def answer(folder: Path, asked: Mapping[str, Any]) -> Report | None:
    """Return the report of a finished evaluation, if it was asked in the same words of the same files.

    Raises:
        UserError: the folder holds something that is no evaluation.
    """
    state = _state(folder)
    if state["asked"] != _plain(asked) or state["left"] != _left(folder, state):
        return None
    try:
        return read_report(folder)
    except UserError:
        return None


def facts(folder: Path, name: str, identity: Identity) -> dict[str, Any] | None:
    """Return what was noted of a file of samples when it was begun, or None where it is not of this identity."""
    part = _state(folder)["parts"].get(name)
    return part["facts"] if part and part["identity"] == _plain(identity) else None


def begin(folder: Path, name: str, identity: Identity, noted: Mapping[str, Any]) -> dict[str, Any]:
    """Make room for a file of samples, or go on with it; say what changed where another one was there.

    Args:
        folder: the evaluation's, held by this process and settled.
        name: of the file.
        identity: what it is to be samples of.
        noted: more to be known of it, such as versions; a change of those is said and nothing else.

    Returns:
        What is noted of the file: of one that was begun before, what was noted then.
    """
    state, identity, noted = _state(folder), _plain(identity), _plain(noted)
    old = state["parts"].get(name)
    if old and old["identity"] == identity:
        if old["facts"] != noted:
            print(f"since {name} was begun, {'; '.join(differences(old['facts'], noted))}", file=sys.stderr)
            noted = old["facts"]
        old = None
    state["parts"][name] = {"identity": identity, "facts": noted}
    if old:
        digest, number = _digest(name, old["identity"]), 1
        aside = folder / "previous" / digest
        while (aside / name).exists():  # put there by somebody else
            number += 1
            aside = aside.with_name(f"{digest}-{number}")
        state["parts"][name] |= {"instead_of": old, "aside": aside.name}
        changed = "; ".join(differences(old["identity"], identity))
        print(f"{changed}: {name} starts anew, the earlier one is in {aside}", file=sys.stderr)
    state["asked"] = None
    state["left"].pop(name, None)
    atomic.write_json(folder / STATE, state)
    settle(folder)
    return dict(noted)


def settle(folder: Path) -> None:
    """Move files aside and back as evaluation.json says; a process that was killed may not have come to it.

    Every step is one rename, and tells by what is there whether it was done.
    """
    state = _state(folder)
    for name, part in state["parts"].items():
        if "instead_of" not in part:
            continue
        aside, back = folder / "previous" / part["aside"], folder / "previous" / _digest(name, part["identity"])
        aside.mkdir(parents=True, exist_ok=True)
        if not (aside / name).exists():
            for file in (REPORT, PAGE):
                if (folder / file).exists():
                    (folder / file).replace(aside / file)
            old = {"lora_grpo_evaluation": FORMAT, "asked": None, "parts": {name: part["instead_of"]}}
            atomic.write_json(aside / STATE, old)
            (folder / name).touch()  # there may have been none yet
            (folder / name).replace(aside / name)
        if (back / name).exists():
            (back / name).replace(folder / name)
            shutil.rmtree(back)
        state["parts"][name] = {key: part[key] for key in ("identity", "facts")}
        atomic.write_json(folder / STATE, state)


def finish(folder: Path, asked: Mapping[str, Any], report: Report) -> None:
    """Write the report, then what was asked: a command that asks the same is answered with it."""
    atomic.write_json(folder / STATE, {**_state(folder), "asked": None})
    write_report(folder, report)
    state = _state(folder)
    atomic.write_json(folder / STATE, {**state, "asked": _plain(asked), "left": _left(folder, state)})


def edited(folder: Path) -> list[str]:
    """Return the files of samples that are no longer as the last finished evaluation left them."""
    state = _state(folder)
    now = _left(folder, state)
    return [name for name, digest in state["left"].items() if now.get(name) != digest]


def _left(folder: Path, state: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the SHA-256 of every file of samples."""
    names = [folder / name for name in state["parts"]]
    return {path.name: atomic.sha256(path) if path.is_file() else None for path in names}


def stamp(paths: Sequence[Path]) -> dict[str, list[int]]:
    """Return size and time of change of files: cheaper than reading them, for asking the same again."""
    found = ((path, path.stat()) for path in paths if path.exists())
    return {str(path.resolve()): [status.st_size, status.st_mtime_ns] for path, status in found}


def differences(old: Identity, new: Identity) -> list[str]:
    """Return each field that differs, as "temperature was 1.0 and is 0.8"."""
    fields = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return [f"{name} was {_short(old.get(name))} and is {_short(new.get(name))}" for name in fields]


def _state(folder: Path) -> dict[str, Any]:
    """Return what evaluation.json says; of a new folder, nothing.

    Raises:
        UserError: the folder holds other files.
    """
    other = f"{folder} holds other files and no evaluation of this kit; choose another --output-dir"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output-dir {folder} is a file; choose another --output-dir")
    if not (folder / STATE).exists():
        foreign = [path for path in folder.glob("*") if not path.name.startswith(".")] if folder.exists() else []
        if foreign:
            raise UserError(other)
        return {"lora_grpo_evaluation": FORMAT, "asked": None, "left": {}, "parts": {}}
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if state["lora_grpo_evaluation"] != FORMAT or not all(
            {"identity", "facts"} <= p.keys() for p in state["parts"].values()
        ):
            raise ValueError(FORMAT)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / STATE} cannot be read; choose another --output-dir") from None
    return {"left": {}, **state}


def _plain(value: Any) -> Any:
    """Return a value as JSON gives it back."""
    return json.loads(json.dumps(value, default=str))


def _digest(name: str, identity: Identity) -> str:
    return hashlib.sha256(json.dumps([name, identity], sort_keys=True).encode()).hexdigest()[:12]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:17]}..."
