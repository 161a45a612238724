"""The page of a profile in a browser."""

import shutil

import pytest
from tests.limits import HANG_S
from tests.monitor.profiles import MODEL, TRAIN, make_profile, make_window, user

from ronde.monitor import summarize_profile
from ronde.render import write_page

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

ATTACK = "</script><script>throw 1</script><img src=x onerror='throw 2'>%DATA%"
SOURCE = {TRAIN: [f"line {n} {ATTACK}" for n in range(99)], MODEL: ["y"] * 300}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page()
    page.set_default_timeout(1000 * HANG_S)
    page.faults, page.requests = [], []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda message: page.faults.append(message.text))
    page.on("request", lambda request: page.requests.append(request.url))
    yield page
    page.close()
    assert page.faults == []
    assert [
        url for url in page.requests if not url.startswith(("file:", "data:"))
    ] == []


@pytest.fixture
def file(tmp_path):
    """Write the page of two ranks: one half of the time compute, then input."""
    windows = [
        make_window(rank, [(name, 500)], begun_s=begun_s)
        for rank in range(2)
        for name, begun_s in (("model", 0.0), ("loader", 5.0))
    ]
    frames = [
        frame._replace(function=ATTACK) if frame == user(88) else frame
        for frame in windows[0].frames
    ]
    profile = make_profile({"compute": 500}, {"compute": 500})
    windows = [window._replace(frames=tuple(frames)) for window in windows]
    report = summarize_profile(
        profile._replace(windows=tuple(windows)), lambda file, before: SOURCE[file]
    )
    path = tmp_path / "profile.html"
    write_page(report, path)
    return path


def shares(page):
    texts = page.locator("#key b").all_inner_texts()
    return [texts[0], texts[3]]  # compute, input


def test_a_time_range_changes_all_figures_by_keyboard_alone(page, file):
    page.goto(file.as_uri())
    assert "50.0%" in page.locator("#lines").inner_text()
    assert shares(page) == ["50.0%", "50.0%"]
    page.locator("#from").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("5")
    page.keyboard.press("Tab")
    assert shares(page) == ["0.0%", "100.0%"]
    assert page.locator("#lines tr").count() == 1
    page.keyboard.press("Escape")
    assert shares(page) == ["50.0%", "50.0%"]
    button = page.locator("#lines button").first
    button.focus()
    page.keyboard.press("Enter")
    details = page.locator("#lines .details").inner_text()
    assert "rank 1" in details
    assert "50.0%" in details
    page.keyboard.press("Enter")  # the button has the focus again
    assert page.locator("#lines .details").count() == 0


def test_a_range_is_selected_by_dragging(page, file):
    page.goto(file.as_uri())
    box = page.locator("#time").bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 9)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 9, box["y"] + 9)
    page.mouse.up()
    assert shares(page) == ["100.0%", "0.0%"]
    page.get_by_role("button").get_by_text("Whole time").click()
    assert shares(page) == ["50.0%", "50.0%"]


def test_markup_in_names_and_source_is_text(page, file):
    page.goto(file.as_uri())
    page.locator("#lines button", has_text="train.py:88").click()
    assert ATTACK in page.locator("#lines .details").inner_text()
    assert page.locator("img").count() == 0


def test_without_scripts_the_page_has_the_text_report(browser, file):
    page = browser.new_page(java_script_enabled=False)
    page.goto(file.as_uri())
    assert "spends its time computing" in page.locator("pre").inner_text()
    page.close()


def test_an_hour_of_eight_ranks_fits_into_a_megabyte(page, tmp_path):
    step = {"loader": 40, "compute": 160, "model": 60, "backward": 90, "save": 5}
    late = {**step, "model": 200, "reduce": 5}
    ranks = [{**step, "reduce": 145}] * 7 + [late]
    report = summarize_profile(make_profile(*ranks, num_windows=720))
    path = tmp_path / "profile.html"
    write_page(report, path)
    assert path.stat().st_size < 1 << 20
    page.goto(path.as_uri())
    assert "rank 7" in page.locator("#advice").inner_text()
    assert page.locator("#ranks tr").count() == 8
