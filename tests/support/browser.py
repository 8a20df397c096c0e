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


def violations(page):
    """What axe-core says against a page, as it is: rule and elements."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe-playwright-python: pip install"
    )
    found = axe.Axe().run(page).response["violations"]
    return [(one["id"], [node["target"] for node in one["nodes"]]) for one in found]
