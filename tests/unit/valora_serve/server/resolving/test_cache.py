"""The cache of fetched adapters: bounded, whole, and readable by the next run."""

import contextlib
import errno
import io
import json
import threading

import pytest

from tests.support.disk_faults import failing
from valora_serve.errors import AdapterError, OverloadedError, SourceError, StorageError
from valora_serve.server.resolving.cache import AdapterCache
from valora_serve.server.resolving.sources import CONFIG, FILES, WEIGHTS, Found, Resolver
from valora_serve.server.settings import ServerSettings


class Shelf(Resolver):
    """Adapters of given sizes; `known` says whether their sizes are named beforehand."""

    def __init__(self, known=True, **sizes):
        super().__init__("shelf", "here")
        self.held, self.known, self.version = sizes, known, "1"

    def find(self, name):
        size = self.held[name] - 3
        named = {CONFIG: 3, WEIGHTS: size} if self.known else dict.fromkeys(FILES)
        return Found(self.version, named)

    @contextlib.contextmanager
    def open(self, name, file, found):
        yield io.BytesIO(b"abc" if file == CONFIG else name.encode()[:1] * (self.held[name] - 3))


@pytest.fixture
def place(tmp_path):
    return tmp_path / "cache"


def cache(place, most=1000, one=600, used=()):
    sizes = {"adapter_cache_bytes": most, "adapter_bytes": one}
    settings = ServerSettings(adapter_cache=str(place), **sizes)
    return AdapterCache(settings, lambda name: name in used)


def fetch(held, shelf, name):
    return held.fetch(shelf, name, shelf.find(name), threading.Event())


def names(held):
    return [entry.name for entry in held.entries()]


def test_the_least_recently_used_is_deleted_first(place):
    shelf, used = Shelf(a=300, b=310, c=320, d=330), []
    held = cache(place, used=used)
    for name in "abc":
        fetch(held, shelf, name)
    assert held.bytes == 930
    assert held.get("a", shelf, "1").bytes == 300
    used.append("b")
    fetch(held, shelf, "d")
    assert names(held) == ["b", "a", "d"]
    assert held.get("c", shelf) is None
    used += "ad"
    with pytest.raises(OverloadedError, match="beside those in use"):
        fetch(held, shelf, "c")
    used.remove("b")
    shelf.held["c"] = 500
    with pytest.raises(OverloadedError, match="beside those in use"):
        fetch(held, shelf, "c")  # also without `b`, which is thus kept
    assert len([item for item in place.iterdir() if item.is_dir()]) == 3


def test_a_new_version_replaces_the_old_one(place):
    shelf = Shelf(a=300)
    held = cache(place)
    old = fetch(held, shelf, "a")
    shelf.version, shelf.held["a"] = "2", 200
    assert held.get("a", shelf, "2") is None
    assert held.get("a", shelf) == old
    elsewhere = Shelf()
    elsewhere.location = "elsewhere"
    assert held.get("a", elsewhere) is None
    new = fetch(held, shelf, "a")
    assert not old.folder.exists()
    assert (held.bytes, new.folder.name) == (200, "a")
    shelf.held["b"] = 600
    for shelf.version in ("3", "4"):  # both together do not fit
        fetch(held, shelf, "b")
    assert held.get("b", shelf, "4").bytes == 600


def test_what_is_too_large_is_named(place):
    held, shelf = cache(place, 4 << 20, 2 << 20), Shelf(False, a=(3 << 20))
    with pytest.raises(
        AdapterError, match=f"has more than {2 << 20} bytes, and may have {2 << 20}"
    ):
        fetch(held, shelf, "a")


def test_what_a_run_leaves_is_found_again_unless_it_is_damaged(place):
    shelf = Shelf(a=300, b=310)
    held = cache(place)
    kept, damaged = fetch(held, shelf, "a"), fetch(held, shelf, "b")
    held.close()
    (damaged.folder / WEIGHTS).write_bytes(b"x" * 307)
    (place / ".partial-1" / "a").mkdir(parents=True)
    junk = place / ("0" * 24)
    junk.mkdir()
    (junk / ".entry.json").write_text(json.dumps([1]))
    again = cache(place)  # without hashing all of it, which takes minutes
    assert names(again) == ["a", "b"] and again.get("b", shelf) is None
    assert again.entries() == [kept]
    assert [item for item in place.iterdir() if item.is_dir()] == [kept.folder.parent]
    again.close()
    assert names(cache(place, most=299, one=299)) == []


def test_what_others_have_put_into_the_folder_stays(place, tmp_path):
    """Also where it looks like the cache's own."""
    for name in ("my-training", "0" * 24, ".git"):
        (place / name / "weights").mkdir(parents=True)
        (place / name / "weights" / "w.bin").write_bytes(b"years of work")
    (tmp_path / "elsewhere").mkdir()
    (place / ".partial-x").symlink_to(tmp_path / "elsewhere")
    held = cache(place)
    fetch(held, Shelf(a=300), "a")
    held.close()
    assert names(cache(place)) == ["a"]
    assert len([*place.rglob("w.bin")]) == 3
    assert (place / ".partial-x").is_symlink()


def test_an_attempt_that_was_given_up_harms_no_later_one(place):
    """It wakes while the next one reads: nothing of either is mixed, and the later one is kept."""
    shelf, held, given_up = Shelf(a=300), cache(place), threading.Event()
    found, again = shelf.find("a"), threading.Event()

    class Late(Shelf):
        """Wakes at its last look, once the other has begun to write."""

        def find(self, name):
            given_up.set()
            again.wait(20)
            return found

    class Slow(Shelf):
        @contextlib.contextmanager
        def open(self, name, file, found):
            with super().open(name, file, found) as stream:
                yield stream
                if file == WEIGHTS:
                    again.set()
                    first.join(20)

    late, slow, failed = Late(a=300), Slow(a=300), []

    def attempt():
        with pytest.raises(SourceError, match="ask again"):
            held.fetch(late, "a", found, given_up)
        failed.append(True)

    first = threading.Thread(target=attempt)
    first.start()
    assert given_up.wait(20)
    entry = held.fetch(slow, "a", found, threading.Event())
    assert failed
    assert entry.is_there(whole=True)
    assert held.get("a", shelf, "1") == entry
    assert [item for item in place.iterdir() if item.is_dir()] == [entry.folder.parent]


def test_a_full_disk(place):
    held = cache(place)
    full = OSError(errno.ENOSPC, "No space left on device")
    with failing(place) as counted:
        fetch(held, Shelf(a=300), "a")
    # Deleting what an earlier attempt may have left is no reason to fail.
    steps = [step for step, name in enumerate(counted.seen) if name != "os.open"]
    assert len(steps) >= 5
    for step in steps:
        shelf = Shelf(b=300)
        with failing(place, step, full), pytest.raises(StorageError, match="free space on that"):
            fetch(held, shelf, "b")
        assert names(held) == ["a"]
        assert len([item for item in place.iterdir() if item.is_dir()]) == 1
