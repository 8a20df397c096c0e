"""Conversations of LLaVA: what they say comes out, what is wrong is named."""

import json

import pytest
from PIL import Image

from tests.support.data_sets import picture, write_video
from tests.support.detection_sets import read_split
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Task
from valora_data.sources.registry import detect_kind


def read(folder, entries, task=Task.GROUNDING, name="set.json", **more):
    """What is read of a file of these entries, whose kind is recognised."""
    for image in ("a.png", "b.png"):
        picture(folder / image, ord(image[0]), (200, 100))
    file = folder / name
    lines = "\n".join(map(json.dumps, entries)) + "\n\n"
    file.write_text(lines if name.endswith("l") else json.dumps(entries))
    return list(read_split(detect_kind(file), file, task=task, **more))


def talk(*turns, **entry):
    said = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns)]
    return {"id": "x", "image": "a.png", "conversations": said} | entry


def test_conversations_become_questions(tmp_path):
    said = [{"role": "user", "content": "<image>Who?"}, {"role": "assistant", "content": "me"}]
    entries = [
        talk("<image>\nWho is it?", "me", "And where?", "here", id="first"),
        {"id": "text", "conversations": talk("hi", "ho")["conversations"]},
        talk("Why?\n<image>", "so"),
        {"images": ["b.png"], "messages": said},
    ]
    samples = read(tmp_path, entries, Task.VQA)
    assert [(s.id, s.prompt, s.answer.answers) for s in samples] == [
        ("first#0", "Who is it?", ("me",)), ("first#1", "And where?", ("here",)),
        ("x", "Why?", ("so",)), ("2", "Who?", ("me",)),
    ]  # fmt: skip
    assert samples[1].image.tobytes() == Image.open(tmp_path / "a.png").tobytes()


CAT = Answer((Box(50, 50, 100, 100, "the cat"),))
TASKS = [
    (Task.CAPTION, "", "a cat", None, Answer(captions=("a cat",))),
    (Task.CLASSIFICATION, "What?", "cat", "What?", Answer(label="cat")),
    (Task.COUNTING, "How many?", "3", "How many?", Answer(count=3)),
    (Task.GROUNDING, "locate", "<ref>the cat</ref><box>(250,500),(500,1000)</box>", "the cat", CAT),
    (Task.GROUNDING, "the cat", "[0.25, 0.5, 0.5, 1.0]", "the cat", CAT),
]


@pytest.mark.parametrize(("task", "asked", "said", "prompt", "answer"), TASKS)
def test_conversations_for_every_task(tmp_path, task, asked, said, prompt, answer):
    (sample,) = read(tmp_path, [talk(f"<image>\n{asked}", said)], task, "talk.jsonl")
    assert (sample.id, sample.prompt, sample.answer) == ("x", prompt, answer)


def test_several_images_and_videos(tmp_path):
    write_video(tmp_path / "c.mp4", [20, 60, 100, 140])
    entries = [
        talk("<image> and <image>\nsame?", "no", image=["a.png", "b.png"]),
        talk("<video>\nwhat?", "a fade", image=None, video="c.mp4", id="y"),
    ]
    both, video = read(tmp_path, entries, Task.VQA, frames=2)
    assert (len(both.images), both.prompt) == (2, "and same?")
    assert both.rest[0].tobytes() == Image.open(tmp_path / "b.png").tobytes()
    assert (len(video.images), video.prompt) == (2, "what?")


FAULTS = {
    "is by human, expected human and gpt in turn": (Task.VQA, talk("hi")),
    "is by nobody": (Task.VQA, talk()),
    "has 1 image and 2 <image>": (Task.VQA, talk("<image><image>?", "b")),
    "question 0: the answer is empty": (Task.VQA, talk("<image>?", "")),
    "has objects beside its messages": (Task.VQA, talk("<image>?", "b", objects={})),
    "no conversation has an image": (Task.GROUNDING, talk("?", "[0, 0, 1, 1]", image=None)),
    "has neither an image nor a question": (Task.VQA, talk("", "b", image=None)),
    "1 of 1 image has faults": (Task.VQA, talk("<image>?", "b", image="gone.png")),
    "label 'fox' is not one of cat, dog": (Task.CLASSIFICATION, talk("<image>?", "fox")),
    "'over there' holds no box": (Task.GROUNDING, talk("<image>?", "over there")),
    "count 'some' is no whole number": (Task.COUNTING, talk("<image>?", "some")),
    "llava has no answers for task detection": (Task.DETECTION, talk("<image>?", "b")),
}


@pytest.mark.parametrize("message", list(FAULTS))
def test_conversations_of_no_use(tmp_path, message):
    task, entry = FAULTS[message]
    labels = ["cat", "dog"] if task is Task.CLASSIFICATION else []
    with pytest.raises(DataError, match=message):
        read(tmp_path, [entry], task, labels=labels)
