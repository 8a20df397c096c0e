import itertools
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tests.bench.base_models import pretrain
from tests.bench.base_models.clips import DOMAIN_WORDS
from tests.bench.base_models.data import (
    BUCKETS,
    CHUNK,
    LOGGED,
    SCENES,
    SPARE_SCENES,
    VISUAL_TOKENS,
    Chunk,
    SampleMaker,
    build_processor,
    domain_tokens,
)
from tests.bench.base_models.evaluation import TEST_SEEDS, Checkpoint, f1, is_right, questions
from tests.bench.base_models.pretrain import (
    GRID,
    Batch,
    PretrainingHead,
    assign,
    detection_loss,
    load,
)
from tests.bench.base_models.shapes import SHAPES
from tests.support.cases import others_slow
from valora_data.sources.generic.scenes import COLORS, PATTERNS

TINY = Path(__file__).parents[4] / "data/valora_data/tiny"
KINDS = [list(SHAPES), list(COLORS), PATTERNS]


@pytest.fixture(scope="module")
def tiny():
    return Checkpoint(TINY, torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer():
    return build_processor().tokenizer.backend_tokenizer


def test_the_checkpoint_is_small_and_plain(tiny):
    files = {path.name for path in TINY.iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) == 2
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl", ".py"))]
    assert (TINY / "model.safetensors").stat().st_size <= 16e6
    with safe_open(TINY / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert type(tiny.model).__name__ == "LlavaForConditionalGeneration"
    assert 3.5e6 <= sum(p.numel() for p in tiny.model.parameters()) <= 4.6e6
    shapes = {name: tuple(tensor.shape) for name, tensor in tiny.head.items()}
    assert shapes == {
        "objectness.weight": (1, 192),
        "objectness.bias": (1,),
        "box.weight": (4, 192),
        "box.bias": (4,),
    }
    assert set(PretrainingHead().state_dict()) == set(shapes)


def test_the_prompt_comes_before_the_image(tiny):
    parts = [{"type": "text", "text": "detect red star"}, {"type": "image"}]
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
        {"role": "user", "content": "why?"},
    ]
    text = tiny.processor.apply_chat_template(chat, add_generation_prompt=True)
    assert text == (
        "<s><|system|>be brief<|user|>detect red star<image><|assistant|>yes</s>"
        "<|user|>why?<|assistant|>"
    )
    wide = Image.fromarray(np.zeros((50, 120, 3), dtype=np.uint8))
    inputs = tiny.processor(text=text, images=[wide], return_tensors="pt")
    assert tuple(inputs["pixel_values"].shape) == (1, 3, 96, 96)
    image = inputs["input_ids"][0] == tiny.model.config.image_token_id
    assert int(image.sum()) == VISUAL_TOKENS == 64


def test_words_and_numbers_are_tokens(tiny):
    tokenizer = tiny.processor.tokenizer
    assert len(tokenizer) == 2048
    text = "<ref>license plate</ref><box>(120,80),(1000,340)</box>"
    pieces = tokenizer.tokenize(text)
    assert {"120", "80", "1000", "340", "<ref>", "</ref>", "<box>", "</box>"} <= set(pieces)
    for number in range(1001):
        assert len(tokenizer.encode(str(number), add_special_tokens=False)) == 1
    for word in ("license", "plate", "traffic", "sign", "vehicle", "vegetation", "bicycle"):
        assert len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1
    for sentence in (text, "where is the Straße? 日本 3.5 %", "  two  spaces\nand a line"):
        ids = tokenizer.encode(sentence, add_special_tokens=False)
        assert tokenizer.decode(ids) == sentence
    # What marks a box is part of an answer's text.
    box = "<ref>red star</ref><box>(10,20),(300,450)</box>"
    ids = tokenizer.encode(f"<s>{box}</s>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == box
    assert tokenizer.get_added_vocab() == build_processor().tokenizer.get_added_vocab()


def test_the_recipe_still_makes_the_shipped_tokenizer(tiny, tokenizer):
    shipped = tiny.processor.tokenizer.backend_tokenizer
    assert tokenizer.get_vocab() == shipped.get_vocab()


@pytest.mark.slow
def test_it_answers_held_out_questions(tiny):
    tuning = json.loads((TINY / "figures.json").read_text())["reached"]["threshold"]
    asked = questions("detect", 150, TEST_SEEDS)
    assert f1(tiny.detect(asked), asked, tuning) >= 0.80
    for task, least in (("yes_no", 0.88), ("color", 0.85), ("where", 0.85)):
        asked = questions(task, 70, TEST_SEEDS)
        right = [
            is_right(task, said, item.question.answer)
            for said, item in zip(tiny.write(asked), asked, strict=True)
        ]
        assert np.mean(right) >= least, task


@pytest.mark.parametrize("name", others_slow(["short", "album_1"], BUCKETS))
def test_samples_are_deterministic_and_name_no_domain(tokenizer, name):
    chunk, again = (SampleMaker(3, tokenizer).make(name) for _ in range(2))
    assert np.array_equal(chunk.pixels, again.pixels)
    assert np.array_equal(chunk.ids, again.ids)
    count = len(chunk.ids)
    assert count == CHUNK
    assert chunk.pick.shape == (count, BUCKETS[name].images)
    assert chunk.pick.max(initial=0) < len(chunk.pixels)
    image = tokenizer.token_to_id("<image>")
    assert ((chunk.ids == image).sum(1) == VISUAL_TOKENS * BUCKETS[name].images).all()
    assert not np.isin(chunk.ids, domain_tokens(tokenizer)).any()
    repeated = chunk.task == LOGGED.index("repeat")
    for ids in chunk.ids[~repeated]:
        text = tokenizer.decode(ids.tolist())
        assert not DOMAIN_WORDS & set(re.findall("[a-z]+", text))
    assert ((chunk.n_boxes >= 0) == (chunk.task == LOGGED.index("detect"))).all()
    joined = Chunk.join([chunk, again])
    assert np.array_equal(joined.pixels[joined.pick[count:]], again.pixels[again.pick])


@pytest.mark.parametrize("name", others_slow(["album_4"], [n for n in BUCKETS if n not in SCENES]))
def test_albums_answer_the_questions_that_follow_them(tokenizer, name):
    chunk = SampleMaker(4, tokenizer).make(name)
    assert chunk.pick.max() < len(chunk.pixels) == BUCKETS[name].images + SPARE_SCENES
    samples = zip(chunk.pick, chunk.ids, chunk.span, chunk.look, strict=True)
    for pick, ids, spans, looks in samples:
        assert len(set(pick.tolist())) == BUCKETS[name].images
        shown = [
            [kinds[int(i)] for kinds, i in zip(KINDS, thing[4:], strict=True)]
            for image in pick
            for thing in chunk.things[image, : chunk.n_things[image]]
        ]
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        head, *turns = re.split(r"<\|user\|>", text.replace("<pad>", ""))
        assert head.startswith("<s><|system|>")
        answers = [turn.split("<|assistant|>")[1].removesuffix("</s>") for turn in turns]
        told = [ids[start:end] for start, end in spans if end]
        assert [tokenizer.decode(one.tolist()) for one in told] == answers
        assert all(one[-1] == tokenizer.token_to_id("</s>") for one in told)
        assert (looks[len(turns) :] == 0).all()
        for turn, answer, (named, cell) in zip(turns, answers, looks, strict=False):
            question = turn.split("<|assistant|>")[0]
            (shape,) = re.findall(r"the ([a-z ]+?)(?: has which|\?)", question)
            (thing,) = [thing for thing in shown if thing[0] == shape]
            assert answer == thing[1 if "color" in question else 2]
            assert tokenizer.decode([ids[named]]).strip() == shape.split()[-1]
            image, place = divmod(int(cell) - 2, VISUAL_TOKENS)
            x, y = (place % 8 + 0.5) / 8, (place // 8 + 0.5) / 8
            boxes = [
                box[:4]
                for box in chunk.things[pick[image], : chunk.n_things[pick[image]]]
                if KINDS[0][int(box[4])] == shape
            ]
            assert [abs((box[0] + box[2]) / 2 - x) <= 1 / 16 + 0.006 for box in boxes] == [True]
            assert [abs((box[1] + box[3]) / 2 - y) <= 1 / 16 + 0.006 for box in boxes] == [True]
    batch = Batch(chunk, torch.device("cpu"))
    assert len(batch.asked) == int((chunk.span[..., 1] > 0).sum())
    assert set(batch.turn.tolist()) == set(batch.asked.tolist())


def test_cells_answer_for_the_boxes_they_hold():
    boxes = torch.tensor([[[0.0, 0.0, 0.1, 0.1], [0.3, 0.3, 0.7, 0.7], [0.0, 0.0, 1.0, 1.0]]])
    answers, which = assign(boxes, torch.tensor([2]))
    cells = {i: int(which[0, i]) for i in torch.nonzero(answers[0]).flatten().tolist()}
    # The small box's centre lies in cell 0; the middle of the large one is a corner of four.
    assert cells == {0: 0, 27: 1, 28: 1, 35: 1, 36: 1}
    none, _ = assign(boxes, torch.tensor([0]))
    assert not none.any()


def test_a_perfect_prediction_costs_nothing():
    boxes = torch.tensor([[[0.26, 0.26, 0.36, 0.36]]])
    answers, which = assign(boxes, torch.tensor([1]))
    cell = int(torch.nonzero(answers[0])[0])
    center = torch.tensor([(cell % GRID[1] + 0.5) / 8, (cell // GRID[1] + 0.5) / 8])
    codes = torch.zeros(1, 64, 4)
    codes[0, cell, :2] = (torch.tensor([0.31, 0.31]) - center) * 8
    codes[0, cell, 2:] = torch.tensor(0.8).log()
    logits = torch.where(answers, 20.0, -20.0)
    loss, _, _ = detection_loss(logits, codes, boxes, torch.tensor([1]))
    assert float(loss) < 1e-3
    assert int(which[0, cell]) == 0
    worse, _, _ = detection_loss(logits, codes + 0.3, boxes, torch.tensor([1]))
    assert float(worse) > 0.3


@pytest.mark.slow
def test_an_interrupted_training_continues(tmp_path, monkeypatch, capsys):
    """Steps, optimiser and weights go on; other options and damaged files are refused."""
    kept, out = tmp_path / "state" / "unfinished.pt", tmp_path / "out"
    legs = (
        pretrain.Leg(0.001, 32, 1e-3, 0, ("short",)),
        pretrain.Leg(0.15, 32, 1e-3, 1, ("album_1",), 0.5, retain=True),
    )
    monkeypatch.setattr(pretrain, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(pretrain, "FIRST_CHUNKS", 1)
    monkeypatch.setattr(pretrain, "READING_TOKENS", 2048)
    seconds = itertools.count()  # a clock by which every step takes two seconds
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)), sleep=time.sleep)
    monkeypatch.setattr(pretrain, "time", clock)
    states = []
    write = pretrain.Unfinished.write

    def interrupted(self, state):
        write(self, state)
        if state["leg"] == 1 and state["steps"] == 3:
            states.append(torch.load(self.path, weights_only=True))
            raise KeyboardInterrupt

    monkeypatch.setattr(pretrain.Unfinished, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(out, legs, 1, kept, TINY)
    assert not out.exists()  # nothing half-trained
    monkeypatch.setattr(pretrain.Unfinished, "write", write)
    with pytest.raises(SystemExit, match="other options: give those again"):
        pretrain.train(out, legs[1:], 1, kept, TINY)
    loaded = []
    load_state = pretrain.Retention.load_state_dict

    def noted(self, state, *more):
        loaded.append(state)
        return load_state(self, state, *more)

    monkeypatch.setattr(pretrain.Retention, "load_state_dict", noted)
    pretrain.train(out, legs, 1, kept, TINY)
    assert "continuing leg 2 after" in capsys.readouterr().out
    known = states[0]["retention"]
    assert all(torch.equal(part, known[name]) for name, part in loaded[-1].items())
    name = "layers.0.self_attn.q_proj.weight"
    started = load(TINY)[0].model.language_model.state_dict()[name]
    assert torch.equal(known[f"language.{name}"], started)
    assert not torch.equal(states[0]["model"][f"model.language_model.{name}"], started)
    assert not kept.exists()
    trained = json.loads((out / "figures.json").read_text())["training"]
    own = json.loads((TINY / "figures.json").read_text())["training"]
    assert trained[: len(own)] == own
    assert [leg["minutes"] for leg in trained[len(own) :]] == [0.001, 0.15]
    assert [leg["steps"] for leg in trained[len(own) :]] == [0, 4]
    assert trained[-1]["command"].endswith("--buckets album_1 --reading 0.5 --retain --start")
    assert sorted(path.name for path in out.iterdir()) == sorted(
        path.name for path in TINY.iterdir() if path.name != "README.md"
    )
    Checkpoint(out, torch.device("cpu"))
    kept.parent.mkdir(exist_ok=True)
    kept.write_bytes(b"nothing")
    with pytest.raises(SystemExit, match="is damaged"):
        pretrain.train(out, legs, 1, kept, TINY)
