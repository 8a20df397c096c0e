"""Text as it comes: what is given out adds up to what the tokenizer makes of all tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from valora_data.contract.base_model import base_folder
from valora_serve.model.detokenizer import Detokenizer
from valora_serve.tokens import text_and_bytes

WORDS = ["▁", "▁the", "▁cat", "s", "▁sat", ".", "a", "▁a", "fé", "▁\u4f60", "!", "ca", "t"]
SPECIAL = ["<s>", "</s>", "<pad>"]


def wrapped(raw):
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def metaspace():
    """As Llama's: spaces are part of words, the first is dropped, unknown bytes are tokens."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    known = {piece: i for i, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(known, [], byte_fallback=True, unk_token="<pad>"))
    raw.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return wrapped(raw)


def byte_level():
    """As Qwen's: every token is bytes, some of them parts of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return wrapped(raw)


TOKENIZERS = {
    "metaspace": metaspace(),
    "bytes": byte_level(),
    "tiny": PreTrainedTokenizerFast.from_pretrained(base_folder("tiny")),
}


def pushed(tokenizer, tokens, stop=(), min_tokens=0):
    """The pieces, the last one from the flush, and the detokenizer."""
    text = Detokenizer(tokenizer, stop, min_tokens)
    pieces = []
    for token in tokens:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return [*pieces, text.flush()], text


def whole(tokenizer, tokens):
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_pieces_add_up(name, data):
    """And are those of the tokenizers library's own stream."""
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    pieces, _ = pushed(tokenizer, tokens)
    if name != "metaspace":  # which takes bytes that are no characters back
        stream = decoders.DecodeStream(skip_special_tokens=True)
        said = [stream.step(tokenizer.backend_tokenizer, token) or "" for token in tokens]
        assert pieces[:-1] == said
        assert "".join(pieces) == whole(tokenizer, tokens)


PIECES = [[0], [1], *([n] for n in range(259, 259 + len(WORDS)))]


@given(
    parts=st.lists(
        st.sampled_from(PIECES)
        | st.characters(codec="utf-8").map(lambda c: [3 + b for b in c.encode()]),
        max_size=20,
    )
)
@settings(max_examples=30, deadline=None)
def test_pieces_add_up_with_bytes_among_words(parts):
    """Bytes that are no characters are left out: such a tokenizer then takes back what it said."""
    tokenizer = TOKENIZERS["metaspace"]
    tokens = [token for part in parts for token in part]
    pieces, _ = pushed(tokenizer, tokens)
    assert "".join(pieces) == whole(tokenizer, tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=30, deadline=None)
def test_characters_are_never_given_in_parts(name, text):
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces, detokenizer = pushed(tokenizer, tokens)
    said = whole(tokenizer, tokens)
    assert "".join(pieces) == said
    assert detokenizer.chars == len(said)
    raw = b"".join(text_and_bytes(tokenizer, token)[1] or b"" for token in tokens)
    if "\ufffd" not in said:
        assert raw in (said.encode(), f" {said}".encode())  # the space before the first word
        assert not any("\ufffd" in piece for piece in pieces)


def _tokens(text):
    return list(TOKENIZERS["bytes"](text, add_special_tokens=False)["input_ids"])


LETTERS = ["a", "b", "aa", "ab", "ba", "aab", "bab", "aaaa", "abaab"]
OF_LETTERS = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(LETTERS)}, "a"))
OF_LETTERS.decoder = decoders.Fuse()


@given(
    tokens=st.lists(st.integers(0, len(LETTERS) - 1), max_size=16),
    stop=st.lists(st.text("ab", min_size=1, max_size=6), max_size=3),
)
@settings(max_examples=80, deadline=None)
def test_the_answer_ends_before_the_first_stop_text(tokens, stop):
    """The one that is complete first, the longest of them, however the text is divided."""
    text = "".join(LETTERS[token] for token in tokens)
    ends = [text.find(one) + len(one) for one in stop if one in text]
    said = text
    if ends:
        seen = text[: min(ends)]
        said = seen[: min(len(seen) - len(one) for one in stop if seen.endswith(one))]
    pieces, detokenizer = pushed(wrapped(OF_LETTERS), tokens, stop)
    assert "".join(pieces) == said
    assert detokenizer.stopped == bool(ends)
    for count in range(1, len(pieces) - bool(ends)):  # nothing waits but what may become one
        held = "".join(LETTERS[token] for token in tokens[:count])
        held = held.removeprefix("".join(pieces[:count]))
        assert not held or any(one.startswith(held) for one in stop)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_what_never_becomes_text_is_not_decoded_for_ever(name, bad):
    """Special tokens, bytes that begin no character, and beginnings of characters, again and again.

    The text around them is that of the whole, and few tokens are decoded at a time.
    """
    tokenizer = TOKENIZERS[name]
    byte = {"metaspace": lambda b: 3 + b}.get(name) or (
        lambda b: next(
            t for t in range(len(tokenizer)) if text_and_bytes(tokenizer, t)[1] == bytes([b])
        )
    )
    again = [[tokenizer.eos_token_id], [byte(0x80)], [byte(0xE2), byte(0x82)]][bad]
    word = [byte(b) for b in b"cat"] if name != "metaspace" else [tokenizer.get_vocab()["▁cat"]]
    longest = 0

    class Counting:
        def decode(self, tokens, **options):
            nonlocal longest
            longest = max(longest, len(tokens))
            return str(tokenizer.decode(tokens, **options))

    tokens = [*word, *again * 200, *word, *word]
    pieces, text = pushed(Counting(), tokens)
    said, expected = "".join(pieces), whole(tokenizer, tokens)
    assert longest < 100
    assert said.startswith("cat") and said.endswith(expected[-6:].strip())
    assert said.count("\ufffd") == expected.count("\ufffd")
    assert text.chars == len(said)


def test_no_stop_text_is_looked_for_before_min_tokens():
    tokenizer = TOKENIZERS["bytes"]
    tokens = _tokens("ab ab ab")
    assert "".join(pushed(tokenizer, tokens, ["ab"])[0]) == ""
    assert "".join(pushed(tokenizer, tokens, ["ab"], 2)[0]) == "ab "
    assert "".join(pushed(tokenizer, tokens, ["ab"], 7)[0]) == "ab ab ab"
