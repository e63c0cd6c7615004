"""Folders that a user may enter, but not list."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from support.other_user import USER, as_user

from orchestrate.files.folder import ROOT, unlinked


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
