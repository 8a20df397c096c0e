"""Boxes that are corrected in the console, by mouse, touch and keyboard, and what exports say then.

The server is real, its engine a fake one: a picture of w × h has a box (0, 0, w/2, h/2) of
confidence 0.9 and one (w/4, h/4, w, h) of 0.4.
"""

import json
import zipfile
from dataclasses import replace

import pytest
from PIL import Image

from tests.support.browser import asked, drawn, is_focused, opened, saved, violations
from tests.support.fake_engine import PERSON, FakeEngine
from tests.support.http_helpers import serving

pytestmark = pytest.mark.slow

WIDTH, HEIGHT = 80, 60
SURE, UNSURE = [0, 0, 40, 30], [20, 15, 80, 60]


@pytest.fixture(scope="module")
def server():
    engine = FakeEngine()
    engine._served["person"] = replace(PERSON, labels=("person", "dog"))
    with serving(engine) as running:
        yield running


@pytest.fixture
def pictures(tmp_path):
    names = []
    for name, size in {"one.png": (WIDTH, HEIGHT), "two.png": (120, 40)}.items():
        Image.radial_gradient("L").resize(size).convert("RGB").save(tmp_path / name)
        names.append(str(tmp_path / name))
    return names


def answered(page, files):
    asked(page, "person", files, "0.1")
    page.click("#correct")
    assert page.locator("#edit .grip").count() == 2


@pytest.fixture
def page(browser, server, pictures):
    with opened(browser, server.url) as shown:
        answered(shown, pictures)
        yield shown


def at(page, x, y):
    """Where a point of the picture is on the screen."""
    place = page.locator("#edit").bounding_box()
    width, height = map(float, page.locator("#boxes").get_attribute("viewBox").split()[2:])
    return place["x"] + x / width * place["width"], place["y"] + y / height * place["height"]


def drag(page, start, end):
    page.mouse.move(*at(page, *start))
    page.mouse.down()
    page.mouse.move(*at(page, *[(a + b) / 2 for a, b in zip(start, end, strict=True)]))
    page.mouse.move(*at(page, *end))
    page.mouse.up()


def boxes(page):
    """The boxes as they are drawn: (x0, y0, x1, y1), in order."""
    return [[x, y, x + width, y + height] for x, y, width, height in drawn(page)]


def exactly(*expected):
    return [pytest.approx(box, abs=0.15) for box in expected]


def test_by_mouse_with_undo_and_redo(page):
    drag(page, (10, 10), (20, 20))  # (10, 10) lies in the first box alone
    moved = [10, 10, 50, 40]
    assert boxes(page) == exactly(moved, UNSURE)
    drag(page, (50, 40), (46, 31))  # its corner
    smaller = [10, 10, 46, 31]
    assert boxes(page) == exactly(smaller, UNSURE)
    drag(page, (2, 50), (14, 58))  # free ground
    new = [2, 50, 14, 58]
    assert boxes(page) == exactly(smaller, UNSURE, new)
    page.select_option("#label", label="dog")
    assert page.locator("#legend button").all_inner_texts() == ["person 2", "dog 1"]
    page.mouse.click(*at(page, 70, 50))
    page.click("#delete")
    assert boxes(page) == exactly(smaller, new)
    for expected in ([smaller, UNSURE, new], [smaller, UNSURE, new], [smaller, UNSURE],
                     [moved, UNSURE], [SURE, UNSURE]):  # fmt: skip
        page.click("#undo")
        assert boxes(page) == exactly(*expected)
    assert page.locator("#undo").is_disabled()
    for _ in range(5):
        page.click("#redo")
    assert boxes(page) == exactly(smaller, new)
    assert page.locator("#redo").is_disabled()
    page.click("#reset")
    assert boxes(page) == exactly(SURE, UNSURE)
    page.click("#undo")
    assert boxes(page) == exactly(smaller, new)


def test_boxes_stay_in_the_picture_and_edges_may_cross(page):
    drag(page, (10, 10), (70, 70))
    assert boxes(page) == exactly([40, 30, 80, 60], UNSURE)
    page.click("#undo")
    drag(page, (40, 30), (-30, 10))  # its corner, far beyond the other edge
    assert boxes(page) == exactly(SURE, UNSURE), "a box without a width is none"
    page.mouse.click(*at(page, 70, 50))
    drag(page, (20, 15), (80, 5))  # its corner, beyond the opposite one
    assert boxes(page) == exactly(SURE, UNSURE)
    drag(page, (20, 60), (80, 4))  # another one: right to the edge there is nothing left
    assert boxes(page) == exactly(SURE, UNSURE)
    drag(page, (20, 37.5), (76, 40))  # the left edge, close to the right one
    drag(page, (80, 37.5), (50, 40))  # which goes beyond it
    assert boxes(page) == exactly(SURE, [50, 15, 76, 60])


def test_by_keyboard_alone(page):
    page.locator(".grip").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Control+ArrowRight"):
        page.keyboard.press(key)
    assert boxes(page) == exactly([12, 1, 52, 31], UNSURE)
    page.keyboard.press("Shift+ArrowLeft")
    page.keyboard.press("Control+Shift+ArrowDown")
    assert boxes(page) == exactly([12, 1, 51, 41], UNSURE)
    assert "moved" in page.locator(".grip").first.get_attribute("aria-label")
    page.keyboard.press("Enter")  # to its label
    page.keyboard.press("d")
    assert page.locator("#legend button").all_inner_texts() == ["dog 1", "person 1"]
    page.locator(".grip").nth(1).focus()
    page.keyboard.press("Delete")
    assert boxes(page) == exactly([12, 1, 51, 41])
    assert is_focused(page.locator(".grip"))
    page.keyboard.press("n")
    assert len(boxes(page)) == 2
    assert is_focused(page.locator(".grip").nth(1))
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    assert boxes(page) == exactly([12, 1, 51, 41], UNSURE)
    page.keyboard.press("Control+Shift+Z")
    page.keyboard.press("Control+Z")
    page.locator("#undo").focus()
    while page.locator("#undo").is_enabled():
        page.keyboard.press("Enter")
    assert boxes(page) == exactly(SURE, UNSURE)
    assert is_focused(page.locator("#redo"))
    page.locator(".grip").first.focus()
    page.keyboard.press("Shift+Tab")
    assert page.locator(":focus").count() == 1


def test_by_touch(browser, server, pictures):
    with opened(
        browser, server.url, has_touch=True, viewport={"width": 390, "height": 844}
    ) as page:
        answered(page, pictures[0])
        send = page.context.new_cdp_session(page).send

        def swipe(start, end):
            page.locator("#edit").scroll_into_view_if_needed()
            middle = [(a + b) / 2 for a, b in zip(start, end, strict=True)]
            for kind, point in (("Start", start), ("Move", middle), ("Move", end), ("End", None)):
                x, y = at(page, *(point or end))
                points = [] if point is None else [{"x": x, "y": y}]
                send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})

        swipe((10, 10), (15, 20))
        assert boxes(page) == [pytest.approx([5, 10, 45, 40], abs=0.5), UNSURE]
        page.click("#new-box")  # a tap right after a swipe may count as its end
        swipe((30, 5), (60, 25))  # over other boxes, after "New box"
        assert boxes(page)[2] == pytest.approx([30, 5, 60, 25], abs=0.5)
        assert page.locator("#new-box").get_attribute("aria-pressed") == "false"
        page.click("#delete")
        assert len(boxes(page)) == 2


def test_other_labels(page):
    page.locator(".grip").first.focus()
    page.select_option("#label", label="Another label…")
    page.locator("#label-text").fill("  grey   cat ")
    page.keyboard.press("Enter")
    assert page.locator("#legend button").all_inner_texts() == ["grey cat 1", "person 1"]
    assert "relabelled" in page.locator("#said").inner_text()
    page.select_option("#label", label="Another label…")
    page.keyboard.press("Escape")
    assert page.locator("#label").input_value().endswith("grey cat")


def test_exports_carry_corrected_boxes_and_say_what_was_changed(page, tmp_path):
    page.locator(".grip").first.focus()
    page.keyboard.press("Control+ArrowRight")  # the first moves by ten pixels
    page.locator(".grip").nth(1).focus()
    page.keyboard.press("Delete")
    drag(page, (2, 50), (12, 58))
    page.select_option("#label", label="dog")
    page.locator(".thumb").nth(1).click()
    assert page.locator("#undo").is_disabled()
    assert boxes(page) == exactly([0, 0, 60, 20], [30, 10, 120, 40])

    coco = json.loads(saved(page, "coco", tmp_path).read_text())
    names = {one["id"]: one["name"] for one in coco["categories"]}
    rows = [
        (one["image_id"], names[one["category_id"]], one.get("score"),
         one.get("attributes", {}).get("correction")) for one in coco["annotations"]
    ]  # fmt: skip
    assert rows == [
        (1, "person", 0.9, "moved"), (1, "dog", None, "added"),
        (2, "person", 0.9, None), (2, "person", 0.4, None),
    ]  # fmt: skip
    assert coco["annotations"][0]["bbox"] == pytest.approx([10, 0, 40, 30])
    assert coco["annotations"][1]["bbox"] == pytest.approx([2, 50, 10, 8], abs=0.15)
    assert coco["annotations"][1]["area"] == pytest.approx(80, abs=3)
    first, second = coco["images"]
    facts = [(one["file_name"], one["width"], one["height"]) for one in (first, second)]
    assert facts == [("one.png", WIDTH, HEIGHT), ("two.png", 120, 40)]
    assert first["corrections"] == {"added": 1, "moved": 1, "relabelled": 0, "deleted": 1}
    assert [(one["bbox"], one["score"]) for one in first["deleted"]] == [([20, 15, 60, 45], 0.4)]
    assert "corrections" not in second

    with zipfile.ZipFile(saved(page, "yolo", tmp_path)) as packed:
        assert packed.testzip() is None
        lines = packed.read("labels/one.txt").decode().splitlines()
        changed = json.loads(packed.read("corrections.json"))
        listed = packed.read("data.yaml").decode()
    assert [float(value) for value in lines[0].split()[1:]] == pytest.approx(
        [30 / 80, 15 / 60, 40 / 80, 30 / 60]
    )
    assert listed.index('"person"') < listed.index('"dog"')
    assert len(lines) == 2 and lines[1].startswith("1 ")
    assert changed == {
        "labels/one.txt": {
            "added": 1, "moved": 1, "relabelled": 0, "deleted": 1, "rows": ["moved", "added"]
        }
    }  # fmt: skip

    one, two = json.loads(saved(page, "labelstudio", tmp_path).read_text())
    assert "annotations" not in two
    model, person = one["predictions"][0]["result"], one["annotations"][0]["result"]
    assert [region["value"]["width"] for region in model] == [50, 75]
    assert [region["origin"] for region in person] == ["prediction-changed", "manual"]
    assert person[0]["id"] == model[0]["id"]
    assert person[0]["value"]["x"] == pytest.approx(12.5)
    assert person[1]["value"]["rectanglelabels"] == ["dog"]

    table = saved(page, "csv", tmp_path).read_text().splitlines()
    assert [row.rsplit(",", 1)[1] for row in table] == [
        "correction", "moved", "added", "deleted", "", ""
    ]  # fmt: skip


def test_nothing_is_lost_by_switching_pictures_and_asked_before_it_would_be(page, pictures):
    page.locator(".grip").first.focus()
    page.keyboard.press("ArrowRight")
    page.locator(".thumb").nth(1).click()
    page.locator(".grip").nth(1).focus()
    page.keyboard.press("Delete")
    assert boxes(page) == exactly([0, 0, 60, 20])
    page.locator(".thumb").nth(0).click()
    assert boxes(page) == exactly([1, 0, 41, 30], UNSURE)
    assert [text.strip() for text in page.locator(".thumb").all_inner_texts()] == ["2 ✎", "1 ✎"]
    page.click("#undo")
    assert boxes(page) == exactly(SURE, UNSURE)
    page.click("#redo")
    for lose in (lambda: page.click("#run"), lambda: page.click("#clear"),
                 lambda: page.set_input_files("#file", pictures[0])):  # fmt: skip
        lose()
        page.locator("#confirm-dialog[open]").wait_for()
        assert "2 pictures" in page.locator("#confirm-text").inner_text()
        assert is_focused(page.locator("#confirm-no"))
        page.keyboard.press("Escape")
        page.locator("#confirm-dialog[open]").wait_for(state="detached")
        assert boxes(page) == exactly([1, 0, 41, 30], UNSURE)
    page.click("#save")  # what is saved can go
    page.click("#clear")
    page.locator("#gallery").wait_for()
    asked(page, "person", pictures)
    assert boxes(page) == exactly(SURE, UNSURE)


def test_any_sequence_of_changes_can_be_undone(page):
    assert page.evaluate(
        """async () => {
            const { Corrections } = await import("/console/corrections.js");
            let seed = 7;
            const random = (n) => { seed = (seed * 48271) % 2147483647; return seed % n; };
            const made = new Corrections();
            const box = (n) => ({ label: "x", confidence: 0.5, box: [n, n, n + 9, n + 9] });
            made.take("a", [0, 1, 2].map(box));
            const states = [JSON.stringify(made.boxes)];
            for (let step = 0; step < 150; step += 1) {
                const one = made.boxes[random(Math.max(1, made.boxes.length))];
                const kind = random(5);
                if (!one || kind === 0) made.add("a", "y", [step, 1, step + 2, 3]);
                else if (kind === 1) made.remove(one.id);
                else if (kind === 2) made.put(one.id, { label: "z" });
                else if (kind === 3) made.put(one.id, { box: one.box.map((v) => v + 1) });
                else made.reset();
                states.push(JSON.stringify(made.boxes));
            }
            for (let step = 149; step >= 0; step -= 1) {
                made.undo();
                if (JSON.stringify(made.boxes) !== states[step]) return `undo ${step}`;
            }
            if (made.changed) return "changed";
            for (let step = 1; step <= 150; step += 1) made.redo();
            if (JSON.stringify(made.boxes) !== states[150]) return "redo";
            for (let step = 0; step < 500; step += 1) made.add("a", "y", [step, 1, step + 2, 3]);
            return made.past.length <= 200 ? "right" : "unbounded";
        }"""
    ) == "right"  # fmt: skip


def test_axe_has_nothing_to_say(browser, server, pictures):
    for scheme in ("light", "dark"):
        with opened(browser, server.url, color_scheme=scheme, bypass_csp=True) as page:
            answered(page, pictures)
            page.locator(".grip").first.focus()
            page.keyboard.press("ArrowRight")
            assert violations(page) == []
