"""Code that was compiled here is loaded only from a folder that nobody else may write to, and only whole."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from oxidion._cuda import device
from oxidion._torch.cache import (
    UntrustedFolder,
    check_private,
    digest_file,
    digest_of,
    is_whole,
    make_private,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
ANOTHER = 12345


def given_away(path: Path) -> None:
    os.chown(path, ANOTHER, -1)


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
def test_folder_that_is_made_is_for_its_user_alone_under_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_private(tmp_path / "caches" / "oxidion")
    finally:
        os.umask(before)
    assert mode(tmp_path / "caches" / "oxidion") == mode(tmp_path / "caches") == 0o700


@pytest.mark.parametrize(("spoil", "message"), UNTRUSTED)
@pytest.mark.parametrize("link", [False, True], ids=["folder", "link"])
def test_folder_that_others_may_write_to_is_refused_with_the_way_out(
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
    check_private(tmp_path / "folder")


def kept(folder: Path) -> Path:
    file = folder / "library.so"
    file.write_bytes(b"\x7fELF and more")
    digest_file(file).write_text(digest_of(file))
    return file


def test_kept_file_is_whole_only_with_its_digest(tmp_path: Path) -> None:
    file = kept(tmp_path)
    assert is_whole(file)
    content = file.read_bytes()
    for other in (content + b"\0", content[:-1], b"", content.replace(b"more", b"less")):
        file.write_bytes(other)
        assert not is_whole(file)
    file.write_bytes(content)
    digest = digest_file(file)
    for text in (b"", digest.read_bytes()[:-1], b"\xff\xfe"):
        digest.write_bytes(text)
        assert not is_whole(file)
    digest.unlink()
    assert not is_whole(file)


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
    assert not is_whole(file)


@pytest.mark.parametrize(("spoil", "message"), UNTRUSTED)
def test_kernels_are_not_kept_where_others_may_write_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], message: str
) -> None:
    monkeypatch.setenv("OXIDION_CACHE", str(tmp_path / "cache"))
    assert device.kept_in() == tmp_path / "cache"
    spoil(tmp_path / "cache")
    with pytest.warns(UserWarning, match=rf"compiled anew in each process, and not kept: .*{message}"):
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
