"""The page in a real browser: what a reader sees, searches and is protected from."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.report_runs import HOSTILE, completion, write_run
from helpers.warm_process import finish

from lora_grpo.evaluation import read_report
from lora_grpo.report.plots import plots_of
from lora_grpo.report.writing import write_report
from lora_grpo.runs.reader import RunFiles, read_run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome here")

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gsm8k_lora.py"
TINY = shlex.split(
    "--preset starter --model.engine peft --sampling.num-generations 4 --sampling.max-completion-tokens 32 "
    "--train.max-steps 3 --train.prompts-per-step 2 --train.micro-batch-size 4 --train.completions-steps 2 "
    "--data.eval-limit 8 --eval.num-samples 2 --eval.k 1 2"
)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Open a page; when the test ends, it must have requested nothing but itself and logged no errors."""
    opened_pages = []
    requests = []
    errors = []

    def open_page(path, **context):
        page = browser.new_context(**context).new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(dialog.message))
        page.goto(path.resolve().as_uri())
        opened_pages.append(page)
        return page

    yield open_page
    assert errors == []
    assert requests == [page.url for page in opened_pages]
    for page in opened_pages:
        page.context.close()


@pytest.fixture(scope="module")
def trained(warm, tmp_path_factory):
    """A run that the recipe trained, evaluated and reported on."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    ended = finish(warm.start(RECIPE, *TINY, "--output-dir", folder))
    assert f"report    {folder / 'report' / 'report.html'}" in ended.stdout
    return folder


def shown_count(page):
    """Return how many completions the page says it found."""
    return int(page.locator("#count").inner_text().split(" of ")[0].replace(",", ""))


def assert_count(page, expected, **filters):
    """Set filters, and wait until the page says that it found as many completions as expected."""
    page.click("text=Clear")
    for name, value in filters.items():
        field = page.locator(f"[name={name}]")
        if name in ("source", "step", "verdict", "sort"):
            field.select_option(value)
        else:
            field.fill(str(value))
    sync_api.expect(page.locator("#count")).to_have_text(re.compile(rf"^{expected:,} of "))


class TrainedPage(NamedTuple):
    """The page of a trained run, and the completions that it must show."""

    page: Any
    run: RunFiles
    completions: list[dict]
    """Lines of completions/, of training."""
    samples: list[dict]
    """Of the evaluations before and after training."""

    @property
    def all_lines(self):
        return [*self.completions, *self.samples]


@pytest.fixture
def trained_page(trained, visit):
    page = visit(trained / "report" / "report.html")
    page.wait_for_selector("#list li")
    run = read_run(trained)
    return TrainedPage(page, run, run.completions, [*run.samples["base"], *run.samples["trained"]])


def test_a_trained_run_is_all_there(trained, trained_page):
    page, run, completions, samples = trained_page
    assert page.locator("figure img").count() == len(plots_of(run, read_report(trained / "evaluation"))) > 10
    assert page.locator(".state").inner_text() == "Complete."
    assert len(samples) == 2 * 8 * 3
    assert shown_count(page) == len(completions) + len(samples)


def test_filters_by_source_step_and_reward_count_right(trained_page):
    page, run, completions, _ = trained_page
    last_step = completions[-1]["step"]
    assert_count(page, len(run.samples["trained"]), source="trained")
    assert_count(page, sum(line["step"] == last_step for line in completions), step=str(last_step))
    assert_count(page, sum(1.0 <= line["reward"] <= 3.0 for line in completions), least=1.0, most=3.0)


def test_filters_by_verdict_count_right(trained_page):
    page = trained_page.page
    failed = sum(line.get("passed") is False for line in trained_page.all_lines)
    wrong = sum(line.get("status") == "wrong_answer" for line in trained_page.all_lines)
    assert failed > 0
    assert_count(page, failed, verdict="verdict failed")
    assert_count(page, wrong, verdict="status wrong_answer")


def test_a_search_reads_questions_completions_ids_and_answers(trained_page):
    page, run, completions, samples = trained_page
    texts = []
    for line in (*completions, *samples):
        question = line.get("question") if "step" in line else run.rows[line["task_id"]]["question"]
        row_id = line.get("id", line.get("task_id"))
        texts.append(f"{question} {line['completion']}\n{row_id}\n{line.get('extracted', '')}".lower())
    word = completions[0]["completion"].split()[-1][:6].lower()
    with_word = sum(word in text for text in texts)
    assert with_word > 0
    assert_count(page, with_word, text=word.upper())
    assert_count(page, 0, text="surely nobody wrote this")
    assert page.locator("#detail").inner_text() == "No completion matches."


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")
INVISIBLE = re.compile("[\x80-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text):
    """Return a text as the page shows it, with a picture or the number of each invisible character."""
    text = CONTROL.sub(lambda match: chr(ord("␀") + ord(match[0])), text)
    text = text.replace("\x7f", "␡")
    return INVISIBLE.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


def test_whatever_a_model_wrote_is_shown_as_text(tmp_path, visit):
    lines = [completion(1, text, 0.0, question=text, answer=text, extracted=text) for text in HOSTILE]
    run = write_run(tmp_path / "run", completions=lines, evaluated=False, status="failed", error=HOSTILE[1])
    page = visit(write_report(run))
    page.wait_for_selector("#list li")
    page.focus("#list")
    for text in HOSTILE:
        texts = page.locator("#detail pre").evaluate_all("boxes => boxes.map((box) => box.textContent)")
        assert texts == [visible(text)] * 4
        page.keyboard.press("ArrowDown")
    assert page.locator(".state").inner_text() == f"Failed: {HOSTILE[1]}"
    assert page.evaluate("window.hacked") is None
    assert page.locator("script").count() == 2 and page.locator("img").count() == page.locator("figure").count()


def test_no_script_but_its_own_can_run_in_the_page(tmp_path, browser):
    page = browser.new_page()
    page.goto(write_report(write_run(tmp_path / "run", evaluated=False)).resolve().as_uri())
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.hacked = 1";
        document.body.append(script);
        document.body.insertAdjacentHTML("beforeend", "<img src='x:' onerror='window.hacked = 2'>");
    }""")
    page.wait_for_timeout(100)
    assert page.evaluate("window.hacked") is None
    page.close()


def test_a_phone_does_not_scroll_sideways_and_dark_is_dark(tmp_path, visit):
    name = "a_run_with_quite_a_long_name_and_no_blank_in_it"
    run = write_run(tmp_path / name, completions=[completion(1, "long" * 200, 1.0)], versions={"python": "3" * 60})
    path = write_report(run)
    backgrounds = {}
    for scheme in ("light", "dark"):
        page = visit(path, viewport={"width": 380, "height": 800}, color_scheme=scheme)
        page.evaluate("document.querySelectorAll('details').forEach((part) => (part.open = true))")
        assert page.evaluate("document.documentElement.scrollWidth") == 380
        backgrounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert backgrounds["light"] != backgrounds["dark"]
