from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.bench.base_models import pretrain
from tests.bench.base_models.data import SampleMaker, build_processor
from tests.bench.base_models.pretrain import GRID, Batch, Pretraining, load

TINY = Path(__file__).parents[4] / "data/valora_data/tiny"
CPU = torch.device("cpu")


pytestmark = pytest.mark.slow


@pytest.fixture
def task(monkeypatch):
    """Losses of the checkpoint that ships; images are not augmented."""
    monkeypatch.setattr(
        pretrain, "augment", lambda pixels, _: pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0
    )
    return Pretraining(*load(TINY), CPU)


def some_of(name, samples):
    chunk = SampleMaker(9, build_processor().tokenizer.backend_tokenizer).make(name)
    parts = ("pick", "ids", "span", "look", "boxes", "n_boxes", "task")
    return Batch(replace(chunk, **{part: getattr(chunk, part)[:samples] for part in parts}), CPU)


def change(task):
    """Move the language model and the head away from what they were."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in [*task.model.model.language_model.parameters(), *task.head.parameters()]:
            weight.add_(torch.randn_like(weight), alpha=0.02)


def test_the_loss_is_the_divergence_from_transformers_own_answers(task):
    batch = some_of("short", 16)
    before, old_head, _ = load(TINY)
    task.retain()
    change(task)
    task.loss(batch)
    pixels = (batch.pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0)[batch.pick[:, 0]]
    with torch.no_grad():
        old, new = (
            model(input_ids=batch.ids, pixel_values=pixels, output_hidden_states=True)
            for model in (before, task.model)
        )
    p, q = (
        (found.logits + task.silent).log_softmax(-1)[batch.row, batch.column - 1].double()
        for found in (old, new)
    )
    spoken = task.silent == 0
    gaps = (p.exp() * (p - q))[:, spoken].sum(-1)
    assert task.losses[0] == pytest.approx(0.05 * float(gaps.mean()), rel=1e-3)
    assert gaps.mean() > 0.01

    cells = batch.ids[batch.wanted] == task.image_token
    with torch.no_grad():
        (old_scores, old_codes), (scores, codes) = (
            head(found.hidden_states[-1][batch.wanted][cells].view(-1, GRID[0] * GRID[1], 192))
            for head, found in ((old_head, old), (task.head, new))
        )
    holds = old_scores.sigmoid()
    entropy = -(holds * scores.sigmoid().log() + (1 - holds) * (1 - scores.sigmoid()).log())
    apart = (codes - old_codes).abs()
    apart = torch.where(apart < 0.1, apart**2 / 0.2, apart - 0.05).sum(-1)
    wanted = (entropy + apart * holds).sum() / holds.sum()
    assert task.losses[1] == pytest.approx(0.05 * float(wanted), rel=1e-3)


def test_what_is_remembered_does_not_learn(task):
    task.retain()
    names = {name for name, _ in task.parameters()}
    assert names and not [name for name in names if "vision" in name or "projector" in name]
    kept = {name: part.clone() for name, part in task.retention.state_dict().items()}
    optimizer = pretrain.make_optimizer(task.parameters(), 1e-3, CPU)
    for name in ("short", "album_1"):  # albums are learnt from their answers
        loss = task.loss(some_of(name, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, part in task.retention.state_dict().items():
        assert torch.equal(part, kept[name]), name
    moved = task.model.model.language_model.state_dict()
    assert not torch.equal(
        moved["layers.0.mlp.up_proj.weight"], kept["language.layers.0.mlp.up_proj.weight"]
    )
    tower = load(TINY)[0].model.vision_tower.state_dict()
    for name, part in task.model.model.vision_tower.state_dict().items():
        assert torch.equal(part, tower[name]), name
