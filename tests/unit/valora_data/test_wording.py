"""Numbers with their words, and the first words of errors."""

import pytest

from valora_data.faults import FaultKind
from valora_data.wording import agreeing, first_line, plural


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        (1, "domain", "1 domain"), (0, "domain", "0 domains"),
        (3, "LoRA adapter", "3 LoRA adapters"), (1, "LoRA adapter", "1 LoRA adapter"),
        (1, "box|boxes", "1 box"), (2, "box|boxes", "2 boxes"),
        (1, "class|classes has|have no samples", "1 class has no samples"),
        (5, "class|classes has|have no samples", "5 classes have no samples"),
    ],
)  # fmt: skip
def test_words_agree_with_their_number(number, words, said):
    assert plural(number, words) == said
    assert agreeing(1.0, "request|requests") == "request"


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_of_fault_is_a_sentence_of_one_and_of_several(kind):
    one, two = plural(1, kind.what), plural(2, kind.what)
    assert one != two and "|" not in one + two
    verbs = {"is": "are", "has": "have", "lies": "lie", "lacks": "lack", "differs": "differ",
             "belongs": "belong", "occurs": "occur", "cannot": "cannot"}  # fmt: skip
    (verb,) = set(one.split()[2:4]) & {*verbs}
    assert verbs[verb] in two.split()


@pytest.mark.parametrize(
    ("said", "first"), [("one\ntwo", "one"), ("\n  late \nmore", "late"), ("", "ValueError")]
)
def test_the_first_line_of_an_error(said, first):
    assert first_line(ValueError(said)) == first
