"""The console's other views: beside the teacher, the engine's history, documents, and labels.

The server is real, its engine a fake one, whose state a test sets.
"""

import json
from dataclasses import replace

import pytest
from PIL import Image

from tests.support.browser import asked, drawn, is_focused, opened, overhang, violations
from tests.support.fake_engine import PERSON, SCENE, FakeEngine
from tests.support.http_helpers import ADMIN, encoded, loading, picture, serving
from valora_serve.types import Mode

pytestmark = pytest.mark.slow

KEY = f"sessionStorage.setItem('valora-key', '{ADMIN}')"
HIDDEN = "Object.defineProperty(document, 'hidden', { value: true })"
REFUSED = ("Failed to load resource",)  # what the browser says of an answer that is an error


class Machine(FakeEngine):
    """An engine whose state is what a test sets."""

    def __init__(self):
        super().__init__()
        self.now = super().stats()
        self.parts = None

    def stats(self):
        return self.now

    def replicas(self):
        return self.parts


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """A bundle's golden examples: boxes with a teacher's, labels with a teacher's, and neither."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "golden").mkdir()
    (folder / "golden" / "a.png").write_bytes(encoded(picture(80, 60)))

    def box(*corners):
        return {"label": "person", "box": list(corners), "confidence": 0.625}

    listed = [
        {"domain": "person", "image": "golden/a.png", "expected": [],
         "teacher": [box(1, 1, 41, 31), box(60, 40, 70, 50)]},
        {"domain": "person", "image": "golden/a.png", "expected": []},
        {"domain": "scene", "image": "golden/a.png", "expected": "street",
         "teacher": {"label": "beach", "confidence": 0.375}},
    ]  # fmt: skip
    (folder / "golden" / "golden.json").write_text(json.dumps(listed))
    domains = {"person": {}, "scene": {}}
    (folder / "bundle.json").write_text(json.dumps({"domains": domains}))
    return folder


@pytest.fixture(scope="module")
def server(examples, tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    (place / "adapters").mkdir()
    engine = Machine()
    engine._served |= {m.name: replace(m, root=str(examples)) for m in (PERSON, SCENE)}
    with serving(engine, **loading(place)) as running:
        yield running


@pytest.fixture
def page(browser, server):
    """A page whose tab has the key."""
    with opened(browser, server.url, REFUSED, [KEY], bypass_csp=True) as shown:  # for axe-core
        yield shown


def text(page, name):
    return page.locator(name).inner_text()


def test_an_example_beside_the_boxes_of_its_teacher(page):
    page.locator(".example").nth(0).click()
    page.locator("#timing", has_text="in total").wait_for()
    assert not page.locator("#beside").is_visible()
    page.click("#compare")
    assert page.locator("#boxes rect").count() == 1
    assert drawn(page, "#beside-boxes rect") == [[1, 1, 40, 30], [60, 40, 10, 10]]
    left, right = (page.locator(name).bounding_box() for name in ("#stage", "#beside-stage"))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    assert (left["width"], left["height"]) == (right["width"], right["height"])
    assert text(page, "#agreement") == (
        "In common: 1 (overlap of at least 0.5). Only VaLoRA's: 0. Only the teacher's: 1."
    )
    page.click("#larger")
    assert page.locator("#beside-stage").bounding_box()["width"] == pytest.approx(
        1.5 * right["width"], abs=1
    )
    page.click("#correct")
    page.locator(".grip").first.focus()
    page.keyboard.press("Delete")
    assert "In common: 0" in text(page, "#agreement")
    page.keyboard.press("Control+z")
    page.click("#fit")
    page.set_viewport_size({"width": 360, "height": 740})
    left, right = (page.locator(name).bounding_box() for name in ("#stage", "#beside-stage"))
    assert left["y"] + left["height"] <= right["y"], "one below the other on a phone"
    assert overhang(page) <= 0
    assert violations(page) == []


def test_examples_without_a_teacher_and_with_one_of_labels(page):
    page.locator(".example").nth(1).click()
    page.locator("#timing", has_text="in total").wait_for()
    assert page.locator("#compare").is_hidden()
    page.click("#clear")
    page.locator(".example").nth(2).click()
    page.locator("#said", has_text="The teacher of scene answers: beach (0.375)").wait_for()


def seen(page, **values):
    """Let the engine have a state and the page look at it."""
    page.server.engine.now = replace(page.server.engine.now, **values)
    page.evaluate("async () => (await import('/console/engine.js')).refresh()")


@pytest.fixture
def watched(browser, server):
    """A page that looks at the engine once, and then only when a test says so."""
    with opened(browser, server.url, scripts=[KEY, HIDDEN], bypass_csp=True) as shown:
        shown.locator("#state", has_text="ready").wait_for()
        shown.server = server
        shown.click("#tab-engine")
        yield shown
    server.engine.parts = None


def test_the_engine_over_time(watched):
    seen(watched, running=4, waiting=7, mode=Mode.MERGED, merged_adapter="adapter-1", switches=5)
    seen(watched, running=2, waiting=1, mode=Mode.UNMERGED, merged_adapter=None, switches=8,
         pages_kv=31, pages_contexts=6, pages_adapters=12, pages_free=51)  # fmt: skip
    queue = "2 running and 1 waiting now; in the last two minutes at most 11 at a time."
    assert text(watched, "#e-queue-said") == queue
    assert "31 KV cache, 6 documents, 12 adapters, 51 free of 100" in text(watched, "#e-pages-said")
    said = text(watched, "#e-mode-said")
    assert said.startswith("unmerged now, no adapter is merged; merged ")
    assert said.endswith("(8 since the start).")
    assert text(watched, "#e-queue-top") == "20"
    assert watched.locator("#e-queue").get_attribute("aria-labelledby").endswith("e-queue-said")
    watched.locator("#e-table summary").click()
    watched.wait_for_function("() => document.querySelector('#e-rows').children.length >= 3")
    now, before = (
        watched.locator("#e-rows tr").nth(n).inner_text().split("\t")[1:] for n in (0, 1)
    )
    assert now == ["2", "1", "unmerged", "none", "8", "31", "6", "12", "51"]
    assert before[:5] == ["4", "7", "merged", "adapter-1", "5"]
    for scheme in ("light", "dark"):
        watched.emulate_media(color_scheme=scheme)
        assert violations(watched) == []
    watched.set_viewport_size({"width": 360, "height": 740})
    assert overhang(watched) <= 0
    assert watched.locator("#replicas").is_hidden()


def test_every_replica(watched):
    base = watched.server.engine.now
    watched.server.engine.parts = {
        "east": replace(base, running=3, waiting=9, merged_adapter="adapter-1", mode=Mode.MERGED),
        "west": replace(base, running=5, waiting=0, switches=21, pages_free=44, mode=Mode.MIXTURE),
    }
    seen(watched, running=8, waiting=9)
    rows = [row.inner_text().split("\t") for row in watched.locator("#replica-rows tr").all()]
    assert [row[:3] for row in rows] == [["east", "3", "9"], ["west", "5", "0"]]
    assert "56 of 100" in rows[1][-1]
    assert text(watched, "#e-queue-said").startswith("8 running and 9 waiting")
    watched.select_option("#replica", "west")
    assert text(watched, "#e-queue-said").startswith("5 running and 0 waiting")
    assert "(21 since the start)" in text(watched, "#e-mode-said")
    del watched.server.engine.parts["west"]
    seen(watched, running=3)
    assert watched.locator("#replica-rows tr").count() == 1
    assert text(watched, "#e-queue-said").startswith("5 running"), "its history stays"
    assert violations(watched) == []


def test_history_is_bounded_and_has_gaps(watched):
    points = watched.evaluate(
        """async () => {
            const { refresh } = await import("/console/engine.js");
            const state = await (await fetch("v1/status", {
                headers: { Authorization: "Bearer " + sessionStorage.getItem("valora-key") },
            })).text();
            const [ask, now] = [window.fetch, Date.now];
            let at = now();
            window.fetch = async () => new Response(state);
            Date.now = () => at;
            document.querySelector("#span").value = "900";
            for (let step = 0; step < 1200; step += 1) {
                at += step === 1000 ? 60000 : 500;
                await refresh();
            }
            [window.fetch, Date.now] = [ask, now];
            const drawn = [...document.querySelectorAll("#e-queue path.running")];
            return drawn.map((path) => path.getAttribute("d").split("L").length);
        }"""
    )
    assert len(points) == 2, "one line before the gap, one after it"
    assert sum(points) <= 2 * 900


def test_nothing_is_asked_while_the_page_is_hidden(browser, server):
    context = browser.new_context()
    context.add_init_script(KEY)
    page = context.new_page()
    page.clock.install()
    asked = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    page.goto(server.url)
    page.locator("#state", has_text="ready").wait_for()
    with page.expect_request("**/v1/status"):
        page.clock.run_for(2000)
    page.evaluate(f"() => {HIDDEN}")
    page.evaluate("() => fetch('health')")  # what was on its way has been sent
    before = asked.count("status")
    page.clock.run_for(60_000)
    page.evaluate("() => fetch('health')")
    assert asked.count("status") == before
    context.close()


def test_a_document_is_added_asked_and_deleted(page, server, tmp_path):
    page.click("#tab-documents")
    page.locator("#contexts-none").wait_for()
    file = tmp_path / "House rules.txt"
    file.write_text("No dogs after eight.")
    page.set_input_files("#learn-file", str(file))
    page.wait_for_function("() => document.querySelector('#learn-name').value === 'House-rules'")
    page.fill("#learn-name", "rules")
    page.click("#learn-send")
    page.locator("#learn-said", has_text="rules: 4 tokens are held in 4").wait_for()
    row = page.locator("#context-rows tr")
    assert row.inner_text().split("\t")[:3] == ["rules", "prefix", "4"]
    assert page.locator("#context").input_value() == "rules"
    page.wait_for_function("() => document.activeElement.id === 'question'")
    page.keyboard.type("When may dogs come?")
    page.keyboard.press("Enter")
    page.locator("#context-answers .hint", has_text="generated").wait_for()
    assert "a red star" in text(page, "#context-answers .text")
    assert server.engine.asked[-1].model == "rules"
    assert server.engine.asked[-1].sampling.temperature == 0
    assert violations(page) == []

    page.fill("#learn-name", "rules")  # the name is in use
    page.fill("#learn-document", "No cats.")
    page.click("#learn-send")
    page.locator("#learn-error", has_text="set replace").wait_for()
    page.fill("#learn-document", " ")
    page.locator("#learn summary").click()
    page.check("#learn-replace")
    page.click("#learn-send")
    page.locator("#learn-error", has_text="the document is empty").wait_for()
    assert page.locator("#context-rows tr").count() == 1

    row.get_by_role("button", name="Delete rules").click()
    page.keyboard.press("Escape")
    page.locator("#confirm-dialog[open]").wait_for(state="detached")
    assert page.locator("#context-rows tr").count() == 1
    row.get_by_role("button", name="Delete rules").click()
    page.click("#confirm-yes")
    page.locator("#contexts-none").wait_for()
    assert page.locator("#question-ask").is_disabled()
    page.wait_for_function("() => document.activeElement.id === 'refresh'")
    assert [m.name for m in server.engine.models() if m.form] == []


def test_a_document_that_is_gone_is_said_so(page, server):
    page.click("#tab-documents")
    page.fill("#learn-name", "gone")
    page.fill("#learn-document", "Nothing stays.")
    page.click("#learn-send")
    page.locator("#context-rows tr").wait_for()
    answer = server.client.delete("/v1/contexts/gone", headers={"authorization": f"Bearer {ADMIN}"})
    assert answer.status_code == 200
    page.fill("#question", "What stays?")
    page.click("#question-ask")
    page.locator("#question-error", has_text="gone").wait_for()
    assert page.locator("#context-answers article").count() == 0
    page.get_by_role("button", name="Delete gone").click()
    page.click("#confirm-yes")
    page.locator("#contexts-error", has_text="gone").wait_for()


def test_a_file_that_is_no_text(page, tmp_path):
    page.click("#tab-documents")
    (tmp_path / "a.txt").write_bytes(b"a\0b")
    page.set_input_files("#learn-file", str(tmp_path / "a.txt"))
    page.locator("#learn-error", has_text="a.txt is no text").wait_for()


def test_the_key_can_be_put_off_and_entered_later(browser, server):
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        page.locator("#key-dialog[open]").wait_for()
        assert is_focused(page.locator("#key"))
        page.fill("#key", "a-wrong-one")
        page.keyboard.press("Enter")
        page.locator("#key-error", has_text="not known here").wait_for()
        assert page.locator("#key-dialog[open]").count() == 1
        page.keyboard.press("Escape")
        page.locator("#key-dialog[open]").wait_for(state="detached")
        page.locator("#state", has_text="key needed").wait_for()
        page.click("#enter-key")
        assert page.locator("#key-error").is_hidden()
        page.fill("#key", ADMIN)
        page.keyboard.press("Enter")
        page.locator("#model option").first.wait_for(state="attached")
        page.locator("#state", has_text="ready").wait_for()
        assert page.locator("#enter-key").is_hidden()


def plates(page):
    return page.locator("#boxes .plate").evaluate_all(
        "nodes => nodes.map((node) => node.getBBox())"
        ".map((b) => [b.x, b.y, b.x + b.width, b.y + b.height])"
    )


def common(a, b):
    across = min(a[2], b[2]) - max(a[0], b[0])
    down = min(a[3], b[3]) - max(a[1], b[1])
    return max(0, across) * max(0, down)


@pytest.mark.parametrize("size", [(500, 3000), (3000, 500), (400, 300)])
def test_labels_are_beside_what_they_name(page, tmp_path, size):
    width, height = size
    Image.radial_gradient("L").resize(size).save(tmp_path / "a.png")
    asked(page, "person", str(tmp_path / "a.png"), "0.1")
    page.wait_for_function("() => document.querySelectorAll('#boxes .plate').length === 2")
    shape = page.locator("#picture").bounding_box()
    assert shape["width"] / shape["height"] == pytest.approx(width / height, rel=0.02)
    assert page.locator("#boxes").bounding_box() == pytest.approx(shape, abs=1)
    boxes = [[0, 0, width / 2, height / 2], [width / 4, height / 4, width, height]]
    found = plates(page)
    assert common(*found) == 0
    for plate, box in zip(found, boxes, strict=True):
        assert common(plate, box) < 0.02 * (plate[2] - plate[0]) * (plate[3] - plate[1])
