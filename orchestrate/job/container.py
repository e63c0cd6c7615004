"""The container of a node, whoever starts it: Compose, Swarm, Kubernetes or Slurm. Pure.

`docker-compose.yml` has the same as literals; tests/test_targets.py compares all of them.
"""

from __future__ import annotations

import math

PROGRAM = "/opt/orchestrate/node"  # in our image, or where this package is mounted
PIPE = ("-I", "-S", f"{PROGRAM}/pipe.py")  # arguments for Python
USER = (1000, 1000)  # of our image
# A user id without an entry in /etc/passwd needs a home folder and a name, or torch's compiler fails.
ACCOUNT = {"HOME": "/tmp", "USER": "node", "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor"}
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # output appears at once, and is not lost when a worker is killed
ENVIRONMENT = ACCOUNT | UNBUFFERED
OOM_SCORE_ADJ = 500  # a machine without memory ends nodes before anything else
LOG_OPTIONS = {"max-size": "50m", "max-file": "3"}
STOP_MARGIN = 10  # seconds that a node has to end, besides the grace period of its workers


def stop_seconds(grace: float) -> int:
    """Seconds from SIGTERM for the node to SIGKILL; `grace` is what its workers have."""
    return math.ceil(grace) + STOP_MARGIN
