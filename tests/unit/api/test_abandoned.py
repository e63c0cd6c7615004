"""Clusters of programs that were killed."""

import os
import time

import pytest
from support.commanded import Whole, create
from support.plans import HERE, plan

from orchestrate.api import cluster
from orchestrate.engines.base import JobState
from orchestrate.host.processes import myself
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec

SPEC = JobSpec(trainers=2)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_clusters_of_killed_programs_must_be_removed_once_their_nodes_have_ended(tmp_path, elsewhere):
    def up(name: str, age: float, program: str | None, job: bool = False) -> None:
        paths = JobPaths(tmp_path / name)
        run_dir.create(SPEC, plan(SPEC, HERE.but(cluster=name, keep=60.0), name, 0), paths)
        if program is not None:
            paths.private.write_text(program)
        if job:
            create(JobPaths(tmp_path / f"of-{name}"), cluster=name).log(0).write_text("mine")
        os.utime(paths.nodes, (time.time() - age,) * 2)

    dead, alive = f"{os.getpid()} 1", myself()
    up("tests-1", 200, dead, job=True)
    up("tests-2", 70, dead)  # its nodes are about to end
    up("tests-3", 200, alive)
    up("tests-4", 200, "")  # who knows
    up("kept-1", 200, None)
    up("kept-2", 200, None, job=True)
    engine = Whole()
    names = [path.name for path in tmp_path.iterdir() if not path.name.startswith("of-")]
    engine.states = [JobState(name, "docker", 1, JobPaths(tmp_path / name).nodes, os.getuid()) for name in names]
    known = cluster.elsewhere(engine, tmp_path / "runs") if elsewhere else cluster.found(tmp_path)
    left = cluster.remove_abandoned(engine, known)
    assert sorted(each.name for each in left) == ["kept-2", "tests-2", "tests-3", "tests-4"]
    assert sorted(engine.calls) == ["remove kept-1", "remove tests-1"]
    assert (tmp_path / "of-tests-1" / "logs" / "rank-0.log").read_text() == "mine"
