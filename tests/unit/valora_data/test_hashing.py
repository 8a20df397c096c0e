"""Hashes of files, code and models: content decides, and only what changed is read."""

import os
import sys
import time

import huggingface_hub.constants
import pytest

from valora_data.hashing import code_hash, hash_files, hub_commit, place_hash


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


def test_names_that_no_file_can_have_are_missing(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    names = ("gone", "a\0", "a" * 5000, "loop")
    assert len({hash_files([tmp_path / name], tmp_path / name) for name in names}) == 1


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


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of a user, whose module reads another one and a file."""
    folder = tmp_path / f"mine_{tmp_path.name.replace('-', '_')}"
    (folder / "deep").mkdir(parents=True)
    for name in ("__init__.py", "deep/__init__.py", "deep/rules.py"):
        (folder / name).write_text("LEVEL = 3\n")
    for name in ("weights.json", "unread.json"):
        (folder / name).write_text("[1]")
    (folder / "teacher.py").write_text('PLACE = "weights.json"\n\ndef answer(samples):\n    pass\n')
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "counts"),
    [("teacher.py", True), ("deep/rules.py", True), ("weights.json", True), ("unread.json", False)],
)
def test_what_a_module_needs_counts(package, file, counts):
    before = code_hash(f"{package.name}.teacher")
    assert before == code_hash(f"{package.name}.teacher") != ""
    path = package / file
    path.write_text(path.read_text() + "\n")
    assert (code_hash(f"{package.name}.teacher") != before) == counts
    (package / "teacher.py").write_text("def (")
    assert code_hash(f"{package.name}.teacher") != ""


@pytest.mark.parametrize("module", ["valora_data.schema", "json", "nowhere.at_all", "no-name", ""])
def test_our_own_modules_and_missing_ones_have_no_hash(module):
    assert module == "json" or code_hash(module) == ""


def test_places_are_hashed_by_content_and_hub_names_by_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub_commit("owner/model") == "" == place_hash("owner/model") == hub_commit("my models")
    for kind, commit in (("models", "abc123"), ("datasets", "def456")):
        refs = tmp_path / "hub" / f"{kind}--owner--model" / "refs"
        refs.mkdir(parents=True)
        (refs / "main").write_text(commit)
    assert place_hash("owner/model") == hub_commit("owner/model") == "abc123"
    assert hub_commit("owner/model", "dataset") == "def456"
    assert place_hash("/no/such/folder") == "" == place_hash("./none")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("1")
    before = place_hash(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert place_hash(tmp_path / "b") == before
    (tmp_path / "b" / "config.json").write_text("2")
    assert place_hash(tmp_path / "b") != before
