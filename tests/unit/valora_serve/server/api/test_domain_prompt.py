"""What a request asks a domain, in all the forms that a request can have."""

from dataclasses import replace
from itertools import permutations

import pytest

from valora_serve.errors import ImageError, RequestError
from valora_serve.server.api.domain_prompt import (
    as_measured,
    check_measured_media,
    completion_warnings,
    question_of,
)
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
MOOD = ServedModel("mood", "domain", "b", head="yes_no", prompt="{}", prompted=True, media="text")
ADAPTER = ServedModel("b/one", "adapter", "b")

IMAGE = {"type": "image_url", "image_url": "data:,1"}
OTHER = {"type": "image_url", "image_url": "data:,2"}


def text(words):
    return {"type": "text", "text": words}


def turn(role, *parts):
    return {"role": role, "content": parts[0] if isinstance(parts[0], str) else list(parts)}


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


@pytest.mark.parametrize(
    ("turns", "ignored"),
    [
        ([turn("user", IMAGE)], []),
        ([turn("user", text("detect person"), IMAGE)], []),
        ([turn("user", IMAGE, text(" detect person\n"))], []),
        ([turn("user", IMAGE, text("  "))], []),
        ([turn("user", text("Who is there?"), IMAGE)], ["the text"]),
        ([turn("user", IMAGE, text("Who is there?"))], ["the text"]),
        ([turn("user", text("Look:"), IMAGE, text("who?"))], ["the text"]),
        ([turn("system", "Be brief."), turn("user", IMAGE)], ["the system prompt"]),
        ([turn("developer", text("Be brief.")), turn("user", IMAGE)], ["the system prompt"]),
        ([turn("user", IMAGE), turn("system", "Be brief.")], ["the system prompt"]),
        (
            [turn("user", OTHER), turn("assistant", "None."), turn("user", text("now"), IMAGE)],
            ["the other turns", "the text"],
        ),
        ([turn("user", IMAGE), turn("assistant", "One."), turn("user", "Sure?")],
         ["the other turns", "the text"]),
        ([turn("user", "Look."), turn("user", IMAGE)], ["the other turns"]),
        ([turn("user", IMAGE), {"role": "assistant", "content": None}], ["the other turns"]),
    ],
)  # fmt: skip
def test_a_head_sees_its_own_prompt_and_the_newest_image(turns, ignored):
    seen, warnings = ask(PERSON, *turns)
    assert seen == MEASURED
    assert len(warnings) == (1 if ignored else 0)
    for what in ignored:
        assert what in warnings[0]
        assert "'detect person'" in warnings[0]


def test_every_order_of_the_parts_gives_the_same_prompt():
    system, picture = turn("system", "You are a pirate."), turn("user", IMAGE)
    words, more = turn("user", "Anyone?"), turn("user", text("Count them"), text("please"))
    for turns in permutations([words, system, picture, more]):
        assert ask(PERSON, *turns)[0] == MEASURED


def test_several_images_of_the_newest_turn_are_kept_in_their_order():
    assert ask(PERSON, turn("user", OTHER, text("and"), IMAGE))[0] == [
        ("user", "detect person", "data:,2", "data:,1")
    ]


def test_a_head_needs_an_image():
    with pytest.raises(RequestError, match=r"person .* send one in a user message"):
        ask(PERSON, turn("user", "detect person"))
    with pytest.raises(RequestError, match="send one in a user message"):
        ask(PERSON, turn("assistant", IMAGE), turn("user", "And now?"))


@pytest.mark.parametrize(
    ("turns", "question", "ignored"),
    [
        ([turn("user", text("is it red?"), IMAGE)], "is it red?", []),
        ([turn("user", IMAGE, text("is it red?"))], "is it red?", []),
        ([turn("user", text("is it"), IMAGE, text("red?"))], "is it red?", []),
        ([turn("system", "Be brief."), turn("user", IMAGE, text("is it red?"))], "is it red?",
         ["the system prompt"]),
        ([turn("user", text("is it red?"), IMAGE), turn("assistant", "yes"),
          turn("user", "is it big?")], "is it big?", ["the other turns"]),
        ([turn("user", text("is it red?"), OTHER), turn("assistant", "yes"),
          turn("user", IMAGE)], "is it red?", ["the other turns"]),
        ([turn("user", "is it red?"), turn("user", IMAGE)], "is it red?", []),
    ],
)  # fmt: skip
def test_a_heads_question_is_kept_before_the_image(turns, question, ignored):
    seen, warnings = ask(FACTS, *turns)
    assert seen == [("user", question, "data:,1")]
    assert bool(warnings) == bool(ignored)
    for what in ignored:
        assert what in warnings[0]


def test_a_question_must_be_sent():
    for model in (FACTS, PLACE):
        for turns in ([turn("user", IMAGE)], [turn("system", "Be brief."), turn("user", IMAGE)]):
            with pytest.raises(RequestError, match="send the question as text"):
                ask(model, *turns)


@pytest.mark.parametrize(
    "words",
    ["the red ball", "locate the red ball", "Locate  the red ball", " locate the red ball "],
)
def test_the_requests_words_are_put_into_the_domains_prompt_once(words):
    for parts in ([text(words), IMAGE], [IMAGE, text(words)]):
        assert ask(PLACE, turn("user", *parts)) == (
            [("user", "locate the red ball", "data:,1")],
            [],
        )


def test_words_that_only_begin_like_the_prompt_are_not_cut():
    assert question_of(PLACE, "located left", head=False)[0] == "locate located left"
    around = replace(PLACE, prompt="is there {}?")
    assert question_of(around, "a dog", head=False)[0] == "is there a dog?"
    assert question_of(around, "Is there a dog?", head=False)[0] == "is there a dog?"
    assert question_of(around, "is there", head=False)[0] == "is there is there?"


@pytest.mark.parametrize(
    ("turns", "seen", "warned"),
    [
        ([turn("user", text("describe it."), IMAGE)], [("user", "describe it.", "data:,1")], []),
        ([turn("user", IMAGE, text("describe it."))], [("user", "describe it.", "data:,1")], []),
        ([turn("user", IMAGE, text("What"), text("is it?"))],
         [("user", "What", "is it?", "data:,1")], ["another text"]),
        ([turn("user", text("a"), IMAGE, text("b"))], [("user", "a", "data:,1", "b")],
         ["another text"]),
        ([turn("system", "Be brief."), turn("user", IMAGE)],
         [("system", "Be brief."), ("user", "describe it.", "data:,1")], ["a system prompt"]),
        ([turn("user", "describe it.")], [("user", "describe it.")], ["no image"]),
        ([turn("user", IMAGE, text("describe it.")), turn("assistant", "A dog."),
          turn("user", "More.")],
         [("user", "describe it.", "data:,1"), ("assistant", "A dog."), ("user", "More.")],
         ["several turns", "another text"]),
    ],
)  # fmt: skip
def test_a_domain_that_writes_is_asked_in_the_order_of_its_training(turns, seen, warned):
    found, warnings = ask(CAPTION, *turns)
    assert found == seen
    assert bool(warnings) == bool(warned)
    for what in warned:
        assert what in warnings[0]


def test_an_image_alone_leaves_the_prompt_to_the_engine():
    assert ask(CAPTION, turn("user", IMAGE)) == ([("user", "data:,1")], [])


def test_without_its_head_a_domain_is_asked_like_one_that_writes():
    found, warnings = ask(PERSON, turn("system", "x"), turn("user", IMAGE, text("y")), head=False)
    assert found == [("system", "x"), ("user", "y", "data:,1")]
    assert warnings == []
    assert ask(PERSON, turn("system", "x"), turn("user", IMAGE), head=False)[0][1] == MEASURED[0]


def test_a_domain_of_text_reads_no_image():
    asked = turn("user", text("Is it fine?"))
    assert ask(MOOD, turn("system", "x"), asked)[0] == [("user", "Is it fine?")]
    written = replace(MOOD, head=None, prompt="How? {}")
    assert ask(written, asked, head=False) == ([("user", "How? Is it fine?")], [])
    warning = ask(written, turn("system", "x"), asked, head=False)[1][0]
    assert "measured with its prompt ('How? {}') alone" in warning
    assert "and images" not in completion_warnings(written)[0]
    with pytest.raises(RequestError, match="which reads text: send one"):
        ask(MOOD, turn("system", "x"))
    with pytest.raises(RequestError, match=r"mood answers questions .*: send the question as text"):
        question_of(MOOD, None, head=True)


def test_others_than_domains_are_asked_as_they_were():
    turns = [turn("user", IMAGE, text("y"))]
    assert ask(ADAPTER, *turns) == ([("user", "data:,1", "y")], [])
    assert completion_warnings(ADAPTER) == []
    assert "chat" in completion_warnings(PERSON)[0]


@pytest.mark.parametrize(
    ("model", "images", "videos", "said"),
    [
        (PERSON, 0, [4], "not videos"), (PERSON, 2, [], "1 image at a time"),
        (PERSON, 1, [4], "not videos"), (ACTION, 1, [], "one video"),
        (ACTION, 0, [4, 4], "one video"), (ACTION, 1, [4], "one video"),
        (replace(FACTS, images=2), 1, [], "2 images at a time"),
        (MOOD, 1, [], "reads text: leave images"), (MOOD, 0, [4], "reads text: leave images"),
    ],
)  # fmt: skip
def test_media_that_a_head_was_not_measured_with_are_refused(model, images, videos, said):
    with pytest.raises(ImageError, match=said):
        check_measured_media(model, images, videos, head=True)
    written = replace(model, head=None)
    (warning,) = check_measured_media(written, images, videos, head=False)
    assert "accuracy does not hold" in warning


def test_media_that_a_head_was_measured_with():
    assert check_measured_media(PERSON, 1, [], head=True) == []
    assert check_measured_media(ACTION, 0, [4], head=True) == []
    assert check_measured_media(replace(PERSON, images=None, media=None), 3, [], head=True) == []
    (warning,) = check_measured_media(ACTION, 0, [8], head=True)
    assert "4 frames" in warning
    assert check_measured_media(PERSON, 2, [], head=False) == []  # it writes, as it was told to
