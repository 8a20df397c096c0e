"""The whole factory on tiny random checkpoints of every architecture, then the engine.

Nothing here is accurate. All parts meet: data, heads, written answers, videos, adapters, export,
the gate in its own process, and the serving engine says what the golden examples say.
"""

import asyncio
import json
from dataclasses import replace

import pytest

from tests.support.engine_reference import make_engine
from tests.support.lmm_checkpoints import CHECKPOINTS, TEXT_CHECKPOINTS
from tests.support.stores import paths_in, run_quietly
from valora_data.contract.base_model import base_family
from valora_data.contract.bundle import GOLDEN, read_bundle
from valora_data.schema import Task
from valora_data.sources.scenes.builtin import builtin_domain
from valora_serve.engine.async_engine import AsyncEngine
from valora_serve.engine.settings import EngineSettings
from valora_serve.server.loading.golden import replay
from valora_serve.server.loading.startup import follow_bundles
from valora_train import settings
from valora_train.errors import SettingsError
from valora_train.tasks.classification import POOLINGS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "gate_here")]

COUNTS = {"train": 8, "unlabelled": 4, "val": 6, "test": 6}
EVERY_TASK = {
    "person": Task.DETECTION,
    "plant_type": Task.CLASSIFICATION,
    "people_count": Task.COUNTING,
    "ball_path": Task.VIDEO,
    "street_presence": Task.VQA,
    "vehicle_color": Task.VQA,
    "place_caption": Task.CAPTION,
    "color_reference": Task.GROUNDING,
}
SOME = ("ball_path", "color_reference", "street_presence")


def domain(name):
    task = EVERY_TASK[name]
    return settings.DomainSettings(
        name=name,
        task=task,
        labels=list(builtin_domain(task, name).labels),
        prompt=builtin_domain(task, name).prompt,
        required=0.01,
        teacher="labels",
        mirror=task is Task.DETECTION,
        source=settings.SourceSettings(kind="scenes", counts=COUNTS),
    )


def settings_of(base, folder, names, *, vision=False, **model):
    projector = vision and bool(base_family(str(base)).projector_targets)
    lora = settings.LoraSettings(rank=4, alpha=8, vision_tower=vision, projector=projector)
    return settings.Settings(
        task=settings.TaskSettings(name="all", type=Task.DETECTION),
        domains={name: domain(name) for name in names},
        model=settings.ModelSettings(id=str(base), batch_size=4, **model),
        # Below any accuracy: what a random model reaches is no matter here. Adapters all the same.
        fusion=settings.FusionSettings(strategy="rehearsal", margin=-1.0, head_only=False),
        heads=settings.HeadSettings(max_tokens=6),
        train=settings.TrainSettings(
            steps=3, steps_per_held=1, batch_size=6, probe_steps=2, threads=1, lora=lora
        ),
        paths=paths_in(folder),
    )


WORDS = {"answers": Task.VQA, "mood": Task.CLASSIFICATION, "choice": Task.VQA}
"""Domains of text: the answers of the first are written, the others have a head."""


def text_domains(folder):
    """Conversations without images, and a document."""
    said = [("mild and fine", "good"), ("wet and cold", "bad")] * 30
    talks = []
    for number, (day, mood) in enumerate(said):
        asked = {"from": "human", "value": f"Day {number} was {day}."}
        talks.append({"id": number, "conversations": [asked, {"from": "gpt", "value": mood}]})
    (folder / "days.json").write_text(json.dumps(talks))
    common = {"required": 0.01, "teacher": "labels", "mirror": False}
    domains = {
        name: settings.DomainSettings(
            name=name,
            task=task,
            labels=[] if name == "answers" else ["good", "bad"],
            prompt="How was it? {}" if name == "answers" else "",  # as users leave it
            source=settings.SourceSettings(kind="llava", path=str(folder / "days.json")),
            **common,
        )
        for name, task in WORDS.items()
    }
    source = settings.SourceSettings(
        kind="records", entries=6, counts={"train": 8, "unlabelled": 8}
    )
    domains["ledger"] = settings.DomainSettings(
        name="ledger", task=Task.CONTEXT, prompt="{}", source=source, **common
    )
    return domains


def make(base, folder, names, **options):
    run_quietly(settings_of(base, folder, names, **options), folder)
    return folder / "bundles" / "all"


def replayed(base, bundle):
    async def ask():
        rounding = follow_bundles(EngineSettings(), [bundle]).quantize
        engine = AsyncEngine(make_engine(str(base), fresh=rounding != "none", quantize=rounding))
        try:
            await engine.load("bundle", bundle)
            return await replay(engine, bundle)
        finally:
            await engine.close()

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def everything(base, tmp_path_factory):
    """A bundle with a domain of every task in one adapter."""
    return make(base, tmp_path_factory.mktemp("every"), tuple(EVERY_TASK))


def test_domains_of_every_task_share_an_adapter(everything):
    bundle = read_bundle(everything)
    assert list(bundle.adapters) == ["adapter-1"]
    kinds = {name: facts["metric"] for name, facts in bundle.domains.items()}
    assert kinds == {
        "person": "f1@0.5", "plant_type": "top1", "people_count": "exact", "ball_path": "top1",
        "street_presence": "vqa", "vehicle_color": "vqa", "place_caption": "cider",
        "color_reference": "acc@iou0.5",
    }  # fmt: skip
    headless = {name for name, facts in bundle.domains.items() if facts["head"] is None}
    assert headless == {"vehicle_color", "place_caption", "color_reference"}
    assert bundle.domains["ball_path"]["media"] == "video"
    assert bundle.domains["plant_type"]["pooling"] in POOLINGS
    assert "within_one" in " ".join(bundle.domains["people_count"]["accuracy"])
    golden = json.loads((everything / GOLDEN).read_text())
    assert {example["domain"] for example in golden} == set(EVERY_TASK)
    for name in EVERY_TASK:
        assert (everything / "pictures" / f"{name}.png").is_file()
        assert name in (everything / "README.md").read_text()


def test_the_engine_replays_every_golden_example(base, everything):
    assert replayed(base, everything) == 2 * len(EVERY_TASK)


@pytest.mark.parametrize("family", [name for name in CHECKPOINTS if name != "llava"])
def test_every_architecture_goes_all_the_way(family, tmp_path):
    base = CHECKPOINTS[family](tmp_path / "base", seed=3)
    coordinates = "pixels" if family == "qwen2_5_vl" else "grid1000"
    vision = family != "qwen2_vl"  # adapt the vision tower and the merger too
    quantize = "nf4" if family == "qwen2_vl" else None
    # Where images are split, a box head reads one grid of all crops.
    names = SOME if family.startswith("qwen") else (*SOME, "person")
    bundle = make(base, tmp_path, names, coordinates=coordinates, vision=vision, quantize=quantize)
    assert read_bundle(bundle).manifest["base"]["coordinates"] == coordinates
    assert read_bundle(bundle).manifest["base"].get("quantize") == quantize
    assert replayed(base, bundle) == 2 * len(names)


@pytest.mark.parametrize("family", [*TEXT_CHECKPOINTS, "llava", "qwen2_5_vl"])
def test_domains_of_text_go_all_the_way(family, tmp_path):
    """On models that take no images, and beside a domain of images on those that do."""
    base = (CHECKPOINTS | TEXT_CHECKPOINTS)[family](tmp_path / "base", seed=3)
    domains = text_domains(tmp_path)
    if family in CHECKPOINTS:
        domains["street_presence"] = domain("street_presence")
    run_quietly(replace(settings_of(base, tmp_path, ()), domains=domains), tmp_path)
    folder = tmp_path / "bundles" / "all"
    bundle = read_bundle(folder)
    assert list(bundle.adapters) == ["adapter-1"]
    assert set(bundle.contexts) == {"ledger"}
    assert {bundle.domains[name]["media"] for name in WORDS} == {"text"}
    assert "speed" not in bundle.manifest  # of an image
    assert {name for name in WORDS if bundle.domains[name]["head"]} == {"mood", "choice"}
    words = family in TEXT_CHECKPOINTS
    assert bundle.manifest["base"].get("class") == ("AutoModelForCausalLM" if words else None)
    assert ("AutoModelForCausalLM" in (folder / "README.md").read_text()) == words
    assert replayed(base, folder) == 2 * len(domains)


def test_domains_of_images_are_refused_before_any_work(tmp_path):
    base = TEXT_CHECKPOINTS["mistral"](tmp_path / "base", seed=3)
    with pytest.raises(
        SettingsError, match=r"domain person shows images .* reads text alone: choo"
    ):
        make(base, tmp_path, ("person",))
    assert not (tmp_path / "work").exists()
