"""Images that cannot be encoded, and the limit of the image cache."""

from dataclasses import replace

import pytest
import torch

from tests.support.engine_reference import (
    Reference,
    add_requests,
    ask,
    assert_empty,
    check_answers,
    finish,
    make_engine,
    noise,
    question,
    run,
)
from tests.support.lmm_checkpoints import save_qwen3_vl
from valora_serve.errors import ImageError
from valora_serve.types import Request, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("error", [RuntimeError, TypeError, MemoryError])
def test_an_image_that_the_encoder_cannot_encode(base, error, monkeypatch, caplog):
    engine = make_engine(base, policy="unmerge_only")
    reference = Reference(base, {})
    requests = [
        replace(
            question(f"{n}"), token_ids=None, messages=ask("Look", images=n % 3),
            images=[noise(20, 20, n + i) for i in range(n % 3)],
        )
        for n in range(5)
    ]  # fmt: skip
    bad = replace(
        requests[2], id="bad", images=[noise(20, 20, 2), noise(20, 20, 77)]
    )  # one of them is also another's
    prepared = engine.prepare(bad)
    wrong = prepared.prompt.visuals[1].tensors["pixel_values"]
    encode = engine.runner.encode

    def fails(visuals, slots):
        if any(torch.equal(one.tensors["pixel_values"], wrong) for one in visuals):
            raise error("cannot")
        return encode(visuals, slots)

    monkeypatch.setattr(engine.runner, "encode", fails)
    add_requests(engine, *requests[:3])
    engine.add(prepared)
    add_requests(engine, *requests[3:])
    found = finish(engine)
    assert isinstance(found["bad"].error, ImageError)
    assert str(found["bad"].error).startswith("image 2 cannot be encoded")
    tracebacks = [record for record in caplog.records if record.exc_info]
    groups = [record for record in tracebacks if "together failed" in record.getMessage()]
    assert tracebacks == groups
    assert groups
    singles = [r.getMessage() for r in caplog.records if "cannot be encoded" in r.getMessage()]
    assert len(singles) == 1
    assert "request bad" in singles[0]
    check_answers(found, reference, *requests)
    assert engine.images.held_bytes == sum(
        one.embeddings.numel() * 4 for one in engine.images._kept.values()
    )
    assert_empty(engine)


def test_the_image_cache_keeps_its_bound(base):
    one = 16 * 64 * 4  # bytes of an encoded image
    engine = make_engine(base, image_cache_bytes=2 * one + 1, prefix_cache=False)
    for n in (1, 2, 1, 3, 1, 2):
        asked = Request(f"{n}", messages=ask("Look", images=1), images=[noise(20, 20, n)],
                        sampling=SamplingParams(max_tokens=1))  # fmt: skip
        run(engine, [asked])
        assert engine.images.held_bytes == len(engine.images) * one <= 2 * one
    assert engine.stats().image_hits == 2  # the least recently used one goes
    assert engine.images.encoded == 4
    engine = make_engine(base, image_cache_bytes=one - 1)
    run(engine, [asked])
    assert not len(engine.images)


def test_cached_images_keep_no_others_in_memory(base):
    """Images that are encoded together lie in one tensor."""
    engine = make_engine(base, policy="unmerge_only", image_cache_bytes=1 << 30)
    asked = [
        replace(question(f"{n}"), token_ids=None, messages=ask("Look", images=1),
                images=[noise(20, 20, n)])
        for n in range(4)
    ]  # fmt: skip
    run(engine, asked)
    kept = list(engine.images._kept.values())
    assert len(kept) == 4
    held = {one.embeddings.untyped_storage().data_ptr(): one.embeddings for one in kept}
    stored = sum(part.untyped_storage().nbytes() for part in held.values())
    assert stored == engine.images.held_bytes


def test_a_video_of_one_frame_is_refused_where_a_model_needs_more(tmp_path):
    """Qwen3-VL's processor says so in its own words."""
    video = [[noise(24, 24, 1)]]
    engine = make_engine(str(save_qwen3_vl(tmp_path / "base", seed=2)))
    with pytest.raises(ImageError, match="one frame, and this model needs more: send the frame"):
        engine.prepare(Request("x", messages=ask("What?", videos=1), videos=video))
