"""A worker without torch that prints its environment and arguments as one line of JSON."""

import json
import os
import sys

print(json.dumps({"env": dict(os.environ), "args": sys.argv[1:], "cwd": os.getcwd()}))
