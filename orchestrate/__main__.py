"""`python -m orchestrate`, and the command `orchestrate`."""

import os
import sys


def forget_current_folder() -> None:
    """Remove the current folder from sys.path, so that a user's queue.py does not shadow the standard library.

    `-m` inserts it in first place, and an empty entry of PYTHONPATH, as in `:/x`, in its own place. The package finds
    its modules without it, even in a checkout that is not installed. An entry that PYTHONPATH names explicitly stays.
    """
    try:
        here = os.getcwd()
    except OSError:  # the folder was removed, so it is not on the path
        return
    if not getattr(sys.flags, "safe_path", sys.flags.isolated) and sys.path[0] == here:
        del sys.path[0]
    entries = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    named = {os.path.abspath(entry) for entry in entries.split(os.pathsep) if entry}
    if entries and here in sys.path and here not in named:
        sys.path.remove(here)


def run() -> None:
    """Run the command line and exit with its exit code."""
    forget_current_folder()
    try:
        if sys.argv[1:2] in (["run"], ["resume"], ["up"]):
            from orchestrate.console import phase, replaces

            if replaces(sys.stderr):
                phase("loading orchestrate")  # importing everything takes a tenth of a second or more
        from orchestrate.cli.main import main

        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # before the command line was parsed
        code = 130
    os._exit(code)  # skip the interpreter's shutdown, which takes about 50 ms


if __name__ == "__main__":
    run()
