"""Files that cannot be trusted: whatever lies in their place, reading ends within its limits."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from valora_data.contract import files


def written_pipe(place):
    os.mkfifo(place)
    os.open(place, os.O_RDWR)  # stays open, so that somebody could be writing


NO_SMALL_FILES = [
    (lambda place: None, "cannot be read (No such file"),
    (lambda place: place.mkdir(), "is no regular file"),
    (os.mkfifo, "is no regular file"),
    (written_pipe, "is no regular file"),
    (lambda place: place.symlink_to("/dev/zero"), "is no regular file"),
    (lambda place: place.symlink_to(place), "cannot be read ("),
    (lambda place: (place.touch(), os.truncate(place, 10 << 30)), "has 10737418240 bytes, more"),
    (lambda place: place.write_bytes(b"x" * 1001), "has 1001 bytes, more than 1000"),
]


def test_what_is_no_small_regular_file(tmp_path):
    cases = [(tmp_path / name, "cannot be read") for name in ("a\0b", "x" * 300)]
    for number, (make, reason) in enumerate(NO_SMALL_FILES):
        make(tmp_path / str(number))
        cases.append((tmp_path / str(number), reason))
    before = len([*Path("/proc/self/fd").iterdir()])
    for place, reason in cases:
        with pytest.raises(files.UnreadableError) as caught:
            files.read_bytes(place, 1000)
        assert caught.value.reason.startswith(reason)
        assert str(place) in str(caught.value)
    assert len([*Path("/proc/self/fd").iterdir()]) == before  # none is left open


def test_json_is_what_json_says(tmp_path):
    value = {
        "a": [1, 2.5, None, True, "ü ] } \" \\\\ [[[", {"": "\\"}], "[[[[": {}, "n": 10**17
    }  # fmt: skip
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=3)):
        (tmp_path / "file").write_text(text, encoding="utf-8")
        assert files.parse_json(text) == files.read_json(tmp_path / "file") == value
    deep = "[" * files.JSON_DEPTH + "1" + "]" * files.JSON_DEPTH
    assert files.parse_json(deep) == json.loads(deep)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 65 + "]" * 65, "is nested more than 64 levels deep"),
        ("[" * 100_000, "is nested more than 64"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "is nested more than 64"),
        ('{"a": 1, "b": 2, "a": 1}', "holds the key 'a' twice"),
        ("1" * 19, "holds a number of 19 digits"), ("-" + "9" * 100_000, "holds a number of"),
        ('"\\ud800"', "holds text that is not Unicode"),
        ('{"\\udc00": 1}', "holds text that is not Unicode"),
        (b'{"a": "\xff"}', "holds text that is not Unicode"),
        *((text, "is no JSON") for text in ("", "{'a': 1}", "[1] [2]", "\ufeff{}")),
        ('"' + "\\" * 99_999, "is no JSON"),
    ],
)  # fmt: skip
def test_json_beyond_a_limit(text, reason):
    with pytest.raises(files.UnreadableError) as caught:
        files.parse_json(text)
    assert caught.value.reason.startswith(reason)
    assert len(str(caught.value)) < 300


def test_safetensors_are_read_and_not_mapped(tmp_path):
    file = tmp_path / "file.safetensors"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(0, 4, dtype=torch.bfloat16)}
    save_file(tensors, file, {"kind": "x"})
    metadata, found = files.read_safetensors(file, 1 << 20)
    file.write_bytes(b"")
    assert metadata == {"kind": "x"}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def stored(header, data=b"\0" * 4, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 7, stored({}, b"", length=2**63), stored({}, b"", length=3),
        *(stored(header, b"") for header in ([], b"{", b"[" * 5000, {"a": ONE})),
        stored({"a": ONE}, b"\0" * 5), stored({"a": ONE | {"dtype": "F77"}}), stored({"a": 5}),
        stored({"a": ONE | {"shape": [2**40, 2**40]}}), stored({"a": ONE | {"shape": [-1]}}),
        stored({"a": ONE | {"data_offsets": [4, 0]}}), stored({"a": ONE, "b": ONE}),
        stored({"a" * 600: ONE}), stored({"a\nb": ONE}),
        stored(b'{"a": %s, "a": %s}' % ((json.dumps(ONE).encode(),) * 2)),
        stored({"a": ONE, "__metadata__": {"x": 1}}), stored({"a": ONE, "__metadata__": "x"}),
    ],
)  # fmt: skip
def test_safetensors_that_lie(tmp_path, content):
    file = tmp_path / "file.safetensors"
    file.write_bytes(content)
    with pytest.raises(files.UnreadableError, match="truncated or damaged") as caught:
        files.read_safetensors(file, 1 << 20)
    assert len(str(caught.value)) < 600
