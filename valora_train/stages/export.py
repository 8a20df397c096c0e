"""Stage `export`: writes a bundle, publishes it past the gate, keeps the previous version."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from accelerate.utils.memory import clear_device_cache

from valora_data import shards
from valora_data.contract.base_model import base_family, base_hash
from valora_data.contract.bundle import GOLDEN, MANIFEST, Bundle, read_bundle, write_manifest
from valora_data.cpu import cpu_multiplies_bfloat16
from valora_data.errors import BundleError, ValoraError
from valora_data.schema import Split
from valora_train.fusion.state import FUSION
from valora_train.metrics.speed import BATCH, measure_speed
from valora_train.reporting.cards import BARS, bundle_card, confusion_file
from valora_train.reporting.fusion_report import run_of
from valora_train.reporting.licences import find_licences, licence_tags
from valora_train.reporting.pictures import accuracy_bars, confusion_matrix
from valora_train.reporting.texts import rejected_lines
from valora_train.reporting.tracking import register_bundle
from valora_train.settings import Settings, as_dict
from valora_train.stage import intact, read_json, versions, write_json
from valora_train.stages.distill import answers_on_test, load_trained
from valora_train.stages.encoder_training import ENCODER
from valora_train.stages.fuse import DomainInputs, adapter_facts
from valora_train.stages.gate import ROUNDED_TOLERANCE, BundleModel
from valora_train.tasks.base import HeadTask

EXAMPLES_PER_DOMAIN = 2
FUSION_KEY = "fusion_stage"
SHORT = "bfloat16"  # the type that GPUs, and CPUs with instructions for it, serve in
ENCODER_NAME = "memory"  # of a bundle's encoder of memory tokens, which began them


def export_bundle(
    settings: Settings, domains: Sequence[DomainInputs], fused: Path
) -> tuple[Bundle, bool]:
    """Write, check, register and publish the bundle of a fusion; also whether it was up to date."""
    place = Path(settings.paths.bundles) / settings.task.name
    previous = _read_previous(place, settings.task.name)
    if previous is not None and previous.manifest["lineage"][FUSION_KEY] == fused.name:
        return previous, True
    result = read_json(intact(fused / FUSION))
    result["mlflow_run_id"] = run_of(settings, fused, result)
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    kept = [one.name.rpartition("@")[2] for one in place.parent.glob(f"{escape(place.name)}@*")]
    older = [int(version) for version in kept if version.isdecimal()]
    version = max([*older, previous.version if previous else 0]) + 1
    try:
        clear_device_cache(garbage_collection=True)  # another model is loaded next
        _write_bundle(partial, settings, domains, fused, result, version)
        clear_device_cache(garbage_collection=True)
        _run_gate(partial, domains, settings.model.device)
        bundle = read_bundle(partial)
        _register(bundle)
        if previous is None:
            partial.rename(place)
        else:
            beside = place.rename(place.with_name(f"{place.name}@{previous.version}"))
            try:
                partial.rename(place)
            except BaseException:
                beside.rename(place)
                raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Bundle(place, bundle.manifest), False


def _read_previous(place: Path, name: str) -> Bundle | None:
    """The bundle that the new one replaces, if there is one."""
    if not place.exists():
        return None
    try:
        bundle = read_bundle(place)
    except BundleError as error:
        raise BundleError(
            f"{place} exists and is not an intact bundle ({error}): move it away, or set "
            "paths.bundles"
        ) from error
    if bundle.name != name:
        raise BundleError(
            f"{place} holds a bundle named {bundle.name}: move it away, or set paths.bundles"
        )
    return bundle


def _write_bundle(
    folder: Path, settings: Settings, domains: Sequence[DomainInputs], fused: Path,
    result: dict[str, Any], version: int,
) -> None:  # fmt: skip
    folder.mkdir(parents=True)
    for part in ("adapters", "heads", "contexts", "pictures"):
        if (fused / part).is_dir():  # there may be no adapter, or no head
            shutil.copytree(intact(fused / part), folder / part)
    manifest = _manifest(settings, domains, fused, result, version)
    start = settings.heads.options.get("context", {}).get("start")
    if start is not None and (encoder := Path(start).parent / ENCODER).is_dir():
        shutil.copytree(intact(encoder), folder / "encoders" / ENCODER_NAME)
        facts = {"path": f"encoders/{ENCODER_NAME}", "tokens": settings.context.tokens}
        manifest["encoders"] = {ENCODER_NAME: facts}
    # Golden examples: answers of the bundle, loaded as a server loads it.
    (folder / GOLDEN).parent.mkdir()
    write_json(folder / GOLDEN, [])
    write_manifest(folder, manifest)
    written, device = read_bundle(folder), settings.model.device
    model, rounded = BundleModel(written, device=device), None
    exact = settings.model.dtype == "float32" and settings.model.quantize is None
    if exact and model.device in ("cpu", "cuda"):
        rounded = BundleModel(written, device=device, dtype=SHORT)
    reported = [item for item in domains if item.settings.name in manifest["domains"]]
    golden = [_golden_examples(folder, manifest, item, model, rounded) for item in reported]
    write_json(folder / GOLDEN, [example for examples in golden for example in examples])
    fast = model.device == "cuda" or cpu_multiplies_bfloat16()
    facts = manifest["domains"]
    if rounded is not None and fast and all(_keeps(facts, item, rounded) for item in reported):
        manifest["base"]["dtypes"] = [settings.model.dtype, SHORT]
        model = rounded  # what serves
    if (speed := _speed(settings, reported, model)) is not None:
        manifest["speed"] = speed
    accuracy_bars(manifest["domains"], manifest["adapters"]).savefig(folder / BARS)
    for name, facts in manifest["domains"].items():
        if matrix := facts["accuracy"].get("confusion"):
            confusion_matrix(name, matrix).savefig(folder / confusion_file(name))
    (folder / "README.md").write_text(bundle_card(manifest), encoding="utf-8")
    write_manifest(folder, manifest)


def _manifest(
    settings: Settings, domains: Sequence[DomainInputs], fused: Path, result: dict[str, Any],
    version: int,
) -> dict[str, Any]:  # fmt: skip
    contexts = {
        name: facts["context"] for name, facts in result["domains"].items() if "context" in facts
    }
    family = base_family(settings.model.id)
    return {
        "name": settings.task.name,
        "version": version,
        "strategy": result["strategy"],
        "base": {
            "id": settings.model.id,
            "sha256": base_hash(settings.model.id),
            "dtype": settings.model.dtype,
            "coordinates": settings.model.coordinates,
            **({"quantize": settings.model.quantize} if settings.model.quantize else {}),
            **({} if family.takes_images else {"class": family.auto}),
        },
        "preprocessing": {
            "image": "the base model's image processor, resized to its square without cropping",
            "prompt": "the base model's chat template: one user turn, the text before the image",
        },
        "boxes": "(x0, y0, x1, y1) in pixels of the image as it was sent",
        "nms": {"nms_iou": settings.heads.nms_iou, "most": settings.heads.most},
        "adapters": {
            name: {
                "path": f"adapters/{name}",
                **adapter_facts(fused / "adapters" / name),
                **({"decode_only": True} if settings.train.lora.decode_only else {}),
                "domains": list(held),
            }
            for name, held in result["packing"].items()
        },
        "domains": {
            name: {key: value for key, value in facts.items() if key != "context"}
            | {"speed": result.get("speed", {}).get(name)}
            for name, facts in result["domains"].items()
        },
        **({"contexts": contexts} if contexts else {}),
        "licenses": find_licences(settings, list(result["domains"])),
        "attempts": len(result["attempts"]),
        "rejected": rejected_lines(result["attempts"]),
        "lineage": {
            "mlflow_run_id": result["mlflow_run_id"],
            FUSION_KEY: fused.name,
            "parent": result["parent"],
            "config": as_dict(settings),
            "data": {
                item.settings.name: {"labelled": item.data.name, "taught": item.distilled.name}
                for item in domains
            },
            "versions": versions(),
        },
    }


def _speed(
    settings: Settings, domains: Sequence[DomainInputs], model: BundleModel
) -> dict[str, Any] | None:
    """How fast heads answer about the same images, and small models; None if it says nothing."""
    tests: dict[str, shards.Shard] = {}  # of domains that an image alone asks
    for item in domains:
        name, test = item.settings.name, shards.open_shard(intact(item.data / Split.TEST))
        lone = len(test[0].images) == 1 and test[0].prompt is None
        if lone and isinstance(model.tasks[name], HeadTask) and not model.tasks[name].video:
            tests[name] = test
    if len(tests) < 2:
        return None
    test = next(iter(tests.values()))
    samples = [test[number] for number in range(min(BATCH, len(test)))]
    ours = measure_speed(partial(model.together, list(tests)), samples, settings.model.device)
    shelf = [
        load_trained(item.settings, item.settings.taught_by or settings.teacher, item.teacher)
        for item in domains
        if item.settings.name in tests and item.teacher is not None
    ]
    teacher = None
    if len(shelf) == len(tests):
        teacher = measure_speed(lambda some: [one.answer(some) for one in shelf], samples)
    return {"domains": len(tests), **ours, "teacher": teacher}


def _golden_examples(
    folder: Path, manifest: Mapping[str, Any], item: DomainInputs, model: BundleModel,
    rounded: BundleModel | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Write some test images of a domain; gives the examples."""
    name, task = item.settings.name, model.tasks[item.settings.name]
    facts = manifest["domains"][name]
    threshold = facts.get("threshold")
    test = shards.open_shard(intact(item.data / Split.TEST))
    # For detection, images with at least one object are more telling.
    wanted = [n for n, answer in enumerate(test.answers()) if threshold is None or answer.boxes]
    if rounded is not None:
        wanted = _steady(name, test, wanted, threshold, model, rounded)
    samples = [test[number] for number in wanted[:EXAMPLES_PER_DOMAIN]]
    answered = answers_on_test(item.distilled)
    examples = []
    for number, (sample, prediction) in enumerate(
        zip(samples, model.answer(name, samples), strict=True)
    ):
        example: dict[str, Any] = {"domain": name}
        files = [
            f"golden/{name}-{number}{f'-{n}' * bool(n)}.png" for n in range(len(sample.images))
        ]
        for file, image in zip(files, sample.images, strict=True):
            image.save(folder / file)
        example |= {"image": files[0]} if files else {}
        example |= {"rest": files[1:]} if files[1:] else {}
        if task.video:
            example["media"] = "video"
        if sample.prompt is not None:
            example["prompt"] = sample.prompt
            example["question"] = task.domain.question(sample)
        if "max_tokens" in facts:
            example["max_tokens"] = facts["max_tokens"]
        example["expected"] = task.golden(prediction, threshold)
        if answered and (teacher := answered[wanted[number]]) is not None:
            example["teacher"] = teacher
        examples.append(example)
    return examples


def _steady(
    name: str, test: shards.Shard, wanted: Sequence[int], threshold: float | None,
    model: BundleModel, rounded: BundleModel,
) -> list[int]:  # fmt: skip
    """Samples first whose answer is the same in 16 bits, in which most servers compute."""
    tried, task = list(wanted[: 8 * EXAMPLES_PER_DOMAIN]), model.tasks[name]
    samples = [test[number] for number in tried]
    answers = zip(tried, model.answer(name, samples), rounded.answer(name, samples), strict=True)
    differ = {
        number: not task.matches(task.golden(b, threshold), task.golden(a, threshold), threshold)
        for number, a, b in answers
    }
    return sorted(tried, key=differ.__getitem__)


def _keeps(domains: Mapping[str, Any], item: DomainInputs, rounded: BundleModel) -> bool:
    """Whether a domain reaches in 16 bits what it must on test, and nearly what it did in 32."""
    name = item.settings.name
    exact, required = domains[name]["accuracy"]["test"], domains[name]["required"]
    reached = rounded.accuracy(name, shards.read(intact(item.data / Split.TEST)))
    return bool(reached >= max(exact - ROUNDED_TOLERANCE, min(exact, required)))


def _run_gate(folder: Path, domains: Sequence[DomainInputs], device: str) -> None:
    command = [sys.executable, "-m", "valora_train.stages.gate", str(folder), "--device", device]
    reported = read_json(folder / MANIFEST)["domains"]
    for item in domains:
        if item.settings.name in reported:
            command += ["--data", item.settings.name, str(item.data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        why = reason[0].removeprefix("error: ")
        raise ValoraError(f"the export gate rejected the bundle: {why}")


def _register(bundle: Bundle) -> None:
    manifest, name = bundle.manifest, "images_per_second"
    tags = {
        "bundle_version": str(bundle.version), "adapters": str(len(bundle.adapters)),
        "strategy": manifest["strategy"], FUSION_KEY: manifest["lineage"][FUSION_KEY],
        **{f"test.{k}": f"{v['accuracy']['test']:.4f}" for k, v in bundle.domains.items()},
        **licence_tags(manifest["licenses"]),
    }  # fmt: skip
    speed = manifest.get("speed") or {}
    rates = {"": speed, "teacher_": speed.get("teacher")}
    figures = {f"{kind}{name}_together": one[name] for kind, one in rates.items() if one}
    run = manifest["lineage"]["mlflow_run_id"]
    register_bundle(run, f"valora-{bundle.name}", bundle.folder, tags, figures)
