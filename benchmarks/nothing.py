"""A worker that sleeps; `nothing.py SECONDS`."""

import sys
import time

time.sleep(float(sys.argv[1]))
