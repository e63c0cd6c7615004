"""Folders that a user may enter, but not list."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from orchestrate.files.folder import ROOT, unlinked


@pytest.mark.skipif(os.getuid() != 0, reason="must be root to become another user")
def test_folders_that_may_only_be_entered_must_not_keep_a_user_from_their_own():
    """As where /home, or the folder of a group, has the mode 0711."""
    top = Path(tempfile.mkdtemp())
    home = top / "home" / "ada"
    home.mkdir(parents=True)
    (home / "file").write_text("mine")
    for path in (home, home / "file"):
        os.chown(path, 61000, 61000)
    for path in (top, top / "home"):
        path.chmod(0o711)
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            os.setgid(61000)
            os.setuid(61000)
            with ROOT.open(f"{home}/file") as file, ROOT.opened(f"{home}/new/inner", make=True) as inner:
                right = file.read() == b"mine" and os.fstat(inner).st_uid == 61000
            os._exit(0 if right and unlinked(home / "file").st_size == 4 else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    shutil.rmtree(top)
