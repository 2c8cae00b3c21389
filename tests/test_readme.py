"""tools/check_readme.py: the outputs that the documents quote are those of a run."""

import check_readme

REPORT = """starter: 8 samples

|  | base |
|---|---:|
| pass@1 | 33.1 |
took 12.5 s, in RUN/merged
"""
QUOTED = """
<!-- printed by cat outputs/gsm8k_lora/report.md -->
| | base |
|---|---:|
| pass@1 | 33.1 |

<!-- printed by cat outputs/gsm8k_lora/report.md -->
```
took 13 s, in outputs/gsm8k_lora/merged
```
"""


def checked(tmp_path, text):
    (tmp_path / "report.md").write_text(REPORT.replace("RUN", str(tmp_path)))
    (tmp_path / "README.md").write_text(text)
    return check_readme.check([tmp_path / "README.md"], tmp_path)


def test_spaces_times_and_the_folder_may_differ_and_figures_may_not(tmp_path, capsys):
    assert checked(tmp_path, QUOTED) == 0 and "2 of 2 quoted outputs" in capsys.readouterr().out
    assert checked(tmp_path, QUOTED.replace("33.1", "33.2")) == 1
    printed = capsys.readouterr().out
    assert "README.md:2 differs" in printed and "+ | pass@1 | 33.1 |" in printed and "1 of 2" in printed


def test_a_document_without_marks_is_not_called_checked(tmp_path):
    assert checked(tmp_path, "| pass@1 | 99.9 |") == 1


def test_the_readme_and_the_merge_page_are_checked():
    documents = ("README.md", "docs/merge-and-publish.md")
    texts = [(check_readme.ROOT / name).read_text(encoding="utf-8") for name in documents]
    assert [len(check_readme.blocks(text)) for text in texts] == [1, 1]
    assert all(quoted for text in texts for _, _, quoted in check_readme.blocks(text))
