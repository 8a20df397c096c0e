"""Folders of images alone, without answers: what a teacher is to label."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.schema import Answer, Sample, Task
from valora_data.sources.base import Source, SourceFormat, Splits, take_missing_from_train
from valora_data.sources.formats.files import folder_splits, images_below
from valora_data.sources.formats.labelled import ImageReader, Reading

if TYPE_CHECKING:
    from collections.abc import Iterator


class ImagesFormat(SourceFormat):
    """A folder of images, of which nothing is known."""

    def supports(self, task: Task) -> bool:
        """All tasks whose samples are single images without a question."""
        return not task.spec.video and not task.spec.prompted

    def open(self, source: Source) -> Splits:
        """The splits that folders are named after, or all images as one piece."""
        whole = Path(source.location)
        folders = folder_splits(whole)
        places = take_missing_from_train(folders) if folders else {None: whole}
        return {
            split: partial(
                read_images,
                folder,
                source.reader,
                "" if len(folders) < 2 else f"{folder.name}/",
            )
            for split, folder in places.items()
        }


def read_images(
    folder: Path, reader: ImageReader | None = None, prefix: str = "unlabelled/"
) -> Iterator[Sample]:
    """Read images without answers.

    Args:
        folder: The folder; images in folders below it count, too.
        reader: Opens the images; by default a reader that tolerates few faults.
        prefix: What ids begin with, before the path below the folder.

    Yields:
        One sample per image that decodes, in the order of paths.

    Raises:
        DataError: If the folder does not exist or holds no images, or too many have faults.
    """
    files = images_below(folder)
    with Reading(reader, folder.name, len(files)) as reading:
        for path, picture in zip(files, reading.open_all(files), strict=True):
            if picture is not None:
                yield Sample(prefix + path.relative_to(folder).as_posix(), picture, Answer())
