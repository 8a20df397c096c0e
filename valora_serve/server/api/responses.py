"""From the engine's outputs to what clients read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_serve.server.api.schema import (
    DetectionAnswer,
    ImageAnswer,
    TokenDetails,
    TokenLogprob,
    TopLogprob,
    UsageAnswer,
    ValoraAnswer,
)
from valora_serve.types import Finish

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from valora_serve.types import HeadResult, Logprob, Output, ServedModel, TokenLogprobs

GRID = 1000  # boxes in text are on Qwen-VL's grid


def finish_reason(finish: Finish) -> str:
    """OpenAI's word for why an answer ended."""
    return "length" if finish is Finish.LENGTH else "stop"


def usage(lasts: Iterable[Output], prompts: int = 1) -> UsageAnswer:
    """Tokens of a request's answers; a prompt that is answered several times counts once.

    Args:
        lasts: The last output of every answer, those of a prompt side by side.
        prompts: Prompts that there were.
    """
    used = [last.usage for last in lasts if last.usage is not None]
    firsts = used[:: max(1, len(used) // prompts)]
    prompt = sum(item.prompt for item in firsts)
    completion = sum(item.completion for item in used)
    return UsageAnswer(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=TokenDetails(
            cached_tokens=sum(item.cached for item in firsts),
            image_tokens=sum(item.image for item in firsts),
        ),
    )


def detections(result: HeadResult, number: int) -> list[DetectionAnswer]:
    """Boxes of one image."""
    return [
        DetectionAnswer(label=item.label, confidence=item.confidence, box=item.box)
        for item in result.detections[number]
    ]


def valora_block(
    model: ServedModel, last: Output, sizes: Sequence[tuple[int, int]]
) -> ValoraAnswer:
    """How the answer came about, and what the head said.

    Args:
        model: What was asked.
        last: The last output.
        sizes: (width, height) of the images, as they were sent.
    """
    head, times = last.head, last.times
    facts: dict[str, Any] = {}
    if head is not None:
        facts["kind"] = head.kind
        facts["label"] = head.label
        facts["confidences"] = dict(head.confidences)
        facts["confidence"] = head.confidences.get(head.label) if head.label else None
        facts["images"] = [
            ImageAnswer(width=size[0], height=size[1], detections=detections(head, number))
            for number, size in enumerate(sizes[: len(head.detections)])
        ]
    if times is not None and times.started is not None and times.finished is not None:
        facts["queue_seconds"] = times.started - times.arrival
        facts["seconds"] = times.finished - times.arrival
    return ValoraAnswer(
        model=model.name,
        adapter=model.adapter,
        bundle=model.bundle,
        mode=str(last.mode) if last.mode is not None else None,
        **facts,
    )


def head_text(result: HeadResult, sizes: Sequence[tuple[int, int]]) -> str:
    """A head's answer in words: the label, or boxes as Qwen-VL writes them, one a line."""
    if result.kind != "detection":
        return result.label or ""
    lines = []
    for found, (width, height) in zip(result.detections, sizes, strict=False):
        for item in found:
            x0, y0, x1, y1 = (
                round(GRID * min(max(value / size, 0.0), 1.0))
                for value, size in zip(item.box, (width, height, width, height), strict=True)
            )
            lines.append(f"<ref>{item.label}</ref><box>({x0},{y0}),({x1},{y1})</box>")
    return "\n".join(lines)


def chat_logprobs(items: Iterable[TokenLogprobs]) -> list[TokenLogprob]:
    """Log probabilities in the form of the chat endpoint."""
    return [
        TokenLogprob(
            **_one(item.chosen), top_logprobs=[TopLogprob(**_one(top)) for top in item.top]
        )
        for item in items
    ]


def _one(item: Logprob) -> dict[str, Any]:
    # JSON has no infinity; OpenAI, too, says -9999 for what cannot come.
    value = max(item.logprob, -9999.0)
    return {"token": item.text, "logprob": value, "bytes": list(item.text.encode())}
