"""A headless Chromium, where there is one, and what tests do with it."""

import contextlib
import shutil

import pytest


def chromium_path():
    """The browser that the system has; skips the test if there is none."""
    path = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium runs this test")
    return path


@contextlib.contextmanager
def opened(browser, url, allowed=(), scripts=(), **options):
    """A page of the console that has loaded; fails if it says errors other than those allowed.

    Args:
        browser: The browser.
        url: Address of the server.
        allowed: Parts of messages that may come.
        scripts: JavaScript that runs before the page's own.
        options: Options of the page.
    """
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 800}} | options)
    for script in scripts:
        page.add_init_script(script)
    problems = []
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    try:
        page.goto(url)
        page.locator("#model option").first.wait_for(state="attached")
        yield page
        assert not [text for text in problems if not any(part in text for part in allowed)]
    finally:
        page.close()


def asked(page, model, files, least=None, until="in total"):
    """Ask a model about files, and wait for its answers."""
    page.select_option("#model", model)
    page.set_input_files("#file", files)
    if least is not None:
        page.locator("#least").fill(least)
    page.click("#run")
    page.locator("#timing", has_text=until).wait_for(timeout=20_000)


def drawn(page, name="#boxes rect"):
    """Boxes as they are drawn: x, y, width and height of each."""
    sides = ("x", "y", "width", "height")
    return [[float(box.get_attribute(side)) for side in sides] for box in page.locator(name).all()]


def saved(page, form, folder):
    """Download the answers in a format."""
    page.select_option("#format", form)
    with page.expect_download() as loading:
        page.click("#save")
    loading.value.save_as(folder / loading.value.suggested_filename)
    return folder / loading.value.suggested_filename


def overhang(page):
    """By how many pixels a page is wider than its window."""
    return page.evaluate("() => document.documentElement.scrollWidth - innerWidth")


def is_focused(place):
    return place.evaluate("node => node === document.activeElement")


def violations(page):
    """What axe-core says against a page, as it is: rule and elements."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe-playwright-python: pip install"
    )
    found = axe.Axe().run(page).response["violations"]
    return [(one["id"], [node["target"] for node in one["nodes"]]) for one in found]
