"""Data-set formats by name: opening a source, and recognising the format of a path."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from valora_data.errors import DataError
from valora_data.registry import Registry
from valora_data.schema import Split
from valora_data.sources.base import Location, Source, SourceFormat, Splits, check_unpacked
from valora_data.sources.formats.files import images_below

_HERE = "valora_data.sources.formats"
FORMATS: Registry[type[SourceFormat]] = Registry(
    "valora.sources",
    "source kind",
    {  # in the order in which `detect_kind` asks: the first that recognises a path is taken
        "scenes": "valora_data.sources.scenes.builtin:ScenesFormat",
        "records": f"{_HERE}.documents:RecordsFormat",
        "linked_records": f"{_HERE}.documents:LinkedRecordsFormat",
        "album": f"{_HERE}.documents:AlbumFormat",
        "documents": f"{_HERE}.documents:DocumentsFormat",
        "quality": f"{_HERE}.documents:QualityFormat",
        "texts": f"{_HERE}.documents:TextsFormat",
        "shards": f"{_HERE}.rows:ShardsFormat",
        "hub": f"{_HERE}.rows:HubFormat",
        "cvat": f"{_HERE}.annotation_tools:CvatFormat",
        "kitti": f"{_HERE}.yolo:KittiFormat",
        "voc": f"{_HERE}.annotation_tools:VocFormat",
        "yolo": f"{_HERE}.yolo:YoloFormat",
        "labelstudio": f"{_HERE}.annotation_tools:LabelStudioFormat",
        "llava": f"{_HERE}.conversations:LlavaFormat",
        "coco": f"{_HERE}.coco:CocoFormat",
        "roboflow": f"{_HERE}.coco:CocoFormat",
        "videofolder": f"{_HERE}.rows:VideoFolderFormat",
        "imagefolder": f"{_HERE}.rows:ImageFolderFormat",
        "images": f"{_HERE}.rows:ImagesFormat",
    },
    DataError,
)


def open_source(source: Source) -> Splits:
    """The splits of a source as streams; a `DataError` if it is unknown, missing or unfit."""
    found = FORMATS[source.kind]()
    if not found.supports(source.task):
        kinds = sorted(kind for kind, other in FORMATS.items() if other().supports(source.task))
        text = f"a source of kind {source.kind} has no answers for task {source.task}: choose one"
        raise DataError(f"{text} of {', '.join(kinds)}")
    splits = found.open(source)
    if source.unlabelled is not None:
        if Split.UNLABELLED in splits:
            text = f"the source has an unlabelled split, and {source.unlabelled} would be another"
            raise DataError(f"{text}: leave source.unlabelled out")
        read = FORMATS["images"]().read  # type: ignore[attr-defined]
        part = (Path(source.unlabelled), "unlabelled/")
        splits[Split.UNLABELLED] = partial(read, source, part)
    return splits


def files_of(source: Source) -> Iterator[Path]:
    """Files whose content decides on the samples; some of them may be missing."""
    yield from FORMATS[source.kind]().reads(source)
    if source.unlabelled is not None:
        yield from images_below(Path(source.unlabelled))


def detect_kind(path: Path | str) -> str:
    """The kind of source of a path or a name on the hub; other packages' are asked first."""
    check_unpacked(Path(path))
    location = Location(str(path))
    for kind, found in FORMATS.items():
        if found().recognises(location):
            return kind
    if not location.path.exists():
        raise DataError(f"{path} does not exist: check the path")
    if location.path.is_dir():
        raise DataError(f"folder {path} holds no images, videos or tables: check the path")
    raise DataError(f"{location.path.name} is of no known kind: docs/reference/data.md lists all")
