"""The cache is used if nobody else can write to it; otherwise a private directory is, with one warning."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from encore import folders
from encore.cached_files import CachedFileError, read_record, write_record
from encore.folders import cache_directory, cache_folder, private_directory

STRANGER = 54321


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a cache that is not there yet."""
    chosen = tmp_path / "deep" / "cache"
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(chosen))
    return chosen


def assert_private(directory: Path) -> None:
    assert directory == private_directory()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert directory.stat().st_uid == os.geteuid()


def assert_not_used(reason: str) -> None:
    with pytest.warns(UserWarning, match=reason) as caught:
        assert_private(cache_directory())
    assert len(caught) == 1
    assert "Set ENCORE_CACHE_DIR to a directory that only you can write to" in str(caught[0].message)
    assert_private(cache_directory())  # without a second warning, which would be an error


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a path belong to another user; without the right to do so, be another user."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def test_a_cache_that_is_made_is_for_this_user_alone(cache: Path) -> None:
    before = os.umask(0)
    try:
        assert cache_directory() == cache
        assert cache_folder("native") == cache / "native"
    finally:
        os.umask(before)
    for made in (cache, cache.parent, cache / "native"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o722, 0o770, 0o702, 0o1777])
def test_a_cache_that_others_may_write_to(cache: Path, mode: int) -> None:
    cache.mkdir(parents=True)
    cache.chmod(mode)
    assert_not_used(rf"not trusted, since other users may write to .*cache' \(its mode is {mode:04o}\)")


def test_a_cache_of_another_user(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    give_away(cache, monkeypatch)
    assert_not_used("belongs to the user")


def test_a_directory_above_in_which_others_may_rename_the_cache(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.parent.chmod(0o777)
    assert_not_used("other users may write to .*deep'")


def test_a_sticky_directory_above(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.parent.chmod(0o1777)
    assert cache_directory() == cache


def test_a_link_leads_to_where_it_leads(cache: Path, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    cache.parent.mkdir()
    cache.symlink_to(open_to_all)
    assert_not_used("other users may write to .*open'")


def test_a_link_to_a_directory_of_ones_own(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "real")
    assert cache_directory() == tmp_path / "real", "whoever changes the link later changes nothing"


@pytest.mark.parametrize("below", [False, True])
def test_a_file_instead_of_a_directory(cache: Path, below: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir()
    cache.write_text("")
    if below:
        monkeypatch.setenv("ENCORE_CACHE_DIR", str(cache / "below"))
    assert_not_used(r"there can be no cache in .* \((it is a file|.*Not a directory)")


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_a_path_that_cannot_be(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_chosen_directory", lambda: tmp_path / name)
    assert_not_used("there can be no cache")


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("ENCORE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert_not_used("there is no home directory")


def test_no_place_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Path:
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setattr(folders, "private_directory", full)
    cache.parent.mkdir()
    cache.write_text("")
    with pytest.warns(UserWarning, match="there can be no cache"):
        nowhere = cache_directory()
    with pytest.raises(OSError):  # noqa: PT011  whatever the system calls it
        (nowhere / "file").write_text("")
    with pytest.raises(CachedFileError):
        read_record(nowhere / "file")
    assert cache_folder("native").parent == nowhere


@pytest.mark.parametrize("kind", ["open", "link"])
def test_a_folder_of_the_cache_that_others_may_write_to(cache: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    cache.mkdir(parents=True)
    if kind == "link":
        (cache / "native").symlink_to(tmp_path / "elsewhere")
    else:
        (cache / "native").mkdir()
        (cache / "native").chmod(0o777)
    with pytest.warns(UserWarning, match="not trusted, since"):
        folder = cache_folder("native")
    assert folder == private_directory() / "native"
    assert folder.is_dir()


def test_a_group_that_has_one_member_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Ubuntu, where each user has a group and the umask is 002."""
    user = SimpleNamespace(pw_uid=1000, pw_gid=1000, pw_name="me")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = os.stat_result((0o40775, 0, 0, 0, 1000, 1000, 0, 0, 0, 0))
    for name, members, trusted in (("me", [], True), ("me", ["me"], True), ("me", ["you"], False), ("lab", [], False)):
        monkeypatch.setattr(grp, "getgrgid", lambda _, n=name, m=members: SimpleNamespace(gr_name=n, gr_mem=m))
        assert (folders.reason_of_status(Path("x"), found) == "") == trusted


# -- files -----------------------------------------------------------------------------------------------------------


def test_records_survive_and_are_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = {"text": 'quoted " and \udcff', "number": 0.1, "list": [1, None], "nested": {"b": 1, "a": 2}}
    before = os.umask(0)
    try:
        write_record(path, record)
    finally:
        os.umask(before)
    assert read_record(path) == record
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_every_cut_and_every_flipped_byte_of_a_record_is_found(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, {"a": 1.5, "b": "text"})
    content = path.read_bytes()
    for place in range(len(content)):
        for damaged in (content[:place], content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(CachedFileError):
                read_record(path)
    for other in (b"[" * 100_000, b"[1]", b"null", b'{"sha256": 1}', b"9" * 5000):
        path.write_bytes(other)
        with pytest.raises(CachedFileError):
            read_record(path)


def test_what_is_not_a_file_is_not_read(tmp_path: Path) -> None:
    write_record(tmp_path / "real.json", {"a": 1})
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("link", "folder", "pipe", "missing"):
        with pytest.raises(CachedFileError):
            read_record(tmp_path / f"{name}.json")


@pytest.mark.parametrize("kind", ["group", "others", "stranger"])
def test_a_file_that_another_user_could_have_written(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    write_record(path, {"a": 1})
    if kind == "stranger":
        give_away(path, monkeypatch)
    else:
        path.chmod(0o620 if kind == "group" else 0o602)
    with pytest.warns(UserWarning, match="is not trusted"), pytest.raises(CachedFileError):
        read_record(path)
    with pytest.raises(CachedFileError):
        read_record(path)  # without a second warning, which would be an error


def test_a_private_directory_goes_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    program = "from encore.folders import cache_directory; print(cache_directory())"
    environment = {**os.environ, "ENCORE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("encore: ") == 1
    assert done.stdout.strip()
    assert not Path(done.stdout.strip()).exists()
