"""A worker that writes numbered lines; `lines.py COUNT`."""

import sys

for number in range(int(sys.argv[1])):
    print("line", number)
