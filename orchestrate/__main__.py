"""`python -m orchestrate`."""

import os
import sys

try:
    from orchestrate.cli import main

    code = main(sys.argv[1:])
except KeyboardInterrupt:  # before the command line was read
    code = 130
try:
    if sys.stdout:
        sys.stdout.flush()
except BrokenPipeError:  # whoever read our output has seen enough
    pass
except OSError as error:
    print(f"error: not all of the output was written: {error}", file=sys.stderr)
    code = code or 1
os._exit(code)  # the interpreter would first take apart, for some 50 ms, all that was imported
