"""Numbers with their words, and the first words of errors."""

import pytest

from valora_data.faults import FaultKind, Faults
from valora_data.wording import agreeing, first_line, plural


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        (1, "domain", "1 domain"),
        (0, "domain", "0 domains"),
        (3, "LoRA adapter", "3 LoRA adapters"),
        (1, "LoRA adapter", "1 LoRA adapter"),
        (1, "box|boxes", "1 box"),
        (2, "box|boxes", "2 boxes"),
        (1, "class|classes has|have no samples", "1 class has no samples"),
        (5, "class|classes has|have no samples", "5 classes have no samples"),
    ],
)
def test_words_agree_with_their_number(number: int, words: str, said: str) -> None:
    assert plural(number, words) == said


def test_a_rate_of_one_is_one() -> None:
    assert agreeing(1.0, "request|requests") == "request"
    assert agreeing(0.5, "request|requests") == "requests"


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_of_fault_is_a_sentence_of_one_and_of_several(kind: FaultKind) -> None:
    one, two = plural(1, kind.what), plural(2, kind.what)
    assert one != two
    assert "|" not in one + two
    several = {"are", "have", "lie", "lack", "differ", "belong", "occur", "their"}
    singular = {"is", "has", "lies", "lacks", "differs", "belongs", "occurs", "its"}
    assert not several & set(one.split()) - {"are"} | ({"are"} & set(one.split()[2:4]))
    assert not singular & set(two.split()) - {"is"}
    assert " cannot " in one or singular & set(one.split()[2:4])


def test_a_single_fault_is_told_in_the_singular() -> None:
    faults = Faults("folder", tolerance=1.0, total=1)
    faults.add(FaultKind.BOX_OUTSIDE, "a.png", "box 1 of a.png lies outside")
    said = faults.summary()
    assert said is not None
    assert "1 of 1 image skipped in whole or in part: 1 box lies outside its image" in said


@pytest.mark.parametrize(
    ("said", "first"), [("one\ntwo", "one"), ("\n  late \nmore", "late"), ("", "ValueError")]
)
def test_the_first_line_of_an_error(said: str, first: str) -> None:
    assert first_line(ValueError(said)) == first
