"""What a request asks a domain: the prompt that the domain was measured with.

A domain's accuracy holds for the prompt of its training only: one user turn, the text before the
image. A head always gets exactly this prompt; a warning says what else was left out, and what
contradicts the prompt is refused. A domain whose language model answers may be asked anything: the
order of its training is restored, and a warning names what its accuracy was not measured with.
"""

from __future__ import annotations

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
    words = (words or "").strip()
    prompt = model.prompt or ""
    if not words:
        if not prompt or PLACE in prompt:
            hint = f" (its prompt is {shown(prompt)})" if prompt else ""
            raise RequestError(f"{model.name} answers questions{hint}: send the question as text")
        return prompt, []
    if model.takes_words:
        return _filled(prompt, words), []
    if words == prompt.strip():
        return prompt, []
    if head:
        return prompt, [_ignored(model, ["the text"])]
    return words, [_unmeasured(model, ["another text"])] if model.head is None else []


def check_measured_media(
    model: ServedModel, images: int, videos: Sequence[int], *, head: bool
) -> list[str]:
    """Compare the images of one prompt with what a domain was measured with."""
    if model.kind != "domain" or model.form or not (images or videos):
        return []
    if model.head is not None and not head:
        return []
    wrong = None
    if model.media == "text":
        wrong = f"{model.name} reads text: leave images and videos out"
    elif model.media == "video" and (images or len(videos) != 1):
        wrong = f"{model.name} reads one video: send a video, or its frames as such"
    elif model.media == "images" and videos:
        wrong = f"{model.name} reads images, not videos: send images"
    elif model.media != "video" and model.images is not None and images not in (0, model.images):
        wrong = (
            f"{model.name} reads {plural(model.images, 'image')} at a time, got "
            f"{images}: send {'that many' if model.images > 1 else 'one'} in a request"
        )
    if wrong is not None:
        if head:
            raise ImageError(wrong)
        return [_unmeasured(model, ["other images or videos"])]
    if model.media == "video" and model.images is not None and videos[0] != model.images:
        return [
            f"{model.name} was measured with {plural(model.images, 'frame')} of a video, and "
            f"this one has {videos[0]}: its accuracy may differ"
        ]
    return []


def completion_warnings(model: ServedModel) -> list[str]:
    """Warnings for a text completion, which reads neither a domain's prompt nor an image."""
    if model.kind != "domain" or model.form is not None:
        return []
    return [
        f"{_measured(model)}, which text completions lack: its accuracy does not hold, ask "
        "/v1/chat/completions instead"
    ]


def _about_context(model: ServedModel, messages: Sequence[Message]) -> Asked:
    """The conversation about a context, in place of whose head the context stands."""
    turns = [one for one in messages if one.role not in _SYSTEM]
    if not turns:
        raise RequestError(f"{model.name} answers questions about a document: send one")
    warnings = []
    if len(turns) < len(messages):
        warnings.append(
            f"{model.name} is a context, which stands in place of the system prompt: ignored the "
            "system prompt"
        )
    if (model.prompt or PLACE) != PLACE and turns[-1].role == "user" and _text(turns[-1]):
        turns[-1] = _asking(turns[-1], _filled(model.prompt or PLACE, _text(turns[-1])))
    return turns, warnings


def _for_head(model: ServedModel, messages: Sequence[Message]) -> Asked:
    """The only turn that a head sees: its prompt, and the newest images."""
    read, what = (_text, "text") if model.media == "text" else (_media, "an image or video")
    newest = _newest(messages, read)
    if newest is None:
        raise RequestError(
            f"{model.name} answers with its {model.head} head, which reads {what}: "
            "send one in a user message, or set valora.head to false to generate"
        )
    spoken = _newest(messages, _text) if model.takes_words else None
    question, _ = question_of(model, None if spoken is None else _text(messages[spoken]), head=True)
    dropped: list[str] = []
    for number, message in enumerate(messages):
        words = _text(message)
        if number == spoken or (number == newest and words in ("", question.strip())):
            continue
        if message.role in _SYSTEM:
            dropped.append("the system prompt")
        elif message.role == "user" and number >= newest and spoken is None:
            dropped += ["the text"] * bool(words)
        else:
            dropped.append("the other turns")
    turn = _asking(Message(role="user", content=messages[newest].content), question)
    return [turn], [_ignored(model, dropped)] if dropped else []


def _for_language_model(model: ServedModel, messages: Sequence[Message], told: bool) -> Asked:
    """The conversation in the order of training, with the domain's prompt if it has no text."""
    spoken, newest = _newest(messages, _text), _newest(messages, _media)
    turns = list(messages)
    unmeasured: list[str] = []
    if spoken is None and newest is not None:
        question, _ = question_of(model, None, head=False)
        if told or any(map(_text, messages)):  # otherwise the engine adds the prompt
            turns[newest] = _asking(turns[newest], question)
    elif spoken is not None:
        words = _text(turns[spoken])
        if model.takes_words:
            turns[spoken] = _asking(turns[spoken], _filled(model.prompt or "", words))
        elif words != (model.prompt or "").strip():
            unmeasured.append("another text")
    if newest is None and model.media != "text":
        unmeasured.append("no image")
    said = [message for message in messages if message.role not in _SYSTEM]
    if told or len(said) < len(messages):
        unmeasured.append("a system prompt")
    if len(said) > 1:
        unmeasured.append("several turns")
    turns = [_text_first(message) if message.role == "user" else message for message in turns]
    if model.head is not None:
        unmeasured = []  # its accuracy is that of the head, which was not wanted
    return turns, [_unmeasured(model, unmeasured)] if unmeasured else []


def _newest(messages: Sequence[Message], read: Callable[[Message], object]) -> int | None:
    users = (n for n, one in enumerate(messages) if one.role == "user" and read(one))
    return max(users, default=None)


def _filled(prompt: str, words: str) -> str:
    """The domain's prompt with a request's words in it, which may hold the whole prompt already."""
    if PLACE not in prompt:
        return words
    before, _, after = prompt.partition(PLACE)
    start, end = before.lstrip(), after.rstrip()
    has_start = words[: len(start)].lower() == start.lower()
    has_end = words[len(words) - len(end) :].lower() == end.lower()
    if (start or end) and has_start and has_end and len(words) > len(start) + len(end):
        words = words[len(start) : len(words) - len(end)].strip()
    return prompt.replace(PLACE, words)


def _ignored(model: ServedModel, what: Sequence[str]) -> str:
    return (
        f"{model.name} answers with its {model.head} head, which reads only the prompt that it was "
        f"measured with ({shown(model.prompt)}) and the image: ignored "
        + ", ".join(dict.fromkeys(what))
    )


def _unmeasured(model: ServedModel, what: Sequence[str]) -> str:
    return f"{_measured(model)} alone: its accuracy does not hold with {', '.join(what)}"


def _measured(model: ServedModel) -> str:
    images = "" if model.media == "text" else " and images"
    return f"{model.name} was measured with its prompt ({shown(model.prompt)}){images}"


def _text(message: Message) -> str:
    """All texts of a message, joined; empty if they hold nothing but white space."""
    content = message.content
    if isinstance(content, str):
        return content.strip()
    texts = (part.text.strip() for part in content or () if isinstance(part, TextPart))
    return " ".join(text for text in texts if text)


def _media(message: Message) -> list[ContentPart]:
    content = message.content if isinstance(message.content, list) else []
    return [part for part in content if not isinstance(part, TextPart)]


def _asking(message: Message, text: str) -> Message:
    """A message with another text, which precedes its images."""
    parts = [TextPart(type="text", text=text), *_media(message)]
    return message.model_copy(update={"content": parts})


def _text_first(message: Message) -> Message:
    """A message whose text follows its images, in the other order; any other message as it is."""
    content, media = message.content, _media(message)
    if not isinstance(content, list) or content[: len(media)] != media:
        return message
    return message.model_copy(update={"content": [*content[len(media) :], *media]})
