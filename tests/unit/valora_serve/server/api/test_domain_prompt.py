"""What a request asks a domain, in all the forms that a request can have."""

from dataclasses import replace

import pytest

from valora_serve.errors import ImageError, RequestError
from valora_serve.server.api.domain_prompt import as_measured, check_measured_media
from valora_serve.server.api.schema import ChatRequest
from valora_serve.types import ServedModel

PERSON = ServedModel(
    "person", "domain", "b", head="detection", boxes=True, prompt="detect person", media="images",
    images=1,
)  # fmt: skip
FACTS = ServedModel(
    "facts", "domain", "b", head="yes_no", prompt="{}", prompted=True, media="images", images=1
)
ACTION = ServedModel(
    "action", "domain", "b", head="action", prompt="which action?", media="video", images=4
)
CAPTION = ServedModel("caption", "domain", "b", prompt="describe it.", media="images", images=1)
PLACE = ServedModel("place", "domain", "b", prompt="locate {}", prompted=True, media="images")
THERE = replace(PLACE, prompt="is there {}?")
MOOD = ServedModel("mood", "domain", "b", head="yes_no", prompt="{}", prompted=True, media="text")
WRITTEN = replace(MOOD, head=None, prompt="How? {}")
ADAPTER = ServedModel("b/one", "adapter", "b")

IMAGE = {"type": "image_url", "image_url": "data:,1"}
OTHER = {"type": "image_url", "image_url": "data:,2"}
BRIEF = {"role": "system", "content": "Be brief."}


def user(*parts):
    return {"role": "user", "content": [
        {"type": "text", "text": part} if isinstance(part, str) else part for part in parts
    ]}  # fmt: skip


def said(text):
    return {"role": "assistant", "content": text}


def ask(model, *turns, head=True):
    """The turns that a model sees, as (role, parts), and the warnings."""
    messages = ChatRequest(messages=list(turns)).messages
    asked, warnings = as_measured(model, messages, head=head and model.head is not None)
    seen = []
    for message in asked:
        if isinstance(message.content, str):
            seen.append((message.role, message.content))
            continue
        parts = [
            part.text if part.type == "text" else part.image_url.take()
            for part in message.content or ()
        ]
        seen.append((message.role, *parts))
    return seen, warnings


MEASURED = [("user", "detect person", "data:,1")]
RED, BIG = [("user", "is it red?", "data:,1")], [("user", "is it big?", "data:,1")]
LOCATE, CAPTIONED = [("user", "locate the dog", "data:,1")], [("user", "describe it.", "data:,1")]


@pytest.mark.parametrize(
    ("model", "turns", "seen", "warned"),
    [
        # A head sees its own prompt and the newest image.
        (PERSON, [user(IMAGE)], MEASURED, []),
        (PERSON, [user("detect person", IMAGE)], MEASURED, []),
        (PERSON, [user(IMAGE, " detect person\n")], MEASURED, []),
        (PERSON, [user(IMAGE, "  ")], MEASURED, []),
        (PERSON, [user("Who is there?", IMAGE)], MEASURED, ["the text", "'detect person'"]),
        (PERSON, [user("Look:", IMAGE, "who?")], MEASURED, ["the text"]),
        (PERSON, [BRIEF, user(IMAGE)], MEASURED, ["the system prompt"]),
        (PERSON, [user(IMAGE), BRIEF | {"role": "developer"}], MEASURED, ["the system prompt"]),
        (PERSON, [user(OTHER), said("None."), user("now", IMAGE)], MEASURED,
         ["the other turns", "the text"]),
        (PERSON, [user(IMAGE), said("One."), user("Sure?")], MEASURED,
         ["the other turns", "the text"]),
        (PERSON, [user("Look."), user(IMAGE)], MEASURED, ["the other turns"]),
        (PERSON, [user(IMAGE), said(None)], MEASURED, ["the other turns"]),
        (PERSON, [user(OTHER, "and", IMAGE)], [("user", "detect person", "data:,2", "data:,1")],
         ["the text"]),
        # A head's question is kept before the image.
        (FACTS, [user("is it red?", IMAGE)], RED, []),
        (FACTS, [user(IMAGE, "is it red?")], RED, []),
        (FACTS, [user("is it", IMAGE, "red?")], RED, []),
        (FACTS, [user("is it red?"), user(IMAGE)], RED, []),
        (FACTS, [BRIEF, user(IMAGE, "is it red?")], RED, ["the system prompt"]),
        (FACTS, [user("is it red?", IMAGE), said("yes"), user("is it big?")], BIG,
         ["the other turns"]),
        (FACTS, [user("is it red?", OTHER), said("yes"), user(IMAGE)], RED, ["the other turns"]),
        (MOOD, [BRIEF, user("Is it fine?")], [("user", "Is it fine?")], ["the system prompt"]),
        # The request's words are put into the domain's prompt once.
        (PLACE, [user("the dog", IMAGE)], LOCATE, []),
        (PLACE, [user(IMAGE, "the dog")], LOCATE, []),
        (PLACE, [user(IMAGE, "Locate  the dog")], LOCATE, []),
        (PLACE, [user(" locate the dog ", IMAGE)], LOCATE, []),
        (PLACE, [user("located left")], [("user", "locate located left")], ["no image"]),
        *((THERE, [user(words)], [("user", asked)], ["no image"]) for words, asked in (
            ("a dog", "is there a dog?"), ("Is there a dog?", "is there a dog?"),
            ("is there", "is there is there?"),
        )),
        (WRITTEN, [user("Is it fine?")], [("user", "How? Is it fine?")], []),
        (WRITTEN, [BRIEF, user("Fine?")], [("system", "Be brief."), ("user", "How? Fine?")],
         ["measured with its prompt ('How? {}') alone"]),
        # A domain that writes is asked in the order of its training.
        (CAPTION, [user(IMAGE)], [("user", "data:,1")], []),  # the engine adds the prompt
        (CAPTION, [user("describe it.", IMAGE)], CAPTIONED, []),
        (CAPTION, [user(IMAGE, "describe it.")], CAPTIONED, []),
        (CAPTION, [user(IMAGE, "What", "is it?")], [("user", "What", "is it?", "data:,1")],
         ["another text"]),
        (CAPTION, [user("a", IMAGE, "b")], [("user", "a", "data:,1", "b")], ["another text"]),
        (CAPTION, [BRIEF, user(IMAGE)], [("system", "Be brief."), *CAPTIONED],
         ["a system prompt"]),
        (CAPTION, [user("describe it.")], [("user", "describe it.")], ["no image"]),
        (CAPTION, [user(IMAGE, "describe it."), said("A dog."), user("More.")],
         [*CAPTIONED, ("assistant", "A dog."), ("user", "More.")],
         ["several turns", "another text"]),
        # Others than domains are asked as they were.
        (ADAPTER, [user(IMAGE, "y")], [("user", "data:,1", "y")], []),
    ],
)  # fmt: skip
def test_what_is_asked(model, turns, seen, warned):
    found, warnings = ask(model, *turns)
    assert found == seen
    assert len(warnings) == bool(warned)
    for what in warned:
        assert what in warnings[0]


def test_without_its_head_a_domain_is_asked_like_one_that_writes():
    seen = [("system", "Be brief."), ("user", "y", "data:,1")]
    assert ask(PERSON, BRIEF, user(IMAGE, "y"), head=False) == (seen, [])
    assert ask(PERSON, BRIEF, user(IMAGE), head=False)[0][1] == MEASURED[0]


@pytest.mark.parametrize(
    ("model", "turns", "message"),
    [
        (PERSON, [user("detect person")], "person .* send one in a user message"),
        (PERSON, [said("x") | {"content": [IMAGE]}, user("Now?")], "send one in a user message"),
        (MOOD, [BRIEF], "which reads text: send one"),
        *((model, turns, "send the question as text") for model in (FACTS, PLACE)
          for turns in ([user(IMAGE)], [BRIEF, user(IMAGE)])),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(model, turns, message):
    with pytest.raises(RequestError, match=message):
        ask(model, *turns)


@pytest.mark.parametrize(
    ("model", "images", "videos", "message"),
    [
        (PERSON, 0, [4], "not videos"), (PERSON, 2, [], "1 image at a time"),
        (PERSON, 1, [4], "not videos"), (ACTION, 1, [], "one video"),
        (ACTION, 0, [4, 4], "one video"), (ACTION, 1, [4], "one video"),
        (replace(FACTS, images=2), 1, [], "2 images at a time"),
        (MOOD, 1, [], "reads text: leave images"), (MOOD, 0, [4], "reads text: leave images"),
    ],
)  # fmt: skip
def test_media_that_a_head_was_not_measured_with_are_refused(model, images, videos, message):
    with pytest.raises(ImageError, match=message):
        check_measured_media(model, images, videos, head=True)
    (warning,) = check_measured_media(replace(model, head=None), images, videos, head=False)
    assert "accuracy does not hold" in warning


def test_media_that_a_head_was_measured_with():
    assert check_measured_media(PERSON, 1, [], head=True) == []
    assert check_measured_media(ACTION, 0, [4], head=True) == []
    assert check_measured_media(replace(PERSON, images=None, media=None), 3, [], head=True) == []
    (warning,) = check_measured_media(ACTION, 0, [8], head=True)
    assert "4 frames" in warning
    assert check_measured_media(PERSON, 2, [], head=False) == []  # it writes, as it was told to
