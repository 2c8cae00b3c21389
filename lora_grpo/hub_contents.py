"""What a revision on the Hub holds, held against what is to be there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from lora_grpo.upload_files import UploadFile

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


def _same(file: UploadFile, there: RepoFile) -> bool:
    """Compare by what the Hub calls a file: a large one by SHA-256, a small one by git's SHA-1."""
    from huggingface_hub.utils.sha import git_hash

    if file.size != there.size:
        return False
    if there.lfs is not None:
        return file.sha256 == there.lfs.sha256
    content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
    return bool(git_hash(content) == there.blob_id)
