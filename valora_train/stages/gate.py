"""The export gate: a reloaded bundle, in a process of its own, must answer as it did."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from PIL import Image
from transformers.utils import logging

from valora_data import shards
from valora_data.contract.bundle import FILE_BYTES, GOLDEN, Bundle, check_base, read_bundle
from valora_data.contract.files import read_safetensors
from valora_data.contract.results import computed_in
from valora_data.errors import ValoraError
from valora_data.schema import Answer, Domain, Sample, Split, Task, no_image
from valora_data.wording import plural
from valora_train.model.lmm import Lmm
from valora_train.settings import HeadSettings, LoraSettings, ModelSettings
from valora_train.tasks.base import DomainTask, HeadTask, Prediction, answer_together
from valora_train.tasks.registry import load_head, make_task

WEIGHTS = "adapter_model.safetensors"
ACCURACY_TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 1e-2  # 16 bits round by batches: 0.003 was seen


class BundleModel:
    """A bundle loaded on its base model, or on one of another name (`base`)."""

    def __init__(
        self, bundle: Bundle, base: str | None = None, device: str = "cpu", dtype: Any = None
    ) -> None:
        self._bundle = bundle
        # Features must not be cached if an adapter changes the vision side.
        weights = [bundle.folder / facts["path"] / WEIGHTS for facts in bundle.adapters.values()]
        names = [name for file in weights for name in read_safetensors(file, FILE_BYTES)[1]]
        decoder = re.compile(r"\.(language|text)_model\.")
        lora = LoraSettings(vision_tower=not all(map(decoder.search, names)))
        facts = bundle.manifest["base"]
        model = ModelSettings(
            id=base or facts["id"],
            device=device,
            keep_features=device == "cpu",
            batch_size=bundle.manifest["lineage"]["config"]["model"]["batch_size"],
            dtype=dtype or facts["dtype"],
            quantize=facts.get("quantize"),
            coordinates=facts.get("coordinates", "grid1000"),
        )
        self._lmm = Lmm(model, lora)
        self.device = self._lmm.device.type
        for name, adapter in bundle.adapters.items():
            late = adapter.get("decode_only", False)
            self._lmm.adapters.load(name, bundle.folder / adapter["path"], decode_only=late)
        self.tasks: dict[str, DomainTask] = {}
        self._heads: dict[str, Any] = {}
        for name, facts in bundle.domains.items():
            written = {"max_tokens": facts["max_tokens"]} if "max_tokens" in facts else {}
            settings = HeadSettings(**bundle.manifest["nms"], **written)
            domain = Domain(
                name, Task(facts["task"]), tuple(facts["labels"]), facts["prompt"],
                facts["required"],
            )  # fmt: skip
            video = facts.get("media") == "video"
            self.tasks[name] = make_task(domain, settings, self._lmm, video=video)
            memory = bundle.contexts[name].file if name in bundle.contexts else None
            part = facts["head"] or memory
            file = bundle.folder / part if part else None
            self._heads[name] = load_head(self.tasks[name], file, self._lmm)

    def answer(self, domain: str, samples: Sequence[Sample]) -> list[Prediction]:
        """The bundle's answers for samples; their true answers are not used."""
        self._lmm.adapters.activate(self._bundle.domains[domain]["adapter"])
        return self.tasks[domain].answer(self._heads[domain], self._lmm, samples)

    def together(self, domains: Sequence[str], samples: Sequence[Sample]) -> None:
        """Have domains with heads answer the same samples, in as few passes as they need."""
        adapters = [self._bundle.domains[name]["adapter"] for name in domains]
        for adapter in dict.fromkeys(adapters):
            self._lmm.adapters.activate(adapter)
            mine = [name for name, one in zip(domains, adapters, strict=True) if one == adapter]
            heads = [(self.tasks[name], self._heads[name]) for name in mine]
            answer_together(cast("list[tuple[HeadTask, Any]]", heads), self._lmm, samples)

    def accuracy(self, domain: str, samples: Sequence[Sample]) -> float:
        """Accuracy of the bundle on samples with true answers."""
        predictions = self.answer(domain, samples)
        return self.tasks[domain].evaluate(self._heads[domain], predictions, samples).accuracy


def check_golden(model: BundleModel, bundle: Bundle) -> int:
    """Replay the golden examples; gives their number."""
    examples = json.loads((bundle.folder / GOLDEN).read_text(encoding="utf-8"))
    for example in examples:
        images = []
        for file in [*([example["image"]] if "image" in example else []), *example.get("rest", [])]:
            with Image.open(bundle.folder / file) as image:
                images.append(image.convert("RGB"))
        first, *rest = images or [no_image()]
        named = str(example.get("image", example.get("prompt", "")))
        sample = Sample(named, first, Answer(), example.get("prompt"), tuple(rest))
        domain = example["domain"]
        threshold = bundle.domains[domain].get("threshold")
        found = model.tasks[domain].golden(model.answer(domain, [sample])[0], threshold)
        with computed_in(bundle.manifest["base"]["dtype"]):
            same = model.tasks[domain].matches(found, example["expected"], threshold)
        if not same:
            raise ValoraError(
                f"golden example {named} of {domain} came out differently: expected "
                f"{example['expected']}, got {found}; export the bundle again"
            )
    return len(examples)


def check_accuracy(model: BundleModel, bundle: Bundle, data: Mapping[str, Path]) -> None:
    """Measure the accuracy on the test split of outputs of stage `data`, by domain."""
    exact = bundle.manifest["base"]["dtype"] == "float32"
    for name, folder in data.items():
        reached = model.accuracy(name, shards.read(folder / Split.TEST))
        on_test = bundle.domains[name]["accuracy"]["test"]
        if abs(reached - on_test) > (ACCURACY_TOLERANCE if exact else ROUNDED_TOLERANCE):
            raise ValoraError(
                f"{name} reaches {reached:.4f} on test after reloading, but {on_test:.4f} was "
                "measured in training: the bundle is not what was trained, fuse again"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the bundle that the command line names; gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--base", help="base model to use instead of the one that the bundle names")
    parser.add_argument("--device", default="cpu", help="device in torch's terms, e.g. cuda")
    parser.add_argument(
        "--data", nargs=2, action="append", default=[], metavar=("DOMAIN", "FOLDER"),
        help="data stage of a domain, whose test split is measured again",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    logging.disable_progress_bar()  # of loading
    try:
        bundle = read_bundle(chosen.bundle)
        facts = bundle.manifest["base"]
        check_base(bundle, chosen.base or facts["id"], quantize=facts.get("quantize"))
        model = BundleModel(bundle, chosen.base, chosen.device)
        examples = check_golden(model, bundle)
        check_accuracy(model, bundle, {name: Path(folder) for name, folder in chosen.data})
    except ValoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    counted = plural(len(chosen.data), "domain")
    measured = f" and the test accuracy of {counted}" if chosen.data else ""
    print(f"{chosen.bundle}: {plural(examples, 'golden example')}{measured} reproduced")
    return 0


if __name__ == "__main__":
    sys.exit(main())
