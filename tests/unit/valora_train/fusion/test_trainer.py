"""Training: rollback bit for bit, nothing else moved, same seed same weights, it learns."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.support import colour_trainer
from tests.support.colour_trainer import COLOURS, same, train
from tests.support.helpers import coloured_squares
from valora_data.checkpoint import Checkpoint
from valora_data.schema import Answer, Domain, Split, Task
from valora_train import settings
from valora_train.fusion import trainer as trainer_module
from valora_train.fusion.samples import DomainData
from valora_train.fusion.trainer import DivergedError
from valora_train.model.lmm import Lmm
from valora_train.tasks.registry import make_task

make = partial(colour_trainer.make, count=8)


@pytest.mark.parametrize(("rehearse", "vision"), [(False, False), (True, True)])
def test_rollback_is_bit_for_bit(random_llava, rehearse, vision):
    trainer, lmm = make(random_llava, vision=vision)
    base = {k: v.clone() for k, v in lmm.model.state_dict().items() if "lora" not in k}
    trainer.open("adapter-1", seed=3)
    train(trainer, "apple")
    trainer.evaluate("adapter-1", "apple", Split.VAL)
    before = trainer.snapshot("adapter-1")
    assert {key.split("/")[0] for key in before} == {"lora", "head", "optimizer", "random"}
    first = train(trainer, "sky", held=["apple"], rehearse=rehearse)
    after = trainer.snapshot("adapter-1")
    assert not same(before, after)
    head = [key for key in before if key.startswith("head/apple/linear")]
    assert all(torch.equal(before[key], after[key]) != rehearse for key in head)
    trainer.restore("adapter-1", before)
    assert same(trainer.snapshot("adapter-1"), before)
    # What follows is what would have followed, to the bit.
    assert train(trainer, "sky", held=["apple"], rehearse=rehearse) == first
    assert same(trainer.snapshot("adapter-1"), after)
    for key, value in lmm.model.state_dict().items():
        plain = key.replace(".base_layer", "")
        if plain in base:
            assert torch.equal(value, base[plain]), key


WATCHED = {"validations": 2, "validation_samples": 6, "validation_share": 1e3}


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("held", "cut", "more"),
    [
        (False, 1, {}), (True, 2, {"precision": "bfloat16", "threads": 2}),
        (True, 8, {"best_of": 3}),  # the best step is remembered
    ],
)  # fmt: skip
def test_a_training_that_was_killed_continues_to_the_bit(random_llava, tmp_path, held, cut, more):
    def run(file, kill_after=None, seed=0):
        torch.manual_seed(seed)
        # A small norm, so that the order of gradients would tell.
        trainer, _ = make(random_llava, clip=1e-3, **WATCHED, **more)
        trainer.open("adapter-1", seed=3)
        if held:  # its head comes first, though its name does not
            trainer.train("adapter-1", ["sky"], held=[], rehearse=False, seed=5)
            trainer.evaluate("adapter-1", "sky", Split.VAL)
        steps, figures = [], {}

        def on_step(step, of, loss, found):
            steps.append((step, of, loss))
            figures[step] = found
            if step == kill_after:
                raise Killed

        trainer.train(
            "adapter-1", ["apple"], held=["sky"] if held else [], rehearse=held, seed=6,
            on_step=on_step, checkpoint=Checkpoint(tmp_path / file, every=0.0),
        )  # fmt: skip
        return steps, figures, trainer

    steps, figures, whole = run("whole")
    with pytest.raises(Killed):
        run("killed", cut)
    again, other_figures, second = run("killed", seed=99)  # another process
    assert (again, other_figures) == (steps, figures)
    assert sum("validation/apple" in found for found in figures.values()) == 2
    assert same(second.snapshot("adapter-1"), whole.snapshot("adapter-1"))
    assert list(second.snapshot("adapter-1")) == list(whole.snapshot("adapter-1"))
    one, other = (t.evaluate("adapter-1", "apple", Split.VAL).accuracy for t in (whole, second))
    assert one == other


def test_a_batch_is_shared_by_domains(random_llava):
    trainer, _ = make(random_llava, batch_size=12, rehearsal_share=0.75)
    trainer._data |= dict.fromkeys(("sea", "hill"), trainer._data["sky"])
    generator = torch.Generator().manual_seed(0)
    # A new domain gets no less than one that is held, and as much as other new ones.
    for new, held, counts in (
        (["sky"], [], {"sky": 12}),
        (["sky"], ["apple", "sea", "hill"], {"sky": 3, "apple": 3, "sea": 3, "hill": 3}),
        (["sky", "sea"], ["apple"], {"sky": 4, "sea": 4, "apple": 4}),
    ):
        batch = trainer._draw(generator, new, held)
        assert {name: len(rows) for name, rows in batch.items()} == counts
    trainer._settings = replace(trainer._settings, batch_size=13)  # the odd sample goes around
    drawn = [trainer._draw(generator, list(COLOURS), []) for _ in range(20)]
    assert {len(batch["sky"]) for batch in drawn} == {6, 7}


def test_seeds_decide_and_adapters_do_not_touch_each_other(random_llava):
    states = []
    for seed in (3, 3, 4):
        trainer, _ = make(random_llava)
        trainer.open("adapter-1", seed=seed)
        train(trainer, "apple")
        states.append(trainer.snapshot("adapter-1"))
    assert same(states[0], states[1])
    head = "head/apple/linear.weight"
    assert not torch.equal(states[0][head], states[2][head])
    trainer.open("adapter-2", seed=9)
    trainer.train("adapter-2", ["sky"], held=[], rehearse=False, seed=1)
    now = trainer.snapshot("adapter-1")
    assert all(torch.equal(now[k], v) for k, v in states[2].items() if k != "random/torch")
    trainer.close("adapter-2")
    assert trainer.evaluate("adapter-1", "apple", Split.VAL).predictions[0].answer.boxes is not None


def test_it_learns(random_llava):
    # A random LLaVA learns to find red squares on noise; the test split follows validation.
    trainer, _ = make(random_llava, steps=100, count=32)
    trainer.open("adapter-1", seed=3)
    losses = train(trainer, "apple")
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    val = trainer.evaluate("adapter-1", "apple", Split.VAL)
    again = trainer.evaluate("adapter-1", "apple", Split.VAL)  # calibration begins anew
    assert (val.accuracy, val.details, val.threshold) == (
        again.accuracy, again.details, again.threshold,
    )  # fmt: skip
    test = trainer.evaluate("adapter-1", "apple", Split.TEST)
    assert val.threshold == test.threshold
    assert val.interval[0] <= val.accuracy <= val.interval[1]
    assert val.accuracy > 0.5
    assert test.accuracy > 0.4


def test_views_are_trained_on_besides_the_images_and_their_mirrors(random_llava, caplog):
    lmm = Lmm(settings.ModelSettings(id=str(random_llava)), settings.LoraSettings(rank=4))
    domain = Domain("apple", Task.DETECTION, ("apple",), "detect apple", 0.8)
    pseudo_labelled = coloured_squares(5, 1, "apple", "red")

    def data(mirror=True, **augment):
        task = make_task(domain, settings.HeadSettings(), lmm)
        views = settings.AugmentSettings(color=0.4, shift=0.2, **augment)
        return DomainData(task, pseudo_labelled, {}, lmm, mirror, views, seed=3)

    plain, four = data(views=0), data(views=4)
    assert len(plain.inputs) == 10
    assert len(four.inputs) == len(four.targets.positive) == 30
    features = torch.stack([item.features for item in four.inputs])
    assert torch.equal(features[:10], torch.stack([item.features for item in plain.inputs]))
    assert len(torch.unique(features.flatten(1), dim=0)) == 30  # no two views are alike
    again = data(views=4)
    assert torch.equal(features, torch.stack([item.features for item in again.inputs]))
    assert len(data(mirror=False, views=2).inputs) == 15
    # Memory for two views and a half.
    one = sum(item.bytes for item in plain.inputs[:5])
    one += sum(sample.image.width * sample.image.height * 3 for sample in pseudo_labelled)
    few = data(views=4, memory_gb=2.5 * one / 1e9)
    assert len(few.inputs) == 20
    assert "gets 2 of 4 augmented views" in caplog.text


def test_curves_change_nothing_that_is_trained(random_llava):
    def run(**more):
        trainer, _ = make(random_llava, **more)
        head_figures, figures = {}, {}
        head = trainer.train_head_only(
            "apple", 2, lambda step, *rest: head_figures.update({step: rest[-1]})
        )
        trainer.open("adapter-1", seed=3)
        losses = train(trainer, "apple")
        trainer.evaluate("adapter-1", "apple", Split.VAL)

        def on_step(step, steps, loss, found):
            losses.append(loss)
            figures[step] = found

        trainer.train("adapter-1", ["sky"], held=["apple"], rehearse=True, seed=5, on_step=on_step)
        state = trainer.snapshot("adapter-1")
        reached = trainer.evaluate("adapter-1", "sky", Split.VAL)
        return losses, state, head.state_dict(), reached.accuracy, figures, head_figures

    plain, watched = run(validations=0), run(**WATCHED)
    assert plain[0] == watched[0]
    assert same(plain[1], watched[1])
    assert same(plain[2], watched[2])
    assert plain[3] == watched[3]
    looks = {step for step, found in watched[4].items() if "validation/sky" in found}
    assert looks == {3, 6}  # of 9
    assert all(0 <= watched[4][step]["validation/apple"] <= 1 for step in looks)
    assert [step for step, found in watched[5].items() if "validation/apple" in found] == [2, 3]
    assert not any("validation" in key for found in plain[4].values() for key in found)
    # Warm-up in the first tenth, then a cosine.
    rates = [found["lr"] for found in watched[4].values()]
    assert len(rates) == 9
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert max(rates) <= 4e-3


@pytest.mark.parametrize("loss", [math.inf, 0.5])
def test_training_that_diverges_ends(random_llava, monkeypatch, loss):
    def learn(heads, batch, weights):
        for weight in weights:
            weight.grad = torch.full_like(weight, math.nan)
        return loss

    trainer, _ = make(random_llava)
    trainer.open("adapter-1", seed=3)
    monkeypatch.setattr(trainer, "_learn", learn)
    with pytest.raises(DivergedError):
        train(trainer, "apple")


@pytest.mark.parametrize(
    ("reached", "patience", "kept", "trained"),
    [
        ([0.5, 0.7, 0.6], 0, 10, 12), ([0.5, 0.5, 0.5], 2, 8, 12),
        ([0.5, 0.4, 0.6], 1, 8, 10),  # ended before the best: that is what patience costs
    ],
)  # fmt: skip
def test_the_best_step_is_kept(random_llava, monkeypatch, reached, patience, kept, trained):
    trainer, _ = make(random_llava, steps=12, best_of=3, patience=patience)
    assert settings.TrainSettings(best_of=3).candidates(12) == {8, 10, 12}
    shown = iter(reached)
    monkeypatch.setattr(trainer, "evaluate", lambda *_: SimpleNamespace(accuracy=next(shown)))
    states = {}
    trainer.open("adapter-1", 1)
    trainer.train(
        "adapter-1", ["sky"], held=[], rehearse=False, seed=5,
        on_step=lambda step, *_: states.update({step: trainer.snapshot("adapter-1")}),
    )  # fmt: skip
    assert max(states) == trained
    now = trainer.snapshot("adapter-1")
    weights = [key for key in now if key.startswith(("lora", "head", "optimizer"))]
    assert all(torch.equal(now[key], states[kept][key]) for key in weights)


def test_however_a_step_is_parted_it_learns_what_it_learns_at_once(random_llava, monkeypatch):
    """Threads, micro-batches, groups of like length and one pass of all add up to the batch."""
    monkeypatch.setattr(trainer_module, "LENGTH_RATIO", 1.0)
    found, squares = [], coloured_squares(8, 1, "sky", "blue")
    # Only sky is parted: the loss of boxes is a mean over their number.
    parts = [(1, 0, 0.0, 2), (1, 6, 1e9, 2), (1, 0, 1e9, 1), (2, 0, 1e9, 1), (2, 0, 1e9, 1)]
    for threads, micro, padding, passes in parts:
        trainer, lmm = make(random_llava, vision=True, threads=threads, micro_batch=micro)
        trainer._pass_tokens = padding
        sky = Domain("sky", Task.CLASSIFICATION, ("even", "odd"), "detect sky", 0.8)
        trainer._data["sky"] = DomainData(
            make_task(sky, settings.HeadSettings(), lmm),
            [replace(one, answer=Answer(label=sky.labels[n % 2])) for n, one in enumerate(squares)],
            {}, lmm, mirror=False,
        )  # fmt: skip
        trainer.open("adapter-1", 1)
        for name in COLOURS:
            trainer._add_head("adapter-1", name, 2)
        opened = trainer._open["adapter-1"]
        weights = [p for group in opened.optimizer.param_groups for p in group["params"]]
        with torch.no_grad():  # so that A learns, too
            for key, weight in lmm.adapters.parameters("adapter-1").items():
                if "lora_B" in key:
                    weight.normal_(std=0.1, generator=opened.generator)
        batch = {"apple": torch.tensor([0, 3, 9, 5]), "sky": torch.tensor([1, 2, 4, 7])}
        assert len(trainer._parts(batch)) == passes
        loss, inputs = trainer._learn(opened.heads, batch, weights), trainer._data["sky"].inputs
        raw = trainer._outputs(trainer.task("sky"), opened.heads["sky"], inputs)
        found.append((loss, [weight.grad for weight in weights], raw))
    for one in found[1:]:
        assert one[0] == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(one[1:], found[0][1:], rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, found[-1][1], found[-2][1]))


def test_samples_of_a_step_are_of_like_length(random_llava):
    trainer, _ = make(random_llava, group_by_length=True)
    inputs = [SimpleNamespace(ids=[0] * (9 * n % 40)) for n in range(160)]
    rows = trainer._rows(inputs, 8, torch.Generator().manual_seed(1)).tolist()
    lengths = [len(inputs[row].ids) for row in rows]
    assert len(rows) == 8 and max(lengths) - min(lengths) < 12
