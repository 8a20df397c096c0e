"""Images whose tokens see each other, with what reuses or shares their pages."""

import pytest

from tests.support.cases import others_slow
from tests.support.engine_reference import (
    Reference,
    ask,
    check_answers,
    finish,
    make_engine,
    noise,
    run,
)
from tests.support.lmm_checkpoints import save_gemma3
from tests.support.serve_helpers import DomainSpec, make_bundle
from valora_serve.engine.sequence import Prepared
from valora_serve.errors import AdapterError
from valora_serve.types import NewContext, Request, SamplingParams

SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)
RED, BLUE, GREEN = (noise(40, 30, seed) for seed in range(3))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_gemma3(tmp_path_factory.mktemp("gemma3"), seed=7))


def asked(name, images, text="Which?", model=None):
    shown = ask(text, images=len(images))
    return Request(name, model=model, messages=shown, images=images, sampling=SAMPLING)


@pytest.mark.parametrize(
    ("block_size", "chunk"), others_slow([(4, 5)], [(4, 5), (4, 256), (16, 256), (1, 7)])
)
def test_two_images_again_from_the_prefix_cache(base, block_size, chunk):
    engine, reference = make_engine(base, block_size=block_size, chunk=chunk), Reference(base, {})
    cached = {}
    for name, images, text in (
        ("first", [RED, BLUE], "Which?"), ("again", [RED, BLUE], "Which?"),
        ("other", [RED, GREEN], "Which?"), ("turned", [BLUE, RED], "Which?"),
        ("shorter", [RED], "Which?"),
    ):  # fmt: skip
        request = asked(name, images, text)
        found = run(engine, [request])
        check_answers(found, reference, request)
        cached[name] = found[name].last.usage.cached
    at = [int(one.at[0]) for one in engine.prepare(asked("x", [RED, BLUE])).prompt.visuals]
    assert cached["first"] == 0
    assert cached["turned"] <= at[0]
    # The first image, and nothing of the second, of which the tokens would see another's.
    assert at[0] + 16 - block_size < cached["other"] <= at[1]
    assert at[1] + 16 - block_size < cached["again"]


def test_a_template_without_system_turns_reads_no_contexts(base):
    new = NewContext("doc", "The red key opens the old green door.")
    with pytest.raises(AdapterError, match=r"context doc: .* writes no system turn before"):
        make_engine(base).prepare_compression(new, "doc")


def test_domains_of_one_prompt_share_a_pass(base, tmp_path):
    domains = {
        "count": DomainSpec("adapter-1", "counting", ["0", "1"], "visual_mean", "Find it."),
        "place": DomainSpec("adapter-1", "classification", ["in", "out"], "grid", "Find it."),
        "rest": DomainSpec("adapter-1", "yes_no", ["no", "yes"], prompt="Find it."),
    }
    bundle = make_bundle(tmp_path / "look", base, name="look", domains=domains, seed=3)
    requests = [Request(name, model=name, images=[RED]) for name in domains]
    found = []
    for together in (False, True):
        engine = make_engine(base, block_size=4, chunk=9, prefix_cache=False)
        engine.load("bundle", bundle)
        if together:
            prepared = engine.prepare_all(requests)
            assert not engine.add_all([p for p in prepared.values() if isinstance(p, Prepared)])
            found.append(finish(engine))
        else:
            found.append({one.id: run(engine, [one])[one.id] for one in requests})
    for name in domains:
        alone, shared = (one[name] for one in found)
        assert shared.error is alone.error is None
        assert shared.last.head.logits == pytest.approx(alone.last.head.logits, abs=1e-4)
