"""Files that cannot be trusted: whatever lies in their place, reading ends within its limits."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from valora_data.contract import files
from valora_data.contract.files import (
    UnreadableError,
    expanded,
    parse_json,
    read_bytes,
    read_json,
    read_safetensors,
    shown,
)


def test_home_folders_that_there_are_and_are_not(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/model") == tmp_path / "model"
    assert expanded("~no-such-user/model") == Path("~no-such-user/model")
    assert expanded(Path("model~")) == Path("model~")


def pipe(place):
    os.mkfifo(place)


def written_pipe(place):
    os.mkfifo(place)
    os.open(place, os.O_RDWR)  # stays open, so that somebody could be writing


def sparse(place):
    with place.open("wb") as file:
        file.truncate(10 << 30)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda place: None, "cannot be read (No such file"),
        (lambda place: place.mkdir(), "is no regular file"),
        (pipe, "is no regular file"),
        (written_pipe, "is no regular file"),
        (lambda place: place.symlink_to("/dev/zero"), "is no regular file"),
        (lambda place: place.symlink_to("/dev/null"), "is no regular file"),
        (lambda place: place.symlink_to(place), "cannot be read ("),
        (sparse, "has 10737418240 bytes, more than 1000"),
        (lambda place: place.write_bytes(b"x" * 1001), "has 1001 bytes, more than 1000"),
    ],
)
def test_what_is_no_small_regular_file(tmp_path, make, reason):
    place = tmp_path / "file"
    make(place)
    with pytest.raises(UnreadableError) as caught:
        read_bytes(place, 1000)
    assert caught.value.reason.startswith(reason)
    assert str(place) in str(caught.value)


def test_names_that_no_file_can_have(tmp_path):
    for name in ("a\0b", "x" * 300):
        with pytest.raises(UnreadableError, match="cannot be read"):
            read_bytes(tmp_path / name, 10)


def test_no_descriptor_is_left_open(tmp_path):
    before = len([*Path("/proc/self/fd").iterdir()])
    for number, make in enumerate((pipe, lambda place: place.mkdir(), sparse)):
        make(tmp_path / str(number))
        for _ in range(20):
            with pytest.raises(UnreadableError):
                read_bytes(tmp_path / str(number), 1000)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_json_is_what_json_says(tmp_path):
    value = {
        "a": [1, 2.5, None, True, "ü ] } \" \\\\ [[[", {"": "\\"}], "[[[[": {}, "n": 10**17
    }  # fmt: skip
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=3)):
        assert parse_json(text) == parse_json(text.encode()) == value
        (tmp_path / "file").write_text(text, encoding="utf-8")
        assert read_json(tmp_path / "file") == value
    deep = "[" * files.JSON_DEPTH + "]" * files.JSON_DEPTH
    assert parse_json(deep) == json.loads(deep)
    assert parse_json(json.dumps("[{" * 1000)) == "[{" * 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 65 + "]" * 65, "is nested more than 64 levels deep"),
        ("[" * 100_000, "is nested more than 64"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "is nested more than 64"),
        ('["\\"", ' * 70 + "1" + "]" * 70, "is nested more than 64"),
        ("[" + "1," * 400_000 + "1]", "holds more than 300000 values"),
        ('{"a": 1, "b": 2, "a": 1}', "holds the key 'a' twice"),
        ('[{"x": {"": 1, "": 2}}]', "holds the key '' twice"),
        ("1" * 19, "holds a number of 19 digits"),
        ("-" + "9" * 100_000, "holds a number of"),
        ('"\\ud800"', "holds text that is not Unicode"),
        ('{"\\udc00": 1}', "holds text that is not Unicode"),
        (b"\xff\xfe", "holds text that is not Unicode"),
        (b'{"a": "\xff"}', "holds text that is not Unicode"),
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("{'a': 1}", "is no JSON"),
        ("[1] [2]", "is no JSON"),
        ('"' + "\\" * 99_999, "is no JSON"),
        ("\ufeff{}", "is no JSON"),
    ],
)
def test_json_beyond_a_limit(text, reason):
    with pytest.raises(UnreadableError) as caught:
        parse_json(text)
    assert caught.value.reason.startswith(reason)
    assert len(str(caught.value)) < 300


def test_values_in_messages_are_short():
    assert shown("all") == "'all'"
    for long in ("x" * 10**6, ["y" * 10**5] * 10**4, {str(n): n for n in range(10**4)}):
        assert len(shown(long)) < 700


def test_safetensors_are_read_and_not_mapped(tmp_path):
    file = tmp_path / "file.safetensors"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(0, 4, dtype=torch.bfloat16)}
    save_file(tensors, file, {"kind": "x"})
    metadata, found = read_safetensors(file, 1 << 20)
    file.write_bytes(b"")
    assert metadata == {"kind": "x"}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def stored(header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 7, stored({}, length=2**63), stored({}, length=3), stored([]), stored(b"{"),
        stored(b"[" * 5000), stored({"a": ONE}), stored({"a": ONE}, b"\0" * 5),
        stored({"a": ONE | {"dtype": "F77"}}, b"\0" * 4), stored({"a": 5}, b"\0" * 4),
        stored({"a": ONE | {"shape": [2**40, 2**40]}}, b"\0" * 4),
        stored({"a": ONE | {"shape": [-1]}}, b"\0" * 4),
        stored({"a": ONE | {"data_offsets": [4, 0]}}, b"\0" * 4),
        stored({"a": ONE, "b": ONE}, b"\0" * 4),
        stored({"a" * 600: ONE}, b"\0" * 4), stored({"a\nb": ONE}, b"\0" * 4),
        stored(b'{"a": %s, "a": %s}' % ((json.dumps(ONE).encode(),) * 2), b"\0" * 4),
        stored({"a": ONE, "__metadata__": {"x": 1}}, b"\0" * 4),
        stored({"a": ONE, "__metadata__": "x"}, b"\0" * 4),
    ],
)  # fmt: skip
def test_safetensors_that_lie(tmp_path, content):
    file = tmp_path / "file.safetensors"
    file.write_bytes(content)
    with pytest.raises(UnreadableError, match="truncated or damaged") as caught:
        read_safetensors(file, 1 << 20)
    assert len(str(caught.value)) < 600
