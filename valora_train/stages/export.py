"""Stage `export`: a fusion becomes a bundle, once the gate has let it through.

The bundle stands at ``bundles/<task>``; the one that stood there moves to
``bundles/<task>@<version>``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data import shards
from valora_data.contract.base_model import base_hash
from valora_data.contract.bundle import MANIFEST, Bundle, read_bundle, write_manifest
from valora_data.errors import BundleError
from valora_data.schema import Split
from valora_train.errors import GateError
from valora_train.fusion.state import FUSION
from valora_train.reporting.report import counted
from valora_train.reporting.tracking import register_bundle
from valora_train.settings import as_dict
from valora_train.stage import read_json, versions, write_json
from valora_train.stages.gate import GOLDEN, BundleModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_train.settings import Settings
    from valora_train.stages.fuse import DomainInputs

EXAMPLES = 2  # golden examples per domain
FUSION_KEY = "fusion_stage"


def export_bundle(
    settings: Settings, domains: Sequence[DomainInputs], fused: Path
) -> tuple[Bundle, bool]:
    """Write, check, register and publish the bundle of a fusion.

    Args:
        settings: All settings.
        domains: The domains with their data.
        fused: Output of stage `fuse`.

    Returns:
        The bundle, and whether it was there already.

    Raises:
        BundleError: If something that is not an older version of it stands in its place.
        GateError: If the reloaded bundle does not do what was measured.
    """
    place = Path(settings.paths.bundles) / settings.task.name
    standing = _standing(place, settings.task.name)
    if standing is not None and standing.manifest["lineage"][FUSION_KEY] == fused.name:
        return standing, True
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _fill(partial, settings, domains, fused, _next_version(place))
        _pass_gate(partial, domains, settings.model.device)
        bundle = read_bundle(partial)
        _register(settings, bundle)
        if standing is not None:
            place.rename(place.with_name(f"{place.name}@{standing.version}"))
        partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Bundle(place, bundle.manifest), False


def _standing(place: Path, name: str) -> Bundle | None:
    """The bundle in our place, if there is one."""
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


def _next_version(place: Path) -> int:
    pattern = re.compile(rf"{re.escape(place.name)}@(\d+)")
    older = [
        int(found[1])
        for item in (place.parent.iterdir() if place.parent.is_dir() else ())
        if (found := pattern.fullmatch(item.name))
    ]
    if (place / MANIFEST).is_file():
        older.append(int(read_json(place / MANIFEST)["version"]))
    return max(older, default=0) + 1


def _fill(
    folder: Path, settings: Settings, domains: Sequence[DomainInputs], fused: Path, version: int
) -> None:
    result = read_json(fused / FUSION)
    for part in ("adapters", "heads", "pictures"):
        shutil.copytree(fused / part, folder / part)
    manifest = _manifest(settings, domains, fused, result, version)
    _write_golden(folder, manifest, domains, settings.model.device)
    (folder / "README.md").write_text(_card(manifest), encoding="utf-8")
    write_manifest(folder, manifest)


def _manifest(
    settings: Settings,
    domains: Sequence[DomainInputs],
    fused: Path,
    result: dict[str, Any],
    version: int,
) -> dict[str, Any]:
    return {
        "name": settings.task.name,
        "version": version,
        "strategy": result["strategy"],
        "base": {
            "id": settings.model.id,
            "sha256": base_hash(settings.model.id),
            "dtype": settings.model.dtype,
            "coordinates": settings.model.coordinates,
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
                "rank": settings.train.lora.rank,
                "domains": list(held),
            }
            for name, held in result["packing"].items()
        },
        "domains": result["domains"],
        "attempts": len(result["attempts"]),
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


def _write_golden(
    folder: Path, manifest: dict[str, Any], domains: Sequence[DomainInputs], device: str
) -> None:
    """Keep test images with what the bundle, loaded as a server would, says of them."""
    (folder / GOLDEN).parent.mkdir()
    write_json(folder / GOLDEN, [])
    write_manifest(folder, manifest)
    model = BundleModel(read_bundle(folder), device=device)
    examples: list[dict[str, Any]] = []
    for item in domains:
        if item.settings.name in manifest["domains"]:
            examples += _golden_of(folder, manifest, item, model)
    write_json(folder / GOLDEN, examples)


def _golden_of(
    folder: Path, manifest: Mapping[str, Any], item: DomainInputs, model: BundleModel
) -> list[dict[str, Any]]:
    name, task = item.settings.name, model.tasks[item.settings.name]
    threshold = manifest["domains"][name].get("threshold")
    test = shards.open_shard(item.data / Split.TEST)
    # Images with something on them say more.
    wanted = [n for n, answer in enumerate(test.answers()) if threshold is None or answer.boxes]
    samples = [test[number] for number in wanted[:EXAMPLES]]
    examples = []
    for number, (sample, said) in enumerate(zip(samples, model.answer(name, samples), strict=True)):
        files = []
        for place, image in enumerate(sample.images):
            files.append(f"golden/{name}-{number}{f'-{place}' if place else ''}.png")
            image.save(folder / files[-1])
        example: dict[str, Any] = {"domain": name, "image": files[0]}
        if files[1:]:
            example["rest"] = files[1:]
        if task.video:
            example["media"] = "video"
        if sample.prompt is not None:
            example["prompt"] = sample.prompt
            example["question"] = task.domain.question(sample)
        if "max_tokens" in manifest["domains"][name]:
            example["max_tokens"] = manifest["domains"][name]["max_tokens"]
        example["expected"] = task.golden(said, threshold)
        examples.append(example)
    return examples


def _pass_gate(folder: Path, domains: Sequence[DomainInputs], device: str) -> None:
    command = [sys.executable, "-m", "valora_train.stages.gate", str(folder), "--device", device]
    promised = read_json(folder / MANIFEST)["domains"]
    for item in domains:
        if item.settings.name in promised:
            command += ["--data", item.settings.name, str(item.data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise GateError(f"the export gate refuses the bundle: {reason[0].removeprefix('error: ')}")


def _register(settings: Settings, bundle: Bundle) -> None:
    accuracy = {f"test.{k}": f"{v['accuracy']['test']:.4f}" for k, v in bundle.domains.items()}
    tags = {
        "bundle_version": str(bundle.version),
        "adapters": str(len(bundle.adapters)),
        "strategy": bundle.manifest["strategy"],
        FUSION_KEY: bundle.manifest["lineage"][FUSION_KEY],
    } | accuracy
    run = bundle.manifest["lineage"]["mlflow_run_id"]
    register_bundle(settings.paths.tracking, run, f"valora-{bundle.name}", bundle.folder, tags)


def _card(manifest: dict[str, Any]) -> str:
    """The bundle's README, for people."""
    lines = [
        "---",
        f"base_model: {manifest['base']['id']}",
        "library_name: peft",
        "tags: [valora, lora, vision]",
        "---",
        f"# {manifest['name']}, version {manifest['version']}",
        "",
        f"{counted(len(manifest['domains']), 'domain')} in "
        f"{counted(len(manifest['adapters']), 'LoRA adapter')} of "
        f"`{manifest['base']['id']}` (strategy `{manifest['strategy']}`, "
        f"{counted(manifest['attempts'], 'attempt')}).",
        "",
        "| adapter | rank | domains |",
        "|---|---|---|",
    ]
    for facts in manifest["adapters"].values():
        lines.append(f"| `{facts['path']}` | {facts['rank']} | {', '.join(facts['domains'])} |")
    lines += [
        "",
        "Accuracy on the test split, which no decision has seen (95 % interval), beside what was "
        "required, what the frozen base reaches with a head of its own (or by writing), and what "
        "the teacher reaches.",
        "",
        "| domain | metric | required | test | status | without LoRA | teacher | further |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, facts in manifest["domains"].items():
        accuracy = facts["accuracy"]
        low, high = accuracy["test_ci95"]
        teacher = "–" if accuracy["teacher"] is None else f"{accuracy['teacher']:.3f}"
        lines.append(
            f"| {name} | {facts['metric']} | {facts['required']:.2f} | {accuracy['test']:.3f} "
            f"({low:.3f}–{high:.3f}) | {facts['status']} | {accuracy['head_only']:.3f} | {teacher} "
            f"| {_further(accuracy)} |"
        )
    lines += [
        "",
        "## Pictures",
        "Test images: true boxes in white, what is found or answered rightly in green, what is "
        "answered wrongly in red, with the truth in grey.",
        "",
    ]
    lines += [f"**{name}**\n\n![{name}](pictures/{name}.png)\n" for name in manifest["domains"]]
    first = next(iter(manifest["adapters"].values()))["path"]
    lines += [
        "## Use",
        "Serve it with `valora-serve`. Or load an adapter with plain PEFT:",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForImageTextToText",
        "",
        "base = AutoModelForImageTextToText.from_pretrained(...)  # weights: see bundle.json",
        f'model = PeftModel.from_pretrained(base, "{first}")',
        "```",
        "",
        "The heads in `heads/` read last hidden states of the domain's prompt; domains without a "
        "head write their answers. `bundle.json` says which prompt, adapter and head.",
        "",
    ]
    return "\n".join(lines)


def _further(accuracy: Mapping[str, Any]) -> str:
    """Metrics beside the standard one, such as ``map 0.61``."""
    known = ("test", "test_ci95")
    return ", ".join(
        f"{key.removeprefix('test_')} {value:.3f}"
        for key, value in accuracy.items()
        if key.startswith("test_") and key not in known
    )
