"""Hooks of MkDocs for the site: pages from the root of the repository, and links to its files.

Pages link to files of the repository (`../recipes/your_task.py`), as on GitHub. On the site, these are links to the
repository. README.md, CHANGELOG.md, CONTRIBUTING.md and AGENTS.md become pages. The report of a run, if there is one in
outputs/gsm8k_lora, is the live example.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "agents-guide.md",
}
"""Files of the root -> their pages."""
REPORT = ROOT / "outputs" / "gsm8k_lora" / "report" / "report.html"
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", flags=re.M | re.S)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from the root, and the report."""
    for source, page in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_outside_code(content, _from_root, config["repo_url"])))
    if REPORT.is_file():
        report = REPORT.read_text(encoding="utf-8")
    else:
        report = "<p>This site was built without a run. <code>make demo</code> makes one.</p>"
    files.append(File.generated(config, "report.html", content=report))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links out of docs/ to the pages of the root, or to the repository."""
    if page.file.src_uri in PAGES.values():
        return markdown
    depth = page.file.src_uri.count("/")
    return _outside_code(markdown, lambda link, url: _from_docs(link, url, depth), config["repo_url"])


def _outside_code(markdown: str, change: Any, repository: str) -> str:
    """Change the links of a text, but not those in code."""
    parts = _CODE.split(markdown)
    for index in range(0, len(parts), 2):
        parts[index] = _LINK.sub(lambda match: match[1] + change(match[2], repository) + match[3], parts[index])
    return "".join(parts)


def _from_root(link: str, repository: str) -> str:
    """Return the link of a page of the root, seen from docs/."""
    if "://" in link or link.startswith("#"):
        return link
    name, hash_sign, anchor = link.partition("#")
    if name in PAGES:
        return PAGES[name] + hash_sign + anchor
    if name.startswith("docs/") and (ROOT / name).is_file():
        return link.removeprefix("docs/")
    return _of_repository(ROOT / name, repository)


def _from_docs(link: str, repository: str, depth: int) -> str:
    """Return the link of a page in docs/, or `depth` folders below it."""
    up = "../" * (depth + 1)
    if not link.startswith(up):
        return link
    name, hash_sign, anchor = link.removeprefix(up).partition("#")
    if name in PAGES:
        return "../" * depth + PAGES[name] + hash_sign + anchor
    return _of_repository(ROOT / name, repository)


def _of_repository(path: Path, repository: str) -> str:
    if not path.exists():
        raise FileNotFoundError(f"a page links to {path}, which does not exist")
    kind = "tree" if path.is_dir() else "blob"
    return f"{repository}/{kind}/main/{path.relative_to(ROOT).as_posix()}"
