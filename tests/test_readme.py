"""tools/check_readme.py: the outputs that the documents quote are those of a run."""

import re

import check_readme
import pytest


def report_of(folder):
    """Return what the run has printed."""
    return f"""starter: 8 samples

|  | base |
|---|---:|
| pass@1 | 33.1 |
took 12.5 s, in {folder}/merged
"""


def document_with(score):
    """Return a document that quotes the report, with another time and another folder."""
    return f"""
<!-- printed by cat outputs/gsm8k_lora/report.md -->
| | base |
|---|---:|
| pass@1 | {score} |

<!-- printed by cat outputs/gsm8k_lora/report.md -->
```
took 13 s, in outputs/gsm8k_lora/merged
```
"""


def checked(tmp_path, document):
    """Return the exit code of the check of a document."""
    (tmp_path / "report.md").write_text(report_of(tmp_path))
    (tmp_path / "README.md").write_text(document)
    return check_readme.check([tmp_path / "README.md"], tmp_path)


def test_spaces_times_and_the_folder_may_differ(tmp_path, capsys):
    assert checked(tmp_path, document_with("33.1")) == 0
    assert "2 of 2 quoted outputs" in capsys.readouterr().out


def test_figures_may_not_differ(tmp_path, capsys):
    assert checked(tmp_path, document_with("33.2")) == 1
    printed = capsys.readouterr().out
    assert "README.md:2 differs" in printed and "+ | pass@1 | 33.1 |" in printed and "1 of 2" in printed


def test_a_document_without_marks_is_not_called_checked(tmp_path):
    assert checked(tmp_path, "| pass@1 | 99.9 |") == 1


@pytest.mark.parametrize("name", ["README.md", "docs/merge-and-publish.md"])
def test_the_readme_and_the_merge_page_are_checked(name):
    document = (check_readme.ROOT / name).read_text(encoding="utf-8")
    [(_, _, quoted)] = check_readme.blocks(document)
    assert quoted


def pages():
    root = check_readme.ROOT
    return [*sorted(root.glob("*.md")), *sorted(root.glob("docs/**/*.md"))]


def without_code(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page):
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
