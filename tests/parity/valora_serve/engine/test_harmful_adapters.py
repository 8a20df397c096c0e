"""Adapters that overflow, beside others: their own requests fail, everybody else's are as before.

Each is finite as a file. What they compute is not: for every input, or for some only.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.valora_serve.engine.test_engine import Forced
from tests.support.cases import others_slow
from tests.support.engine_reference import (
    add_requests,
    ask,
    assert_empty,
    check_answers,
    collect,
    finish,
    make_engine,
    noise,
    question,
    run,
)
from tests.support.lmm_checkpoints import save_llava
from tests.support.serve_helpers import (
    EVERYTHING,
    LANGUAGE,
    MLP,
    VISION,
    DomainSpec,
    make_adapter,
    make_adapters,
    make_bundle,
)
from valora_serve.errors import AdapterError, NonFiniteError
from valora_serve.orchestrator.registry import POLICIES
from valora_serve.types import Mode, Request, SamplingParams

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
]


Change = Callable[[str, torch.Tensor], torch.Tensor]


def rewritten(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: change(name, one.clone()).contiguous() for name, one in tensors.items()}, file)
    return folder


def larger(factor, part="lora_B"):
    return lambda name, one: one * (factor if part in name else 1.0)


def one_row(name, one):
    if "lora_B" in name:
        one[5] *= 3e5
    return one


def one_direction(name, one):
    """In the first layer, overflows for inputs on one side of a plane only."""
    if "layers.0." not in name:
        return torch.zeros_like(one) if "lora_B" in name else one
    if "lora_A" in name:
        one[1:] = 0
        return one
    one[:, 1:] = 0
    # All outputs of the gate have one sign, and a gate that is far below 0 is closed.
    return (one.abs() if "gate_proj" in name else one) * 3e14


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("llava"), seed=11))


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    return make_adapters(
        tmp_path_factory.mktemp("adapters"), base, 0.25,
        attention=(1, 8, 16, LANGUAGE), everything=(2, 3, 7, EVERYTHING),
    )  # fmt: skip


@pytest.fixture(scope="module")
def harmful(base, tmp_path_factory):
    changes = {
        "loud": (larger(1e6), (21, 4, 8, f"{LANGUAGE}|{MLP}")),
        "row": (one_row, (22, 4, 8, LANGUAGE)),
        "always": (larger(1e14), (23, 4, 8, MLP)),
        "sometimes": (one_direction, (24, 4, 8, MLP)),
        "tower": (larger(1e14), (25, 4, 8, f"{VISION}|{MLP}")),
        "seeing": (larger(1e6), (26, 4, 8, VISION)),
    }
    kinds = {name: kind for name, (_, kind) in changes.items()}
    made = make_adapters(tmp_path_factory.mktemp("harmful"), base, 0.25, **kinds)
    return {name: rewritten(made[name], change) for name, (change, _) in changes.items()}


def with_image(name, model, seed):
    return replace(question(name, model), token_ids=None, images=[noise(30 + seed, 40, seed)],
                   messages=ask("What is this?", images=1))  # fmt: skip


def crowd(harmful, **params):
    """Requests of others, and many more of harmful adapters, so that policies want to merge."""
    others = []
    for number, name in enumerate((None, "attention", "everything")):
        others += [question(f"{name} {n}", name, tokens=9) for n in range(2)]
        others.append(with_image(f"{name} image", name, number))
    others = [replace(one, sampling=replace(one.sampling, **params)) for one in others]
    bad = [question(f"{name} {n}", name, tokens=14) for n in range(5) for name in harmful]
    bad += [with_image(f"{name} image", name, 50 + n) for n, name in enumerate(harmful)]
    return others, bad


def check_bad(found, bad):
    """Answers of harmful adapters are errors or texts, and never empty."""
    for one in bad:
        error = found[one.id].error
        if error is None:
            assert one.model not in ("always", "tower")
            assert len(found[one.id].tokens) == one.sampling.max_tokens
        else:
            assert isinstance(error, NonFiniteError) and str(one.model) in str(error)
            assert (error.status, error.code) == (422, "non_finite_output")


def check_crowd(engine, harmful, reference):
    """Of each kind in turn: others get their answers, and harmful ones errors or texts."""
    others, bad = crowd(harmful)
    share = len(bad) // len(others)
    asked = [one for n, own in enumerate(others) for one in (*bad[n * share :][:share], own)]
    found = run(engine, asked + bad[len(others) * share :], together=25)
    check_answers(found, reference, *others)
    check_bad(found, bad)
    assert_empty(engine)
    return [found[one.id] for one in bad]


@pytest.mark.parametrize(
    ("policy", "overlap"),
    others_slow(
        [("cost", True), ("merge_only", True), ("valora", False)],
        [(name, n % 2 == 0) for n, name in enumerate(POLICIES)],
    ),
)
def test_others_get_the_answers_of_their_own_models(
    base, adapters, harmful, reference, policy, overlap
):
    engine = make_engine(
        base, adapters | harmful, policy=policy, overlap=overlap, max_requests=10, pages=1024
    )
    bad = check_crowd(engine, harmful, reference)
    stats = engine.stats()
    assert stats.quarantined == {} and stats.merged_adapter not in harmful
    assert stats.non_finite == sum(got.error is not None for got in bad) > 0


def test_some_inputs_overflow_and_others_do_not(base, harmful):
    engine = make_engine(base, {"sometimes": harmful["sometimes"]})
    asked = [
        Request(str(n), "sometimes", token_ids=[10 + 3 * n], sampling=SamplingParams(max_tokens=1))
        for n in range(40)
    ]
    assert 0 < sum(got.error is not None for got in run(engine, asked).values()) < 40


@pytest.mark.parametrize("overlap", [False, True])
def test_a_policy_that_insists_on_merging_them(base, adapters, harmful, reference, overlap):
    """The engine does not merge what must not be merged, whatever it is told."""
    engine = make_engine(base, adapters | harmful, policy="valora", overlap=overlap, pages=1024)
    turn = count()

    def choose(view):  # one adapter at a time
        names = sorted(view.resident)
        merged = names[next(turn) % len(names)] if names else None
        return (Mode.MIXTURE, merged) if names else (Mode.UNMERGED, None)

    engine.policy = Forced(choose, engine)
    check_crowd(engine, harmful, reference)
    assert engine.stats().switches > 5


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pages_that_held_nan_serve_others(base, adapters, harmful, prefix_cache):
    """Log probabilities are equal to the bit to those of an engine that saw no harmful adapter."""

    def answers(bad_first):
        engine = make_engine(
            base, adapters | harmful, policy="unmerge_only", attention="torch", block_size=4,
            prefix_cache=prefix_cache, pages=260, max_requests=4,
        )  # fmt: skip
        if bad_first:
            _, bad = crowd(harmful)
            check_bad(run(engine, bad), bad)
            # Free pages hold what their last owners left there.
            assert not bool(engine.memory.storage.isfinite().all())
        return run(engine, crowd(harmful, logprobs=3)[0])

    assert_same(answers(bad_first=True), answers(bad_first=False))


def assert_same(found, wanted):
    for name, got in wanted.items():
        assert got.error is None
        assert (found[name].tokens, found[name].logprobs) == (got.tokens, got.logprobs)


@pytest.mark.parametrize("value", others_slow([torch.nan], [torch.nan, torch.inf]))
def test_memory_that_is_not_finite_at_the_start(base, adapters, value):
    def answers(poison):
        engine = make_engine(
            base, adapters, policy="valora", attention="torch", block_size=4, chunk=9, pages=1024
        )
        if poison:
            size = engine.memory.page.elements
            engine.memory.storage[: engine.memory.pages * size] = value
        return run(engine, crowd({}, logprobs=2)[0])

    assert_same(answers(poison=True), answers(poison=False))


def test_cancelled_and_preempted_in_the_middle(base, adapters, harmful, reference):
    """Pages of requests that ended before anybody read their outputs are reused as well."""
    engine = make_engine(
        base, adapters | harmful, policy="cost", chunk=5, block_size=4, pages=420, overlap=True
    )
    found = {}
    for turn in range(4):
        bad = [question(f"bad {turn} {n}", "always", tokens=9) for n in range(4)]
        one = question(f"good {turn}", ("attention", None)[turn % 2], tokens=9)
        add_requests(engine, *bad, one)
        for _ in range(2):
            collect(engine.step(), found)
        for item in bad:
            engine.cancel(item.id)
        finish(engine, found)
        check_answers(found, reference, one)
    assert_empty(engine)


DOMAINS = {
    "plates": DomainSpec("adapter-1", labels=["plate"], prompt="Find plates."),
    "scene": DomainSpec("adapter-2", "classification", ["a", "b", "c"], prompt="Which scene?"),
    "crowd": DomainSpec("adapter-1", "counting", ["0", "1", "2"], "visual_mean", "How many?"),
    "sure": DomainSpec("adapter-2", "yes_no", ["no", "yes"], "attention", "Is it?"),
    "caption": DomainSpec("adapter-2", None, [], prompt="Describe the image."),
}


@pytest.mark.parametrize(
    "policy", others_slow(["cost", "merge_only"], ["cost", "valora", "merge_only", "unmerge_only"])
)
def test_domains_of_others_and_of_its_own(tmp_path, policy):
    """Heads on a harmful adapter answer with an error, never with an empty list of boxes."""
    fine = make_bundle(tmp_path / "fine", "tiny", name="fine", domains=DOMAINS, seed=1)
    names = {f"bad {name}": spec for name, spec in DOMAINS.items()}
    options = {"targets": f"{LANGUAGE}|{MLP}", "strength": 1e15}
    bad = make_bundle(
        tmp_path / "bad", "tiny", name="bad", domains=names, seed=2,
        adapters={"adapter-1": {"rank": 4, **options}, "adapter-2": {"rank": 2, **options}},
    )  # fmt: skip

    def requests(*domains):
        return [
            Request(f"{name} {n}", model=name, images=[noise(60, 40 + n, n)], min_score=0.05,
                    sampling=SamplingParams(max_tokens=5, ignore_eos=True))
            for n in range(3)
            for name in domains
        ]  # fmt: skip

    alone, engine = (make_engine("tiny", policy=policy) for _ in range(2))
    for one, bundle in ((alone, fine), (engine, fine), (engine, bad)):
        one.load("bundle", bundle)
    wanted = run(alone, requests(*DOMAINS))
    own, theirs = requests(*DOMAINS), requests(*names)
    found = run(engine, [one for pair in zip(theirs, own, strict=True) for one in pair])
    for one in theirs:
        assert isinstance(found[one.id].error, NonFiniteError)
        assert found[one.id].last.head is None
    for one in own:
        got, expected = found[one.id], wanted[one.id]
        assert (got.error, got.tokens) == (None, expected.tokens)
        heads = [side.last.head for side in (got, expected) if side.last.head is not None]
        if expected.last.head is not None:
            logits = [torch.from_numpy(head.logits) for head in heads]
            torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert_empty(engine)


REFUSED = {
    "A of 1e30": larger(1e30, "lora_A"),
    "B of 1e30": larger(1e30),
    "a product of 1e40": lambda _, one: one * 1e20,
    "one row of 1e30": lambda name, one: one + 1e30 * torch.eye(*one.shape)
    if "lora_B" in name else one,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_no_input_survives_is_refused_at_load(base, tmp_path, dtype):
    engine = make_engine(base, dtype=dtype, policy="valora")
    for what, change in REFUSED.items():
        folder = make_adapter(tmp_path / what / "bad", base, seed=3, rank=4)
        rewritten(folder, change)
        with pytest.raises(AdapterError, match=r"bad"):
            engine.load("adapter", folder, "bad")
        assert len(engine.adapters) == 0 and len(engine.store.models()) == 1
