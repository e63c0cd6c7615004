"""`python -m orchestrate`, and the command `orchestrate`."""

import os
import sys


def forget_current_folder() -> None:
    """Import nothing from the current folder: a file named queue.py there is the user's own.

    `-m` puts that folder first, and so does an empty entry of PYTHONPATH, as in `:/x`, in its place. The package finds
    its own modules without it, also in a checkout that is not installed. One that PYTHONPATH names stays.
    """
    try:
        here = os.getcwd()
    except OSError:  # the folder is gone, and is not on the path
        return
    if not getattr(sys.flags, "safe_path", sys.flags.isolated) and sys.path[0] == here:
        del sys.path[0]
    entries = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    named = {os.path.abspath(entry) for entry in entries.split(os.pathsep) if entry}
    if entries and here in sys.path and here not in named:
        sys.path.remove(here)


def run() -> None:
    """Run the command line, and end the process with its exit code."""
    forget_current_folder()
    try:
        from orchestrate.cli.main import main

        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # before the command line was read
        code = 130
    os._exit(code)  # the interpreter would first take apart, for some 50 ms, all that was imported


if __name__ == "__main__":
    run()
