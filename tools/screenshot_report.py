"""Take the screenshot of the report for the docs, docs/report.png.

    python tools/screenshot_report.py outputs/gsm8k_lora

Requires Chromium and the `dev` extra. The page is written again first.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from playwright import sync_api

from lora_grpo.cli import run_command
from lora_grpo.errors import UserError
from lora_grpo.flags import Flag, read_flags
from lora_grpo.report import write_report

DOCS = Path(__file__).resolve().parent.parent / "docs"
WINDOW = {"width": 1280, "height": 1500}
"""Window size in pixels, which shows the results and the first plots."""


@dataclass(frozen=True)
class Options:
    run: Annotated[Path, Flag("RUN")]
    """Folder of the run to show."""


def main() -> None:
    options = read_flags(Options, sys.argv[1:], __doc__)
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser_path is None:
        raise UserError("no chromium, chromium-browser or google-chrome on the PATH; install one")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport=WINDOW)
        page.goto(write_report(options.run).resolve().as_uri())
        page.screenshot(path=DOCS / "report.png")
        print(f"wrote     {DOCS / 'report.png'}")
        browser.close()


if __name__ == "__main__":
    sys.exit(run_command(main))
