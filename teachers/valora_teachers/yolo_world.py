"""Open-vocabulary detection by YOLO-World of Ultralytics: for labels, or for a sample's own phrase.

Ultralytics would download a text encoder through a package of its own. Here the same encoder, CLIP
ViT-B/32, comes from transformers: from a folder, or by name from the hub.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from valora_data.schema import Answer, Task
from valora_teachers.base import BATCH, BatchTeacher, TeacherError
from valora_teachers.ultralytics_plugin import open_weights, threads_kept
from valora_teachers.yolo import read_boxes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from valora_data.schema import Sample

TEXT_ENCODER = "openai/clip-vit-base-patch32"
TEXT_WIDTH = 512
MIN_CONFIDENCE = 0.01


class YoloWorld(BatchTeacher):
    """A YOLO-World that looks for what it is told.

    What it looks for at once changes what it sees, so labels of a detection domain go together,
    and phrases of grounding alone.
    """

    def __init__(
        self,
        model: Any,
        task: Task,
        phrases: Mapping[str, str],
        text_encoder: str,
        batch: int = BATCH,
    ) -> None:
        """Wrap a loaded model; use `load` for a file.

        Args:
            model: An `ultralytics.YOLO` that holds a `WorldModel`.
            task: Detection or grounding.
            phrases: What to look for, to the label that it stands for; empty for grounding.
            text_encoder: Folder, or name on the hub, of CLIP's text encoder.
            batch: Images per batch.
        """
        super().__init__(task, tuple(dict.fromkeys(phrases.values())), batch)
        self._model = model
        self._phrases = dict(phrases)
        self._encoder = text_encoder
        self._told: tuple[str, ...] = ()

    @classmethod
    def load(
        cls,
        path: Path,
        task: Task = Task.GROUNDING,
        labels: Sequence[str] = (),
        names: Mapping[str, str] | None = None,
        text_encoder: str = TEXT_ENCODER,
    ) -> YoloWorld:
        """Load a `.pt` file. It is a pickle: loading runs its code, so load only what you trust.

        Args:
            path: The file.
            task: Detection or grounding.
            labels: Labels of the domain, which are also looked for, underscores read as
                spaces; empty for grounding.
            names: Further phrases, to the labels that they stand for.
            text_encoder: Folder, or name on the hub, of CLIP's text encoder.

        Raises:
            TeacherError: If Ultralytics, the file or the text encoder is missing, or it is no
                YOLO-World.
        """
        model, _, _ = open_weights(path)
        kind = type(model.model).__name__
        if kind != "WorldModel":
            hint = " (YOLOE's text encoder comes by download only)" if "YOLOE" in kind else ""
            raise TeacherError(
                f"{path.name} is a {kind}, which cannot be asked for a phrase{hint}: give a "
                "YOLO-World"
            )
        if task.spec.detects and not labels:
            raise TeacherError(
                f"{path.name} has to be told what to look for: give the domain labels"
            )
        stray = [label for label in (names or {}).values() if label not in labels]
        if stray:
            raise TeacherError(
                f"{path.name} is mapped to {stray[0]!r}, which is not one of {', '.join(labels)}: "
                "correct teacher.options.names"
            )
        named = set((names or {}).values())
        phrases = {label.replace("_", " "): label for label in labels if label not in named}
        _text_encoder(text_encoder)  # is it there?
        return cls(model, task, phrases | dict(names or {}), text_encoder)

    def _answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        if self.task.spec.detects:
            return self._find(samples, self._phrases)
        answers: dict[int, Answer] = {}
        by_phrase: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            if not sample.prompt:
                raise TeacherError(f"sample {sample.id} has no phrase to look for: give it one")
            by_phrase.setdefault(sample.prompt, []).append(place)
        for phrase, places in by_phrase.items():
            found = self._find([samples[place] for place in places], {phrase: phrase})
            answers |= {
                place: Answer(answer.boxes[:1]) for place, answer in zip(places, found, strict=True)
            }
        return [answers[place] for place in range(len(samples))]

    def _find(self, samples: Sequence[Sample], phrases: Mapping[str, str]) -> list[Answer]:
        self._tell(tuple(phrases))
        label_of = dict(enumerate(phrases.values()))
        with threads_kept():
            results = self._model.predict(
                [sample.image.convert("RGB") for sample in samples],
                conf=MIN_CONFIDENCE,
                iou=0.5,
                device="cpu",
                save=False,
                verbose=False,
            )
        return [read_boxes(result, label_of) for result in results]

    def _tell(self, phrases: tuple[str, ...]) -> None:
        """What `WorldModel.set_classes` does, with our text encoder."""
        if phrases == self._told:
            return
        network = self._model.model
        network.txt_feats = text_features(self._encoder, phrases)[None]
        network.model[-1].nc = len(phrases)
        network.names = dict(enumerate(phrases))
        self._model.predictor = None
        self._told = phrases


def text_features(encoder: str, phrases: Sequence[str]) -> Tensor:
    """CLIP's embeddings of phrases.

    Returns:
        (phrases, 512) float32, each of length 1.

    Raises:
        TeacherError: If the encoder cannot be loaded or has another width.
    """
    tokenizer, model = _text_encoder(encoder)
    inputs = tokenizer(list(phrases), padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        features: Tensor = model(**inputs).text_embeds.float()
    unit: Tensor = features / features.norm(dim=-1, keepdim=True)
    return unit.clone()  # an ordinary tensor, which may be copied with the model


@cache
def _text_encoder(name: str) -> tuple[Any, Any]:
    from transformers import AutoTokenizer, CLIPTextModelWithProjection

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = CLIPTextModelWithProjection.from_pretrained(name, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise TeacherError(
            f"the text encoder {name} of YOLO-World cannot be loaded: set "
            f"teacher.options.text_encoder to a folder that holds {TEXT_ENCODER}"
        ) from error
    if model.config.projection_dim != TEXT_WIDTH:
        raise TeacherError(
            f"text encoder {name} gives {model.config.projection_dim} numbers, expected "
            f"{TEXT_WIDTH}: YOLO-World was trained with {TEXT_ENCODER}"
        )
    return tokenizer, model.requires_grad_(False).eval()
