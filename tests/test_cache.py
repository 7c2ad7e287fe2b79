"""Code that was compiled here is loaded only from a folder that no other user may change, and only whole."""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from oxidion._cuda import device
from oxidion._torch import cache
from oxidion._torch.cache import (
    MOST_LINKS,
    UntrustedFolder,
    digest_name,
    keep,
    keep_with_digest,
    make_private,
    open_private,
    open_whole,
    private_folder,
    read_private,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
ANOTHER = 12345


def given_away(path: Path) -> None:
    os.chown(path, ANOTHER, -1, follow_symlinks=False)


def open_to(mode: int) -> Callable[[Path], None]:
    return lambda path: path.chmod(mode)


UNTRUSTED = [
    pytest.param(open_to(0o770), "mode 0770 .*chmod 700 ", id="group"),
    pytest.param(open_to(0o702), "mode 0702 .*chmod 700 ", id="others"),
    pytest.param(open_to(0o1777), "mode 1777 .*chmod 700 ", id="sticky"),
    pytest.param(
        given_away, f"belongs to user {ANOTHER}, and this process runs as", marks=as_root, id="owner"
    ),
]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_new_folder_is_for_its_user_alone_under_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_private(tmp_path / "caches" / "oxidion")
    finally:
        os.umask(before)
    assert mode(tmp_path / "caches" / "oxidion") == mode(tmp_path / "caches") == 0o700


@pytest.mark.parametrize(("spoil", "message"), UNTRUSTED)
@pytest.mark.parametrize("link", [False, True], ids=["folder", "link"])
def test_folder_writable_by_others_is_refused_with_a_remedy(
    tmp_path: Path, spoil: Callable[[Path], None], message: str, link: bool
) -> None:
    folder = named = tmp_path / "a folder"
    folder.mkdir()
    if link:
        named = tmp_path / "link"
        named.symlink_to(folder)
    make_private(named)
    spoil(folder)
    with pytest.raises(UntrustedFolder, match=message) as raised:
        make_private(named)
    assert str(raised.value).startswith(f"{named} keeps code that is loaded")
    assert "set OXIDION_CACHE to a folder of your own" in str(raised.value)
    if "chmod" in message:
        assert f"chmod 700 '{folder}'" in str(raised.value)


def test_folder_that_others_may_read_is_taken(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(0o755)
    make_private(tmp_path / "folder")


@pytest.mark.parametrize("above", [1, 2, 3])
@pytest.mark.parametrize("exists", [True, False], ids=["there", "missing"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(open_to(0o770), "has mode 0770 .*chmod go-w ", id="group"),
        pytest.param(open_to(0o707), "has mode 0707 .*chmod go-w ", id="others"),
        pytest.param(given_away, f"belongs to user {ANOTHER}, ", marks=as_root, id="owner"),
    ],
)
def test_folder_is_refused_if_others_may_write_to_one_above_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
    message: str,
    exists: bool,
    above: int,
) -> None:
    monkeypatch.setattr(cache, "_is_of_user_alone", lambda gid: False)
    parents = tmp_path / "a" / "b" / "c"
    parents.mkdir(parents=True)
    folder = parents / "cache"
    if exists:
        folder.mkdir(mode=0o700)
    spoilt = folder.parents[above - 1]
    spoil(spoilt)
    with pytest.raises(UntrustedFolder, match=message) as raised:
        make_private(folder)
    assert f"{folder} keeps code that is loaded, but {spoilt} on the way there " in str(raised.value)
    assert "set OXIDION_CACHE to a folder of your own" in str(raised.value)
    assert folder.exists() == exists, "nothing is made where it could be replaced"


def test_folder_in_one_writable_by_the_users_own_group_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, own = pwd.getpwuid(os.geteuid()), tmp_path.stat().st_gid
    group = grp.struct_group((user.pw_name, "x", own, [user.pw_name]))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: pwd.struct_passwd((*user[:3], own, *user[4:])))
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)
    tmp_path.chmod(0o775)
    make_private(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o775)
    with pytest.raises(UntrustedFolder, match="has mode 0775"):
        make_private(tmp_path / "cache")
    for wrong in ((user.pw_name, "x", own, ["another"]), ("users", "x", own, [])):
        group = grp.struct_group(wrong)
        with pytest.raises(UntrustedFolder, match="on the way there has mode 0775"):
            make_private(tmp_path / "other")


def test_folder_in_a_sticky_one_is_taken_as_it_cannot_be_moved(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    make_private(shared / "cache")
    assert mode(shared / "cache") == 0o700
    make_private(shared / "cache" / "inner")


@as_root
def test_folder_of_another_user_in_a_sticky_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared" / "cache").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o1777)
    given_away(tmp_path / "shared" / "cache")
    with pytest.raises(UntrustedFolder, match=f"cache on the way there belongs to user {ANOTHER}"):
        make_private(tmp_path / "shared" / "cache" / "inner")


def linked(tmp_path: Path) -> tuple[Path, Path]:
    """A folder by a link that lies in another folder, and that link."""
    (tmp_path / "real" / "cache").mkdir(parents=True)
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "link"
    link.symlink_to(Path("..", "real"))
    return link / "cache", link


def test_links_of_this_user_are_followed_to_what_is_checked(tmp_path: Path) -> None:
    folder, _ = linked(tmp_path)
    absolute = tmp_path / "absolute"
    absolute.symlink_to(folder)
    for way in (folder, absolute, tmp_path / "links" / ".." / "real" / "cache"):
        with private_folder(way) as at:
            assert os.path.samestat(os.fstat(at), (tmp_path / "real" / "cache").stat())
    (tmp_path / "real").chmod(0o777)
    for way in (folder, absolute):
        with pytest.raises(UntrustedFolder, match=f"{tmp_path}/real on the way there has mode 0777"):
            make_private(way)


def test_link_in_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder, link = linked(tmp_path)
    link.parent.chmod(0o777)
    with pytest.raises(UntrustedFolder, match=f"{link.parent} on the way there has mode 0777"):
        make_private(folder)


@as_root
@pytest.mark.parametrize("bits", [0o755, 0o1777], ids=["own", "sticky"])
def test_link_of_another_user_is_refused(tmp_path: Path, bits: int) -> None:
    folder, link = linked(tmp_path)
    link.parent.chmod(bits)
    given_away(link)
    with pytest.raises(UntrustedFolder, match=f"{link} on the way there belongs to user {ANOTHER}"):
        make_private(folder)


def test_links_that_never_end_are_an_error_that_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match=rf"symbolic links.*{tmp_path}/a/cache"):
        make_private(tmp_path / "a" / "cache")
    inner = tmp_path / "chain"
    inner.mkdir()
    for number in range(MOST_LINKS):
        inner, target = tmp_path / f"link{number}", inner
        inner.symlink_to(target)
    make_private(inner)
    (tmp_path / "last").symlink_to(inner)
    with pytest.raises(OSError, match="symbolic links"):
        make_private(tmp_path / "last")


@pytest.mark.parametrize("make", [True, False])
def test_file_where_a_folder_should_be_is_named(tmp_path: Path, make: bool) -> None:
    (tmp_path / "file").write_text("")
    expected = rf"Not a directory: '{tmp_path}/file'"
    with (
        pytest.raises(NotADirectoryError, match=expected),
        private_folder(tmp_path / "file" / "x", make=make),
    ):
        pass


def kept(folder: Path, content: bytes = b"\x7fELF and more") -> Path:
    file = folder / "library.so"
    with private_folder(folder) as at:
        keep_with_digest(at, file.name, content)
    return file


def digest_file(file: Path) -> Path:
    return file.with_name(digest_name(file.name))


def whole(file: Path) -> bytes | None:
    """The content of a file that is accepted, read from the descriptor that a library is loaded from."""
    with private_folder(file.parent) as at:
        descriptor = open_whole(at, file.name)
    if descriptor is None:
        return None
    with open(descriptor, "rb") as opened:
        opened.seek(0)
        return opened.read()


def is_whole(file: Path) -> bool:
    return whole(file) == file.read_bytes()


def test_kept_file_is_whole_only_with_its_digest(tmp_path: Path) -> None:
    file = kept(tmp_path)
    assert is_whole(file)
    content = file.read_bytes()
    for other in (content + b"\0", content[:-1], b"", content.replace(b"more", b"less")):
        file.write_bytes(other)
        assert whole(file) is None
    file.write_bytes(content)
    digest = digest_file(file)
    for text in (b"", digest.read_bytes()[:-1], b"\xff\xfe"):
        digest.write_bytes(text)
        assert whole(file) is None
    digest.unlink()
    assert whole(file) is None


@pytest.mark.parametrize(
    "spoil",
    [open_to(0o664), open_to(0o646), pytest.param(given_away, marks=as_root)],
    ids=["group", "others", "owner"],
)
@pytest.mark.parametrize("which", [lambda file: file, digest_file], ids=["file", "digest"])
def test_kept_file_that_others_may_write_to_is_not_whole(
    tmp_path: Path, spoil: Callable[[Path], None], which: Callable[[Path], Path]
) -> None:
    file = kept(tmp_path)
    spoil(which(file))
    assert whole(file) is None
    with pytest.raises(UntrustedFolder):
        read_private(which(file))


@pytest.mark.parametrize("which", [lambda file: file, digest_file], ids=["file", "digest"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_irregular_file_is_not_whole(tmp_path: Path, kind: str, which: Callable[[Path], Path]) -> None:
    file = kept(tmp_path)
    place = which(file)
    moved = place.rename(tmp_path / "moved")
    {"link": lambda: place.symlink_to(moved), "pipe": lambda: os.mkfifo(place), "folder": place.mkdir}[kind]()
    assert whole(file) is None
    with pytest.raises(OSError, match=r"symbolic links|must be a regular file"):
        read_private(place)
    if kind != "folder":
        assert whole(kept(tmp_path, b"made again")) == b"made again"
        assert moved.read_bytes() != b"made again"


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_kept_file_is_there_whole_and_for_its_user_to_write(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with private_folder(tmp_path) as at:
            keep(at, "record", b"first")
            keep(at, "record", b"second")
            (tmp_path / "taken").mkdir()
            with pytest.raises(IsADirectoryError):
                keep(at, "taken", b"third")
    finally:
        os.umask(before)
    assert read_private(tmp_path / "record") == b"second"
    assert mode(tmp_path / "record") == 0o644
    assert {path.name for path in tmp_path.iterdir()} == {"record", "taken"}, "no part of a file is left"


def test_file_goes_into_the_folder_that_was_checked(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    with private_folder(tmp_path / "cache") as at:
        (tmp_path / "cache").rename(tmp_path / "moved")
        (tmp_path / "cache").mkdir(mode=0o777)
        keep(at, "record", b"content")
    assert not list((tmp_path / "cache").iterdir())
    assert (tmp_path / "moved" / "record").read_bytes() == b"content"


def test_no_descriptor_stays_open_after_a_refusal(tmp_path: Path) -> None:
    file = kept(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/dev/fd"))
    with private_folder(tmp_path) as at:
        for name in ("pipe", "missing"):
            with pytest.raises(OSError, match=r"pipe|missing"):
                open_private(at, name)
    for folder in (tmp_path / "shared", tmp_path / "shared" / "inner", tmp_path / "none" / "inner"):
        with pytest.raises(OSError, match=r"shared|none"), private_folder(folder):
            pass
    digest_file(file).write_text("")
    assert whole(file) is None
    assert len(os.listdir("/dev/fd")) == before


OWN, BAD = b"own code", b"code of another user"
LOOKS = 3000
SWAPPER = """
import os, sys
place, bad, good, end = sys.argv[1:]
print(flush=True)
while not os.path.exists(end):
    for old, new in ((place, good), (bad, place), (place, bad), (good, place)):
        os.rename(old, new)
"""
"""A process of its own: a thread would take turns with the check, which hides most races."""


def race(file: Path, bad: Path, place: Path) -> set[bytes | None]:
    """What is accepted while a process replaces what is at a path and puts it back; None for a refusal."""

    def look() -> bytes | None:
        with suppress(OSError):
            return whole(file)
        return None

    good, end = bad.with_name("good"), bad.with_name("end")
    words = [sys.executable, "-I", "-S", "-c", SWAPPER, *map(str, (place, bad, good, end))]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as swapper:
        assert swapper.stdout is not None
        swapper.stdout.readline()
        try:
            found = {look() for _ in range(LOOKS)}
        finally:
            end.touch()
    assert swapper.returncode == 0
    return found


@pytest.mark.parametrize("swap", ["folder", "link", pytest.param("owner", marks=as_root)])
def test_folder_that_is_swapped_during_the_check_is_never_used(tmp_path: Path, swap: str) -> None:
    folder, other = tmp_path / "cache" / "torch", tmp_path / "other"
    for each, content in ((folder, OWN), (other, BAD)):
        make_private(each)
        kept(each, content)
    given_away(other) if swap == "owner" else other.chmod(0o777)
    if swap == "link":
        (tmp_path / "link").symlink_to(other)
        other = tmp_path / "link"
    assert race(folder / "library.so", other, folder) == {OWN, None}


@pytest.mark.parametrize("swap", ["file", "link"])
def test_file_that_is_swapped_during_the_check_is_never_loaded(tmp_path: Path, swap: str) -> None:
    folder, other = tmp_path / "cache", tmp_path / "other"
    for each, content in ((folder, OWN), (other, BAD)):
        make_private(each)
        kept(each, content)
    # The digest is that of the other file, so that nothing else keeps it from being loaded.
    digest_file(other / "library.so").replace(digest_file(folder / "library.so"))
    bad = other / "library.so"
    if swap == "link":
        (tmp_path / "link").symlink_to(bad)
        bad = tmp_path / "link"
    else:
        bad.chmod(0o666)
    assert race(folder / "library.so", bad, folder / "library.so") == {None}
    digest_file(folder / "library.so").write_bytes(hashlib.sha256(OWN).hexdigest().encode())
    assert whole(folder / "library.so") == OWN, "the file of this user is as good as before"


@pytest.mark.parametrize(("spoil", "message"), UNTRUSTED)
def test_kernels_are_not_kept_and_warn_where_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], message: str
) -> None:
    monkeypatch.setenv("OXIDION_CACHE", str(tmp_path / "cache"))
    assert device.kept_in() == tmp_path / "cache"
    spoil(tmp_path / "cache")
    with pytest.warns(UserWarning, match=rf"compiled in each process again, and not kept: .*{message}"):
        assert device.kept_in() is None


def test_kernels_are_not_kept_where_no_folder_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OXIDION_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=r"not kept: .*file"):
        assert device.kept_in() is None
    monkeypatch.setattr(device, "cache_folder", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device.kept_in() is None
