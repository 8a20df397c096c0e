"""Licences of base model, data and teachers: by settings, then files; never the network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, try_to_load_from_cache

from valora_data.contract.base_model import base_folder
from valora_data.contract.files import expanded
from valora_data.errors import ValoraError
from valora_data.hashing import hub_name
from valora_teachers.registry import KINDS
from valora_train.settings import LABELS, DomainSettings, Settings

UNKNOWN = "unknown"
DRAWN = "drawn here"
TRAINED = "trained here"
ANNOTATIONS = ("*.json", "*/_annotations.coco.json", "annotations/instances_*.json")


def find_licences(settings: Settings, names: list[str]) -> dict[str, Any]:
    """Licences of a bundle with these domains: `base`, and `data` and `teacher` by domain."""
    base = settings.base_license
    with suppress(ValoraError):
        base = base or _of_card(base_folder(settings.model.id))
    return {
        "base": base or UNKNOWN,
        "domains": {
            one.name: {"data": _of_data(one), "teacher": _of_teacher(one, settings)}
            for one in settings.chosen()
            if one.name in names
        },
    }


def licence_lines(licences: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of a table: what, the licence of its data, that of its teacher."""
    rows = [(name, one["data"], one["teacher"] or "–") for name, one in licences["domains"].items()]
    return [*rows, ("base model", licences["base"], "")]


def licence_tags(licences: Mapping[str, Any]) -> dict[str, str]:
    """Tags of a registered model."""
    domains = licences["domains"].items()
    every = [(f"{name}.{key}", text) for name, one in domains for key, text in one.items() if text]
    return {f"license.{name}": text for name, text in [("base", licences["base"]), *every]}


def _of_teacher(domain: DomainSettings, settings: Settings) -> str | None:
    """None where there is no teacher."""
    if domain.teacher == LABELS:
        return None
    kind = KINDS[(domain.taught_by or settings.teacher).kind]
    own = TRAINED if domain.teacher == "train" else _of_card(domain.teacher)
    return domain.teacher_license or kind.license or own or UNKNOWN


def _of_data(domain: DomainSettings) -> str:
    source = domain.source
    if domain.license or source.format.drawn:
        return domain.license or DRAWN
    found = set[str]()
    if source.path is not None:
        with suppress(Exception):  # files of any form: what cannot be read says nothing
            found = set(_of_files(source.path.partition(":")[0], source.path))
    return ", ".join(sorted(found)) or UNKNOWN


def _of_files(name: str, path: str) -> Iterator[str]:
    """What the files of a data set say: its YAML, a COCO file's `licenses`, its card."""
    place = expanded(path)
    files = [place] if place.is_file() else []
    if place.is_dir():
        files = [file for wanted in ("*.y*ml", *ANNOTATIONS) for file in sorted(place.glob(wanted))]
    for file in files:
        if file.suffix in (".yaml", ".yml"):
            facts = yaml.safe_load(file.read_text(encoding="utf-8"))
            if isinstance(facts, dict):
                theirs = facts.get("roboflow")
                text = facts.get("license") or (isinstance(theirs, dict) and theirs.get("license"))
                yield from [str(text)] if text else []
        elif file.suffix == ".json":
            facts = json.loads(file.read_bytes())
            if isinstance(facts, dict) and isinstance(facts.get("licenses"), list):
                yield from _of_coco(facts)
    folder = place.parent if files[:1] == [place] else place
    if card := _of_card(str(folder), "dataset") or _of_card(name, "dataset"):
        yield card
    elif folder.resolve() != Path.cwd():  # where the licence is that of another project
        yield from (f"see {file.name}" for file in sorted(folder.glob("LICEN[CS]E*")))


def _of_coco(facts: Mapping[str, Any]) -> Iterator[str]:
    """Names of the licences that images have; of all where no image names one."""
    images = [one for one in facts.get("images", []) if isinstance(one, dict)]
    used = {one["license"] for one in images if isinstance(one.get("license"), int | str)}
    for one in facts["licenses"]:
        known = isinstance(one, dict) and (not used or one.get("id") in used)
        if known and (text := one.get("name") or one.get("url")):
            yield str(text)


def _of_card(place: str, kind: str = "model") -> str | None:
    """The licence in the metadata of a README.md, in a folder or the cache of the hub."""
    file = expanded(place) / "README.md"
    with suppress(Exception):  # names and metadata of any form: no card then
        if not expanded(place).exists():
            name, revision = hub_name(place)
            kept = try_to_load_from_cache(name, "README.md", repo_type=kind, revision=revision)
            file = Path(str(kept))
        data = ModelCard(file.read_text(encoding="utf-8"), ignore_metadata_errors=True).data
        known = data.get("license_name") or data.get("license")
        return ", ".join(known if isinstance(known, list) else [str(known)]) if known else None
    return None
