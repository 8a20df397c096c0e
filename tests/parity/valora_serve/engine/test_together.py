"""Several domains about one image: each answers as a request of its own does."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import valora_serve.demo
from tests.support.cases import crossed, others_slow
from tests.support.engine_reference import assert_empty, finish, make_engine, noise, steps
from tests.support.serve_helpers import DomainSpec, make_bundle
from valora_serve.engine.sequence import Prepared
from valora_serve.errors import CancelledRequestError, DeadlineError
from valora_serve.server.loading.golden import read_examples
from valora_serve.types import Finish, Request, SamplingParams

COMMON = "detect thing"
DOMAINS = {
    "plates": DomainSpec("adapter-1", labels=["plate"], prompt=COMMON),
    "traffic": DomainSpec("adapter-1", labels=["car", "bus", "bike"], prompt=COMMON),
    "signs": DomainSpec("adapter-1", labels=["stop"], prompt="Find the signs."),
    "place": DomainSpec("adapter-1", "classification", ["here", "there"], "grid", COMMON),
    "crowd": DomainSpec("adapter-1", "counting", ["0", "1", "2"], "visual_mean", "How many?"),
    "scene": DomainSpec("adapter-1", "classification", ["wood", "street"], prompt="Which scene?"),
    "move": DomainSpec("adapter-1", "classification", ["sit", "run"], prompt=COMMON),
    "rest": DomainSpec("adapter-1", "yes_no", ["no", "yes"], prompt=COMMON),
    "caption": DomainSpec("adapter-1", None, [], prompt="Describe the image."),
    "boats": DomainSpec("adapter-2", labels=["boat"], prompt=COMMON),
    "bare": DomainSpec(None, labels=["tree"], prompt=COMMON),
    "sky": DomainSpec(None, "classification", ["clear", "grey"], "last", "Which sky?"),
}
IMAGE_FIRST = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endfor %}<|assistant|>"
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles") / "look"
    return make_bundle(folder, "tiny", name="look", domains=DOMAINS, seed=3)


def engine_of(bundle, *, image_first=False, **options):
    engine = make_engine("tiny", **options)
    if image_first:
        engine.lmm.processor = copy.copy(engine.lmm.processor)
        engine.lmm.processor.chat_template = IMAGE_FIRST
    engine.load("bundle", bundle)
    return engine


def requests_of(names, image, tag=""):
    sampling = SamplingParams(max_tokens=6)
    return [
        Request(f"{name}{tag}", model=name, images=[image], min_score=0.05, sampling=sampling)
        for name in names
    ]


def begin(engine, asked):
    prepared = engine.prepare_all(asked)
    assert not engine.add_all([one for one in prepared.values() if isinstance(one, Prepared)])


def together(engine, asked):
    begin(engine, asked)
    return finish(engine)


def assert_alike(found, wanted):
    assert found.error is None
    assert (found.finish, found.tokens, found.text) == (wanted.finish, wanted.tokens, wanted.text)
    assert found.last.usage.prompt == wanted.last.usage.prompt
    if wanted.finish is Finish.HEAD:
        own, alone = found.last.head.logits, wanted.last.head.logits
        assert own.shape == alone.shape
        assert abs(own - alone).max() < 1e-4


SETTINGS = [
    {"policy": "unmerge_only", "overlap": True, "chunk": 19},
    {"policy": "merge_only", "overlap": False, "block_size": 8},
    {"policy": "valora", "overlap": True, "max_requests": 2},
    {"policy": "cost", "overlap": False, "prefix_cache": False},
]


@pytest.mark.parametrize(("options", "image_first"), crossed(SETTINGS, [True, False]))
def test_any_set_of_domains_answers_as_alone(bundle, options, image_first):
    alone = engine_of(bundle, image_first=image_first, policy="unmerge_only", prefix_cache=False)
    engine = engine_of(bundle, image_first=image_first, **options)
    pictures = [noise(50, 70, 1), noise(96, 96, 2)]
    wanted = {}

    names = st.lists(st.sampled_from(list(DOMAINS)), min_size=1, max_size=9, unique=True)

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(names, st.integers(0, 1)), min_size=1, max_size=2))
    def check(looks):
        found = {}
        for n, (names, at) in enumerate(looks):
            begin(engine, requests_of(names, pictures[at], f" {n}"))
            steps(engine, 1, found)
        finish(engine, found)
        for n, (names, at) in enumerate(looks):
            for name in names:
                if (name, at) not in wanted:
                    asked = requests_of([name], pictures[at])
                    wanted[name, at] = together(alone, asked)[name]
                assert_alike(found[f"{name} {n}"], wanted[name, at])

    check()


def test_domains_of_one_prompt_and_adapter_share_a_pass(bundle):
    engine = engine_of(bundle)
    names = ["plates", "traffic", "signs", "place", "boats", "bare", "move", "rest"]
    together(engine, requests_of(names, noise(80, 80, 3)))
    stats = engine.stats()
    # plates, traffic and place; move and rest; signs, boats and bare alone
    assert stats.shared_passes == 3
    assert stats.image_queries == 5
    assert engine.images.encoded == 1


def test_what_reads_the_last_token_computes_the_image_once(bundle):
    engine = engine_of(bundle, image_first=True, block_size=4)
    names = ["scene", "caption", "move", "rest", "plates", "traffic", "signs", "crowd"]
    together(engine, requests_of(names, noise(80, 80, 4)))
    stats = engine.stats()
    assert stats.shared_passes == 4  # rest on move; the four that read the image on one pass
    whole, image = 2 + 64 + 12, 2 + 64
    assert stats.prompt_tokens < whole + image + 4 * 20


def test_one_that_carries_others_may_end_first(bundle):
    engine = engine_of(bundle, chunk=16, policy="unmerge_only")
    names = ["plates", "traffic", "place"]
    plates, traffic, place = requests_of(names, noise(60, 60, 5))
    begin(engine, [plates, traffic, replace(place, deadline=600.0)])
    found = steps(engine)
    engine.cancel("plates")
    assert engine.requests.find("traffic").latency_limit <= 600  # as place's, which it carries
    finish(engine, found)
    assert isinstance(found["plates"].error, CancelledRequestError)
    wanted = together(engine_of(bundle), requests_of(names, noise(60, 60, 5)))
    for name in names[1:]:
        assert_alike(found[name], wanted[name])


def test_riders_keep_deadlines_and_errors_of_their_own(bundle):
    engine = engine_of(bundle, policy="unmerge_only")
    asked = requests_of(["plates", "traffic", "place"], noise(60, 60, 6))
    late = Request("late", model="traffic", images=asked[0].images, deadline=1e-9)
    unknown = Request("unknown", model="nothing", images=asked[0].images)
    prepared = engine.prepare_all([*asked, late, unknown])
    assert not isinstance(prepared.pop("unknown"), Prepared)
    engine.add_all([one for one in prepared.values() if isinstance(one, Prepared)])
    found = finish(engine)
    assert isinstance(found["late"].error, DeadlineError)
    assert all(found[one.id].error is None for one in asked)
    for one in asked[::2]:
        engine.add(engine.prepare(one))
    engine.fail_all("stop")
    assert_empty(engine)


@pytest.mark.parametrize(
    "policy", others_slow(["merge_only", "cost"], ["unmerge_only", "merge_only", "cost"])
)
def test_the_demo_reproduces_its_golden_examples_with_all_domains_at_once(policy):
    folder = Path(valora_serve.demo.__file__).parent / "bundles" / "detection"
    engine = make_engine("tiny", policy=policy)
    engine.load("bundle", folder)
    names = [model.name for model in engine.store.models() if model.kind == "domain"]
    for example in read_examples(folder):
        with Image.open(example.files[0]) as file:
            image = file.convert("RGB")
        found = together(engine, requests_of(names, image))
        head = found[example.domain].last.head
        assert head.matches(head.golden(), example.expected, example.threshold)
        assert all(found[name].error is None for name in names)
