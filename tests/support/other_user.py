"""Code that runs as another user than root, whom modes restrict."""

import contextlib
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

USER = 61000  # of user and group; no account has it


@contextlib.contextmanager
def folder_of_user() -> Iterator[Path]:
    """A folder of USER, or of the account that runs the tests unless that is root, which it can reach."""
    top = Path(tempfile.mkdtemp())
    if not os.getuid():
        os.chown(top, USER, USER)
    try:
        yield top
    finally:
        shutil.rmtree(top)


def as_user(action: Callable[[], object]) -> None:
    """Call a function as USER if the tests run as root, or else as the account that runs them; it must not raise."""
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    code = 1
    try:
        if not os.getuid():
            os.setgroups([])
            os.setgid(USER)
            os.setuid(USER)
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
