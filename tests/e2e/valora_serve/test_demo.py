"""`valora demo` as a user starts it: the bundle of the package, its console and an answer."""

import os
import re
import signal
import time

import httpx
import pytest

from tests.e2e.valora_serve.serving import ENVIRONMENT
from tests.support.browser import opened
from tests.support.forked import Forked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Address of a running demo."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "log").touch()
    process = Forked(
        "valora_serve.commands", ["demo", "--no-browser", "--port", "0"], folder, folder / "log",
        os.environ | ENVIRONMENT,
    )  # fmt: skip
    end = time.monotonic() + 180
    while (found := re.search(r"console is at (\S+)", (folder / "log").read_text())) is None:
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < end, (folder / "log").read_text()
        time.sleep(0.1)
    yield found[1]
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert {path.name for path in folder.iterdir()} == {"log"}, "the demo leaves nothing behind"


def test_the_domains_of_the_package_answer(demo):
    models = httpx.get(f"{demo}v1/models").json()["data"]
    domains = {model["id"]: model for model in models if model["kind"] == "domain"}
    assert len(domains) == 6
    assert all(model["accuracy"] >= model["required"] for model in domains.values())
    example = httpx.get(f"{demo}v1/examples").json()["data"][0]
    image = httpx.get(demo + example["images"][0]).content
    answer = httpx.post(f"{demo}v1/vision/{example['domain']}", files={"image": image}).json()
    assert answer["results"][0]["detections"]


def test_a_box_in_the_browser_with_one_click(demo, browser):
    with opened(browser, demo) as page:
        page.locator(".example").first.click()
        page.locator("#boxes rect").first.wait_for(state="attached", timeout=30_000)
        page.locator("#timing", has_text="6 answers").wait_for(timeout=30_000)
