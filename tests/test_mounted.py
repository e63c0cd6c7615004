"""Folders that a job names: data and mounts, what nodes see of them, and what may not be mounted."""

import os
import socket
import textwrap
from pathlib import Path

import pytest

from orchestrate.cli.arguments import flags, parse
from orchestrate.engines.docker import folders
from orchestrate.errors import UsageError
from orchestrate.files.paths import JobPaths
from orchestrate.job.folders import with_absolute
from orchestrate.job.layers import resolve

SCRIPT = textwrap.dedent("""
    import os, pathlib, sys
    data = pathlib.Path(os.environ["DATA_TRAIN"])
    print("argument", sys.argv[1] == str(data), "data", sorted(os.listdir(data)), (data / "a").read_text())
    for path in (data, pathlib.Path("/models"), pathlib.Path("/cache")):
        try:
            (path / "written").write_text("x")
            print(path.name, "written")
        except OSError as error:
            print(path.name, error.strerror)
""")
OPTIONS = ("--trainers", "0", "--gpus", "none")


@pytest.fixture
def given(cli):
    """The command line in a folder with data, a model and a cache."""
    for name in ("data/a", "models/m", "cache/c"):
        (cli.folder / name).parent.mkdir()
        (cli.folder / name).write_text(name)
    (cli.folder / "cache").chmod(0o777)
    (cli.folder / "uses.py").write_text(SCRIPT)
    return cli


@pytest.mark.docker
def test_nodes_must_see_data_and_mounts_read_only_unless_a_job_asks_for_more(given, docker_engine, nothing_left):
    mounts = ("--mount", "models:/models", "--mount", "./cache:/cache:rw")
    done = given("run", *OPTIONS, "--data", "train=data", *mounts, "uses.py", "$DATA_TRAIN")
    assert done.returncode == 0, done.stderr
    assert given.log(0).splitlines()[-4:] == [
        *("argument True data ['a'] data/a", "train Read-only file system", "models Read-only file system"),
        "cache written",
    ]
    assert (given.folder / "cache" / "written").read_text() == "x"
    assert f"data:\n  train: {given.folder}/data\n" in (given.run_dir() / "job.yaml").read_text()


def test_local_processes_must_see_data_at_its_own_path(given, nothing_left):
    run = ("run", "--engine", "process", *OPTIONS, "--data", "train=data", "uses.py", "${DATA_TRAIN}")
    done = given(*run)
    assert done.returncode == 0, done.stderr
    assert "argument True data ['a'] data/a\n" in given.log(0)
    done = given(*run[:5], "--mount", "models:/models", "uses.py")
    assert (done.returncode, "the process engine does not support mounts" in done.stderr) == (2, True)


@pytest.mark.docker
def test_a_cluster_must_have_the_mounts_of_its_jobs(given, docker_engine, nothing_left):
    assert given("up", *OPTIONS, "--data", "train=data").returncode == 0
    done = given("run", *OPTIONS, "--data", "train=data", "uses.py", "$DATA_TRAIN")
    assert ("argument True" in done.stdout, "not using" in done.stderr) == (True, False), done.stderr
    done = given("run", *OPTIONS, "--data", "train=models", "uses.py", "x")
    assert "not using cluster-" in done.stderr and "data is {'train': " in done.stderr
    assert given("down", "cluster").returncode == 0


def mounted(spec: dict, runs: Path) -> list[dict]:
    return folders.given_mounts(with_absolute(resolve({"user": "root", **spec} if not os.geteuid() else spec)), runs)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"mounts": "/:/x"}, "/ cannot be mounted: it is a system folder"),
        ({"mounts": "/proc/self:/x"}, "cannot be mounted: it is a system folder"),
        ({"mounts": "/dev/null:/x"}, "/dev/null cannot be mounted: it is a system folder"),
        ({"mounts": "none:/x"}, "none: No such file or directory"),
        ({"mounts": "data:/"}, "data cannot be mounted at /: that path is in use"),
        ({"mounts": "data:/job/x"}, "data cannot be mounted at /job/x: that path is in use"),
        ({"mounts": "data:/opt"}, "data cannot be mounted at /opt: that path is in use"),
        ({"mounts": "data:/x/../etc"}, "data cannot be mounted at /etc: that path is in use"),
        ({"mounts": "data:/usr/lib"}, "data cannot be mounted at /usr/lib: that path is in use"),
        ({"mounts": ["data:/x", "data:/x"]}, "two folders are mounted at /x"),
        ({"mounts": ["data:/x", "data:/x/y"]}, "two folders are mounted at /x and /x/y, one inside the other"),
        ({"data": {"a": "data"}, "mounts": "data:/data"}, "mounted at /data/a and /data, one inside the other"),
        ({"data": {"a": "data"}, "mounts": "data:/data/a"}, "two folders are mounted at /data/a"),
        ({"mounts": "runs:/x"}, "runs cannot be mounted: it has files of jobs, which may contain secrets"),
        ({"mounts": "runs/j-1:/x"}, "j-1 cannot be mounted: it has files of jobs, which may contain secrets"),
        ({"mounts": ".:/x"}, "cannot be mounted: it has files of jobs, which may contain secrets"),
        ({"mounts": "state/orchestrate:/x"}, "cannot be mounted: it has files of jobs, which may contain secrets"),
        ({"mounts": "runs/j-1/job/link:/x"}, "link is a link to "),
        ({"mounts": "runs/j-1/job/other:/x"}, "other is a link to "),
        ({"mounts": "pipe:/x"}, "pipe cannot be mounted: it is neither a folder nor a file"),
        ({"data": {"train": "none"}}, "data.train: "),
        ({"data": {"train": "data/a"}}, "a is not a folder"),
        ({"data": {"a-b": "data"}}, "data must be a mapping of names to folders"),
        ({"data": {"a": "data", "A": "data"}}, "data must be a mapping of names to folders"),
        ({"data": {"a": ""}}, "data must be a mapping of names to folders"),
        ({"mounts": ["data"]}, "mounts must be a list of mounts"),
        ({"mounts": "data:x"}, "mounts must be a list of mounts"),
        ({"mounts": "data:/x:wr"}, "mounts must be a list of mounts"),
    ],
)
def test_what_may_not_be_mounted_must_be_refused(tmp_path, monkeypatch, spec, error):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").touch()
    JobPaths(tmp_path / "runs" / "j-1").create()
    JobPaths(tmp_path / "runs" / "j-2").create()
    (tmp_path / "runs" / "j-1" / "job" / "link").symlink_to(tmp_path / "data")
    (tmp_path / "runs" / "j-1" / "job" / "other").symlink_to(tmp_path / "runs" / "j-2" / "job" / "logs")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError) as failure:
        mounted(spec, tmp_path / "runs")
    assert error in str(failure.value)


def test_files_that_an_earlier_job_wrote_must_be_mountable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    JobPaths(tmp_path / "runs" / "j-1").create()
    (mount,) = mounted({"data": {"start": "runs/j-1/checkpoints"}}, tmp_path / "runs")
    source = str(tmp_path / "runs" / "j-1" / "job" / "checkpoints")
    assert (mount["source"], mount["target"], mount["read_only"]) == (source, "/data/start", True)


def test_sockets_and_pipes_in_a_mounted_folder_must_be_hidden(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "deep").mkdir(parents=True)
    os.mkfifo(tmp_path / "data" / "deep" / "pipe")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("data/door")
        hidden = [mount["target"] for mount in mounted({"mounts": "data:/x"}, tmp_path / "runs")[1:]]
    assert hidden == ["/x/door", "/x/deep/pipe"]


@pytest.mark.parametrize("target", ["kubernetes", "slurm", "compose"])
def test_folders_of_this_machine_must_not_be_exported(given, target):
    done = given("export", target, "--gpus", "none", "--data", "train=data", "uses.py")
    assert (done.returncode, "data and mounts are for this machine only" in done.stderr) == (2, True)


def test_data_of_the_command_line_must_be_added_to_that_of_the_job_file():
    options = flags(parse(["run", "--data", "b=z"])[0])
    assert resolve({"data": {"a": "x", "b": "y"}}, options).data == {
        "a": "x",
        "b": "z",
    }
