"""Built-in visual question answering: colours, presence, places, digits and signs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.schema import Answer, Task
from valora_data.sources.generic.scenes import color_of
from valora_data.sources.scenes.boards import Board, resized
from valora_data.sources.scenes.digits import LABELS as DIGITS
from valora_data.sources.scenes.digits import digit_layer
from valora_data.sources.scenes.objects import SIGNS, TARGETS, VEHICLES, traffic_sign
from valora_data.sources.scenes.scene_domain import Drawn, SceneDomain, chosen
from valora_data.sources.scenes.words import (
    CLEAR_COLORS,
    PLACES,
    TABLE_SHAPES,
    annotators,
    article,
    put,
)

if TYPE_CHECKING:
    import numpy as np

    from valora_data.schema import Split

STREET = {
    "vehicle": "vehicle", "vegetation": "plant", "bicycle": "bicycle", "person": "person",
    "traffic_sign": "traffic sign",
}  # fmt: skip
"""Class that is drawn to what questions call it."""
SIGN_FACTS = {
    "prohibition": ("circle", "red"), "no entry": ("circle", "red"), "warning": ("triangle", "red"),
    "give way": ("triangle", "red"), "mandatory": ("circle", "blue"),
    "priority": ("diamond", "yellow"), "information": ("square", "blue"),
}  # fmt: skip
"""Kind of sign to its outline and colour."""


def _asked(
    board: Board, rng: np.random.Generator, question: str, answer: str, others: tuple[str, ...]
) -> Drawn:
    wrong = tuple(other for other in others if other != answer)
    said = Answer(answers=annotators(rng, answer, wrong))
    return Drawn((board.image(rng),), said, question)


def _vehicle_color(rng: np.random.Generator, split: Split) -> Drawn:
    kind, color = chosen(rng, list(VEHICLES)), chosen(rng, CLEAR_COLORS)
    red, green, blue = (int(level) for level in color_of(color, rng) * 255)
    board = Board.photograph(rng, split)
    board.add(rng, VEHICLES[kind](rng, (red, green, blue)).layer())
    put(rng, board, chosen(rng, TABLE_SHAPES), chosen(rng, CLEAR_COLORS), length=(14, 20))
    return _asked(board, rng, f"what color is the {kind}?", color, CLEAR_COLORS)


def _street_presence(rng: np.random.Generator, split: Split) -> Drawn:
    board = Board.photograph(rng, split, "grass")
    kinds = [str(kind) for kind in rng.permutation(list(STREET))]
    shown = [
        kind
        for kind in kinds[: int(rng.integers(1, 3))]
        if board.add(rng, TARGETS[kind](rng).thing) is not None
    ]
    there = bool(shown) and rng.random() < 0.5
    asked = chosen(rng, shown if there else [kind for kind in kinds if kind not in shown])
    question = f"is there {article(STREET[asked])}?"
    return _asked(board, rng, question, "yes" if there else "no", ("yes", "no"))


def _place_content(rng: np.random.Generator, split: Split) -> Drawn:
    while True:
        board = Board.photograph(rng, split)
        places = [str(place) for place in rng.choice(list(PLACES), 3, replace=False)]
        shapes = [str(shape) for shape in rng.choice(TABLE_SHAPES, 3, replace=False)]
        found = [
            put(rng, board, shape, chosen(rng, CLEAR_COLORS), length=(18, 26), region=PLACES[place])
            for place, shape in zip(places, shapes, strict=True)
        ]
        if None not in found:
            break
    where = places[0] if places[0] == "center" else f"the {places[0]}"
    question = f"what is at {where}?"
    return _asked(board, rng, question.replace("at center", "in the center"), shapes[0],
                  tuple(shapes))  # fmt: skip


def _digit_facts(rng: np.random.Generator, split: Split) -> Drawn:
    board = Board.slate(rng)
    layer, digit = digit_layer(rng, split, rng.uniform(56, 88), (235, 235, 228))
    board.add(rng, layer)
    if rng.random() < 0.5:
        return _asked(board, rng, "which digit is this?", digit, DIGITS)
    limit = int(rng.integers(2, 8))
    answer = "yes" if int(digit) > limit else "no"
    return _asked(board, rng, f"is this digit more than {limit}?", answer, ("yes", "no"))


def _sign_facts(rng: np.random.Generator, split: Split) -> Drawn:
    kind = chosen(rng, list(SIGN_FACTS))
    board = Board.photograph(rng, split)
    board.add(rng, traffic_sign(rng, SIGNS.index(kind), rng.uniform(28, 56)).thing)
    if rng.random() < 0.5:
        board.add(rng, resized(TARGETS["vegetation"](rng).thing, 0.7))
    which = int(rng.integers(2))
    answer = SIGN_FACTS[kind][which]
    others = tuple(sorted({facts[which] for facts in SIGN_FACTS.values()}))
    question = ("what shape is the sign?", "what color is the sign?")[which]
    return _asked(board, rng, question, answer, others)


VQA = {
    "vehicle_color": SceneDomain(Task.VQA, "{}", _vehicle_color),
    "street_presence": SceneDomain(Task.VQA, "{}", _street_presence, ("no", "yes")),
    "place_content": SceneDomain(Task.VQA, "{}", _place_content),
    "digit_facts": SceneDomain(Task.VQA, "{}", _digit_facts),
    "sign_facts": SceneDomain(Task.VQA, "{}", _sign_facts),
}
"""Domains by name; every sample has its own question and ten annotators."""
