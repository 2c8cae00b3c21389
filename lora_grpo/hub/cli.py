"""`scripts/push.py`: a run's adapter, merged model or GGUF files, with their card, into a repository of the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lora_grpo.errors import UserError
from lora_grpo.hub import card as model_card
from lora_grpo.hub import facts as card_facts
from lora_grpo.hub import metadata, token, whole_files
from lora_grpo.hub import push as hub
from lora_grpo.hub.card_schema import read_merge
from lora_grpo.hub.upload_files import CARD, UploadFile, collect, find
from lora_grpo.merging import check_current


@dataclass(frozen=True)
class Options:
    """What is pushed, and where to."""

    named: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    """A run, or the folder of an adapter, of a merged model or of GGUF files."""
    repository: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="YOU/NAME")]]
    """The repository; it is made where there is none."""
    what: Literal["adapter", "merged", "gguf"] | None = None
    """What of the run: its adapter (the default), RUN/merged or RUN/gguf. Of another folder it is found out."""
    public: bool = False
    """Make the repository one that everybody can see, or push to one that is."""
    dry_run: bool = False
    """Show every file and the whole card; send nothing."""


def push(options: Options) -> None:
    """Push, or show what would be pushed.

    Raises:
        UserError: a mistake in arguments, files or permissions; nothing that others see has changed.
        RunError: the Hub, or the way to it, failed; the same command goes on.
    """
    hub.check_repo_id(options.repository)
    folder, kind = find(options.named, options.what)
    if kind != "adapter":
        read_merge(folder)  # or what it is made of cannot be told
        check_current(folder)
    files, left, card = prepare(folder, kind, options.repository)
    visible = "public" if options.public else "private"
    print(f"{folder} ({kind}) to {options.repository}, {visible}")
    for file in files:
        print(f"  {hub.megabytes(file.size):>16}  {file.name}")
    print(f"  {hub.megabytes(sum(file.size for file in files)):>16}  in {len(files)} files")
    if left:
        print(f"stays here: {', '.join(left)}")
    if (folder / CARD).is_file():
        print(f"stays here: {CARD}; the card takes its place")
    if options.dry_run:
        print(f"{options.repository} would be made, {visible}, where there is none; nothing was sent\n\n{card}", end="")
        return
    address = hub.push(hub.Push(options.repository, kind, files, options.public))
    print(f"\n{address}")


def prepare(folder: Path, kind: str, repo_id: str) -> tuple[list[UploadFile], list[str], str]:
    """Return the files that go up, card and evaluation results among them; the names of those that stay; the card.

    Args:
        folder: what is pushed.
        kind: which of `upload_files.KINDS` it is.
        repo_id: the repository that the card speaks of.

    Raises:
        UserError: a file may not go up or is damaged, or a record cannot be read.
    """
    base = card_facts.base_of(folder, kind)
    files, left = collect(folder, kind, base.hub_id or base.name)
    whole_files.check(folder, kind, files, read_merge(folder))
    facts = card_facts.gather(folder, kind, tuple(files), base)
    texts = {CARD: model_card.write(repo_id, facts), **metadata.eval_results(facts)}
    files += [UploadFile(name, text.encode()) for name, text in texts.items()]
    _refuse_tokens(files)
    return files, left, texts[CARD]


def _refuse_tokens(files: Sequence[UploadFile]) -> None:
    """Refuse a token in a text or in the card, without showing it.

    Raises:
        UserError: names the file.
    """
    tokens = token.at_hand()
    for file in files:
        if file.is_weights:
            continue
        if token.is_in(file.content if isinstance(file.content, bytes) else file.content.read_bytes(), tokens):
            what = f"the card ({CARD}, from run.json and reports)" if file.name == CARD else file.name
            raise UserError(
                f"{what} holds a token of the Hub, or what looks like one; take it out, and make a new token if others "
                "may have seen it"
            )
