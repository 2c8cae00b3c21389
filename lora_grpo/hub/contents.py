"""What a repository on the Hub holds, held against what is to be there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from lora_grpo.errors import UserError
from lora_grpo.hub.upload_files import CARD, CARD_MARK, LOADED_BY, UploadFile

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile


def tree(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    """Return the files of a revision by name."""
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.hf_api import RepoFile

    def entries() -> Iterator[RepoFile]:
        for entry in api.list_repo_tree(repo_id, recursive=True, revision=revision):
            if isinstance(entry, RepoFile):
                yield entry

    try:
        return {entry.path: entry for entry in entries()}
    except EntryNotFoundError:  # a repository without any commit
        return {}


def missing(files: Sequence[UploadFile], there: Mapping[str, RepoFile]) -> list[UploadFile]:
    """Return the files that are not there, or are others there."""
    return [file for file in files if file.name not in there or not _same(file, there[file.name])]


def refuse_other_kind(repo_id: str, kind: str, there: Iterable[str]) -> None:
    """Refuse an adapter beside a merged model: who loads the two together has the adapter applied twice.

    GGUF files are loaded by their names, and may lie beside either.

    Raises:
        UserError: names what is there.
    """
    holds = {"adapter": "an adapter", "merged": "a whole model"}
    for other, name in LOADED_BY.items():
        if kind in LOADED_BY and kind != other and name in there:
            pushed = "merged model" if kind == "merged" else kind
            raise UserError(f"{repo_id} holds {holds[other]} ({name}); push the {pushed} to a repository of its own")


def refuse_foreign_card(api: HfApi, repo_id: str) -> None:
    """Refuse to replace a README.md on main that is not the kit's.

    Raises:
        UserError: says what to do.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    address = hf_hub_url(repo_id, CARD, revision="main", endpoint=api.endpoint)
    answer = get_session().get(address, headers=build_hf_headers(token=api.token))
    hf_raise_for_status(answer)
    if CARD_MARK.encode() not in answer.content:
        raise UserError(
            f"{repo_id} has a {CARD} that lora_grpo did not write; delete it there first, or push to another repository"
        )


def _same(file: UploadFile, there: RepoFile) -> bool:
    """Compare by what the Hub calls a file: a large one by SHA-256, a small one by git's SHA-1."""
    from huggingface_hub.utils.sha import git_hash

    if file.size != there.size:
        return False
    if there.lfs is not None:
        return file.sha256 == there.lfs.sha256
    content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
    return bool(git_hash(content) == there.blob_id)
