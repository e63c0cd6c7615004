"""`python -m orchestrate`."""

import os
import sys

try:
    from orchestrate import terminal

    terminal.prepare()
    from orchestrate.cli import main

    code = main(sys.argv[1:])
except KeyboardInterrupt:  # before the command line was read
    code = 130
os._exit(code)  # the interpreter would first take apart, for some 50 ms, all that was imported
