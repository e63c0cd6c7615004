"""What nodes see of the folders that a job names: data and mounts."""

import os
import subprocess
import textwrap

import pytest
from support.exports import make_folder
from support.faults import Background
from support.leftovers import docker
from support.waiting import eventually

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
    assert given("up", *OPTIONS, "--data", "train=data", "--set", "warm=false").returncode == 0
    done = given("run", *OPTIONS, "--data", "train=data", "uses.py", "$DATA_TRAIN")
    assert ("argument True" in done.stdout, "not using" in done.stderr) == (True, False), done.stderr
    done = given("run", *OPTIONS, "--data", "train=models", "uses.py", "x")
    assert "not using cluster-" in done.stderr and "data is {'train': " in done.stderr
    assert given("down", "cluster").returncode == 0


@pytest.mark.parametrize("target", ["kubernetes", "slurm", "pbs"])
def test_folders_of_this_machine_must_not_be_exported_to_others(given, target):
    done = given("export", target, "--gpus", "none", "--data", "train=data", "uses.py")
    assert (done.returncode, "exported only to Compose" in done.stderr) == (2, True)


@pytest.mark.docker
def test_data_must_be_exported_to_compose(given, docker_engine, tmp_path):
    options = ("--gpus", "none", "--trainers", "1", "--name", "exported", "--data", "train=data")
    done = given("export", "compose", *options, "uses.py", "$DATA_TRAIN")
    assert done.returncode == 0, done.stderr
    (file := tmp_path / "exported.yml").write_text(done.stdout)
    make_folder(done.stdout)
    compose = ["docker", "compose", "--file", str(file)]
    try:
        up = subprocess.run([*compose, "up"], capture_output=True, text=True, timeout=120)
        assert up.returncode == 0 and up.stdout.count("argument True data ['a'] data/a") == 2, up.stdout
    finally:
        subprocess.run([*compose, "down", "--volumes"], capture_output=True, timeout=120, check=True)


LINKS = """
import os, sys
os.symlink(sys.argv[1], f"/cache/{os.environ['JOB_ID']}")
os.symlink(sys.argv[1], "/cache/sub")
open(os.path.join(os.environ["JOB_DIR"], "result"), "w").close()
"""


@pytest.mark.docker
def test_a_job_must_not_lead_the_host_out_of_a_folder_that_it_can_write(given, docker_engine, nothing_left):
    (given.folder / "private").mkdir()
    (given.folder / "links.py").write_text(LINKS)
    output = ("--output", f"file://{given.folder}/cache")
    private = f"{given.folder}/private"
    done = given("run", *OPTIONS, "--mount", "cache:/cache:rw", *output, "links.py", private)
    link = given.folder / "cache" / given.run_dir().name
    assert f"{link} is a link, which a job may have made" in done.stderr
    done = given("run", *OPTIONS, "--data", "train=cache/sub", "uses.py", "x")
    why = f"error: {given.folder}/cache/sub leads to {private}, out of {given.folder}/cache, where a job may have made"
    assert (done.returncode, why in done.stderr) == (2, True)
    assert not os.listdir(private)


@pytest.mark.docker
def test_a_job_must_not_lead_what_hides_a_pipe_to_the_script_of_another_job(given, docker_engine, nothing_left):
    (given.folder / "pipe.py").write_text("import os\nos.mkfifo('/cache/pipe')\n")
    (given.folder / "fails.py").write_text(
        "import os, time\nprint('real', flush=True)\n"
        "time.sleep(60 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))\nraise SystemExit('it fails')\n"
    )
    assert not given("run", *OPTIONS, "--mount", "cache:/cache:rw", "pipe.py").returncode
    job = Background(given, "docker", "--name", "other", "--", "fails.py", trainers=0)
    (run,) = eventually(lambda: [*given.folder.glob("runs/other-*")])
    log = run / "job" / "logs" / "rank-0.log"
    eventually(lambda: (log.exists() and "real" in log.read_text()) or job.ended_early())
    (given.folder / "cache" / "pipe").unlink()
    (given.folder / "cache" / "pipe").symlink_to("/job/work/fails.py")
    docker("kill", f"{run.name}-master-1")
    out, err = job.process.communicate(timeout=100)
    assert job.process.returncode == 1, out + err
    assert "/workspace/cache/pipe' is not hidden: a job has put a link in its place" in err
