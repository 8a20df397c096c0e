"""A task type of another package, with its own kind of head: trained, exported and served."""

import asyncio
import json

import pytest
from PIL import Image

from tests.support.engine_reference import make_engine
from tests.support.http_helpers import data_url, serving
from tests.support.stores import paths_in, run_quietly
from valora_data.contract.bundle import GOLDEN, read_bundle
from valora_data.errors import DataError, ValoraError
from valora_data.schema import Task
from valora_serve.engine.async_engine import AsyncEngine
from valora_serve.server.loading.golden import replay
from valora_train import settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "gate_here")]

HEAD = """
from dataclasses import dataclass

from valora_data.contract.head import Head
from valora_data.contract.results import HeadResult


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberResult(HeadResult):
    value: float

    def image_fields(self, number):
        return {"value": self.value}

    def text(self, sizes):
        return f"{self.value:.2f}"

    def golden(self):
        return {"value": self.value}

    @classmethod
    def matches(cls, found, expected, threshold):
        return abs(found["value"] - expected["value"]) <= 0.01


class NumberHead(Head):
    reads_visual = False

    @classmethod
    def parse(cls, kind, metadata, tensors, width):
        return cls(kind=kind, weight=tensors["weight"], bias=tensors["bias"])

    def metadata(self):
        return {}

    def inputs(self, last, visual, places):
        return last.float()

    def interpret(self, logits, sizes, min_score=None):
        return NumberResult(kind=self.kind, value=float(logits[0, 0]))


extension = NumberHead
"""
TASK = """
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from HEADS import NumberHead, NumberResult
from valora_data.schema import Answer
from valora_data.tasks import TaskSpec
from valora_train.metrics.measures import Scores
from valora_train.tasks.base import HeadTask, Prediction


@dataclass(frozen=True)
class NumberOptions:
    bias: float = 0.0


class NumberTask(HeadTask):
    spec = TaskSpec("within_one", answer="count")
    result = NumberResult
    options_type = NumberOptions

    @classmethod
    def measure(cls, predicted, truth):
        pairs = zip(predicted, truth, strict=True)
        return Scores(np.array([abs(p.count - t.count) <= 1 for p, t in pairs], np.float64))

    def targets(self, samples, encoded):
        return torch.tensor([[float(sample.answer.count)] for sample in samples])

    def new_head(self, lmm, first, seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = nn.Linear(lmm.width, 1)
        nn.init.constant_(head.bias, self.options.bias)
        return head

    def head_outputs(self, head, inputs):
        return head(inputs.last.float())

    def head_loss(self, head, inputs, targets):
        return nn.functional.mse_loss(self.head_outputs(head, inputs), targets)

    def stored_head(self, head):
        return NumberHead(kind="number", weight=head.weight.detach(), bias=head.bias.detach())

    def load_head(self, head):
        module = nn.Linear(head.weight.shape[1], 1)
        module.load_state_dict({"weight": head.weight, "bias": head.bias})
        return module

    def predictions(self, head, raw, samples):
        values = raw[:, 0].tolist()
        return [Prediction(Answer(count=max(0, round(v))), repr(v)) for v in values]

    def golden(self, prediction, threshold):
        return {"value": float(prediction.text)}


extension = NumberTask
"""


def write_data(folder):
    for split, count in (("train", 8), ("val", 4), ("test", 4)):
        (folder / split).mkdir(parents=True)
        rows = []
        for number in range(count):
            shade = (30 * number, 200 - 20 * number, len(split) * 10)
            Image.new("RGB", (32, 32), shade).save(folder / split / f"{split}-{number}.png")
            rows.append({"file_name": f"{split}-{number}.png", "count": number % 4})
        text = "\n".join(json.dumps(row) for row in rows)
        (folder / split / "metadata.jsonl").write_text(text)
    return folder


def settings_of(base, folder, data, options):
    domain = settings.DomainSettings(
        name="gauge", task=Task("number"), prompt="what does it show?", required=0.01,
        teacher="labels", source=settings.SourceSettings(kind="imagefolder", path=str(data)),
    )  # fmt: skip
    return settings.Settings(
        task=settings.TaskSettings(name="gauges", type=Task("number")),
        domains={"gauge": domain},
        model=settings.ModelSettings(id=str(base), batch_size=4),
        fusion=settings.FusionSettings(margin=-1.0, head_only=False),
        heads=settings.HeadSettings(options=options),
        train=settings.TrainSettings(
            steps=3,
            batch_size=4,
            probe_steps=2,
            threads=1,
            flip=False,
            lora=settings.LoraSettings(rank=4, alpha=8),
        ),
        paths=paths_in(folder),
    )


def test_a_task_of_another_package_is_trained_and_served(installed, random_llava, tmp_path):
    heads = installed("valora.head_kinds", "number", HEAD)
    installed("valora.tasks", "number", TASK.replace("HEADS", heads))
    data = write_data(tmp_path / "data")
    run_quietly(settings_of(random_llava, tmp_path, data, {"number": {"bias": 50.0}}), tmp_path)
    folder = tmp_path / "bundles" / "gauges"
    promise = read_bundle(folder).domains["gauge"]
    assert (promise["task"], promise["metric"]) == ("number", "within_one")
    golden = json.loads((folder / GOLDEN).read_text())
    # Three steps do not move the bias far from where the option put it.
    assert all(abs(example["expected"]["value"] - 50) < 10 for example in golden)
    engine = AsyncEngine(make_engine(str(random_llava)))

    async def load():
        await engine.load("bundle", folder)
        return await replay(engine, folder)

    assert asyncio.run(load()) == len(golden) == 2
    image = data_url((folder / golden[0]["image"]).read_bytes())
    with serving(engine) as server:
        answer = server.client.post("/v1/vision/gauge", json={"images": [image]})
        found = answer.raise_for_status().json()
    assert found["kind"] == "number"
    assert found["results"][0]["value"] == pytest.approx(golden[0]["expected"]["value"], abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"number": {"slope": 1}}, r"heads\.options\.number\.slope=1: there is no such setting"),
        ({"number": {"bias": "much"}}, r"heads\.options\.number\.bias='much': must be a valid"),
        ({"caption": {"bias": 1}}, "task type caption has no options, got bias: leave heads"),
        ({"poetry": {"bias": 1}}, "unknown task type 'poetry'"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_any_stage(
    installed, tmp_path, options, message
):
    heads = installed("valora.head_kinds", "number", HEAD)
    installed("valora.tasks", "number", TASK.replace("HEADS", heads))
    (tmp_path / "empty").mkdir()
    wanted = settings_of("tiny", tmp_path, tmp_path / "empty", options)
    with pytest.raises(ValoraError, match=message):
        run_quietly(wanted, tmp_path)
    assert not (tmp_path / "work").exists()


def test_an_unknown_task_lists_what_there_is():
    with pytest.raises(DataError, match="unknown task type 'poetry': choose one of caption, class"):
        Task("poetry")
