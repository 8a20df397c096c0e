"""Evaluates the checkpoint of the base model on held-out generic scenes.

Questions go through the processor, the chat template and greedy generation, as a user's would.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_iou, nms

import valora_data.models.lite_tower  # noqa: F401 (registers it with transformers)
from tests.bench.base_models.albums import draw_album
from tests.bench.base_models.clips import draw_clip
from tests.bench.base_models.data import CELLS, PHOTO, SMOL
from tests.bench.base_models.questions import (
    TASKS,
    Question,
    ask_motion,
    ask_which_image,
    caption_phrases,
    read_boxes,
)
from tests.bench.base_models.records import RECORD_TOKENS
from tests.bench.base_models.scenes import MAX_THINGS, Scene, draw_scene
from valora_data.contract.boxes import decode
from valora_data.contract.contexts import system_turn
from valora_data.models import smol
from valora_data.sources.formats.documents import draw_document
from valora_data.sources.generic.scenes import SIZE

GRID = (CELLS, CELLS)
THRESHOLD_SEEDS, TEST_SEEDS, NOVEL_SEEDS = 10_000_000, 20_000_000, 30_000_000
TARGETS = {
    "detect": 0.85, "count": 0.90, "where": 0.90, "color": 0.90, "yes_no": 0.90, "box": 0.75,
    "caption": 0.70,
}  # fmt: skip
"""Accuracy that is required of an ability; the others are only reported."""
DOCUMENT_TOKENS = (128, 256, 512, 1024, 1900)
"""Lengths of record documents, at most, that questions are asked about."""
LINKED_TOKENS = (128, 256, 512)
"""The same for linked questions; in longer documents, few facts are of one letter alone."""
ALBUM_IMAGES = (4, 12, 28)
"""Numbers of images of albums that questions are asked about."""


@dataclass(frozen=True, slots=True)
class SceneQuestion:
    """A question with its images.

    Attributes:
        question: The question.
        scenes: Its images, in order.
        document: The document that it is about, in a system turn; with scenes, those are its
            album. None for a question that its images follow.
    """

    question: Question
    scenes: tuple[Scene, ...]
    document: str | None = None

    def turns(self) -> list[dict[str, Any]]:
        """The turns of the prompt."""
        parts: list[dict[str, str]] = [{"type": "text", "text": self.question.prompt}]
        if self.document is not None:
            head = system_turn(self.document, len(self.scenes))
            return [head, {"role": "user", "content": parts}]
        return [{"role": "user", "content": [*parts, *[{"type": "image"}] * len(self.scenes)]}]


def questions(task: str, n: int, first_seed: int, *, novel: bool = False) -> list[SceneQuestion]:
    """Questions of one task, each about scenes of its own.

    Args:
        task: A key of `TASKS`, `which_image` or `motion`.
        n: Number of questions.
        first_seed: Seed of the first scene.
        novel: Whether each question is about a combination of colour and shape that training never
            shows (detection only).
    """
    items: list[SceneQuestion] = []
    seed = first_seed
    while len(items) < n:
        seed += 10
        rng = np.random.default_rng(seed)
        frames = int(rng.integers(2, 5))
        if task == "motion":
            scenes, shape, way = draw_clip(seed, frames)
            items.append(SceneQuestion(ask_motion(shape, way), scenes))
            continue
        if task == "which_image":
            scenes = tuple(draw_scene(seed + i, 3) for i in range(frames))
            question = ask_which_image(scenes, rng)
        else:
            scenes = (draw_scene(seed, 1 if task == "classify" else MAX_THINGS, novel=novel),)
            question = TASKS[task](scenes[0], rng)
            if novel:
                name = scenes[0].things[0].name
                boxes = tuple(t.box for t in scenes[0].things if t.name == name)
                question = Question("detect", f"detect {name}", boxes=boxes)
        if question is not None:
            items.append(SceneQuestion(question, scenes))
    return items


def record_questions(
    n: int, tokens: int, first_seed: int, *, linked: bool = False
) -> list[SceneQuestion]:
    """Questions about record documents, each about one of its own, in the held-out seeds.

    Args:
        n: Number of questions.
        tokens: Tokens of a document, at most; nearly as many are used.
        first_seed: Seed of the first document.
        linked: Whether questions give another fact of the letter instead of its number.
    """
    items = []
    for number in range(n):
        rng = np.random.default_rng(first_seed + number)
        document = draw_document(rng, max(1, (tokens - 4) // RECORD_TOKENS))
        facts = document.links() if linked else document.facts
        fact = facts[int(rng.integers(len(facts)))]
        question = Question("records", fact.question(-1), fact.value)
        items.append(SceneQuestion(question, (), document.text))
    return items


def album_questions(n: int, images: int, first_seed: int) -> list[SceneQuestion]:
    """Questions about albums, each about one of its own.

    Args:
        n: Number of questions.
        images: Number of images of an album.
        first_seed: Seed of the first album.
    """
    items = []
    for number in range(n):
        seed = first_seed + 1000 * number
        scenes, facts = draw_album(seed, images)
        fact = facts[int(np.random.default_rng(seed).integers(len(facts)))]
        question = Question("album", fact.question(-1), fact.value)
        items.append(SceneQuestion(question, tuple(scenes), ""))
    return items


class Checkpoint:
    """A checkpoint with its processor and detection head, computed in float32.

    Args:
        folder: Folder that `tests.bench.base_models.pretrain` wrote.
        device: Device to compute on; a GPU by default if there is one.
    """

    def __init__(self, folder: Path, device: torch.device | None = None) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.processor = AutoProcessor.from_pretrained(folder)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model: Any = model.eval().to(self.device)
        head = load_file(folder / "detection_head.safetensors")
        self.head = {name: tensor.float().to(self.device) for name, tensor in head.items()}

    def inputs(self, items: Sequence[SceneQuestion]) -> Any:
        """Model inputs for questions, padded on the left."""
        texts, images = [], []
        for item in items:
            text = self.processor.apply_chat_template(item.turns(), add_generation_prompt=True)
            texts.append(text)
            images.append([Image.fromarray(scene.pixels) for scene in item.scenes])
        media = {"images": images} if any(images) else {}
        inputs = self.processor(text=texts, **media, padding=True, return_tensors="pt")
        return inputs.to(self.device)

    @torch.inference_mode()
    def write(self, items: Sequence[SceneQuestion], batch: int = 64) -> list[str]:
        """The greedy answer to each question."""
        answers: dict[int, str] = {}
        by_images: dict[int, list[int]] = defaultdict(list)
        for i, item in enumerate(items):
            by_images[len(item.scenes)].append(i)
        for members in by_images.values():
            for at in range(0, len(members), batch):
                some = members[at : at + batch]
                inputs = self.inputs([items[i] for i in some])
                ids = self.model.generate(**inputs, max_new_tokens=60, do_sample=False)
                for i, row in zip(some, ids[:, inputs["input_ids"].shape[1] :], strict=True):
                    end = (row == self.processor.tokenizer.eos_token_id).nonzero().flatten()
                    said = row[: int(end[0])] if len(end) else row
                    answers[i] = self.processor.tokenizer.decode(said).strip()
        return [answers[i] for i in range(len(items))]

    @torch.inference_mode()
    def detect(
        self, items: Sequence[SceneQuestion], batch: int = 64
    ) -> list[tuple[Tensor, Tensor]]:
        """Boxes (k, 4), relative to the image size, and confidences (k,) for each question."""
        found = []
        for at in range(0, len(items), batch):
            inputs = self.inputs(items[at : at + batch])
            hidden = self.model.model(**inputs, use_cache=False).last_hidden_state
            visual = hidden[inputs["input_ids"] == self.model.config.image_token_id]
            visual = visual.view(-1, GRID[0] * GRID[1], hidden.shape[-1])
            scores = F.linear(
                visual, self.head["objectness.weight"], self.head["objectness.bias"]
            ).sigmoid()
            codes = F.linear(visual, self.head["box.weight"], self.head["box.bias"])
            for boxes, score in zip(decode(codes, GRID).cpu(), scores[..., 0].cpu(), strict=True):
                kept = nms(boxes, score, 0.5)[:50]
                kept = kept[score[kept] >= 0.02]
                found.append((boxes[kept], score[kept]))
        return found


def matches(boxes: Tensor, scores: Tensor, truth: Tensor, iou: float = 0.5) -> Tensor:
    """Which boxes match a true box, (k,) bool: greedily by falling score, each true box once."""
    hits = torch.zeros(len(boxes), dtype=torch.bool)
    if not len(boxes) or not len(truth):
        return hits
    overlap = box_iou(boxes, truth)
    for i in scores.argsort(descending=True).tolist():
        best, j = overlap[i].max(0)
        if best >= iou:
            hits[i] = True
            overlap[:, j] = -1.0
    return hits


def f1(
    found: Sequence[tuple[Tensor, Tensor]], items: Sequence[SceneQuestion], threshold: float
) -> float:
    """F1 at IoU 0.5 over all questions, for boxes whose confidence reaches the threshold."""
    hits = said = there = 0
    for (boxes, scores), item in zip(found, items, strict=True):
        keep = scores >= threshold
        truth = torch.tensor(item.question.boxes, dtype=torch.float32).view(-1, 4) / SIZE
        hits += int(matches(boxes[keep], scores[keep], truth).sum())
        said += int(keep.sum())
        there += len(truth)
    return 2 * hits / max(said + there, 1)


def best_threshold(found: Sequence[tuple[Tensor, Tensor]], items: Sequence[SceneQuestion]) -> float:
    """The confidence between 0.1 and 0.9 with the highest F1."""
    candidates = [i / 20 for i in range(2, 19)]
    return max(candidates, key=lambda threshold: f1(found, items, threshold))


def is_right(task: str, said: str, truth: str) -> bool:
    """Whether an answer is right: equal; captions in any order, boxes at IoU 0.5."""
    if task == "caption":
        return caption_phrases(said) == caption_phrases(truth)
    if task == "box":
        a, b = (torch.tensor(read_boxes(text)).view(-1, 4) for text in (said, truth))
        return len(a) == len(b) and bool(matches(a, torch.ones(len(a)), b).all())
    return said == truth


def measure(model: Checkpoint, n: int, tasks: Iterable[str]) -> dict[str, float]:
    """Accuracy of each task on `n` held-out questions; F1 at IoU 0.5 for detection."""
    figures: dict[str, float] = {}
    for task in tasks:
        if task == "detect":
            tuning = questions("detect", n, THRESHOLD_SEEDS)
            figures["threshold"] = threshold = best_threshold(model.detect(tuning), tuning)
            for key, first in (("detect", TEST_SEEDS), ("detect_new_combination", NOVEL_SEEDS)):
                items = questions("detect", n, first, novel=first == NOVEL_SEEDS)
                figures[key] = f1(model.detect(items), items, threshold)
            continue
        items = questions(task, n, TEST_SEEDS)
        answers = model.write(items)
        right = [
            is_right(task, said, item.question.answer)
            for said, item in zip(answers, items, strict=True)
        ]
        figures[task] = sum(right) / n
    return figures


def measure_contexts(model: Checkpoint, n: int) -> dict[str, float]:
    """Accuracy on `n` held-out questions about documents, by length, and about albums, by images.

    `linked_…` are of questions that do not name the letter; `records_alone` is what questions reach
    without their documents.
    """

    def right(items: list[SceneQuestion], batch: int) -> float:
        said = model.write(items, batch)
        hits = [one == item.question.answer for one, item in zip(said, items, strict=True)]
        return sum(hits) / n

    figures = {}
    for tokens in DOCUMENT_TOKENS:
        items = record_questions(n, tokens, TEST_SEEDS)
        figures[f"records_{tokens}"] = right(items, max(1, 16_384 // tokens))
    for tokens in LINKED_TOKENS:
        items = record_questions(n, tokens, TEST_SEEDS, linked=True)
        figures[f"linked_{tokens}"] = right(items, max(1, 16_384 // tokens))
    alone = [replace(item, document="") for item in record_questions(n, 128, TEST_SEEDS)]
    figures["records_alone"] = right(alone, 64)
    for images in ALBUM_IMAGES:
        items = album_questions(n, images, TEST_SEEDS)
        figures[f"album_{images}"] = right(items, max(1, 128 // images))
    return figures


def evaluate(folder: Path, n: int = 600) -> dict[str, float]:
    """Measure every ability, print a table and add the figures to `figures.json`."""
    from rich.console import Console
    from rich.table import Table

    model = Checkpoint(smol.folder(folder) if SMOL else folder)
    figures = measure(model, n, [*TASKS, "which_image", "motion"])
    if not PHOTO:
        figures |= measure_contexts(model, n)
    table = Table("ability", "reached", "required", title=f"{n} held-out questions each")
    for name, value in figures.items():
        target = TARGETS.get(name)
        style = None if target is None else "green" if value >= target else "red"
        table.add_row(name, f"{value:.3f}", f"{target:.2f}" if target else "", style=style)
    Console().print(table)
    path = folder / "figures.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known |= {"questions": n, "reached": {k: round(v, 4) for k, v in figures.items()}}
    path.write_text(json.dumps(known, indent=2) + "\n")
    return figures
