"""Open-vocabulary detection by YOLO-World of Ultralytics: for labels, or for a sample's own phrase.

Ultralytics would download a text encoder through a package of its own. Here the same encoder, CLIP
ViT-B/32, comes from transformers: from a folder, or by name from the hub.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from valora_data.identity import place_hash
from valora_data.schema import Answer
from valora_teachers.base import Teacher, TeacherError, TeacherOptions, phrase_of
from valora_teachers.ultralytics_plugin import open_weights, predict, read_boxes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from valora_data.schema import Sample

TEXT_ENCODER = "openai/clip-vit-base-patch32"
TEXT_WIDTH = 512


class YoloWorldOptions(TeacherOptions):
    """Options of a YOLO-World.

    Attributes:
        text_encoder: Folder, or name on the hub, of CLIP's text encoder.
    """

    text_encoder: str = TEXT_ENCODER


class YoloWorld(Teacher):
    """Detects a domain's labels, which it looks for together, or each sample's phrase, alone.

    What it looks for at once changes what it sees.
    """

    options_type = YoloWorldOptions
    artefact: ClassVar[str | None] = "teacher.pt"
    reads_prompt: ClassVar[bool] = False

    @classmethod
    def inputs(
        cls, weights: str | None, options: Mapping[str, Any], cache: Path | None
    ) -> dict[str, str]:
        """The model, and the text encoder."""
        encoder = place_hash(options.get("text_encoder", TEXT_ENCODER))
        return super().inputs(weights, options, cache) | {"text_encoder": encoder}

    def load(self, weights: Path | str) -> None:
        """Load a `.pt` file. It is a pickle: loading runs its code, so load only what you trust."""
        path = Path(weights)
        self._model, _, _ = open_weights(path)
        kind = type(self._model.model).__name__
        if kind != "WorldModel":
            hint = " (YOLOE's text encoder comes by download only)" if "YOLOE" in kind else ""
            raise TeacherError(
                f"{path.name} is a {kind}, which cannot be asked for a phrase{hint}: give a "
                "YOLO-World"
            )
        if self.task.spec.detects:
            self._phrases = self.find_phrases(path.name)
        text_encoder(self.options.text_encoder)  # is it there?
        self._prompted: list[str] = []

    def answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        """Find the labels, or what each sample's phrase refers to."""
        if self.task.spec.detects:
            return self._find(samples, self._phrases)
        rows: dict[str, list[int]] = {}
        for row, sample in enumerate(samples):
            rows.setdefault(phrase_of(sample), []).append(row)
        answers = [Answer()] * len(samples)
        for phrase, places in rows.items():
            found = self._find([samples[row] for row in places], {phrase: phrase})
            for row, answer in zip(places, found, strict=True):
                answers[row] = Answer(answer.boxes[:1])
        return answers

    def _find(self, samples: Sequence[Sample], phrases: Mapping[str, str]) -> list[Answer]:
        if list(phrases) != self._prompted:  # as `WorldModel.set_classes`, with our text encoder
            self._prompted = list(phrases)
            network = self._model.model
            network.txt_feats = text_features(self.options.text_encoder, self._prompted)[None]
            network.model[-1].nc = len(phrases)
            network.names = dict(enumerate(phrases))
            self._model.predictor = None
        label_of = dict(enumerate(phrases.values()))
        return [read_boxes(found, label_of) for found in predict(self._model, samples)]


def text_features(encoder: str, phrases: Sequence[str]) -> Tensor:
    """CLIP's embeddings of phrases, (phrases, 512) float32, each of length 1."""
    import torch

    tokenizer, model = text_encoder(encoder)
    inputs = tokenizer(list(phrases), padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        features: Tensor = model(**inputs).text_embeds.float()
    unit: Tensor = features / features.norm(dim=-1, keepdim=True)
    return unit.clone()  # an ordinary tensor, which may be copied with the model


@cache
def text_encoder(name: str) -> tuple[Any, Any]:
    """CLIP's tokenizer and text model."""
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
