"""The web console in headless Chromium, against the real server."""

import base64
from pathlib import Path

import httpx
import pytest
from PIL import Image

from tests.support.browser import asked, drawn, is_focused, opened, overhang
from tests.support.videos import video_file

pytestmark = pytest.mark.slow


@pytest.fixture
def page(browser, served):
    with opened(browser, served.url) as page:
        yield page


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    file = tmp_path_factory.mktemp("pictures") / "scene.png"
    Image.radial_gradient("L").resize((300, 200)).convert("RGB").save(file)
    return str(file)


def test_boxes_are_drawn_where_the_api_says(page, served, image):
    expected = served.look("traffic", Path(image).read_bytes(), min_score="0.1")["detections"]
    assert expected
    asked(page, "traffic", image, "0.1")
    boxes = [item["box"] for item in expected]
    for shown, (x0, y0, x1, y1) in zip(drawn(page), boxes, strict=True):
        assert shown == pytest.approx([x0, y0, max(0, x1 - x0), max(0, y1 - y0)], abs=0.01)
    assert page.locator("#boxes").get_attribute("viewBox") == "0 0 300 200"
    # The overlay lies exactly over the picture.
    over, below = page.locator("#boxes").bounding_box(), page.locator("#picture").bounding_box()
    assert over == pytest.approx(below, abs=1)
    first = page.locator("#said tbody tr").first.inner_text()
    assert expected[0]["label"] in first
    assert f"{expected[0]['confidence']:.3f}" in first
    assert "ms" in page.locator("#timing").inner_text()


def test_labels_with_confidences(page, image):
    asked(page, "scene", image)
    rows = [row.inner_text().split() for row in page.locator("#said tbody tr").all()]
    assert {row[0] for row in rows} == {"forest", "street", "beach"}
    sure = [float(row[1]) for row in rows]
    assert sure == sorted(sure, reverse=True)
    assert sum(sure) == pytest.approx(1, abs=0.01)


def test_text_is_streamed(page, image):
    page.select_option("#model", "tiny")
    page.set_input_files("#file", image)
    page.fill("#prompt", "describe the image.")
    page.click("#run")
    page.locator("#timing", has_text="first token after").wait_for(timeout=20_000)
    assert page.locator("#said .text").inner_text().strip()
    assert "prompt tokens" in page.locator("#timing").inner_text()


def test_a_video(page, tmp_path):
    file = video_file(tmp_path / "clip.webm", codec="libvpx", count=12)
    page.select_option("#model", "scene")
    page.set_input_files("#file", str(file))
    assert page.locator("#clip").is_visible()
    page.click("#run")
    page.locator("#said tbody tr").first.wait_for(timeout=20_000)


def test_the_live_panel(page):
    page.locator("#state", has_text="ready").wait_for()
    assert page.locator("#s-running").inner_text() == "0"
    assert page.locator("#s-mode").inner_text() in {"merged", "unmerged", "mixture"}
    assert "pages" in page.locator("#pages-said").inner_text()
    assert "B" in page.locator("#s-memory").inner_text()


def test_with_the_keyboard_alone(page, image):
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.locator("#talk").is_visible()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#look").is_visible()
    page.keyboard.press("Tab")
    assert is_focused(page.locator("#model"))
    page.keyboard.type("scene")
    assert page.locator("#model").input_value() == "scene"
    page.keyboard.press("Tab")
    assert is_focused(page.locator("#file"))
    page.set_input_files("#file", image)
    page.keyboard.press("Tab")
    page.keyboard.press("Control+Enter")
    page.locator("#said tbody tr").first.wait_for(timeout=20_000)


def test_dropping_a_file(page, image):
    content = base64.b64encode(Path(image).read_bytes()).decode()
    page.select_option("#model", "scene")
    transfer = page.evaluate_handle(
        """content => {
            const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], "dropped.png", { type: "image/png" }));
            return transfer;
        }""",
        content,
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})
    assert "dropped.png" in page.locator("#chosen").inner_text()
    page.click("#run")
    page.locator("#said tbody tr").first.wait_for(timeout=20_000)


def test_errors_are_said(page, tmp_path):
    page.select_option("#model", "scene")
    page.click("#run")
    assert "Choose an image" in page.locator("#error").inner_text()
    broken = tmp_path / "notes.txt"
    broken.write_text("text")
    page.set_input_files("#file", str(broken))
    assert "neither an image" in page.locator("#error").inner_text()


def test_an_example_is_asked_of_every_domain_at_once(page, served):
    listed = httpx.get(f"{served.url}/v1/examples").json()["data"]
    assert {entry["domain"] for entry in listed} == {"plates", "traffic"}
    page.locator(".example").nth(1).click()
    page.locator("#timing", has_text="2 answers").wait_for(timeout=20_000)
    assert page.locator("#model").input_value() == "*"
    content = httpx.get(f"{served.url}/{listed[1]['images'][0]}").content
    counts = {}
    for name in ("plates", "traffic"):
        counts[name] = len(served.look(name, content)["detections"])
    chips = [chip.inner_text().split() for chip in page.locator("#legend button").all()]
    assert {name: int(count) for name, count in chips} == counts
    assert page.locator("#boxes rect").count() == sum(counts.values()) > 0
    page.locator("#legend button", has_text="traffic").click()
    assert page.locator("#boxes rect").count() == counts["plates"]


def test_zoom_keeps_boxes_on_the_picture(page, image):
    asked(page, "plates", image)
    before = page.locator("#picture").bounding_box()
    page.focus("#viewport")
    page.keyboard.press("+")
    after = page.locator("#picture").bounding_box()
    assert after["width"] == pytest.approx(1.5 * before["width"], abs=2)
    assert page.locator("#boxes").bounding_box() == pytest.approx(after, abs=1)
    page.click("#fit")
    assert page.locator("#picture").bounding_box() == pytest.approx(before, abs=1)


def test_promises_and_a_conversation(page, image):
    page.click("#tab-promises")
    rows = page.locator("#promised tbody tr")
    assert rows.count() == 5
    assert "0.600" in rows.nth(0).inner_text()
    page.click("#tab-talk")
    page.set_input_files("#attach", image)
    page.fill("#message", "describe the image.")
    page.keyboard.press("Enter")
    page.wait_for_function("() => !document.querySelector('#send').disabled")
    page.locator("#log article.assistant .text", has_text=" ").wait_for(timeout=20_000)
    page.fill("#message", "and?")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('#log article').length === 4")
    page.wait_for_function("() => !document.querySelector('#send').disabled")
    page.click("#forget")
    assert page.locator("#log article").count() == 0


def test_the_confidence_can_be_given_back_to_the_domains(page):
    page.select_option("#model", "plates")
    page.locator("#least").fill("0.9")
    assert page.locator("#least-value").inner_text() == "0.90"
    page.click("#least-reset")
    assert page.locator("#least-value").inner_text() == "each domain's own"
    assert page.locator("#least-reset").is_disabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1400])
def test_on_any_screen(page, image, scheme, width):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    asked(page, "plates", image)
    assert overhang(page) <= 0, "nothing sticks out to the side"
    ground, ink = page.evaluate(
        """() => {
            const style = getComputedStyle(document.body);
            return [style.backgroundColor, style.color];
        }"""
    )
    light = [
        sum(map(int, value[value.index("(") + 1 : -1].split(",")[:3])) for value in (ground, ink)
    ]
    assert (light[0] > light[1]) == (scheme == "light")
    assert abs(light[0] - light[1]) > 380
