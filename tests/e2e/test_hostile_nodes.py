"""Nodes that a job, or its image, keeps from doing their work, on the real engine, must end nevertheless."""

import os
import shlex

import pytest
from support.leftovers import docker

from orchestrate.spec.spec import IMAGE

pytestmark = pytest.mark.docker
NO_NODE = """#!/bin/sh
case "$*" in *sys.stdout.write*) printf '3 11';; *) trap '' TERM; while :; do sleep 1; done;; esac
"""


STARVES = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
cpu = max(os.sched_getaffinity(0))
os.sched_setaffinity(1, {cpu})
os.setpriority(os.PRIO_PROCESS, 1, 19)
os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))
for _ in range(30):
    if not os.fork():
        os.setsid()
        os.sched_setaffinity(0, {cpu})
        while True:
            pass
while True:
    signal.pause()
"""


def test_a_job_that_takes_the_cpu_from_its_node_must_be_ended(cli, docker_engine, nothing_left):
    (cli.folder / "starves.py").write_text(STARVES)
    options = ("--engine", "docker", "--trainers", "0", "--gpus", "none", "--max-restarts", "0", "--set", "grace=1s")
    done = cli("run", *options, "--max-run", "60s", "--", "starves.py")
    assert done.returncode == 1, done.stderr  # its node has killed it
    assert "not all nodes were removed" not in done.stderr


@pytest.fixture
def without_a_node(docker_engine):
    """An image whose Python runs no node, and does not end when asked."""
    name = f"no-node-{os.getpid():x}:1"
    put = f"p=$(command -v python) && rm $p && printf %s {shlex.quote(NO_NODE)} > $p && chmod 755 $p"
    node = docker("create", "--user", "0:0", "--entrypoint", "bash", IMAGE, "-c", put).strip()
    docker("start", "--attach", node)
    docker("commit", "--change", "STOPSIGNAL SIGCONT", node, name)
    docker("rm", node)
    yield name
    docker("image", "rm", name)


def test_a_job_whose_nodes_never_listen_must_end_at_its_time_limit(cli, without_a_node, nothing_left):
    options = ("--engine", "docker", "--trainers", "0", "--gpus", "none", "--image", without_a_node)
    limits = ("--max-run", "3s", "--set", "grace=1s")
    done = cli("run", *options, *limits, "--", "sums.py", timeout=50)  # a node may take a minute to listen
    assert done.returncode == 124 and "max_run was reached" in done.stderr, done.stderr
