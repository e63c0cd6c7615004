"""Folders that a user may enter, but not list, or not move files into."""

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
from support.other_user import USER, as_user

from orchestrate.files.folder import ROOT, harmless, remove, unlinked


@pytest.mark.skipif(os.getuid() != 0, reason="must be root to become another user")
def test_folders_that_may_only_be_entered_must_not_keep_a_user_from_their_own():
    """As where /home, or the folder of a group, has the mode 0711."""
    top = Path(tempfile.mkdtemp())
    home = top / "home" / "ada"
    home.mkdir(parents=True)
    (home / "file").write_text("mine")
    for path in (home, home / "file"):
        os.chown(path, USER, USER)
    for path in (top, top / "home"):
        path.chmod(0o711)

    def use() -> None:
        with ROOT.open(f"{home}/file") as file, ROOT.opened(f"{home}/new/inner", make=True) as inner:
            assert file.read() == b"mine" and os.fstat(inner).st_uid == USER
        assert unlinked(home / "file").st_size == 4

    as_user(use)
    shutil.rmtree(top)


@pytest.fixture
def xfs(tmp_path):
    """A folder on a file system that has projects."""
    if os.getuid() != 0 or not shutil.which("mkfs.xfs"):
        pytest.skip("needs root and mkfs.xfs")
    (tmp_path / "disk").touch()
    os.truncate(tmp_path / "disk", 300 << 20)
    (tmp_path / "mnt").mkdir()
    subprocess.run(["mkfs.xfs", "-q", tmp_path / "disk"], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", tmp_path / "disk", tmp_path / "mnt"], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a file here")
    yield tmp_path / "mnt"
    subprocess.run(["umount", tmp_path / "mnt"], check=True)


def test_a_folder_into_which_the_kernel_moves_nothing_must_be_cleaned_all_the_same(xfs):
    job = xfs / "job"
    deep = job / "/".join("d" * 40)
    deep.mkdir(parents=True)
    (deep / "program").touch()
    (deep / "program").chmod(0o6755)
    with ROOT.opened(str(job)) as folder:  # linux/fs.h: FS_IOC_FSGETXATTR, FS_XFLAG_PROJINHERIT, FS_IOC_FSSETXATTR
        flags, *rest, project, more, padding = struct.unpack("5I8s", fcntl.ioctl(folder, 0x801C581F, bytes(28)))
        fcntl.ioctl(folder, 0x401C5820, struct.pack("5I8s", flags | 0x200, *rest, project + 5, more, padding))
    with pytest.raises(OSError, match="cross-device"):
        deep.rename(job / "moved")
    harmless(job)
    (program,) = job.rglob("program")
    assert program.stat().st_mode & 0o7777 == 0o755
    remove(job)
    assert not job.exists()
