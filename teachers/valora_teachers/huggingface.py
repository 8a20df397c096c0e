"""Models of transformers: classifiers, detectors, vision-language models; safetensors only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from valora_data.contract.files import expanded
from valora_data.hashing import hub_name
from valora_data.schema import Answer, Sample, question_of
from valora_data.sources.formats.videos import frame_places
from valora_data.wording import first_line
from valora_teachers import base
from valora_teachers.base import BATCH, Count, Dtype, Teacher, TeacherError, TeacherOptions

if TYPE_CHECKING:
    from torch import Tensor

# What a model may be for, in the names of transformers' `AutoModelFor…`; the first have classes of
# their own and read no text.
IMAGES_ALONE = ("ImageClassification", "VideoClassification", "ObjectDetection")
AUTO = (*IMAGES_ALONE, "ZeroShotObjectDetection", "VisualQuestionAnswering", "ImageTextToText")


class HuggingFaceOptions(TeacherOptions):
    """Options of a model of transformers."""

    threshold: base.NotNegative = 0.05  # confidence from which a box counts
    max_new_tokens: Count = 40  # longest answer of a vision-language model, in tokens
    batch: Count = BATCH  # samples per batch
    device: str = "cpu"  # in torch's terms, such as ``cuda``
    dtype: Dtype = "float32"  # of the weights


class HuggingFace(Teacher):
    """What kind of model it is stands in its configuration.

    Probabilities of classes that mean one label add up, and are scaled to 1. Zero-shot detectors
    are asked one phrase at a time; vision-language models decode greedily, and score labels.
    """

    options_type = HuggingFaceOptions
    without_effect: ClassVar[frozenset[str]] = frozenset({"batch", "device"})

    def load(self, weights: Path | str) -> None:
        import transformers

        self.batch = self.options.batch
        self._source = str(weights)
        name, revision = hub_name(self._source)
        place = str(expanded(weights)) if expanded(weights).exists() else name
        at = {"revision": revision or "main"}
        try:
            self._auto = self._choose(transformers.AutoConfig.from_pretrained(place, **at))
            loader = getattr(transformers, f"AutoModelFor{self._auto}")
            dtype = self.options.dtype
            model = loader.from_pretrained(place, dtype=dtype, use_safetensors=True, **at)
            kind = "AutoImageProcessor" if self._auto in IMAGES_ALONE else "AutoProcessor"
            self._processor = getattr(transformers, kind).from_pretrained(place, **at)
        except (OSError, ValueError, RuntimeError) as error:
            raise TeacherError(
                f"teacher {self._source} cannot be loaded ({first_line(error)}): give a folder "
                "with a saved transformers model, or a name on the hub"
            ) from error
        self._model = model.requires_grad_(False).eval().to(self.options.device)
        if self._auto in IMAGES_ALONE:
            if model.config.problem_type == "multi_label_classification":
                raise TeacherError(
                    f"{self._source} gives several labels at once: choose a model that gives one"
                )
            classes = {int(index): str(name) for index, name in model.config.id2label.items()}
            self.match_classes(self._source, classes)
        elif self._auto == "ZeroShotObjectDetection":
            if self.task.spec.detects:
                self._phrases = self.find_phrases(self._source)
        else:
            self._prepare_language()

    def _choose(self, config: Any) -> str:
        """What the model is for, of `AUTO`."""
        import transformers

        found = []
        for auto in AUTO:
            loader = getattr(transformers, f"AutoModelFor{auto}")
            classes = loader._model_mapping.get(type(config), ())
            classes = classes if isinstance(classes, tuple) else (classes,)
            if {one.__name__ for one in classes} & set(config.architectures or ()):
                found.append(auto)
        spec, wanted = self.task.spec, list[str]()
        if spec.choice:
            wanted.append("VideoClassification" if spec.video else "ImageClassification")
        if spec.detects:
            wanted.append("ObjectDetection")
        if spec.answer == "boxes":
            wanted.append("ZeroShotObjectDetection")
        elif not spec.video:
            wanted += ["ImageTextToText", "VisualQuestionAnswering"]
        for auto in wanted:
            if auto in found:
                return auto
        raise TeacherError(
            f"{self._source} is a model for {', '.join(found) or 'nothing that a teacher does'}, "
            f"which gives no answers for task {self.task}: choose another model"
        )

    def _prepare_language(self) -> None:
        self._talks = bool(getattr(self._processor, "chat_template", None))
        tokenizer = self._processor.tokenizer
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if self.labels and not self._talks:
            raise TeacherError(
                f"{self._source} has no chat template, so that labels cannot be scored: choose "
                "another model, or leave the labels empty"
            )

    def answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        import torch

        try:
            with torch.inference_mode():
                match self._auto:
                    case "ImageClassification" | "VideoClassification":
                        return self._classify(samples)
                    case "ObjectDetection":
                        return self._detect(samples)
                    case "ZeroShotObjectDetection":
                        return self._look_for(samples)
                return self._score(samples) if self.labels else self._write(samples)
        except ValueError as error:  # of an image processor
            one = min(samples, key=lambda it: min(it.image.size) / max(it.image.size))
            size = "{} × {}".format(*one.image.size)
            raise TeacherError(
                f"{self._source} cannot take images such as {one.id} of {size} pixels "
                f"({first_line(error)}): cut or pad them, or leave them out"
            ) from error

    def _put(self, inputs: Any) -> dict[str, Tensor]:
        model = self._model
        return {
            key: value.to(model.device, model.dtype if value.is_floating_point() else None)
            for key, value in inputs.items()
            if hasattr(value, "is_floating_point")
        }

    def _classify(self, samples: Sequence[Sample]) -> list[Answer]:
        images: list[Any] = [sample.image.convert("RGB") for sample in samples]
        if self.task.spec.video:
            frames = int(getattr(self._model.config, "num_frames", 8))
            images = [
                [_images(sample)[i] for i in frame_places(len(sample.images), frames)]
                for sample in samples
            ]
        inputs = self._put(self._processor(images, return_tensors="pt"))
        logits = self._model(**inputs).logits
        return [self.choose(row) for row in logits.float().softmax(-1).tolist()]

    def _detect(self, samples: Sequence[Sample]) -> list[Answer]:
        images = [_images(sample)[0] for sample in samples]
        outputs = self._model(**self._put(self._processor(images, return_tensors="pt")))
        found = self._processor.post_process_object_detection(
            outputs, threshold=self.options.threshold, target_sizes=_sizes(samples)
        )
        return [
            _boxes(sample, result, [self.label_of.get(i) for i in result["labels"].tolist()])
            for sample, result in zip(samples, found, strict=True)
        ]

    def _look_for(self, samples: Sequence[Sample]) -> list[Answer]:
        if not self.task.spec.detects:
            phrases = [base.phrase_of(sample) for sample in samples]
            return [Answer(found.boxes[:1]) for found in self._find(samples, phrases, phrases)]
        parts = [
            self._find(samples, [phrase] * len(samples), [label] * len(samples))
            for phrase, label in self._phrases.items()
        ]
        found = [[box for one in row for box in one.boxes] for row in zip(*parts, strict=True)]
        return [Answer(tuple(sorted(boxes, key=lambda box: -box.confidence))) for boxes in found]

    def _find(
        self, samples: Sequence[Sample], phrases: Sequence[str], labels: Sequence[str]
    ) -> list[Answer]:
        images = [sample.image.convert("RGB") for sample in samples]
        queries: Any = [[phrase] for phrase in phrases]
        dino = self._model.config.model_type.endswith("grounding-dino")
        if dino:  # it was trained on lower-case phrases that end with a full stop
            queries = [phrase.lower().rstrip(".") + "." for phrase in phrases]
        inputs = self._put(
            self._processor(text=queries, images=images, padding=True, return_tensors="pt")
        )
        found = self._processor.post_process_grounded_object_detection(
            self._model(**inputs),
            threshold=self.options.threshold,
            target_sizes=_sizes(samples),
            **({"input_ids": inputs["input_ids"]} if dino else {}),
        )
        return [
            _boxes(sample, result, [label] * len(result["scores"]))
            for sample, result, label in zip(samples, found, labels, strict=True)
        ]

    def _text(self, sample: Sample) -> str:
        """The prompt for a sample, in the model's chat template if it has one."""
        question = question_of(self.prompt, sample)
        if not self._talks:
            return question
        content: list[dict[str, str]] = [{"type": "image"} for _ in sample.images]
        content += [{"type": "text", "text": question}] if question else []
        turns = [{"role": "user", "content": content}]
        return str(self._processor.apply_chat_template(turns, add_generation_prompt=True))

    def _encode(self, samples: Sequence[Sample], texts: Sequence[str]) -> dict[str, Tensor]:
        images: list[Any] = [_images(s) if self._talks else _images(s)[0] for s in samples]
        if not any(texts):  # a captioner that is told nothing
            return self._put(self._processor(images=images, return_tensors="pt"))
        begin = self._processor.tokenizer.bos_token
        begun = self._talks and bool(begin) and all(text.startswith(begin) for text in texts)
        # A template that has written the token which begins a text must not get a second one.
        more: dict[str, Any] = {"add_special_tokens": False} if begun else {}
        return self._put(
            self._processor(
                text=list(texts), images=images, padding=True, return_tensors="pt", **more
            )
        )

    def _write(self, samples: Sequence[Sample]) -> list[Answer]:
        inputs = self._encode(samples, [self._text(sample) for sample in samples])
        ids = self._model.generate(
            **inputs, do_sample=False, num_beams=1, max_new_tokens=self.options.max_new_tokens
        )
        asked = inputs.get("input_ids")
        if asked is not None and ids[:, : asked.shape[1]].equal(asked):
            ids = ids[:, asked.shape[1] :]
        texts = self._processor.batch_decode(ids, skip_special_tokens=True)
        written = [(text.strip(),) if text.strip() else () for text in texts]
        captions = self.task.spec.answer == "captions"
        return [Answer(captions=one) if captions else Answer(answers=one) for one in written]

    def _score(self, samples: Sequence[Sample]) -> list[Answer]:
        import torch

        answers = []
        for sample in samples:
            text = self._text(sample)
            asked = self._encode([sample], [text])["input_ids"][0]
            rows = []
            for label in self.labels:
                inputs = self._encode([sample], [text + label])
                ids = inputs["input_ids"]
                # The last token of the question may merge with the first letters of a label.
                length = min(len(asked), ids.shape[1])
                start = int((asked[:length] == ids[0, :length]).cumprod(0).sum())
                logits = self._model(**inputs).logits[0, start - 1 : -1].float()
                rows.append(logits.log_softmax(-1).gather(1, ids[0, start:, None]).sum())
            answers.append(self.choice_answer(torch.stack(rows).softmax(-1).tolist()))
        return answers


def _images(sample: Sample) -> list[Any]:
    return [image.convert("RGB") for image in sample.images]


def _sizes(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    return [sample.image.size[::-1] for sample in samples]


def _boxes(sample: Sample, result: Mapping[str, Any], labels: Sequence[str | None]) -> Answer:
    edges, scores = result["boxes"].float().tolist(), result["scores"].float().tolist()
    return base.boxes_inside(edges, labels, scores, sample.image.size)
