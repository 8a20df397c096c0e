"""Samples of one domain and split on disk: a Hugging Face data set that any tool can open."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from valora_data.errors import DataError
from valora_data.hashing import hash_path
from valora_data.images import decode_image, encoded_file
from valora_data.schema import Answer, Box, Document, Sample, no_image
from valora_data.wording import plural

IMAGES_OF = "images_of.json"  # names a shard beside this one, whose images it answers differently
DOCUMENT = "document.json"  # that all samples ask about; its images are `document-0.png`, …
BUFFERED = 64  # samples that are held in memory while writing


def _features(labels: Sequence[str]) -> Any:
    from datasets import ClassLabel, Features, Image, List, Value

    name = ClassLabel(names=list(labels)) if labels else Value("string")
    text, number = Value("string"), Value("float32")
    boxes = {"bbox": List(List(number, length=4)), "category": List(name), "score": List(number)}
    return Features(
        {
            "id": text, "images": List(Image()), "prompt": text, "label": name,
            "soft": List(number), "answers": List(text), "captions": List(text),
            "count": Value("int32"), "objects": boxes,
        }
    )  # fmt: skip


class ShardWriter:
    """Writes samples one by one; the folder appears when the `with` block ends without an error.

    `labels` are in the order of the class indices, empty where answers are language; `images_of`
    names the shard beside this one that has the images, which are not written again.
    """

    def __init__(self, labels: Sequence[str], folder: Path, images_of: str | None = None) -> None:
        from datasets.arrow_writer import ArrowWriter

        self._labels, self._folder, self._images_of = tuple(labels), folder, images_of
        self._document: Document | None = None
        self._table = folder.with_name(f"{folder.name}.arrow.partial")
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._writer: Any = ArrowWriter(
            features=_features(labels), path=str(self._table), writer_batch_size=BUFFERED
        )
        self.count = 0

    def add(self, sample: Sample) -> None:
        """Write a sample; a `DataError` says that its labels or its document do not fit."""
        answer, labels = sample.answer, self._labels
        for label in (*(box.label for box in answer.boxes), answer.label):
            if labels and label is not None and label not in labels:
                text = f"sample {sample.id}: label {label!r} is not one of {', '.join(labels)}"
                raise DataError(f"{text}: add it to the domain's labels or leave the sample out")
        if answer.soft and len(answer.soft) != len(labels):
            text = f"sample {sample.id} has {plural(len(answer.soft), 'soft label')}, expected"
            raise DataError(f"{text} {len(labels)}: give a probability for each label")
        row = {
            "id": sample.id, "prompt": sample.prompt, "label": answer.label, "count": answer.count,
            "soft": list(answer.soft), "answers": list(answer.answers),
            "captions": list(answer.captions),
            "images": [
                {"bytes": file.content, "path": None} if (file := encoded_file(image)) else image
                for image in sample.images
            ],
            "objects": {
                "bbox": [[b.x0, b.y0, b.x1 - b.x0, b.y1 - b.y0] for b in answer.boxes],
                "category": [b.label for b in answer.boxes],
                "score": [b.confidence for b in answer.boxes],
            },
        }  # fmt: skip
        self.add_row(row, sample.document)

    def add_row(self, row: dict[str, Any], document: Document | None = None) -> None:
        """Write a row of `Shard.row`, whose labels are known, and which asks about a document."""
        if self.count and document is not self._document and document != self._document:
            text = f"samples of {self._folder.name} ask about several documents"
            raise DataError(f"{text}: make each a domain")
        self._document = document
        self._writer.write(row if self._images_of is None else row | {"images": []})
        self.count += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._publish()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            self._writer.close()
            self._table.unlink(missing_ok=True)

    def _publish(self) -> None:
        from datasets import Dataset

        if not self.count:
            raise DataError(f"no samples to write to {self._folder.name}: the source is empty")
        self._writer.finalize()
        table = Dataset.from_file(str(self._table)).data
        # The library would store a fingerprint of the file's time: equal samples give equal files.
        Dataset(table, fingerprint=hash_path(self._table)[:16]).save_to_disk(self._folder)
        if (document := self._document) is not None:
            for index, image in enumerate(document.images):
                image.save(self._folder / f"document-{index}.png")
            facts = {"text": document.text, "measured_by": document.measured_by}
            self._note(DOCUMENT, **facts, images=len(document.images))
        if self._images_of is not None:
            self._note(IMAGES_OF, folder=self._images_of)

    def _note(self, name: str, **facts: object) -> None:
        text = json.dumps(facts, ensure_ascii=False)
        (self._folder / name).write_text(text, encoding="utf-8")


def write(samples: Iterable[Sample], labels: Sequence[str], folder: Path) -> int:
    """Write samples (see `ShardWriter`), and return their number; none is a `DataError`."""
    with ShardWriter(labels, folder) as shard:
        for sample in samples:
            shard.add(sample)
    return shard.count


class Shard:
    """A data set on disk, decoded sample by sample; `images` are rows of another shard's images."""

    def __init__(self, dataset: Any, images: Any = None, document: Document | None = None) -> None:
        self.document = document
        self._dataset = dataset.with_format("arrow")  # which leaves images as they are stored
        self._images = None if images is None else images.with_format("arrow")
        self.labels: tuple[str, ...] = tuple(getattr(dataset.features["label"], "names", ()))

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Sample:
        row = self.row(index)
        first, *rest = [decode_image(image["bytes"]) for image in row["images"]] or [no_image()]
        return Sample(
            row["id"], first, self._answer(row), row["prompt"], tuple(rest), self.document
        )

    def row(self, index: int) -> dict[str, Any]:
        """A row with its encoded images, for `ShardWriter.add_row`."""
        row: dict[str, Any] = self._dataset[index].to_pylist()[0]
        if self._images is not None:
            row["images"] = self._images[index].to_pylist()[0]["images"]
        return row

    def _answer(self, row: dict[str, Any]) -> Answer:
        objects, label = row["objects"], row["label"]
        boxes = tuple(
            Box(x, y, x + w, y + h, self._name(category), score)
            for (x, y, w, h), category, score in zip(
                objects["bbox"], objects["category"], objects["score"], strict=True
            )
        )
        return Answer(
            boxes, None if label is None else self._name(label), tuple(row["soft"]),
            tuple(row["answers"]), tuple(row["captions"]), row["count"],
        )  # fmt: skip

    def _name(self, label: int | str) -> str:
        return label if isinstance(label, str) else self.labels[label]

    def answers(self) -> list[Answer]:
        """The answers alone, in order; no image is decoded."""
        return [self._answer(row) for row in self._dataset.remove_columns("images")[:].to_pylist()]


def is_shard(folder: Path) -> bool:
    """Whether a folder looks like a shard."""
    try:
        facts = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
        return set(_features(())) <= set(facts["features"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_shard(folder: Path) -> Shard:
    """Open a shard, whose samples are decoded when they are accessed; or raise a `DataError`."""
    from datasets import load_from_disk
    from PIL import Image

    images = document = None
    try:
        dataset = load_from_disk(str(folder))
        if (folder / IMAGES_OF).is_file():
            facts = json.loads((folder / IMAGES_OF).read_text(encoding="utf-8"))
            images = load_from_disk(str(folder.parent / facts["folder"]))
        if (folder / DOCUMENT).is_file():
            facts = json.loads((folder / DOCUMENT).read_text(encoding="utf-8"))
            files = [folder / f"document-{index}.png" for index in range(facts["images"])]
            album = tuple(Image.open(file).convert("RGB") for file in files)
            document = Document(facts["text"], album, facts.get("measured_by", ""))
        if missing := sorted(set(_features(())) - set(getattr(dataset, "features", ()))):
            raise ValueError(f"no column {', '.join(missing)}")  # noqa: TRY301
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder} is not a readable data set ({error}): make it again") from error
    return Shard(dataset, images, document)


def read(folder: Path) -> list[Sample]:
    """Read a whole shard into memory; errors are those of `open_shard`."""
    return list(open_shard(folder))
