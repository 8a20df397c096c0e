"""Hashes of many files: content decides, and only what changed is read."""

import os
import time

import pytest

from valora_data.hashing import hash_files


@pytest.fixture
def folder(tmp_path):
    for number in range(20):
        path = tmp_path / "set" / f"{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {number}")
    return tmp_path / "set"


def hashed(folder, cache=True):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return hash_files(files, folder, folder.parent / "hashes.json" if cache else None)


def test_content_and_names_decide(folder, tmp_path):
    first = hashed(folder)
    assert hashed(folder, cache=False) == first
    one = folder / "0" / "3.txt"
    os.utime(one, (1, 1))  # another time, the same content
    assert hashed(folder) == first
    one.rename(folder / "0" / "33.txt")
    assert hashed(folder) != first
    (folder / "0" / "33.txt").rename(one)
    assert hashed(folder) == first
    before = one.stat()  # other content, but size and time of before
    one.write_text("file 5")
    os.utime(one, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert one.stat().st_size == before.st_size
    assert hashed(folder) != first
    one.write_text("file 3")
    for text in ("no JSON", "[]", '{"a": 1}', '{"a": [1, 2]}'):  # a damaged cache is no harm
        (tmp_path / "hashes.json").write_text(text)
        assert hashed(folder) == first
    folder.rename(tmp_path / "moved")
    assert hashed(tmp_path / "moved") == first


def test_unchanged_files_are_not_read(folder, monkeypatch):
    monkeypatch.setattr("valora_data.hashing.SETTLED", 0)
    time.sleep(0.05)
    first = hashed(folder)

    def refuse(file):
        raise AssertionError(f"{file} was read again")

    monkeypatch.setattr("valora_data.hashing.file_hash", refuse)
    assert hashed(folder) == first
    (folder / "2" / "2.txt").write_text("other")
    with pytest.raises(AssertionError, match=r"2\.txt was read again"):
        hashed(folder)
