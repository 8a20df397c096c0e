"""The export gate: a bundle, loaded afresh, must do what its manifest says.

Run in a process of its own (``python -m valora_train.gate BUNDLE``), with nothing but the base
model, plain PEFT and the files of the bundle.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from valora_data import shards
from valora_data.bundle import Bundle, check_base, read_bundle
from valora_data.errors import ValoraError
from valora_data.schema import Box, Split
from valora_train.errors import GateError
from valora_train.evaluate import match
from valora_train.heads import DetectionHead
from valora_train.lmm import Lmm
from valora_train.settings import HeadSettings, LoraSettings, ModelSettings
from valora_train.trainer import MIN_SCORE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GOLDEN = "golden/golden.json"
PIXELS = 0.5  # by how far an edge of a golden box may differ
CONFIDENCE = 0.01
ACCURACY = 1e-3


class BundleModel:
    """A bundle at work on its base model.

    Args:
        bundle: The bundle.
        base: Id of the base model; the bundle's own by default.
    """

    def __init__(self, bundle: Bundle, base: str | None = None) -> None:
        self._bundle = bundle
        # Features must not be cached if an adapter changes the vision side.
        configs = [
            json.loads((bundle.folder / facts["path"] / "adapter_config.json").read_text())
            for facts in bundle.adapters.values()
        ]
        vision = any("vision_tower" in config["target_modules"] for config in configs)
        projector = any("projector" in config["target_modules"] for config in configs)
        lora = LoraSettings(vision_tower=vision, projector=projector)
        base = base or bundle.manifest["base"]["id"]
        self._lmm = Lmm(ModelSettings(id=base, dtype=bundle.manifest["base"]["dtype"]), lora)
        for name, facts in bundle.adapters.items():
            self._lmm.load_adapter(name, bundle.folder / facts["path"])
        self._heads = {
            name: DetectionHead.load(bundle.folder / facts["head"])
            for name, facts in bundle.domains.items()
        }

    def detect(self, domain: str, images: Sequence[Image.Image]) -> list[list[Box]]:
        """Boxes of every image, in its pixels, unsure ones included."""
        import torch

        facts = self._bundle.domains[domain]
        settings = replace(HeadSettings(), **self._bundle.manifest["nms"])
        head = self._heads[domain]
        self._lmm.activate(facts["adapter"])
        found = []
        with torch.no_grad():
            for start in range(0, len(images), 64):
                batch = images[start : start + 64]
                hidden = self._lmm.hidden([facts["prompt"]] * len(batch), self._lmm.inputs(batch))
                found += [
                    head.predict(raw, image.size, settings, MIN_SCORE)
                    for raw, image in zip(head(hidden), batch, strict=True)
                ]
        return found


def golden_rows(boxes: Sequence[Box], threshold: float) -> list[dict[str, Any]]:
    """What ``golden.json`` says of an image: the boxes from the head's threshold on."""
    return [
        {"label": box.label, "box": list(box.xyxy), "confidence": box.confidence}
        for box in boxes
        if box.confidence >= threshold
    ]


def check_golden(model: BundleModel, bundle: Bundle) -> int:
    """Replay the golden examples.

    Returns:
        How many there were.

    Raises:
        GateError: If one comes out differently.
    """
    examples = json.loads((bundle.folder / GOLDEN).read_text(encoding="utf-8"))
    for example in examples:
        domain = example["domain"]
        with Image.open(bundle.folder / example["image"]) as image:
            found = model.detect(domain, [image.convert("RGB")])[0]
        rows = golden_rows(found, bundle.domains[domain]["threshold"])
        if not _same(rows, example["expected"]):
            raise GateError(
                f"golden example {example['image']} of {domain} came out differently: expected "
                f"{example['expected']}, got {rows}; export the bundle again"
            )
    return len(examples)


def _same(rows: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> bool:
    return len(rows) == len(expected) and all(
        row["label"] == other["label"]
        and abs(row["confidence"] - other["confidence"]) <= CONFIDENCE
        and all(abs(a - b) <= PIXELS for a, b in zip(row["box"], other["box"], strict=True))
        for row, other in zip(rows, expected, strict=True)
    )


def check_accuracy(model: BundleModel, bundle: Bundle, data: Mapping[str, Path]) -> None:
    """Measure every domain on its test split again.

    Raises:
        GateError: If one differs from what the bundle promises.
    """
    for name, folder in data.items():
        facts = bundle.domains[name]
        samples = shards.read(folder / Split.TEST)
        found = model.detect(name, [sample.image for sample in samples])
        truth = [sample.answer.boxes for sample in samples]
        reached = match(found, truth, facts["labels"]).f1(facts["threshold"])
        promised = facts["accuracy"]["test"]
        if abs(reached - promised) > ACCURACY:
            raise GateError(
                f"{name} reaches {reached:.4f} on test after reloading, but {promised:.4f} was "
                "measured in training: the bundle is not what was trained, fuse again"
            )


def main() -> int:
    """Command line of the gate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--base", help="base model, if not the one that the bundle names")
    parser.add_argument(
        "--data", nargs=2, action="append", default=[], metavar=("DOMAIN", "FOLDER"),
        help="a domain's data, to measure its test split again",
    )  # fmt: skip
    arguments = parser.parse_args()
    try:
        bundle = read_bundle(arguments.bundle)
        check_base(bundle, arguments.base or bundle.manifest["base"]["id"])
        model = BundleModel(bundle, arguments.base)
        examples = check_golden(model, bundle)
        check_accuracy(model, bundle, {name: Path(folder) for name, folder in arguments.data})
    except ValoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    measured = f" and the test accuracy of {len(arguments.data)} domains" if arguments.data else ""
    print(f"{arguments.bundle}: {examples} golden examples{measured} reproduced")
    return 0


if __name__ == "__main__":
    sys.exit(main())
