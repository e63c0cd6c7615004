"""`python -m orchestrate`, and the command `orchestrate`."""

import os
import sys


def forget_current_folder() -> None:
    """Import nothing from the current folder, which `-m` puts first: a file named queue.py there is the user's own.

    The package finds its own modules without it, also in a checkout that is not installed.
    """
    if getattr(sys.flags, "safe_path", sys.flags.isolated):
        return  # then `-m` has put nothing there
    try:
        if sys.path[0] == os.getcwd():
            del sys.path[0]
    except OSError:  # the folder is gone, and is not on the path
        pass


def run() -> None:
    """Run the command line, and end the process with its exit code."""
    forget_current_folder()
    try:
        from orchestrate.cli import main

        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # before the command line was read
        code = 130
    os._exit(code)  # the interpreter would first take apart, for some 50 ms, all that was imported


if __name__ == "__main__":
    run()
