"""Drawn documents and albums: random facts, and questions that only the document answers."""

from collections import Counter

import numpy as np

from tests.bench.base_models.clips import domain_words_in
from valora_data.contract.base_model import base_folder
from valora_data.sources.formats.documents import RECORD_TOKENS, WORDINGS, draw_document


def test_a_linked_question_has_one_answer_and_does_not_name_the_letter():
    document = draw_document(np.random.default_rng(7), 29)
    links = document.links()
    told = {(fact.key, fact.attribute): fact.value for fact in document.facts}
    for link in links:
        letters = {key for (key, name), value in told.items()
                   if (name, value) == (link.given.attribute, link.given.value)}  # fmt: skip
        assert letters == {link.asked.key} and link.given != link.asked
        assert told[link.asked.key, link.asked.attribute] == link.value
        for wording in range(len(WORDINGS["color"])):
            asked = link.question(wording)
            assert link.given.value in asked and link.asked.attribute in asked
            assert str(link.asked.key) not in asked
    times = Counter((name, value) for (_, name), value in told.items())
    own = Counter(key for (key, name), value in told.items() if times[name, value] == 1)
    assert len(links) == len(set(links)) == 3 * sum(own.values()) > 0


def test_documents_are_made_of_the_base_models_tokens():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{base_folder('tiny')}/tokenizer.json")
    document = draw_document(np.random.default_rng(5), 100)
    assert len(tokenizer.encode(document.text).ids) <= 100 * RECORD_TOKENS
    for fact in document.facts:
        assert len(tokenizer.encode(fact.value).ids) <= 2
    assert not domain_words_in(document.text)
    assert not any(domain_words_in(word) for words in WORDINGS.values() for word in words)
