"""Teachers out of transformers: classifiers, detectors, and vision-language models.

A model comes from a folder or, by name, from the hub; weights are read as safetensors, so that
loading runs no code of theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from valora_data.contract.files import expanded
from valora_data.schema import Answer, Box, Task
from valora_data.sources.formats.videos import frame_places
from valora_data.wording import first_line
from valora_teachers.base import BATCH, BatchTeacher, TeacherError, choice_answer, map_classes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_data.schema import Sample
    from valora_teachers.base import Teacher

MIN_CONFIDENCE = 0.05


def load_huggingface(
    source: str | Path,
    task: Task,
    labels: Sequence[str] | None = None,
    *,
    names: Mapping[str, str] | None = None,
    prompt: str = "",
    threshold: float = MIN_CONFIDENCE,
    max_new_tokens: int = 40,
    batch: int = BATCH,
    device: str = "cpu",
    dtype: str = "float32",
) -> Teacher:
    """Load a teacher for a task; what kind of model it is stands in its configuration.

    Args:
        source: A folder, or a name on the hub.
        task: The domain's task.
        labels: Labels of the domain; the model's classes if None, or empty for language.
        names: Label for a class name of the model, where the two differ. For a zero-shot detector:
            the phrase that it is asked for, to the label that it stands for.
        prompt: The domain's prompt, for vision-language models (see `valora_data.schema.Domain`).
        threshold: Confidence from which a box counts.
        max_new_tokens: Longest answer of a vision-language model, in tokens.
        batch: Samples per batch.
        device: Device in torch's terms, such as ``cpu`` or ``cuda``.
        dtype: Data type of the weights, such as ``float32``.

    Raises:
        TeacherError: If it cannot be loaded, or its kind of model does not do the task, or a label
            is none of its classes.
    """
    kinds = _kinds(source)
    loader = _Loader(source, device, getattr(torch, dtype))
    spec = task.spec
    if spec.choice and spec.video and "VideoClassification" in kinds:
        return VideoClassifier(loader, task, labels, names, batch)
    if spec.choice and not spec.video and "ImageClassification" in kinds:
        return ImageClassifier(loader, task, labels, names, batch)
    if spec.detects and "ObjectDetection" in kinds:
        return Detector(loader, task, labels, names, threshold, batch)
    if spec.answer == "boxes" and "ZeroShotObjectDetection" in kinds:
        return ZeroShotDetector(loader, task, labels or (), names, threshold, batch)
    speaks = kinds & {"ImageTextToText", "VisualQuestionAnswering"}
    if spec.answer != "boxes" and not spec.video and speaks:
        return Speaker(loader, task, labels or (), prompt, max_new_tokens, batch)
    raise TeacherError(
        f"{source} is a model for {', '.join(sorted(kinds)) or 'nothing that a teacher does'}, "
        f"which gives no answers for task {task}: choose another model"
    )


def _kinds(source: str | Path) -> set[str]:
    """What a model's configuration says that it is for, in the names of the auto classes."""
    import transformers
    from transformers.models.auto import modeling_auto

    try:
        config = transformers.AutoConfig.from_pretrained(_place(source))
    except (OSError, ValueError) as error:
        raise _unreadable(source, error) from error
    classes = set(config.architectures or ())
    tables = {
        "ImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "VideoClassification": modeling_auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
        "ObjectDetection": modeling_auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES,
        "ZeroShotObjectDetection": (
            modeling_auto.MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING_NAMES
        ),
        "VisualQuestionAnswering": modeling_auto.MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES,
        "ImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    found = set()
    for kind, table in tables.items():
        names = table.get(config.model_type, ())
        if classes & ({names} if isinstance(names, str) else set(names)):
            found.add(kind)
    return found


def _place(source: str | Path) -> str:
    path = expanded(source)
    return str(path) if path.exists() else str(source)


def _unreadable(source: str | Path, error: Exception) -> TeacherError:
    reason = first_line(error)
    return TeacherError(
        f"teacher {source} cannot be loaded ({reason}): give a folder with a saved transformers "
        "model, or a name on the hub"
    )


class _Loader:
    """Loads the parts of one model."""

    def __init__(self, source: str | Path, device: str, dtype: torch.dtype) -> None:
        self.source = str(source)
        self.device = device
        self.dtype = dtype

    def config(self) -> Any:
        import transformers

        return transformers.AutoConfig.from_pretrained(_place(self.source))

    def model(self, auto_class: str) -> Any:
        import transformers

        loader = getattr(transformers, auto_class)
        try:
            model = loader.from_pretrained(
                _place(self.source), dtype=self.dtype, use_safetensors=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise _unreadable(self.source, error) from error
        return model.requires_grad_(False).eval().to(self.device)

    def processor(self, auto_class: str) -> Any:
        import transformers

        try:
            return getattr(transformers, auto_class).from_pretrained(_place(self.source))
        except (OSError, ValueError) as error:
            raise _unreadable(self.source, error) from error

    def put(self, inputs: Any) -> dict[str, Tensor]:
        """Inputs on the device; what is floating in the model's dtype."""
        return {
            key: value.to(self.device, self.dtype if value.is_floating_point() else None)
            for key, value in inputs.items()
            if isinstance(value, Tensor)
        }


class ImageClassifier(BatchTeacher):
    """An image classifier, such as ViT or ResNet; its probabilities are kept as soft labels.

    Probabilities of several classes that mean one label add up; what other classes have is left
    out and the rest scaled to 1.
    """

    auto_class = "AutoModelForImageClassification"

    def __init__(
        self,
        loader: _Loader,
        task: Task,
        labels: Sequence[str] | None,
        names: Mapping[str, str] | None,
        batch: int,
    ) -> None:
        self._loader = loader
        self._model = loader.model(self.auto_class)
        self._processor = loader.processor("AutoImageProcessor")
        config = self._model.config
        if config.problem_type == "multi_label_classification":
            raise TeacherError(
                f"{loader.source} gives several labels at once: choose a model that gives one"
            )
        classes = {int(index): str(name) for index, name in config.id2label.items()}
        mapped = map_classes(loader.source, classes, labels, names)
        labels = tuple(dict.fromkeys(mapped.values())) if labels is None else tuple(labels)
        super().__init__(task, labels, batch)
        self._to_labels = torch.zeros(len(classes), len(labels))
        for index, label in mapped.items():
            self._to_labels[index, labels.index(label)] = 1.0

    def _inputs(self, samples: Sequence[Sample]) -> Any:
        images = [sample.image.convert("RGB") for sample in samples]
        return self._processor(images, return_tensors="pt")

    def _answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        with torch.inference_mode():
            logits = self._model(**self._loader.put(self._inputs(samples))).logits
        soft = logits.float().cpu().softmax(-1) @ self._to_labels
        return [choice_answer(self.task, self.labels, row) for row in soft.tolist()]


class VideoClassifier(ImageClassifier):
    """A video classifier, such as VideoMAE; it sees as many frames as it was made for.

    They are taken uniformly of a sample's frames; where there are fewer, frames repeat.
    """

    auto_class = "AutoModelForVideoClassification"

    def __init__(
        self,
        loader: _Loader,
        task: Task,
        labels: Sequence[str] | None,
        names: Mapping[str, str] | None,
        batch: int,
    ) -> None:
        super().__init__(loader, task, labels, names, batch)
        self._frames = int(getattr(self._model.config, "num_frames", 8))

    def _inputs(self, samples: Sequence[Sample]) -> Any:
        clips = [
            [
                sample.images[i].convert("RGB")
                for i in frame_places(len(sample.images), self._frames)
            ]
            for sample in samples
        ]
        return self._processor(clips, return_tensors="pt")


class Detector(BatchTeacher):
    """A detector with its own classes, such as DETR or RT-DETR."""

    def __init__(
        self,
        loader: _Loader,
        task: Task,
        labels: Sequence[str] | None,
        names: Mapping[str, str] | None,
        threshold: float,
        batch: int,
    ) -> None:
        self._loader = loader
        self._model = loader.model("AutoModelForObjectDetection")
        self._processor = loader.processor("AutoImageProcessor")
        classes = {int(i): str(name) for i, name in self._model.config.id2label.items()}
        self._label_of = map_classes(loader.source, classes, labels, names)
        self._threshold = threshold
        chosen = tuple(dict.fromkeys(self._label_of.values())) if labels is None else labels
        super().__init__(task, chosen, batch)

    def _answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        images = [sample.image.convert("RGB") for sample in samples]
        inputs = self._loader.put(self._processor(images, return_tensors="pt"))
        with torch.inference_mode():
            outputs = self._model(**inputs)
        found = self._processor.post_process_object_detection(
            outputs, threshold=self._threshold, target_sizes=_sizes(samples)
        )
        answers = []
        for sample, result in zip(samples, found, strict=True):
            labels = [self._label_of.get(index) for index in result["labels"].tolist()]
            answers.append(_boxes(sample, result, labels))
        return answers


class ZeroShotDetector(BatchTeacher):
    """An open-vocabulary detector, such as Grounding DINO or OWL-ViT, asked one phrase at a time.

    For detection it is asked for each label, with underscores read as spaces; for grounding for
    the sample's own phrase, of which the surest box counts.
    """

    def __init__(
        self,
        loader: _Loader,
        task: Task,
        labels: Sequence[str],
        names: Mapping[str, str] | None,
        threshold: float,
        batch: int,
    ) -> None:
        super().__init__(task, labels, batch)
        self._loader = loader
        self._model = loader.model("AutoModelForZeroShotObjectDetection")
        self._processor = loader.processor("AutoProcessor")
        self._threshold = threshold
        if task.spec.detects and not labels:
            raise TeacherError(
                f"{loader.source} has to be told what to look for: give the domain labels"
            )
        stray = [label for label in (names or {}).values() if label not in labels]
        if stray:
            raise TeacherError(
                f"{loader.source} is mapped to {stray[0]!r}, which is not one of "
                f"{', '.join(labels)}: correct teacher.options.names"
            )
        phrases = {label: label.replace("_", " ") for label in labels}
        phrases |= {label: phrase for phrase, label in (names or {}).items()}
        self._phrases = phrases

    def _answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        if not self.task.spec.detects:
            for sample in samples:
                if not sample.prompt:
                    raise TeacherError(f"sample {sample.id} has no phrase to look for: give it one")
            phrases = [sample.prompt or "" for sample in samples]
            found = self._find(samples, phrases, phrases)
            return [Answer(answer.boxes[:1]) for answer in found]
        parts = [
            self._find(samples, [phrase] * len(samples), [label] * len(samples))
            for label, phrase in self._phrases.items()
        ]
        merged = [
            [box for answer in row for box in answer.boxes] for row in zip(*parts, strict=True)
        ]
        return [Answer(tuple(sorted(boxes, key=lambda box: -box.confidence))) for boxes in merged]

    def _find(
        self, samples: Sequence[Sample], phrases: Sequence[str], labels: Sequence[str]
    ) -> list[Answer]:
        images = [sample.image.convert("RGB") for sample in samples]
        queries: Any = [[phrase] for phrase in phrases]
        if self._model.config.model_type.endswith("grounding-dino"):
            # It was trained on lower-case phrases that end with a full stop.
            queries = [phrase.lower().rstrip(".") + "." for phrase in phrases]
        inputs = self._processor(text=queries, images=images, padding=True, return_tensors="pt")
        moved = self._loader.put(inputs)
        with torch.inference_mode():
            outputs = self._model(**moved)
        more: dict[str, Any] = {}
        if self._model.config.model_type.endswith("grounding-dino"):
            more = {"input_ids": moved["input_ids"]}
        found = self._processor.post_process_grounded_object_detection(
            outputs, threshold=self._threshold, target_sizes=_sizes(samples), **more
        )
        return [
            _boxes(sample, result, [label] * len(result["scores"]))
            for sample, result, label in zip(samples, found, labels, strict=True)
        ]


class Speaker(BatchTeacher):
    """A vision-language model: it answers, describes, or chooses among labels by their likelihood.

    Where the domain has labels, each is scored as an answer; the softmax of the summed
    log-probabilities of their tokens is the soft label. Otherwise the answer is decoded greedily.
    """

    def __init__(
        self,
        loader: _Loader,
        task: Task,
        labels: Sequence[str],
        prompt: str,
        max_new_tokens: int,
        batch: int,
    ) -> None:
        super().__init__(task, labels, batch)
        self._loader = loader
        architecture = str((loader.config().architectures or [""])[0])
        self._asked_only = architecture.endswith("ForQuestionAnswering")
        auto = "VisualQuestionAnswering" if self._asked_only else "ImageTextToText"
        self._model = loader.model(f"AutoModelFor{auto}")
        self._processor = loader.processor("AutoProcessor")
        self._prompt = prompt
        self._max_new_tokens = max_new_tokens
        self._talks = bool(getattr(self._processor, "chat_template", None))
        tokenizer = self._processor.tokenizer
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if labels and (self._asked_only or not self._talks):
            raise TeacherError(
                f"{loader.source} has no chat template, so that labels cannot be scored: choose "
                "another model, or leave the labels empty"
            )

    def _question(self, sample: Sample) -> str:
        if sample.prompt is None:
            return self._prompt
        return self._prompt.replace("{}", sample.prompt) if "{}" in self._prompt else sample.prompt

    def _text(self, sample: Sample) -> str:
        question = self._question(sample)
        if not self._talks:
            return question
        content: list[dict[str, str]] = [{"type": "image"} for _ in sample.images]
        content += [{"type": "text", "text": question}] if question else []
        turns = [{"role": "user", "content": content}]
        text: str = self._processor.apply_chat_template(turns, add_generation_prompt=True)
        return text

    def _encode(self, samples: Sequence[Sample], texts: Sequence[str]) -> dict[str, Tensor]:
        images: list[Any] = [[i.convert("RGB") for i in sample.images] for sample in samples]
        if not self._talks:
            images = [pictures[0] for pictures in images]
        if not any(texts):  # a captioner that is told nothing
            return self._loader.put(self._processor(images=images, return_tensors="pt"))
        begin = self._processor.tokenizer.bos_token
        begun = self._talks and bool(begin) and all(text.startswith(begin) for text in texts)
        inputs = self._processor(
            text=list(texts),
            images=images,
            padding=True,
            return_tensors="pt",
            # A template that has written the token which begins a text must not get a second one.
            **({"add_special_tokens": False} if begun else {}),
        )
        return self._loader.put(inputs)

    def _answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        if self.labels:
            return [self._scored(sample) for sample in samples]
        inputs = self._encode(samples, [self._text(sample) for sample in samples])
        with torch.inference_mode():
            ids = self._model.generate(
                **inputs, do_sample=False, num_beams=1, max_new_tokens=self._max_new_tokens
            )
        asked = inputs.get("input_ids")
        if asked is not None and ids[:, : asked.shape[1]].equal(asked):
            ids = ids[:, asked.shape[1] :]
        texts = self._processor.batch_decode(ids, skip_special_tokens=True)
        if self.task.spec.answer == "captions":
            return [Answer(captions=(text.strip(),) if text.strip() else ()) for text in texts]
        return [Answer(answers=(text.strip(),) if text.strip() else ()) for text in texts]

    def _scored(self, sample: Sample) -> Answer:
        """Likelihood of each label as the answer."""
        text = self._text(sample)
        asked = self._encode([sample], [text])["input_ids"][0]
        rows = []
        for label in self.labels:
            inputs = self._encode([sample], [text + label])
            ids = inputs["input_ids"]
            # The last token of the question may merge with the first letters of a label.
            length = min(len(asked), ids.shape[1])
            start = int((asked[:length] == ids[0, :length]).cumprod(0).sum())
            with torch.inference_mode():
                logits = self._model(**inputs).logits[0, start - 1 : -1].float()
            chosen = logits.log_softmax(-1).gather(1, ids[0, start:, None])
            rows.append(chosen.sum())
        soft = torch.stack(rows).softmax(-1)
        return choice_answer(self.task, self.labels, soft.tolist())


def _sizes(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    return [(sample.image.height, sample.image.width) for sample in samples]


def _boxes(sample: Sample, result: Mapping[str, Any], labels: Sequence[str | None]) -> Answer:
    """Boxes inside the image, most confident first; those without a label are left out."""
    width, height = sample.image.size
    boxes = []
    for edges, score, label in zip(
        result["boxes"].float().tolist(), result["scores"].float().tolist(), labels, strict=True
    ):
        x0, y0 = max(0.0, edges[0]), max(0.0, edges[1])
        x1, y1 = min(float(width), edges[2]), min(float(height), edges[3])
        if label is not None and x1 > x0 and y1 > y0:
            boxes.append(Box(x0, y0, x1, y1, label, score))
    return Answer(tuple(sorted(boxes, key=lambda box: -box.confidence)))
