"""Hashes of code and models: whatever changes what they do changes the hash, and nothing else."""

import sys

import huggingface_hub.constants
import pytest

from valora_data.identity import code_hash, hub_commit, place_hash


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


@pytest.mark.parametrize("module", ["valora_data.schema", "json", "nowhere.at_all", "no-name", ""])
def test_our_own_modules_and_missing_ones_have_no_hash(module):
    assert module == "json" or code_hash(module) == ""


def test_a_broken_module_has_a_hash(package):
    (package / "teacher.py").write_text("def (")
    assert code_hash(f"{package.name}.teacher") != ""


def test_places_are_hashed_by_content_and_hub_names_by_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub_commit("owner/model") == "" == place_hash("owner/model")
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
