"""What a request asks a domain: the prompt that the domain was measured with.

A domain's accuracy holds for the prompt of its training only: one user turn, the text before the
image. A head always gets exactly this prompt; a warning says what else was left out, and what
contradicts the prompt is refused. A domain whose language model answers may be asked anything: the
order of its training is restored, and a warning names what its accuracy was not measured with.
"""

import re
from collections.abc import Callable, Sequence

from valora_data.contract.files import shown
from valora_data.wording import plural
from valora_serve.errors import ImageError, RequestError
from valora_serve.server.api.schema import ContentPart, Message, TextPart
from valora_serve.types import ServedModel

Asked = tuple[list[Message], list[str]]
PLACE = "{}"
"""Stands in a domain's prompt for the request's own words."""
_SYSTEM = ("system", "developer")


def as_measured(
    model: ServedModel, messages: Sequence[Message], *, head: bool, told: bool = False
) -> Asked:
    """Return what a model is asked, and what of it was not measured or left out.

    `told`: an instruction is added to the system prompt.
    """
    if model.kind != "domain":
        return list(messages), []
    if model.form is not None:
        return _about_context(model, messages)
    return _for_head(model, messages) if head else _for_language_model(model, messages, told)


def question_of(model: ServedModel, words: str | None, *, head: bool) -> tuple[str, list[str]]:
    """Return the text of a domain's prompt, and warnings."""
    words, prompt = (words or "").strip(), model.prompt or ""
    if not words:
        if not prompt or PLACE in prompt:
            hint = f" (its prompt is {shown(prompt)})" if prompt else ""
            raise RequestError(f"{model.name} answers questions{hint}: send the question as text")
        return prompt, []
    if model.takes_words:
        return filled(prompt, words), []
    if head or words == prompt.strip():
        return prompt, [_ignored(model, ["the text"])] * (words != prompt.strip())
    return words, [_unmeasured(model, ["another text"])] * (model.head is None)


def check_measured_media(
    model: ServedModel, images: int, videos: Sequence[int], *, head: bool
) -> list[str]:
    """Compare the images of one prompt with what a domain was measured with."""
    ignored = model.head is not None and not head
    if model.kind != "domain" or model.form or ignored or not (images or videos):
        return []
    wrong, count = None, model.images
    if model.media == "text":
        wrong = "reads text: leave images and videos out"
    elif model.media == "video" and (images or len(videos) != 1):
        wrong = "reads one video: send a video, or its frames as such"
    elif model.media == "images" and videos:
        wrong = "reads images, not videos: send images"
    elif model.media != "video" and count is not None and images not in (0, count):
        many = "that many" if count > 1 else "one"
        wrong = f"reads {plural(count, 'image')} at a time, got {images}: send {many} in a request"
    if wrong is not None and head:
        raise ImageError(f"{model.name} {wrong}")
    if wrong is not None:
        return [_unmeasured(model, ["other images or videos"])]
    if model.media == "video" and count is not None and videos[0] != count:
        return [
            f"{model.name} was measured with {plural(count, 'frame')} of a video, and this one has "
            f"{videos[0]}: its accuracy may differ"
        ]
    return []


def _about_context(model: ServedModel, messages: Sequence[Message]) -> Asked:
    """The conversation about a context, in place of whose head the context stands."""
    turns = [one for one in messages if one.role not in _SYSTEM]
    if not turns:
        raise RequestError(f"{model.name} answers questions about a document: send one")
    prompt, words = model.prompt or PLACE, text_of(turns[-1])
    if prompt != PLACE and turns[-1].role == "user" and words:
        turns[-1] = _asking(turns[-1], filled(prompt, words))
    ignored = (
        f"{model.name} is a context, which stands in place of the system prompt: ignored the "
        "system prompt"
    )
    return turns, [ignored] * (len(turns) < len(messages))


def _for_head(model: ServedModel, messages: Sequence[Message]) -> Asked:
    """The only turn that a head sees: its prompt, and the newest images."""
    read, what = (text_of, "text") if model.media == "text" else (media_of, "an image or video")
    newest = _newest(messages, read)
    if newest is None:
        raise RequestError(
            f"{model.name} answers with its {model.head} head, which reads {what}: "
            "send one in a user message, or set valora.head to false to generate"
        )
    spoken = _newest(messages, text_of) if model.takes_words else None
    words = None if spoken is None else text_of(messages[spoken])
    question, _ = question_of(model, words, head=True)
    dropped: list[str] = []
    for number, message in enumerate(messages):
        said = text_of(message)
        if number == spoken or (number == newest and said in ("", question.strip())):
            continue
        if message.role in _SYSTEM:
            dropped.append("the system prompt")
        elif message.role != "user" or number < newest or spoken is not None:
            dropped.append("the other turns")
        elif said:
            dropped.append("the text")
    turn = _asking(Message(role="user", content=messages[newest].content), question)
    return [turn], [_ignored(model, dropped)] if dropped else []


def _for_language_model(model: ServedModel, messages: Sequence[Message], told: bool) -> Asked:
    """The conversation in the order of training, with the domain's prompt if it has no text."""
    spoken, newest = _newest(messages, text_of), _newest(messages, media_of)
    turns, unmeasured, prompt = list(messages), [], model.prompt or ""
    if spoken is not None:
        words = text_of(turns[spoken])
        if model.takes_words:
            turns[spoken] = _asking(turns[spoken], filled(prompt, words))
        elif words != prompt.strip():
            unmeasured.append("another text")
    elif newest is not None:
        question, _ = question_of(model, None, head=False)
        if told or any(map(text_of, messages)):  # otherwise the engine adds the prompt
            turns[newest] = _asking(turns[newest], question)
    if newest is None and model.media != "text":
        unmeasured.append("no image")
    said = [message for message in messages if message.role not in _SYSTEM]
    if told or len(said) < len(messages):
        unmeasured.append("a system prompt")
    if len(said) > 1:
        unmeasured.append("several turns")
    turns = [_text_first(message) if message.role == "user" else message for message in turns]
    # With a head, which was not wanted, the accuracy is not that of these answers anyway.
    warned = unmeasured and model.head is None
    return turns, [_unmeasured(model, unmeasured)] if warned else []


def _newest(messages: Sequence[Message], read: Callable[[Message], object]) -> int | None:
    users = (n for n, one in enumerate(messages) if one.role == "user" and read(one))
    return max(users, default=None)


def filled(prompt: str, words: str) -> str:
    """The domain's prompt with a request's words in it, which may hold the whole prompt already."""
    if PLACE not in prompt:
        return words
    before, _, after = prompt.partition(PLACE)
    whole = f"{re.escape(before.lstrip())}(.+){re.escape(after.rstrip())}"
    found = re.fullmatch(whole, words, re.IGNORECASE | re.DOTALL)
    return prompt.replace(PLACE, found[1].strip() if found else words)


def _ignored(model: ServedModel, what: Sequence[str]) -> str:
    return (
        f"{model.name} answers with its {model.head} head, which reads only the prompt that it was "
        f"measured with ({shown(model.prompt)}) and the image: ignored "
        + ", ".join(dict.fromkeys(what))
    )


def _unmeasured(model: ServedModel, what: Sequence[str]) -> str:
    return f"{measured(model)} alone: its accuracy does not hold with {', '.join(what)}"


def measured(model: ServedModel) -> str:
    """What a domain was measured with, as the beginning of a sentence."""
    images = "" if model.media == "text" else " and images"
    return f"{model.name} was measured with its prompt ({shown(model.prompt)}){images}"


def text_of(message: Message) -> str:
    """All texts of a message, joined; empty if they hold nothing but white space."""
    content = message.content
    if isinstance(content, str):
        return content.strip()
    texts = (part.text.strip() for part in content or () if isinstance(part, TextPart))
    return " ".join(text for text in texts if text)


def media_of(message: Message) -> list[ContentPart]:
    """Images and videos of a message."""
    content = message.content if isinstance(message.content, list) else []
    return [part for part in content if not isinstance(part, TextPart)]


def _asking(message: Message, text: str) -> Message:
    """A message with another text, which precedes its images."""
    parts = [TextPart(type="text", text=text), *media_of(message)]
    return message.model_copy(update={"content": parts})


def _text_first(message: Message) -> Message:
    """A message whose text follows its images, in the other order; any other message as it is."""
    content, media = message.content, media_of(message)
    if not isinstance(content, list) or content[: len(media)] != media:
        return message
    return message.model_copy(update={"content": [*content[len(media) :], *media]})
