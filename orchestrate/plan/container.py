"""Settings of node containers, the same under Compose, Swarm, Kubernetes and Slurm. Pure.

`docker-compose.yml` repeats them as literals; tests/unit/export/test_equal_containers.py compares all targets.
"""

from __future__ import annotations

import math

PROGRAM = "/opt/orchestrate/node"  # in the project's image, or the mount point of this package
PIPE = ("-I", "-S", f"{PROGRAM}/programs/pipe.py")  # arguments for Python
USER = (1000, 1000)  # of the project's image
# Without HOME and USER, torch's compiler fails for a user that is not in /etc/passwd.
ACCOUNT = {"HOME": "/tmp", "USER": "node", "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor"}
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # output appears immediately, and is not lost when a worker is killed
ENVIRONMENT = ACCOUNT | UNBUFFERED
OOM_SCORE_ADJ = 500  # when memory runs out, the kernel kills nodes first
LOG_OPTIONS = {"max-size": "50m", "max-file": "3"}
STOP_MARGIN = 10  # seconds for a node to exit, in addition to its workers' grace period


def stop_seconds(grace: float) -> int:
    """Seconds between SIGTERM and SIGKILL for a node whose workers have `grace` seconds."""
    return math.ceil(grace) + STOP_MARGIN
