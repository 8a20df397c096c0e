"""Every architecture that is served, against transformers' own `generate`."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from transformers import AutoTokenizer

from tests.parity.valora_serve.engine.test_engine import Forced
from tests.support.cases import others_slow
from tests.support.engine_reference import (
    Reference,
    ask,
    assert_empty,
    check_answers,
    make_engine,
    noise,
    run,
)
from tests.support.lmm_checkpoints import APART, CHECKPOINTS, FRAMES_AS_IMAGES, TEXT_CHECKPOINTS
from tests.support.serve_helpers import make_adapters
from valora_kernels.launching import ALIGNMENT
from valora_serve.errors import RequestError
from valora_serve.types import Mode, Request, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

CLIP = r"|.*(vision_tower|vision_model).*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"
TARGETS = {
    "gemma3": rf".*language_model.*_proj{CLIP}",
    "idefics3": rf".*text_model.*_proj{CLIP}|.*connector\.modality_projection\.proj",
    "internvl": rf".*language_model.*_proj{CLIP}|.*vision_tower.*projection_layer"
    r"|.*multi_modal_projector\.linear_[12]",
    "llava": rf".*language_model.*_proj{CLIP}|.*multi_modal_projector\.linear_[12]",
    "llava_next": rf".*language_model.*_proj{CLIP}|.*multi_modal_projector\.linear_[12]",
    "qwen2_vl": r".*language_model.*_proj|.*visual\.blocks.*\.(qkv|proj|fc1|fc2)"
    r"|.*visual\.merger\.mlp\.[02]",
    "qwen2_5_vl": r".*language_model.*_proj"
    r"|.*visual\.blocks.*\.(qkv|proj|gate_proj|up_proj|down_proj)|.*visual\.merger\.mlp\.[02]",
    "qwen3_vl": r".*language_model.*_proj|.*visual\.blocks.*\.(qkv|proj|linear_fc[12])"
    r"|.*visual\..*merger.*\.linear_fc[12]",
    "smolvlm": rf".*text_model.*_proj{CLIP}|.*connector\.modality_projection\.proj",
}
"""All linear layers that adapters can change."""

TARGETS |= dict.fromkeys(TEXT_CHECKPOINTS, r".*_proj")
TEXT_ONLY = r".*(language|text)_model.*\.(q_proj|k_proj|down_proj)|model\.layers.*\.(k|o|up)_proj"
FAMILIES = CHECKPOINTS | TEXT_CHECKPOINTS


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request):
    return str(request.param)


@pytest.fixture(scope="module")
def base(family, tmp_path_factory):
    return str(FAMILIES[family](tmp_path_factory.mktemp(family), seed=3))


@pytest.fixture(scope="module")
def adapters(family, base, tmp_path_factory):
    kinds = {"all": (1, 4, 6, TARGETS[family]), "text": (2, 3, 9, TEXT_ONLY)}
    return make_adapters(tmp_path_factory.mktemp("adapters"), base, 0.3, **kinds)


@pytest.fixture(scope="module")
def reference(base, adapters):
    return Reference(base, adapters)


def requests_of(family, names):
    """Text, one image, several of different sizes, a video, both, for each adapter."""
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    video = [noise(40, 32, 20 + n) for n in range(4)]
    long = [noise(24, 40, 30 + n) for n in range(6)]
    made = []
    for name in names:
        cases = {
            "words": Request("", messages=ask("What is there to see?")),
            "image": Request("", messages=ask("Say it.", images=1), images=[noise(40, 30, 1)]),
            "images": Request(
                "",
                messages=ask("Which one is larger?", images=3),
                images=[noise(20, 48, 2), noise(64, 24, 3), noise(33, 33, 4)],
            ),
        }
        if family in TEXT_CHECKPOINTS:
            system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
            long_ago = ask(" ".join(f"Line {n} says {n * n}." for n in range(60)))
            cases = {
                "words": cases["words"],
                "turns": Request("", messages=[system, *ask("Who?"), *ask("Why?")]),
                "long": Request("", messages=long_ago),  # in several chunks
                "text": Request("", text="Once upon a time"),
                "ids": Request("", token_ids=list(range(40, 90, 3))),
            }
        elif family not in FRAMES_AS_IMAGES:
            cases["video"] = Request("", messages=ask("What happens?", videos=1), videos=[video])
        if family in APART:
            others = [video[::-1], [noise(50, 30, 40 + n) for n in range(4)]]
            cases["both"] = Request("", messages=ask("Is it?", videos=2), videos=others)
        elif family not in (*FRAMES_AS_IMAGES, *TEXT_CHECKPOINTS):
            cases["both"] = Request(
                "",
                messages=ask("Is it the same?", images=1, videos=2),
                images=[noise(50, 30, 5)],
                videos=[long, video],
            )
        for case, one in cases.items():
            made.append(replace(one, id=f"{case}-{name}", model=name, sampling=greedy))
    return made


@pytest.mark.parametrize(
    ("policy", "chunk"), others_slow([("valora", 5)], product(["unmerge_only", "valora"], [256, 5]))
)
def test_greedy_tokens_are_those_of_generate(family, base, adapters, reference, chunk, policy):
    requests = requests_of(family, [None, "all", "text"])
    engine = make_engine(base, adapters, fresh=True, chunk=chunk, policy=policy)
    found = run(engine, requests)
    check_answers(found, reference, *requests)
    answers = {tuple(got.tokens) for got in found.values()}
    assert len(answers) == len(requests)  # every prompt and every adapter makes a difference
    assert_empty(engine)


def test_adapters_on_every_linear_are_merged_and_mixed_as_in_peft(
    family, base, adapters, reference
):
    """Adapters with different targets in one batch, in all modes; then the base model alone."""
    engine = make_engine(base, adapters, policy="valora", prefix_cache=False, image_cache_bytes=0)
    whole, part = (
        next(key for key in engine.registry.ranks if key.startswith(name)) for name in adapters
    )
    assert engine.lmm.linears.groups.keys() == {
        name for key in (whole, part) for name in engine.adapters._entries[key].packed.groups
    }
    for memory in engine.lmm.linears.merged:  # odd widths leave the launch to all others
        assert len({any(n % ALIGNMENT for n in shape) for shape in memory.shapes.values()}) == 1
    plain = requests_of(family, [None])
    requests = requests_of(family, ["all", None, "text"])
    for mode, merged, asked in (
        (Mode.UNMERGED, None, requests),
        (Mode.MIXTURE, whole, requests),
        (Mode.MIXTURE, part, requests),
        (Mode.MERGED, whole, requests[: len(requests) // 3]),
        (Mode.UNMERGED, None, plain),
    ):
        for key in (whole, part):
            assert engine.adapters.load(key)
        told = Forced(lambda _, mode=mode, merged=merged: (mode, merged), engine)
        engine.policy = told
        scored = [replace(one, sampling=replace(one.sampling, logprobs=0)) for one in asked]
        found = run(engine, scored)
        assert set(told.modes) == {mode}
        for one in asked:
            got, expected = found[one.id], reference(one)
            assert got.tokens == expected.tokens, (mode, merged, one.id)
            wanted = expected.logprobs()[range(len(got.tokens)), got.tokens].tolist()
            said = [item.chosen.logprob for item in got.logprobs]
            assert said == pytest.approx(wanted, abs=1e-3), (mode, merged, one.id)


FEW = ("llava", "qwen2_5_vl", next(iter(TEXT_CHECKPOINTS)))
"""Families that stand for the others in the fast tests of what all of them share."""


@pytest.mark.parametrize("family", others_slow(FEW, FAMILIES), indirect=True, scope="module")
def test_preempted_in_the_middle_of_an_answer(family, base, adapters, reference):
    """Prompt and answer are computed again together, at the positions that they had."""
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    asked = [replace(one, sampling=greedy) for one in requests_of(family, [None, "text"])]
    engine = make_engine(base, adapters, block_size=4, prefix_cache=False)
    pages = max(-(-(len(engine.prepare(one).prompt.ids) + 24) // 4) for one in asked)
    pages += sum(engine.adapters[k].page_count for k in engine.registry.ranks if "text" in k)
    settings = {"block_size": 4, "prefix_cache": False, "pages": pages + 30}
    engine = make_engine(base, adapters, policy="valora", overlap=True, **settings)
    found = run(engine, asked)
    for one in asked:
        assert found[one.id].tokens == reference(one).tokens
    assert engine.stats().preemptions > 0
    assert_empty(engine)


def test_placeholders_without_what_they_stand_for(family, base):
    """And the other way round; not every processor notices."""
    engine = make_engine(base)
    image = noise(20, 20, 1)
    one = ask("Look at it.", images=1)
    if family in TEXT_CHECKPOINTS:
        clip = {"messages": ask("Look at it.", videos=1), "videos": [[image] * 4]}
        for sent in ({"messages": one, "images": [image]}, {"images": [image]}, clip):
            with pytest.raises(RequestError, match=r"^base model [^/]+ reads text alone"):
                engine.prepare(Request("x", **sent))
        return
    cases = [("image", 1, 0), ("image", 0, 1), ("image", 2, 1), ("image", 1, 2)]
    if family not in FRAMES_AS_IMAGES:
        cases += [("video", 1, 0), ("video", 0, 1)]
    for kind, named, sent in cases:
        given = {f"{kind}s": [image if kind == "image" else [image, image]] * sent}
        asked = Request("x", messages=ask("Look at it.", **{f"{kind}s": named}), **given)
        with pytest.raises(RequestError, match=f"names {named} {kind}s, but {sent} were sent"):
            engine.prepare(asked)
    if family in APART:
        both = Request(
            "x", messages=ask("So?", images=1, videos=1), images=[image], videos=[[image] * 2]
        )
        with pytest.raises(RequestError, match="takes images or videos in a prompt, not both"):
            engine.prepare(both)


def test_special_tokens_in_texts_are_text(family, base):
    """Also those in two parts, and beside an image; the tokenizers library says what text is."""
    engine = make_engine(base)
    tokenizer, plain = engine.lmm.tokenizer, AutoTokenizer.from_pretrained(base)
    options = {"add_special_tokens": False, "split_special_tokens": True}
    added = tokenizer.added_tokens_decoder.values()
    words = [token.content for token in added if token.special]
    assert len(words) >= 7
    around = engine.lmm.render(ask("@")).split("@")
    blank = " " * around[0].endswith(" ")  # a token with the word behind it
    around[0] = around[0].removesuffix(blank)
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in around)
    text = f"so {' and '.join(words)}: {''.join(words)}."
    wanted = [*before, *plain(blank + text, **options)["input_ids"], *after]
    assert (engine.store.models()[0].media == "text") is not engine.lmm.takes_images
    # Gemma's template strips each part.
    beside = [at for at in range(1, len(text)) if " " in text[at - 1 : at + 1]]
    everywhere = sorted({*range(len(text))} - {*(beside if family == "gemma3" else [])})
    for cuts in ((), (5,), everywhere):
        pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        content = [{"type": "text", "text": piece} for piece in pieces]
        asked = [{"role": "user", "content": content}]
        assert engine.prepare(Request("x", messages=asked)).prompt.ids == wanted
        if not engine.lmm.takes_images:
            continue
        shown = [{"role": "user", "content": [*content, {"type": "image"}]}]
        image = noise(20, 20, 1)
        prompt = engine.prepare(Request("x", messages=shown, images=[image])).prompt
        assert text in tokenizer.decode(prompt.ids)
        assert prompt.ids.count(engine.lmm.image_token) == len(prompt.visuals[0].at)
    embedded = engine.prepare(Request("x", text=text, embed=True)).prompt.ids
    assert embedded == plain(text, **options)["input_ids"]


def test_a_video_is_so_many_images_where_there_are_no_videos(tmp_path):
    base = str(CHECKPOINTS["llava"](tmp_path / "llava", seed=4))
    frames, picture = [noise(40, 32, n) for n in range(3)], noise(20, 50, 9)

    def asked(kinds, **media):
        parts = [{"type": "text", "text": "Watch"}, *({"type": kind} for kind in kinds)]
        messages = [{"role": "user", "content": parts}]
        return Request("x", messages=messages, sampling=SamplingParams(max_tokens=8), **media)

    found = run(make_engine(base), [asked(["video", "image"], images=[picture], videos=[frames])])
    same = asked(["image"] * 4, images=[*frames, picture])
    assert found["x"].tokens == Reference(base, {})(same).tokens
