"""Stages: named by content, atomic, resumable, never half-written."""

import errno
from functools import partial

import pytest

from valora_data.hashing import hash_path
from valora_train.errors import StageError
from valora_train.stage import Stage, digest, intact, read_json, was_killed


def stage(resumable=False, **settings):
    return Stage("work-a", 1, settings, {"x": "1"}, resumable)


def write(folder):
    (folder / "result").write_text("42")


def test_the_same_work_is_done_once(tmp_path):
    folder, reused = stage(a=1).run(tmp_path, write)
    assert (reused, (folder / "result").read_text()) == (False, "42")
    assert read_json(folder / "stage.json")["settings"] == {"a": 1}
    again, reused = stage(a=1).run(tmp_path, lambda _: pytest.fail("built again"))
    assert (again, reused) == (folder, True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, partial(OSError, errno.ENOSPC, "no space")])
@pytest.mark.parametrize(("resumable", "found"), [(False, []), (True, ["result"])])
def test_an_interrupted_build_begins_afresh_unless_it_is_resumable(
    tmp_path, resumable, found, error
):
    def fail(folder):
        write(folder)
        raise error()

    with pytest.raises((KeyboardInterrupt, OSError)) as caught:
        stage(resumable).run(tmp_path, fail)
    if caught.type is OSError:  # it says which disk is full
        assert str(stage(resumable).partial(tmp_path)) in str(caught.value)
    left = [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"]
    assert (bool(left), stage(resumable).folder(tmp_path).exists()) == (resumable, False)
    seen = []
    stage(resumable).run(tmp_path, lambda folder: seen.extend(p.name for p in folder.iterdir()))
    assert seen == found


def test_a_shared_output_is_found_under_another_name(tmp_path):
    one, two = (Stage(f"work-{name}", 1, {"a": 1}, {}, shared=True) for name in ("a", "b"))
    folder, _ = one.run(tmp_path, write)
    assert two.run(tmp_path, lambda _: pytest.fail("built again")) == (folder, True)
    others = [("work-b", 1, {"a": 1}, {}), ("work-a", 2, {"a": 1}, {}), ("work-a", 1, {"a": 2}, {}),
              ("work-a", 1, {"a": 1}, {"x": "2"})]  # fmt: skip
    keys = [Stage(*other, shared=shared).key for other in others for shared in (False, True)]
    assert one.key not in keys[:1] + keys[2:] and keys[1] == one.key
    dots = [Stage(f"fuse-{name}", 1, {}, {}) for name in ("a.b", "a.c")]
    assert dots[0].partial(tmp_path) != dots[1].partial(tmp_path)


def test_parts_are_checked(tmp_path):
    folder, _ = stage(a=1).run(tmp_path, write)
    assert digest(folder / "result") == hash_path(folder / "result")
    assert intact(folder / "result") == folder / "result"
    assert intact(tmp_path / "elsewhere") == tmp_path / "elsewhere"
    (folder / "result").write_text("43")
    with pytest.raises(StageError, match=f"result is not what was written.: delete {folder} and"):
        intact(folder / "result")
    (folder / "result").unlink()
    for use in (lambda: stage(a=1).run(tmp_path, write), lambda: intact(folder / "result")):
        with pytest.raises(StageError, match=f"result is missing.: delete {folder} and"):
            use()
    for text in ("{", "[]", '{"parts": 3}'):
        (folder / "stage.json").write_text(text)
        with pytest.raises(StageError, match=rf"stage\.json cannot be read.: delete {folder} and"):
            stage(a=1).run(tmp_path, write)


def test_two_do_not_make_the_same_and_a_free_lock_is_one_of_a_killed_process(tmp_path):
    assert not was_killed(tmp_path, stage().key)  # this folder knows nothing of it

    def build(_):
        assert not was_killed(tmp_path, stage().key)
        with pytest.raises(StageError, match="another process"):
            stage().run(tmp_path, write)

    assert not stage().run(tmp_path, build)[1]
    assert stage().run(tmp_path, write)[1]
    assert was_killed(tmp_path, stage().key)
    assert not was_killed(tmp_path, stage(a=1).key)


def test_another_machine_was_done_first_and_a_network_folder_showed_it_late(tmp_path):
    """Its output counts; the content is the same, as the key is."""

    def build(folder):
        write(folder)
        if not stage().folder(tmp_path).exists():
            other = stage().folder(tmp_path)
            other.mkdir()
            (other / "result").write_text("of the other machine")
            (other / "stage.json").write_text('{"parts": {"result": "1"}}')

    folder, _ = stage().run(tmp_path, build)
    assert (folder / "result").read_text() == "of the other machine"
    assert not stage().partial(tmp_path).exists()
