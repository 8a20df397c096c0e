"""The documentation's site builds without a warning and loads nothing from other hosts."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.e2e.valora_serve.serving import ROOT

pytestmark = pytest.mark.slow

LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}


class Loaded(HTMLParser):
    """Addresses that a page loads by itself; links that a reader may follow are not among them."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in LOADS and given.get("rel") != "canonical":
            self.found.append(given.get(LOADS[tag]) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file",
         str(ROOT / "docs" / "site" / "mkdocs.yml"), "--site-dir", str(folder)],
        capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_there_and_loads_nothing_from_elsewhere(site):
    pages = {path.stem for path in (ROOT / "docs").rglob("*.md")}
    pages |= {path.stem for path in (ROOT / "docs" / "examples").glob("*.ipynb")}
    built = list(site.rglob("*.html"))
    assert pages | {"index"} <= {page.stem for page in built}
    for page in built:
        reader = Loaded()
        reader.feed(page.read_text(encoding="utf-8"))
        assert reader.found
        for address in reader.found:
            assert not re.match(r"(\w+:)?//", address), f"{page.name} loads {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8"))


def test_the_reference_has_what_the_public_names_document(site):
    engine = (site / "reference" / "engine.html").read_text(encoding="utf-8")
    for anchor in ("valora_serve.engine.async_engine.start_engine", "valora_serve.types.Request"):
        assert f'id="{anchor}"' in engine
    assert "A setting cannot be kept on this machine." in engine  # of a docstring's Raises
    settings = (site / "reference" / "settings-server.html").read_text(encoding="utf-8")
    assert "max_waiting" in settings
    assert "--max-waiting" in (site / "reference" / "commands.html").read_text(encoding="utf-8")
    factory = (site / "reference" / "settings-factory.html").read_text(encoding="utf-8")
    assert "rehearsal_share" in factory
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any(entry["location"].startswith("reference/runtime.html#") for entry in index["docs"])
