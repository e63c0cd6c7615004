"""A worker that sleeps, for as many seconds as it is told."""

import sys
import time

time.sleep(float(sys.argv[1]))
