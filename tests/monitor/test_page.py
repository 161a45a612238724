"""A job's page in a browser: Debian's Chromium, driven by playwright."""

import shutil
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from tests.limits import HANG_S
from tests.monitor.jobs import make_table, make_watcher

from ronde.monitor import JobWatcher, WebPage
from ronde.status import PendingCollective

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
FOCUSABLE = "button:not([hidden]), [tabindex='0']"
FOCUSED = """
() => {
  const focused = document.activeElement;
  return [focused.dataset.number, getComputedStyle(focused).outlineWidth];
}
"""
CONTRAST = """
() => {
  const light = (text) => {
    const parts = text.match(/[0-9.]+/g).slice(0, 3).map((part) => part / 255);
    const linear = parts.map(
      (x) => x <= 0.04 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05;
  };
  const style = (name) => getComputedStyle(document.querySelector(name));
  const box = light(style("figure").backgroundColor);
  return ["body", "dt", "dd", "figcaption", "figcaption b", "caption"].map((name) => {
    const text = light(style(name).color);
    return Math.max(text, box) / Math.min(text, box);
  });
}
"""


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        options = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}
        found = driver.chromium.launch(**options, timeout=1000 * HANG_S)
        yield found
        found.close()


@contextmanager
def opened(browser, page, expected=(), **options):
    """Open a page; fail on any message in its console, or a request to elsewhere."""
    context = browser.new_context(**options)
    context.set_default_timeout(1000 * HANG_S)
    tab, problems = context.new_page(), []
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    own = urlsplit(page.where).netloc

    def check(request):
        if urlsplit(request.url).netloc != own:
            problems.append(request.url)

    tab.on("request", check)
    tab.goto(page.where)
    tab.wait_for_selector("#rank-table tbody tr")
    yield tab
    assert [each for each in problems if each not in expected] == []
    context.close()


def wait_for_state(tab, text):
    tab.locator("#state", has_text=text).wait_for()


def rows_of(tab, name="rank"):
    return tab.locator(f"#{name}-table tbody tr")


@pytest.mark.parametrize(
    ("num_ranks", "scheme", "num_rows"),
    [(1, "dark", 1), (512, "light", 1)],
)
def test_a_job_of_any_size_is_legible(browser, num_ranks, scheme, num_rows):
    late = num_ranks // 2 if num_ranks > 1 else None
    with WebPage() as page:
        view = make_watcher(num_ranks, late=late).view()
        page.add(view)
        page.add(view._replace(at=view.at + 1))
        with opened(browser, page, color_scheme=scheme) as tab:
            assert rows_of(tab).count() == num_rows
            first = rows_of(tab).first.text_content()
            assert first.startswith(str(late or 0) + "node")
            assert ("holds others up" in first) == (late is not None)
            assert tab.locator("#title").text_content().endswith("train.py --epochs 3")
            assert min(tab.evaluate(CONTRAST)) >= 4.5
            assert tab.locator("figure:visible .uplot").count() == 4
            page_light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (page_light == "rgb(255, 255, 255)") == (scheme == "light")
            tab.emulate_media(color_scheme="dark" if scheme == "light" else "light")
            assert min(tab.evaluate(CONTRAST)) >= 4.5


def test_the_token_does_not_stay_in_the_address(browser):
    with WebPage() as page:
        page.add(make_watcher(1).view())
        with opened(browser, page) as tab:
            assert urlsplit(tab.url)[2:4] == ("/", "")
            tab.reload()
            tab.wait_for_selector("#rank-table tbody tr")
        stranger = browser.new_page()
        stranger.set_default_timeout(1000 * HANG_S)
        assert stranger.goto(f"http://{urlsplit(page.where).netloc}/").status == 403
        stranger.close()


def test_the_keyboard_reaches_everything(browser):
    view = make_watcher(40, late=37).view()
    with WebPage() as page:
        page.add(view)
        with opened(browser, page) as tab:
            shown = tab.locator(FOCUSABLE).evaluate_all(
                "all => all.map((each, i) => each.dataset.number = `${i}`)"
            )
            reached = []
            for _ in shown:
                tab.keyboard.press("Tab")
                found, width = tab.evaluate(FOCUSED)
                assert width == "3px"
                reached.append(found)
            assert sorted(reached) == sorted(shown)
            tab.locator("[aria-labelledby=ranks]").last.focus()
            tab.keyboard.press("Tab")
            assert tab.locator(":focus").text_content() == "Show all"
            assert rows_of(tab).count() == 1
            tab.keyboard.press("Enter")
            assert rows_of(tab).count() == 40
            page.add(view._replace(at=view.at + 1, step=77777))
            tab.locator("dd", has_text="77,777").wait_for()
            assert tab.locator(":focus").text_content() == "Show those to look at"


def test_a_hang_is_shown_as_text_only(browser):
    call = PendingCollective("<b>x</b>", "all", "allreduce", 0, 64, 9.0)
    table = make_table(3, collectives=[call])
    *rows, last = table.workers
    free = last._replace(status=last.status._replace(collectives=(), num_collectives=0))
    view = JobWatcher(table._replace(workers=(*rows, free))).view()
    with WebPage() as page:
        page.add(view._replace(loss=float("nan"), shares=None))
        with opened(browser, page) as tab:
            hang = tab.locator("#hang").text_content()
            assert hang.startswith("The job hangs: ranks 0-1 have waited 9.1s in <b>x")
            assert tab.title().startswith("hangs, step 105")
            assert "others wait for it" in rows_of(tab).first.text_content()
            assert tab.locator("#figures").text_content().count("not finite") == 1
            assert tab.locator("#loss, #gpus").all_text_contents()
            assert not tab.locator("#loss").is_visible()
            assert not tab.locator("#gpus").is_visible()


def test_the_page_outlives_a_lost_connection(browser):
    view = make_watcher(2).view()
    page = WebPage()
    page.add(view)
    url = urlsplit(page.where)
    failed = "Failed to load resource: "
    expected = [
        failed + "net::ERR_CONNECTION_REFUSED",
        failed + "the server responded with a status of 403 (Forbidden)",
    ]
    with opened(browser, page, expected) as tab:
        page.__exit__(KeyboardInterrupt, None, None)
        wait_for_state(tab, "The connection to ronde top is lost. Trying again.")
        page = WebPage(url.port, url.query.removeprefix("token="))
        page.add(view._replace(at=view.at + 5))
        wait_for_state(tab, "Live.")
        page.__exit__(KeyboardInterrupt, None, None)
        with WebPage(url.port):  # another token
            wait_for_state(tab, "Open the URL that ronde top printed.")
        assert rows_of(tab).count() == 2


def test_the_page_outlives_the_job(browser):
    with WebPage() as page:
        page.add(make_watcher(2).view())
        with opened(browser, page) as tab:
            page.__exit__(None, None, None)
            wait_for_state(tab, "The job has ended. The figures are its last ones.")
            assert rows_of(tab).count() == 2
