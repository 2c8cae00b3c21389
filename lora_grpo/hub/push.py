"""Files into a repository of the Hub, as one visible change that can be interrupted at any moment.

They are gathered in a draft pull request of our own, weights one commit a file, and merged when all are there. Whoever
looks at the repository sees it as it was, or as it is to be. Its title has a digest of the whole content, so the same
command finds it again and sends what it lacks. Trying again after a failure is running the command again: there is one
way to go on.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lora_grpo import __version__
from lora_grpo.errors import RunError, UserError
from lora_grpo.hub import token as hub_token
from lora_grpo.hub.contents import missing, refuse_foreign_card, refuse_other_kind, tree
from lora_grpo.hub.failures import LONGEST_WAIT, Failure, explain, no_long_waits
from lora_grpo.hub.upload_files import CARD, UploadFile, stale

if TYPE_CHECKING:
    from huggingface_hub import Discussion, HfApi
    from huggingface_hub.hf_api import RepoFile

ATTEMPTS = 5
"""Failures in a row, without a file more having arrived, that end a push."""


@dataclass
class Push:
    """What is to be in a repository, and how far it has come."""

    repo_id: str
    kind: str
    """Which of `upload_files.KINDS` it is."""
    files: Sequence[UploadFile]
    public: bool
    """Whether a repository that others can see is meant."""
    endpoint: str | None = None
    """The Hub's address; None takes HF_ENDPOINT, as huggingface_hub does."""
    there: int = field(default=0, init=False)
    """Files that have arrived."""

    @property
    def title(self) -> str:
        """Return the title of the pull request: the same for the same content."""
        digests = json.dumps([(file.name, file.sha256) for file in self.files])
        return f"Upload {self.kind} with lora_grpo ({hashlib.sha256(digests.encode()).hexdigest()[:16]})"


def check_repo_id(repo_id: str) -> None:
    """Refuse a name that no repository can have, or that has no owner.

    Raises:
        UserError: says what is wrong with it.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{repo_id!r} is no name of a repository: {' '.join(str(error).split())}") from None
    if "/" not in repo_id:
        raise UserError(f"{repo_id!r} has no owner; give your name on the Hub before it: YOU/{repo_id}")


def push(asked: Push, wait: Callable[[float], object] = time.sleep) -> str:
    """Bring the files into the repository and return its address.

    Args:
        asked: what is to be there.
        wait: called with the seconds to wait before another attempt.

    Raises:
        UserError: there is no token, or it may not write there; the repository can be seen by others and that was not
            asked for; it holds a model of the other kind, or a README.md that is not the kit's.
        RunError: the Hub or the way to it failed again and again. The same command goes on.
    """
    from huggingface_hub import HfApi, is_offline_mode
    from huggingface_hub.utils import disable_progress_bars

    if is_offline_mode():
        raise UserError("HF_HUB_OFFLINE is set, and a push needs the Hub; unset it")
    token = hub_token.find()
    api = HfApi(endpoint=asked.endpoint, token=token, library_name="lora_grpo", library_version=__version__)
    if not sys.stderr.isatty():
        disable_progress_bars()
    with hub_token.scrubbed(token):
        try:
            outcome = _bring_patiently(api, asked, token, wait)
        except BaseException:  # Ctrl-C, or told to end
            print("stopped; the same command goes on", file=sys.stderr)
            raise
    # What is raised inside an `except` carries the error that is handled there, and what is in it, with it.
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _bring_patiently(
    api: HfApi, asked: Push, token: str, wait: Callable[[float], object]
) -> str | UserError | RunError:
    """Try until it is done or does not get on; return the repository's address, or what is to be raised."""
    failures, there = 0, 0
    while True:
        try:
            with no_long_waits():
                return _bring(api, asked)
        except (UserError, RunError) as error:
            return type(error)(hub_token.scrub(str(error), token))
        except Exception as error:  # noqa: BLE001 - httpx, huggingface_hub and hf_xet raise what they like
            failure = explain(error, token)
        failures = 1 if asked.there > there else failures + 1
        there = asked.there
        if end := _end(failure, asked, failures):
            return end
        pause = 2.0 ** (failures - 1) if failure.seconds is None else failure.seconds
        print(f"{failure.reason}; trying again in {pause:g} s ({failures} of {ATTEMPTS})", file=sys.stderr, flush=True)
        wait(pause)


def _end(failure: Failure, asked: Push, failures: int) -> UserError | RunError | None:
    """Return what is to be raised, or None where another attempt may go better."""
    again = f"run the same command again: {asked.there} of {len(asked.files)} files are there already"
    if failure.status == 401:
        return UserError("the Hub refuses the token; run `hf auth login` or set HF_TOKEN to one that can write")
    if failure.status == 403:
        return UserError(
            f"the token may not do that in {asked.repo_id}: {failure.reason}; use one that can write there, and see "
            "that pull requests are enabled in the repository's settings"
        )
    if not failure.passing:
        return RunError(f"the push to {asked.repo_id} failed: {failure.reason}; once that is mended, {again}")
    if failure.seconds is not None and failure.seconds > LONGEST_WAIT:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + failure.seconds + 60))
        return RunError(f"the push to {asked.repo_id} is to wait until {until}: {failure.reason}; then {again}")
    if failures >= ATTEMPTS:
        return RunError(f"the push to {asked.repo_id} did not get through: {failure.reason}; {again}")
    return None


# One attempt, from wherever the last one came to


def _bring(api: HfApi, asked: Push) -> str:
    _open_repository(api, asked)
    address = f"{api.endpoint}/{asked.repo_id}"
    main = tree(api, asked.repo_id, "main")
    refuse_other_kind(asked.repo_id, asked.kind, main)
    lacking = missing(asked.files, main)
    if CARD in main and any(file.name == CARD for file in lacking):
        refuse_foreign_card(api, asked.repo_id)
    if not lacking and not stale([*main], asked.files, asked.kind):
        asked.there = len(asked.files)
        print(f"{address} holds all {len(asked.files)} files as they are here")
        return address
    change = _own_change(api, asked) or api.create_pull_request(
        asked.repo_id, asked.title, description="Files are sent one by one and merged together, by lora_grpo."
    )
    _fill(api, asked, change, main)
    if change.status == "draft":  # which cannot be merged
        api.change_discussion_status(asked.repo_id, change.num, "open")
    api.merge_pull_request(asked.repo_id, change.num)
    if lost := missing(asked.files, tree(api, asked.repo_id, "main")):
        raise RunError(
            f"{change.url} was merged, and {lost[0].name} is not in {asked.repo_id} as it is here; run the same "
            "command again"
        )
    return address


def _open_repository(api: HfApi, asked: Push) -> None:
    """Make the repository if it is not there, and see who can see it."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        private = api.model_info(asked.repo_id).private
    except RepositoryNotFoundError:
        api.create_repo(asked.repo_id, private=not asked.public, exist_ok=True)
        private = api.model_info(asked.repo_id).private
    if not private and not asked.public:
        raise UserError(
            f"{asked.repo_id} can be seen by everybody; pass --public to push to it all the same, or name another "
            "repository"
        )
    if private and asked.public:
        print(f"{asked.repo_id} is private and stays private; its settings on the Hub make it public", file=sys.stderr)


def _own_change(api: HfApi, asked: Push) -> Discussion | None:
    """Return the pull request that an attempt before this one has left."""
    # By its author too: anybody may open one of the same title in a repository that they can see.
    me = api.whoami()["name"]
    for change in api.get_repo_discussions(asked.repo_id, discussion_type="pull_request"):
        if change.title != asked.title or change.author != me or change.status not in ("draft", "open"):
            continue
        if api.get_discussion_details(asked.repo_id, change.num).conflicting_files:
            api.change_discussion_status(
                asked.repo_id, change.num, "closed", comment="The repository has changed since; a new one takes over."
            )
            continue
        return change
    return None


def _fill(api: HfApi, asked: Push, change: Discussion, main: Mapping[str, RepoFile]) -> None:
    """Send what the pull request lacks: weights one by one, then the rest with what is to be deleted."""
    from huggingface_hub import CommitOperationDelete

    revision = f"refs/pr/{change.num}"
    before = tree(api, asked.repo_id, revision)
    refuse_other_kind(asked.repo_id, asked.kind, before)
    wanted = missing(asked.files, before)
    asked.there = len(asked.files) - len(wanted)
    if asked.there:
        print(f"{asked.there} of {len(asked.files)} files are there already")
    for file in (file for file in wanted if file.is_weights):
        print(f"sending {file.name} ({megabytes(file.size)})", flush=True)
        api.create_commit(asked.repo_id, [_addition(file)], commit_message=f"Add {file.name}", revision=revision)
        asked.there += 1
    rest = [file for file in wanted if not file.is_weights]
    old = stale([*before], asked.files, asked.kind)
    for name in old:
        print(f"deleting {name}, of an earlier push; the repository's history keeps it")
    if CARD in main and any(file.name == CARD for file in rest):
        print(f"replacing {CARD}; the repository's history keeps the old one")
    if rest or old:
        api.create_commit(
            asked.repo_id,
            [*map(_addition, rest), *(CommitOperationDelete(name, is_folder=False) for name in old)],
            commit_message="Add card, configuration and tokenizer",
            revision=revision,
        )
    if lost := missing(asked.files, tree(api, asked.repo_id, revision)):
        raise RunError(
            f"the Hub took {lost[0].name} and does not have it as it is here; a .gitignore in {asked.repo_id} may keep "
            "it out: see there, and run the same command again"
        )
    asked.there = len(asked.files)


def _addition(file: UploadFile) -> Any:
    """Return a file as huggingface_hub commits it; a new one each time, since it notes in it how far it came."""
    from huggingface_hub import CommitOperationAdd

    addition = CommitOperationAdd(file.name, file.content)
    addition.upload_info.sha256 = bytes.fromhex(file.sha256)  # or it would read gigabytes a second time
    return addition


def megabytes(size: int) -> str:
    """Write a number of bytes as people read it."""
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size:,} bytes"
