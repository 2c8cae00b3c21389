"""`lora-grpo push`: select and check the files, write the card, and push everything to the Hub in one commit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lora_grpo import __version__, console
from lora_grpo.commands import command
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.files import disk
from lora_grpo.flags import Flag
from lora_grpo.gguf import check_exported
from lora_grpo.hub import card, facts, token
from lora_grpo.hub.files import collect, find_model, stale
from lora_grpo.hub.private_paths import refuse_private_text
from lora_grpo.hub.uploads import CARD, CARD_MARK, KINDS, UploadFile, is_hub_id, matches
from lora_grpo.merging import check_current, source_adapter
from lora_grpo.models import BEST, choose_adapter, model_files, origin_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True)
class PushOptions:
    """The model to push and its destination."""

    source: Annotated[str, Flag("RUN")]
    """A run, or the folder of an adapter, a merged model or GGUF files."""
    repository: Annotated[str, Flag("YOU/NAME")]
    """The repository; created if it does not exist."""
    what: Literal["adapter", "best", "merged", "gguf"] | None = None
    """What to push from a run: its last adapter (default), the adapter with the highest validation reward (RUN/best),
    RUN/merged or RUN/gguf."""
    public: bool = False
    """Create a public repository, or push to an existing public one."""
    dry_run: bool = False
    """List every file and print the model card; upload nothing."""


@dataclass(frozen=True)
class PushedFiles:
    """What was pushed, or would be with `dry_run`."""

    url: str | None
    """Address of the repository; None if nothing was sent."""
    files: tuple[str, ...]
    """Names of the files in the repository."""
    card: str
    """The model card."""


def push_to_hub(options: PushOptions) -> PushedFiles:
    """Push a model with its card, or tell what would be pushed.

    Raises:
        UserError: an argument, a file, or a permission is invalid. The repository is unchanged.
        RunError: the Hub or the connection failed. The repository is unchanged.
    """
    if not is_hub_id(options.repository) or "/" not in options.repository:
        raise UserError(f"{options.repository!r} is not a repository id; write YOU/NAME with your user name on the Hub")

    # Select the files and write the card.
    requested_kind = "adapter" if options.what == BEST else options.what
    folder, kind = find_model(choose_adapter(options.source, options.what), requested_kind)
    if kind == "gguf":
        check_exported(folder)
    if kind != "adapter":
        check_current(folder.resolve())
    files, skipped, model_facts = prepare(folder, kind, options.repository)

    # List them, and send them.
    visibility = "public" if options.public else "private"
    console.result(f"{origin_of(folder)} ({kind}) -> {options.repository} ({visibility})")
    for file in files:
        console.result(f"  {disk.size(file.size):>16}  {file.name}")
    total_bytes = sum(file.size for file in files)
    console.result(f"  {disk.size(total_bytes):>16}  total, {len(files)} files")
    if skipped:
        console.result(f"not uploaded: {', '.join(skipped)}")
    card_text = files[-1].read().decode()
    url = None
    if options.dry_run:
        console.result(f"dry run: nothing was sent\n\n{card_text}".removesuffix("\n"))
    else:
        url = send(options.repository, kind, files, options.public)
        names = [file.name for file in files]
        verify_command = _verify_command(folder, options.repository, model_facts, names)
        console.result(f"\n{url}\nwhen it is served: {verify_command}")
    return PushedFiles(url, tuple(file.name for file in files), card_text)


def _verify_command(folder: Path, repo_id: str, model_facts: facts.Facts, names: Sequence[str]) -> str:
    """Return the command that verifies what was pushed, served as on its card: by Ollama for GGUF files, else by vLLM.

    Args:
        names: of the files in the repository.
    """
    kind = model_facts.kind
    adapter = origin_of(folder) if kind == "adapter" else source_adapter(folder.resolve())
    flags = ["--trust-remote-code"] if model_facts.base.trust_remote_code else []
    servers = {
        "adapter": f"http://127.0.0.1:8000#{repo_id.split('/')[-1]}",
        "merged": f"http://127.0.0.1:8000#{repo_id}",
        "gguf": f"http://127.0.0.1:11434#{card.ollama_name(repo_id, model_facts, names)}",
    }
    return command("verify", adapter or "ADAPTER", *flags, "--against", servers[kind])


def prepare(folder: Path, kind: str, repo_id: str) -> tuple[list[UploadFile], list[str], facts.Facts]:
    """Return the files to upload, the card last, the names of skipped files, and the facts of the card."""
    model_facts = facts.gather(folder, kind)
    files, skipped = collect(folder, kind, model_facts.base.name)
    if model_facts.plot:
        files.append(UploadFile(model_facts.plot.name, model_facts.plot))
    card_text = card.write(repo_id, model_facts, files)
    files.append(UploadFile(CARD, card_text.encode(errors="replace")))
    refuse_private_text(files, folder)
    return files, skipped, model_facts


def send(repo_id: str, kind: str, files: Sequence[UploadFile], public: bool = False) -> str:
    """Commit files to a repository on the Hub, creating it if needed, and return its URL.

    huggingface_hub skips files that the Hub already has, so the same call continues an interrupted upload.

    Raises:
        UserError: there is no token or it lacks a permission, the repository is public and `public` is False, or the
            repository contains another kind of model, a README.md written by the user, or settings of the user that
            would act on the weights.
        RunError: the Hub or the connection failed.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import disable_progress_bars

    secret = token.find()
    token.hide_in_logs(secret)
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(token=secret, library_name="lora_grpo", library_version=__version__)
    try:
        api.create_repo(repo_id, private=not public, exist_ok=True)
        existing = _existing_files(api, repo_id, kind, public)
        stale_names = stale(existing, files, kind)
        if stale_names and CARD not in existing:  # every push writes a card, so these files are the user's
            raise UserError(
                f"{repo_id} has no card and contains {', '.join(stale_names)}, which would act on the new weights; "
                "delete them or choose another repository"
            )
        if stale_names:
            console.result(f"deleting {', '.join(stale_names)} of an earlier push; the repository's history keeps them")
        additions = [CommitOperationAdd(file.name, file.content) for file in files]
        deletions = [CommitOperationDelete(name, is_folder=False) for name in stale_names]
        api.create_commit(repo_id, [*additions, *deletions], commit_message=f"Upload {kind} with lora_grpo")
    # Connection errors come from the HTTP library, Python, or hf_xet (RuntimeError). A rejected model card is a
    # ValueError.
    except (model_files.hub_http_error(), OSError, RuntimeError, ValueError) as error:
        raise _one_line(error, repo_id, secret) from None
    return f"{api.endpoint}/{repo_id}"


def _existing_files(api: HfApi, repo_id: str, kind: str, public: bool) -> list[str]:
    """Check that the repository accepts this push, and return the names of its files."""
    info = api.model_info(repo_id)
    if not info.private and not public:
        raise UserError(f"{repo_id} is public; pass --public to push to it, or choose another repository")
    if info.private and public:
        console.note(f"{repo_id} is private and stays private; change that in its settings on the Hub")
    names = [sibling.rfilename for sibling in info.siblings or ()]
    # The card describes one kind. An adapter beside its merged model would be loaded onto it, and so applied twice.
    for other_kind, other in KINDS.items():
        if other_kind != kind and any(matches(name, other.identified_by[:1]) for name in names):
            raise UserError(
                f"{repo_id} already contains a model of kind '{other_kind}'; push '{kind}' to another repository"
            )
    if CARD in names:
        card_text = Path(api.hf_hub_download(repo_id, CARD)).read_text(encoding="utf-8")
        if CARD_MARK not in card_text:
            raise UserError(
                f"{repo_id} has a {CARD} that lora_grpo did not write; delete it or choose another repository"
            )
    return names


def _one_line(error: BaseException, repo_id: str, secret: str) -> UserError | RunError:
    """Convert a failed request to a one-line error without the token."""
    from huggingface_hub.errors import HfHubHTTPError

    while not isinstance(error, HfHubHTTPError) and error.__cause__:
        error = error.__cause__
    status = 0
    reason = first_line(error)
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        reason = f"{status} {error.server_message or reason}"
    reason = token.scrub(reason, secret)[:300]
    if status == 401:
        return UserError("the Hub rejected the token; run `hf auth login` or set HF_TOKEN to a token that can write")
    if status in (403, 404):
        return UserError(f"the token may not write to {repo_id}: {reason}; use a token with write access")
    return RunError(f"the push to {repo_id} failed: {reason}; run the same command again to send what is missing")
