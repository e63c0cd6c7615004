"""`python -m orchestrate`."""

import sys

try:
    from orchestrate.cli import main

    code = main(sys.argv[1:])
except KeyboardInterrupt:  # before the command line was read
    code = 130
sys.exit(code)
