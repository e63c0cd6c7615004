"""What is submitted to Slurm."""

import shlex
from pathlib import Path

import pytest

from orchestrate.engines.slurm.batch_script import options, script, short_time, words
from orchestrate.record.paths import JobPaths
from orchestrate.spec.layers import resolve

PATHS = JobPaths(Path("/home/ada lovelace/runs/train-1"))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"trainers": 2, "spares": 1}, {"nodes": "4", "ntasks-per-node": "1", "cpus-per-task": "1"}),
        ({"nproc_per_node": 4}, {"cpus-per-task": "4"}),
        ({"nproc_per_node": 4, "cpus": 1.5}, {"cpus-per-task": "2"}),
        ({"memory": "2g"}, {"mem": "2G"}),
        ({"grace": "1.5s"}, {"signal": "B:TERM@32"}),
        ({"gpus": "all", "nproc_per_node": 2}, {"gpus-per-node": "2"}),
        ({"gpus": 8, "trainers": 3}, {"gpus-per-node": "2", "cpus-per-task": "2"}),
        ({"slurm": {"time": "2h", "time-min": "90s"}}, {"time": "120", "time-min": "2"}),
        ({"slurm": {"time": "soon"}}, {"time": "soon"}),
        ({"slurm": {"time": "1:00", "exclusive": True, "requeues": 3}}, {"time": "1:00", "exclusive": ""}),
    ],
)
def test_options_of_sbatch_must_follow_from_the_job(settings, found):
    assert options(resolve({"command": "train.py", **settings}), PATHS).items() >= found.items()


@pytest.mark.parametrize(
    ("time", "left"),
    [
        *(("2m", 15), ("2", 15), ("2:30", 45), ("0:02:00", 15), ("1m", 0), ("0-0:02", 15)),
        *(("3m", None), ("1:00:00", None), ("1-0", None), ("soon", None), ("", None)),
    ],
)
def test_a_time_limit_that_leaves_workers_no_time_must_be_warned_of(time, left):
    found = short_time(resolve({"grace": "15s", "slurm": {"time": time} if time else {}}))
    assert found == "" if left is None else found.startswith(f"slurm.time leaves workers {left} s to start and train ")


def test_nothing_must_be_asked_for_that_the_job_does_not_name():
    assert not {"time", "mem", "gpus-per-node", "requeues", "partition"} & {*options(resolve({}), PATHS)}


def test_the_command_and_the_script_must_keep_paths_with_spaces():
    spec = resolve({"slurm": {"exclusive": True}})
    assert "--exclusive" in words(spec, PATHS) and words(spec, PATHS)[-1] == "/home/ada lovelace/runs/train-1/slurm.sh"
    text = script(spec, PATHS)
    last = shlex.split(text.splitlines()[-1])
    assert text.startswith("#!/bin/bash\n") and last[-2:] == ["--runs", "/home/ada lovelace/runs"]
