"""Take a screenshot for the docs: of the report of a run, or of commands and what they print.

    python tools/screenshot.py docs/report.png outputs/gsm8k_lora
    python tools/screenshot.py docs/chat.png "lora-grpo chat starter 'What is 3 times 7?'" ...

An argument that is a folder is a run, whose report is written again; all others are commands. Requires Chromium and the
`dev` extra.
"""

import html
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright import sync_api

from lora_grpo.cli import run_command
from lora_grpo.errors import UserError
from lora_grpo.report import write_report

WINDOW = {"width": 1280, "height": 1500}
"""Window size in pixels, which shows the results and the first plots of a report."""
TERMINAL = """<meta charset="utf-8"><style>body {{ margin: 0; background: #1e1e2e; color: #cdd6f4;
font: 15px/1.5 monospace; white-space: pre-wrap; }} div {{ padding: 16px 20px; width: 1000px; }} b {{ color: #a6e3a1; }}
</style><div>{lines}</div>"""


def terminal(commands: list[str]) -> str:
    """Run the commands in a shell, and return a page with them and what they print, without notes on stderr."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    lines = []
    for command in commands:
        done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"{command!r} ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}")
        lines.append(f"<b>$ {html.escape(command)}</b>\n{html.escape(done.stdout.strip())}")
    return TERMINAL.format(lines="\n\n".join(lines))


def main() -> None:
    if len(sys.argv) < 3:
        raise UserError("got no picture and what it shows; see the top of this file")
    picture, shown = Path(sys.argv[1]), sys.argv[2:]
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser_path is None:
        raise UserError("no chromium, chromium-browser or google-chrome on the PATH; install one")
    is_report = Path(shown[0]).is_dir()
    with sync_api.sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        page_file = write_report(Path(shown[0])) if is_report else Path(folder) / "terminal.html"
        if not is_report:
            page_file.write_text(terminal(shown), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport=WINDOW)
        page.goto(page_file.resolve().as_uri())
        (page if is_report else page.locator("div")).screenshot(path=picture)
        browser.close()
    print(f"wrote     {picture}")


if __name__ == "__main__":
    sys.exit(run_command(main))
