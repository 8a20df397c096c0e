"""Heads at work: a linear layer on last hidden states instead of generated text (VaLoRA §4.2.2).

The files are described in docs/bundle.md. Heads of any kinds and sizes answer in one batch; all
arithmetic from the hidden states on is fp32.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from valora_data.contract.boxes import read_detections
from valora_data.contract.grid_pooling import PLACES, pool_places
from valora_serve.errors import AdapterError, RequestError, ServeError
from valora_serve.types import Detection, HeadResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

DETECTION = "detection"
LINEAR_KINDS = ("classification", "counting", "yes_no", "action")


class Pooling(StrEnum):
    """What a linear head looks at."""

    LAST = "last"
    VISUAL_MEAN = "visual_mean"
    ATTENTION = "attention"
    GRID = "grid"


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A head of a domain, read by `read_head`.

    Attributes:
        kind: `DETECTION` or one of `LINEAR_KINDS`.
        labels: In the order of the outputs.
        weight: [outputs, width] float32; [outputs, 16 · width] with `Pooling.GRID`.
        bias: [outputs] float32.
        pooling: Of a linear head; None for detection, which reads every visual token.
        query: [width] float32, of `Pooling.ATTENTION`.
        temperature: Of a linear head: logits are divided by it before the softmax.
        grid: Of a detection head: rows and columns of visual tokens of an image.
        calibration: Of a detection head: [2] float32 on the CPU, see `read_detections`.
        threshold: Of a detection head: confidence from which a box counts.
        nms_iou: Of a detection head: overlap above which the less sure of two boxes goes.
        most: Of a detection head: boxes of an image at most.
    """

    kind: str
    labels: tuple[str, ...]
    weight: torch.Tensor
    bias: torch.Tensor
    pooling: Pooling | None = None
    query: torch.Tensor | None = None
    temperature: float = 1.0
    grid: tuple[int, int] = (0, 0)
    calibration: torch.Tensor = field(default_factory=lambda: torch.tensor([1.0, 0.0]))
    threshold: float = 0.0
    nms_iou: float = 0.5
    most: int = 32

    @property
    def reads_visual(self) -> bool:
        """Whether it needs the visual tokens' hidden states, and not only the last token's."""
        return self.pooling is not Pooling.LAST

    def to(self, device: torch.device | str) -> Head:
        """The same head, ready to run on a device."""
        query = None if self.query is None else self.query.to(device)
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device), query=query)


def read_head(file: Path, width: int) -> Head:
    """Read a head.

    Args:
        file: A safetensors file as in docs/bundle.md.
        width: Size of the base model's hidden states.

    Returns:
        The head, on the CPU.

    Raises:
        AdapterError: It is damaged, of an unknown kind, or for another width.
    """
    try:
        with safe_open(file, "pt") as parts:
            facts = dict(parts.metadata() or {})
            tensors = {
                key: parts.get_tensor(key).to(torch.float32, copy=True)  # not a view of the file
                for key in parts.keys()  # noqa: SIM118
            }
    except (OSError, SafetensorError) as error:
        raise AdapterError(
            f"head {file} is damaged ({error}): copy or export the bundle again"
        ) from error
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"head {file}: tensor {name} holds NaN or Inf; train it again")
    try:
        return _parse(facts, tensors, width)
    except KeyError as error:
        raise AdapterError(f"head {file} lacks {error}: export the bundle again") from error
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise AdapterError(f"head {file} does not fit: {error}; export the bundle again") from error


def _parse(facts: Mapping[str, str], tensors: Mapping[str, torch.Tensor], width: int) -> Head:
    kind = facts["kind"]
    if kind == DETECTION:
        head = _detection(facts, tensors)
    elif kind in LINEAR_KINDS:
        head = _linear(kind, facts, tensors)
    else:
        raise ValueError(f"kind: expected one of {(DETECTION, *LINEAR_KINDS)}, got {kind}")
    outputs = head.weight.shape[0]
    inputs = width * (PLACES if head.pooling is Pooling.GRID else 1)
    shapes: dict[str, tuple[int, ...]] = {"weight": (outputs, inputs), "bias": (outputs,)}
    if head.query is not None:
        shapes["query"] = (width,)
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            got = tuple(tensors[name].shape)
            raise ValueError(f"tensor {name}: expected shape {shape}, got {got}")
    return head


def _labels(facts: Mapping[str, str]) -> tuple[str, ...]:
    labels = json.loads(facts["labels"])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise TypeError(f"labels: expected a list of names, got {labels}")
    if len(set(labels)) != len(labels) or not labels:
        raise ValueError(f"labels: expected different names, got {labels}")
    return tuple(labels)


def _detection(facts: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> Head:
    labels = _labels(facts)
    rows, columns = (int(side) for side in json.loads(facts["grid"]))
    want = 5 + (len(labels) if len(labels) > 1 else 0)
    if tensors["weight"].shape[0] != want:
        raise ValueError(
            f"tensor weight: expected {want} outputs for {len(labels)} labels, "
            f"got {tensors['weight'].shape[0]}"
        )
    if tuple(tensors["calibration"].shape) != (2,) or min(rows, columns) < 1:
        raise ValueError("expected a calibration of 2 numbers and a grid of rows and columns")
    return Head(
        kind=DETECTION,
        labels=labels,
        weight=tensors["weight"].contiguous(),
        bias=tensors["bias"],
        grid=(rows, columns),
        calibration=tensors["calibration"],
        threshold=float(tensors["threshold"].reshape(1)[0]),
        nms_iou=float(facts["nms_iou"]),
        most=int(facts["most"]),
    )


def _linear(kind: str, facts: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> Head:
    labels = _labels(facts)
    if tensors["weight"].shape[0] != len(labels) or len(labels) < 2:
        raise ValueError(
            f"tensor weight: expected an output for each of at least 2 labels, got "
            f"{tensors['weight'].shape[0]} outputs, {len(labels)} labels"
        )
    temperature = 1.0
    if "temperature" in tensors:
        temperature = float(tensors["temperature"].reshape(1)[0])
        if temperature <= 0:
            raise ValueError(f"temperature: expected more than 0, got {temperature}")
    pooling = Pooling(facts["pooling"])
    return Head(
        kind=kind,
        labels=labels,
        weight=tensors["weight"].contiguous(),
        bias=tensors["bias"],
        pooling=pooling,
        query=tensors["query"] if pooling is Pooling.ATTENTION else None,
        temperature=temperature,
    )


@dataclass(frozen=True, slots=True, eq=False)
class HeadTask:
    """What a head shall read.

    Attributes:
        head: The head, on the device of `hidden`.
        hidden: [tokens, width] last hidden states, after the final norm, of a request's real
            tokens; the last row is the prompt's last token. For a head that only reads the last
            token, [1, width] is enough.
        visual: [tokens] bool, which of them are visual tokens; may lie on the CPU. None for none.
        sizes: Of a detection head: width and height in pixels of each image, in their order.
        min_score: Of a detection head: confidence below which boxes are dropped; the head's
            threshold if None.
        places: With `Pooling.GRID`: [visual tokens] int64 on the CPU, see
            `valora_data.contract.grid_pooling.places_of`.
    """

    head: Head
    hidden: torch.Tensor
    visual: torch.Tensor | None = None
    sizes: Sequence[tuple[int, int]] = ()
    min_score: float | None = None
    places: torch.Tensor | None = None

    def check(self) -> None:
        """Make sure that the head can read this.

        Raises:
            RequestError: No visual tokens for a head that reads them, or not a grid an image.
        """
        visual = 0 if self.visual is None else int(self.visual.sum())
        check_visual(self.head, visual, len(self.sizes))


def check_visual(head: Head, visual: int, images: int) -> None:
    """Make sure that a head can read a prompt, before anything is computed.

    Args:
        head: The head.
        visual: Visual tokens in the prompt.
        images: Images in it.

    Raises:
        RequestError: It cannot.
    """
    if not head.reads_visual:
        return
    if not visual:
        raise RequestError(f"a {head.kind} head reads visual tokens: send an image")
    if head.kind == DETECTION and visual != images * head.grid[0] * head.grid[1]:
        raise RequestError(
            f"a detection head of {head.grid[0]} × {head.grid[1]} cells cannot read {images} "
            f"images of {visual} visual tokens in all: send images as the bundle's card says"
        )


class HeadLogits:
    """Logits of a batch of heads, on their way to the host.

    Args:
        tasks: What was asked.
        errors: For each task why it cannot be answered, or None.
        logits: [elements] float32 on the host, one task's after the other's; the copy into it
            may be under way.
        shapes: (rows, outputs) of each task's part.
        copied: Recorded after that copy, None if it is done.
    """

    def __init__(
        self,
        tasks: Sequence[HeadTask],
        errors: Sequence[ServeError | None],
        logits: torch.Tensor,
        shapes: Sequence[tuple[int, int]],
        copied: torch.cuda.Event | None,
    ) -> None:
        self._tasks = tasks
        self._errors = errors
        self._logits = logits
        self._shapes = shapes
        self._copied = copied

    @property
    def ready(self) -> bool:
        """Whether `read` would not wait."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> list[HeadResult | ServeError]:
        """Wait for the logits and say what they mean, for each task; pure host work after that."""
        if self._copied is not None:
            self._copied.synchronize()
        results: list[HeadResult | ServeError] = []
        start = 0
        for task, error, shape in zip(self._tasks, self._errors, self._shapes, strict=True):
            stop = start + shape[0] * shape[1]
            results.append(error or _interpret(task, self._logits[start:stop].view(shape)))
            start = stop
        return results


class HeadSet:
    """Runs heads of any kinds and sizes in one batch; see `run`."""

    def launch(self, tasks: Sequence[HeadTask]) -> HeadLogits:
        """Compute the logits of a batch; nothing waits for the device.

        One matrix product for each different head, one copy to the host in all. A task that
        cannot be answered gets an error of its own.
        """
        errors: list[ServeError | None] = []
        rows: list[torch.Tensor] = []
        members: dict[int, list[int]] = {}
        for number, task in enumerate(tasks):
            try:
                task.check()
            except RequestError as error:
                errors.append(error)
                rows.append(task.hidden[:0].float())
                continue
            errors.append(None)
            rows.append(_pool(task))
            members.setdefault(id(task.head), []).append(number)
        parts = [torch.empty(0) for _ in tasks]
        for numbers in members.values():
            head = tasks[numbers[0]].head
            together = torch.cat([rows[number] for number in numbers])
            raw = torch.addmm(head.bias, together, head.weight.T)
            for number, part in zip(
                numbers, raw.split([len(rows[number]) for number in numbers]), strict=True
            ):
                parts[number] = part
        shapes = [
            (len(part), task.head.weight.shape[0]) if error is None else (0, 0)
            for part, task, error in zip(parts, tasks, errors, strict=True)
        ]
        answered = [
            part.reshape(-1) for part, error in zip(parts, errors, strict=True) if not error
        ]
        flat = torch.cat(answered) if answered else torch.empty(0)
        copied = None
        if flat.is_cuda:
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            flat = host
        return HeadLogits(tasks, errors, flat, shapes, copied)

    def run(self, tasks: Sequence[HeadTask]) -> list[HeadResult | ServeError]:
        """Answer a batch: for each task a result, or the error that hits only this one."""
        return self.launch(tasks).read()


def _pool(task: HeadTask) -> torch.Tensor:
    """[rows, inputs] float32 that the head's linear layer acts on."""
    head, hidden = task.head, task.hidden
    if head.pooling is Pooling.LAST:
        return hidden[-1:].float()
    assert task.visual is not None
    # Indices made on the host: a mask on the device would have to be waited for.
    places = torch.nonzero(task.visual.cpu()).flatten()
    places = places.pin_memory() if hidden.is_cuda else places
    seen = hidden[places.to(hidden.device, non_blocking=True)].float()
    if head.pooling is Pooling.VISUAL_MEAN:
        return seen.mean(0, keepdim=True)
    if head.pooling is Pooling.ATTENTION:
        assert head.query is not None
        weights = torch.softmax(seen @ head.query / math.sqrt(seen.shape[1]), dim=0)
        return (weights @ seen)[None]
    if head.pooling is Pooling.GRID:
        assert task.places is not None
        where = task.places.pin_memory() if hidden.is_cuda else task.places
        where = where.to(hidden.device, non_blocking=True)[None]
        return pool_places(seen[None], where, torch.ones_like(where, dtype=torch.bool))
    return seen


def _interpret(task: HeadTask, raw: torch.Tensor) -> HeadResult:
    head = task.head
    logits: NDArray[np.float32] = raw.numpy().copy()
    if head.kind != DETECTION:
        shares = torch.softmax(raw[0] / head.temperature, dim=0).tolist()
        best = max(range(len(shares)), key=shares.__getitem__)
        return HeadResult(
            kind=head.kind,
            label=head.labels[best],
            confidences=dict(zip(head.labels, shares, strict=True)),
            logits=logits,
        )
    min_score = head.threshold if task.min_score is None else task.min_score
    images = raw.view(len(task.sizes), head.grid[0] * head.grid[1], -1)
    detections = []
    for cells, (width, height) in zip(images, task.sizes, strict=True):
        boxes, scores, classes = read_detections(
            cells,
            head.grid,
            head.calibration,
            nms_iou=head.nms_iou,
            min_score=min_score,
            most=head.most,
        )
        found = zip(boxes.tolist(), scores.tolist(), classes.tolist(), strict=True)
        detections.append(
            tuple(
                Detection(
                    label=head.labels[index],
                    confidence=score,
                    box=(x0 * width, y0 * height, x1 * width, y1 * height),
                )
                for (x0, y0, x1, y1), score, index in found
            )
        )
    return HeadResult(kind=head.kind, detections=tuple(detections), logits=logits)
