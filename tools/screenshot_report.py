"""Take the report screenshots for the docs: docs/report.png of one run and docs/report-diff.png of two runs.

    python tools/screenshot_report.py outputs/gsm8k_lora outputs/another

Requires Chromium and the `dev` extra. Both pages are regenerated first.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from playwright import sync_api

from lora_grpo.cli import read_flags, run_command
from lora_grpo.errors import UserError
from lora_grpo.report import write_diff, write_report

DOCS = Path(__file__).resolve().parent.parent / "docs"
WINDOW = {"width": 1280, "height": 1240}
"""Window size in pixels, which shows the results and the first plots."""


@dataclass(frozen=True)
class Options:
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run to show."""
    other: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OTHER")]
    """Folder of the run to compare with."""


def main() -> None:
    options = read_flags(Options, sys.argv[1:], prog="screenshot_report.py", description=str(__doc__))
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser_path is None:
        raise UserError("no chromium, chromium-browser or google-chrome on the PATH; install one")
    pages = {
        "report.png": write_report(options.run),
        "report-diff.png": write_diff(options.run, options.other),
    }
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, path in pages.items():
            page = browser.new_page(viewport=WINDOW)
            page.goto(path.resolve().as_uri())
            page.screenshot(path=DOCS / name)
            print(f"wrote     {DOCS / name}")
        browser.close()


if __name__ == "__main__":
    sys.exit(run_command(main))
