"""What the end-to-end tests of the server share."""

import pytest

from tests.e2e.valora_serve.serving import Process, bundle_with_golden
from tests.support.browser import chromium_path


@pytest.fixture(scope="session")
def sample_bundle(tmp_path_factory):
    """A random bundle on the tiny base model."""
    return bundle_with_golden(tmp_path_factory.mktemp("bundles") / "sample")


@pytest.fixture(scope="session")
def served(sample_bundle, tmp_path_factory):
    """A server with the sample bundle."""
    with Process(sample_bundle, cwd=tmp_path_factory.mktemp("serve")) as process:
        yield process


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium; skips where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install playwright"
    )
    path = chromium_path()
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()
