from pathlib import Path

import pytest
import torch

from tests.bench.base_models.data import SampleMaker, build_processor
from tests.bench.base_models.lookup import ATTRIBUTES, FINDER, LETTERS, LookupTutor
from tests.bench.base_models.pretrain import load
from tests.bench.base_models.records import RecordDrawer

TINY = Path(__file__).parents[4] / "data/valora_data/tiny"
CPU = torch.device("cpu")


def test_heads_are_judged_by_the_attention_that_the_model_computes():
    """The loss equals that of the probabilities that transformers returns."""
    model, _, _ = load(TINY)
    model.set_attn_implementation("eager")
    language = model.model.language_model
    tutor = LookupTutor(language)
    tokenizer = build_processor().tokenizer.backend_tokenizer
    batch = RecordDrawer(tokenizer, 7, CPU).draw(3, (1, 3), 5)
    with torch.no_grad():
        probabilities = language(
            inputs_embeds=model.get_input_embeddings()(batch.ids), output_attentions=True
        ).attentions
        loss = tutor.loss(batch)
    places = batch.start - 1
    value = batch.lines[..., 2]
    linked = batch.link > 0
    assert linked.any() and not linked.all()
    wanted = [
        (0, LETTERS, value, batch.lines[..., 0]),
        (0, ATTRIBUTES, value, batch.lines[..., 1]),
        (1, LETTERS, places, batch.asked[..., 0]),
        (1, ATTRIBUTES, places, batch.asked[..., 1]),
        (FINDER, 0, places * ~linked, batch.asked[..., 2]),
        (FINDER, 1, places * linked, batch.link),
        (FINDER + 1, 0, places * linked, batch.asked[..., 2]),
    ]
    losses = []
    for layer, head, at, to in wanted:
        rows = [
            (probabilities[layer][sample, head, int(one)], int(other))
            for sample in range(3)
            for one, other in zip(at[sample], to[sample], strict=True)
            if one > 0
        ]
        losses.append(torch.stack([-row[other].log() for row, other in rows]).mean())
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_heads_are_shown_the_thing_that_an_album_is_asked_about():
    """The loss of albums equals that of the probabilities that transformers returns."""
    model, _, _ = load(TINY)
    model.set_attn_implementation("eager")
    language = model.model.language_model
    tutor = LookupTutor(language)
    chunk = SampleMaker(3, build_processor().tokenizer.backend_tokenizer).make("album_4")
    start, look = (torch.from_numpy(part[:3]) for part in (chunk.span[..., 0], chunk.look))
    with torch.no_grad():
        probabilities = language(
            inputs_embeds=model.get_input_embeddings()(torch.from_numpy(chunk.ids[:3])),
            output_attentions=True,
        ).attentions
        loss = tutor.album_loss(start, look)
    losses = [[], []]
    for sample, turn in (start > 0).nonzero().tolist():
        place = int(start[sample, turn]) - 1
        for part, (layer, head) in enumerate(((1, LETTERS), (FINDER, 0))):
            row = probabilities[layer][sample, head, place]
            losses[part].append(-row[look[sample, turn, part]].log())
    expected = torch.stack([torch.stack(part).mean() for part in losses]).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
