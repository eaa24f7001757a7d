"""Files are whole or as they were, seals are compared, and locks end with who holds them."""

import errno
import hashlib
import os
import sys

import pytest

from confitune import files
from confitune.errors import ConfituneError
from confitune.files import (
    DamagedFileError,
    checksum_of,
    exclusive,
    open_plain,
    read_sealed,
    remove_partial,
    require_writable,
    run_file,
    write_sealed,
    write_whole,
)
from locks import held_by_another, without_locks

POSIX = pytest.mark.skipif(os.name != "posix", reason="links and pipes as POSIX has them")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- whole or as before ----------------------------------------------------------------------------------------------


def test_a_file_is_written_and_replaced_and_nothing_is_left_beside_it(tmp_path):
    for content in (b"first", b"second"):
        write_whole(tmp_path / "a.json", lambda out, content=content: out.write(content))
        assert (tmp_path / "a.json").read_bytes() == content
        assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_file_that_cannot_be_written_to_the_end_is_as_it_was(tmp_path, error):
    def breaks_off(out):
        out.write(b"half of ")
        raise error

    (tmp_path / "a.json").write_bytes(b"before")
    for name in ("a.json", "new.json"):
        with pytest.raises(type(error)):
            write_whole(tmp_path / name, breaks_off)
    assert names(tmp_path) == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"before"


def test_the_bytes_are_on_the_disk_before_they_have_the_name(tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("rename"), replace(*paths)))
    write_whole(tmp_path / "a", lambda out: out.write(b"x"))
    assert done == (["sync", "rename", "sync"] if os.name == "posix" else ["sync", "rename"])  # the folder, at last


@pytest.mark.parametrize(("stem", "left"), [("*", []), ("a", ["b.1.partial"])])
def test_what_a_killed_process_left_is_deleted_and_nothing_else(tmp_path, stem, left):
    for name in ("a.1.partial", "a.2.partial", "b.1.partial", "a.json", "partial"):
        (tmp_path / name).touch()
    remove_partial(tmp_path, stem)
    assert names(tmp_path) == sorted([*left, "a.json", "partial"])


def test_a_folder_is_made_or_said_to_be_impossible(tmp_path):
    require_writable(tmp_path / "new" / "folder")
    assert names(tmp_path / "new" / "folder") == []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfituneError, match=r"cannot write in .*file.*; choose another folder with --out"):
        require_writable(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


# ---- plain files, seals and checksums --------------------------------------------------------------------------------


@POSIX
def test_only_plain_files_are_opened(tmp_path):
    (tmp_path / "plain").write_bytes(b"as it is")
    with open_plain(tmp_path / "plain") as file:
        assert file.read() == b"as it is"
    (tmp_path / "link").symlink_to(tmp_path / "plain")
    for name in ("link", "."):
        with pytest.raises(OSError, match="not a regular file"):
            open_plain(tmp_path / name)


@POSIX
def test_a_file_of_two_names_is_not_opened(tmp_path):
    (tmp_path / "plain").touch()
    os.link(tmp_path / "plain", tmp_path / "other")
    with pytest.raises(OSError, match="several hard links"):
        open_plain(tmp_path / "plain")


def test_a_sealed_file_comes_back_and_every_changed_bit_is_noticed(tmp_path):
    path, data = tmp_path / "sealed", b"line\n\x00\xff\nline"
    write_sealed(path, data)
    assert read_sealed(path) == data
    whole = path.read_bytes()
    assert whole.partition(b"\n")[0].endswith(hashlib.sha256(data).hexdigest().encode())
    changed = [bytes([*whole[:n], whole[n] ^ 1 << bit, *whole[n + 1 :]]) for n in range(len(whole)) for bit in range(8)]
    for other in (*changed, whole[:-1], whole + b"x", b""):
        path.write_bytes(other)
        with pytest.raises(DamagedFileError, match="sealed is damaged: its checksum does not match"):
            read_sealed(path)


def test_a_sealed_file_that_is_not_there_is_damage(tmp_path):
    with pytest.raises(DamagedFileError, match="none cannot be read"):
        read_sealed(tmp_path / "none")


def test_a_checksum_is_of_values_and_not_of_their_order():
    assert checksum_of({"b": [2.5], "a": "ä"}) == hashlib.sha256('{"a": "ä", "b": [2.5]}'.encode()).hexdigest()
    assert checksum_of({"a": 1}) != checksum_of({"a": 1.0})


# ---- locks -----------------------------------------------------------------------------------------------------------


def not_waiting():
    pytest.fail("it is free")


@POSIX
def test_a_lock_is_waited_for_and_ends_with_the_process_that_holds_it(tmp_path):
    lock, waited = tmp_path / "new" / ".lock", []
    with exclusive(lock, not_waiting) as held:
        assert held
    with held_by_another(lock) as other, exclusive(lock, lambda: (waited.append("once"), other.kill())) as held:
        assert held
    assert waited == ["once"]


@without_locks
def test_where_there_are_no_locks_that_is_said(tmp_path, monkeypatch, locks):
    monkeypatch.setattr(files, "fcntl", locks)
    with exclusive(tmp_path / ".lock", not_waiting) as held:
        assert not held


def test_a_lock_does_not_empty_the_file(tmp_path):
    (tmp_path / "runs.jsonl").write_text("results")
    with exclusive(tmp_path / "runs.jsonl", not_waiting):
        assert (tmp_path / "runs.jsonl").read_text() == "results"


# ---- code of the user's own ------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path):
    """Writes a file of one's own; what it became is forgotten at the end."""
    before = set(sys.modules)

    def own(text):
        (tmp_path / "mine.py").write_text(text)
        return str(tmp_path / "mine.py")

    yield own
    for name in {name for name in sys.modules if name.startswith("confitune_own_")} - before:
        del sys.modules[name]


def test_a_file_is_run_once_and_again_when_it_has_changed(own):
    path = own("from dataclasses import dataclass\n@dataclass\nclass Mine:\n    value: 'int' = 1\n")
    first = run_file(path)
    assert (first.Mine().value, first.__file__) == (1, path)
    assert run_file(path) is first
    second = run_file(own("value = 2"))
    assert second is not first
    assert (second.value, hasattr(second, "Mine")) == (2, False)


def test_a_file_that_fails_is_run_anew(own, tmp_path):
    path = own(f"from pathlib import Path\nvalue = Path({str(tmp_path / 'there')!r}).read_text()")
    with pytest.raises(FileNotFoundError):
        run_file(path)
    (tmp_path / "there").write_text("by now")
    assert run_file(path).value == "by now"
