"""Failures of workers, hosts and networks in a job on three hosts, each with its own engine."""

import shutil

import pytest
from support.hosts import command
from support.swarm_jobs import RANKS, Job, assert_succeeded
from support.waiting import eventually

pytestmark = pytest.mark.docker
WRITES = """
import os, pathlib, runpy
own = pathlib.Path("out", os.environ["RANK"])
own.parent.mkdir(exist_ok=True)
with own.open("a") as file:
    file.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + "\\n")
runpy.run_path("count.py", run_name="__main__")
"""
WRITES_MUCH = """
import os, pathlib
pathlib.Path(os.environ["JOB_DIR"], "much-" + os.environ["RANK"]).write_bytes(os.urandom(200_000_000))
"""


SHARDS = """
import os, pathlib, shutil, signal, time
rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
latest = pathlib.Path(os.environ["JOB_DIR"], "checkpoints", "latest")
print("found", *sorted(path.name for path in latest.glob("*")), flush=True)
if rank == "0":
    shutil.rmtree(latest, ignore_errors=True)
time.sleep(1)  # as a barrier would
latest.mkdir(parents=True, exist_ok=True)
(latest / f"shard-{rank}").write_text(f"{rank} of {generation}")
time.sleep(2)  # until all have saved, and these files have been copied several times
if generation != "2" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def assert_host_lost(job: Job, ranks: list[int]) -> None:
    """Check that the only failure was the loss of a host, with one of these ranks."""
    ((rank, cause),) = job.causes()
    assert cause == "host lost" and rank in ranks


def test_a_killed_worker_must_restart_the_gang_from_the_checkpoints_of_all_hosts(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "until-restarted")
    job.until_step(25, rank=2)
    job.kill_worker(2)
    assert_succeeded(job)
    assert job.causes() == [(2, "killed")]


@pytest.mark.exhaustive
def test_checkpoints_that_rank_0_deletes_and_all_ranks_write_again_must_be_kept(cli, swarm):
    (cli.folder / "shards.py").write_text(SHARDS)
    job = Job(cli, swarm, "--", "shards.py")
    assert job.end(240) == 0, job.err
    found = {path.name: path.read_text() for path in (cli.run_dir() / "checkpoints" / "latest").iterdir()}
    assert found == {f"shard-{rank}": f"{rank} of 2" for rank in RANKS}
    assert all(cli.log(rank).count(" ".join(["found", *sorted(found)])) == 2 for rank in RANKS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "rank"), [("master", 0), ("trainer-1", 1)])
def test_a_killed_task_must_be_replaced_by_one_with_its_files(cli, swarm, name, rank):
    (cli.folder / "writes.py").write_text(WRITES)
    job = Job(cli, swarm, "--", "writes.py", "until-restarted")
    job.until_step(25, rank)
    eventually(lambda: all((cli.run_dir() / "work" / "out" / str(each)).exists() for each in RANKS))
    host, node = job.where(name)
    host.docker("kill", node)
    job.until("generation_started", 2)
    written = [line.removeprefix(f"[rank {rank}] ") for line in host.docker("logs", node).splitlines()]
    assert_succeeded(job)
    assert cli.log(rank).partition("[node] generation 1")[0].splitlines() == written
    assert job.causes() == [(rank, "node lost")]
    again = [step for step, generation in job.steps(rank) if generation == 1]
    assert again[0] % 10 == 1 and again[0] > 1  # from its checkpoint, copied here and then to the new node
    out = cli.run_dir() / "work" / "out"
    assert {path.name: path.read_text() for path in out.iterdir()} == {str(each): "0\n1\n" for each in RANKS}
    assert cli.report()["written"] == [f"out/{each}" for each in RANKS]
    assert f"the workers wrote 4 files: {cli.run_dir()}/work\n" in job.err


@pytest.mark.exhaustive
def test_a_restart_on_a_busy_machine_must_lose_nothing(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "400")
    job.until_step(25, rank=2)
    swarm.hosts[0].docker("update", "--cpus", "0.03", f"{job.project()}-relay")  # all nodes are reached through it
    job.kill_worker(2)
    assert_succeeded(job, 400)
    assert job.causes() == [(2, "killed")]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_must_continue_without_a_host_that_dies(cli, swarm):
    job = Job(cli, swarm, "--set", "grace=2s", "--", "count.py", "until-restarted")
    last = swarm.hosts[2]
    job.until_step(30, rank=0)
    ranks = job.on(last)
    assert ranks
    last.kill()
    assert_succeeded(job)
    assert_host_lost(job, ranks)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_must_continue_with_fewer_nodes_if_no_host_accepts_another(cli, swarm):
    options = ["--min-trainers", "1", "--set", "cpus=1", "--set", "grace=2s"]
    job = Job(cli, swarm, *options, "--", "count.py", "until-restarted", trainers=5)
    job.until_step(30, rank=0)
    assert all(len(job.on(host)) == 2 for host in swarm.hosts)
    swarm.hosts[2].kill()
    assert job.until("nodes_missing")["missing"] == 2
    replicas = swarm.hosts[0].docker(
        "service", "inspect", "--format", "{{.Spec.Mode.Replicated.Replicas}}", f"{job.project()}-trainer"
    )
    assert int(replicas) <= 5 + 2  # not more with each attempt
    assert_succeeded(job)


@pytest.mark.exhaustive
def test_the_nodes_of_a_drained_host_must_be_replaced_on_other_hosts(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "until-restarted")
    job.until_step(25, rank=0)
    last = swarm.hosts[2]
    ranks = job.on(last)
    assert ranks  # nodes are on all hosts
    try:
        swarm.hosts[0].docker("node", "update", "--availability", "drain", last.name)
        assert_succeeded(job)
    finally:
        swarm.hosts[0].docker("node", "update", "--availability", "active", last.name)
    ((rank, cause),) = job.causes()
    assert rank in ranks and cause == "node stopped"
    assert f"({last.name}) was terminated with its node" in job.err


@pytest.fixture
def grow(cli):
    """Put run directories on a disk of 20 MB; yields a function that enlarges it."""
    runs = cli.folder / "runs"
    runs.mkdir()
    command("mount", "-t", "tmpfs", "-o", "size=20m", "small", str(runs))
    yield lambda: command("mount", "-o", "remount,size=200m", str(runs))
    shutil.rmtree(cli.run_dir())
    command("umount", str(runs))


@pytest.mark.exhaustive
def test_files_that_do_not_fit_on_the_disk_must_stay_on_the_nodes_until_they_do(cli, swarm, grow):
    (cli.folder / "large.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n"
        "    open(os.environ['JOB_DIR'] + '/large', 'wb').write(bytes(range(256)) * 160_000)\n"
        "    if not os.fork():\n        os.setsid()\n        os.execvp('sleep', ['sleep', '4242'])\n"
    )
    done = cli("run", "--engine", "swarm", "--gpus", "none", "--trainers", "1", "--", "large.py")
    assert done.returncode == 0
    assert "warning: not all nodes were removed: 1 file could not be copied, such as 'large': " in done.stderr
    nodes = [(host, node) for host in swarm.hosts for node in host.docker("ps", "-q").split()]
    running = [host.docker("top", node) for host, node in nodes]
    assert len(running) >= 2  # the nodes are kept
    assert not any("sleep 4242" in text for text in running)  # but nothing that the job has left
    name = cli.run_dir().name
    done = cli("stop", name)
    assert (done.returncode, "1 file could not be copied" in done.stderr) == (1, True)
    grow()
    done = cli("stop", name)
    assert done.returncode == 0, done.stderr
    assert (cli.run_dir() / "job" / "large").read_bytes() == bytes(range(256)) * 160_000
    assert cli.report()["left_behind"] == ""


@pytest.mark.exhaustive
def test_a_checkpoint_that_does_not_fit_on_the_disk_must_delay_the_next_generation(cli, swarm, grow):
    (cli.folder / "large.py").write_text(
        "import os, pathlib\npath = pathlib.Path(os.environ['JOB_DIR'], 'checkpoints', 'large')\n"
        "if path.exists():\n    print('found', path.stat().st_size)\n"
        "elif os.environ['RANK'] == '1':\n    path.write_bytes(bytes(40_000_000))\n    raise SystemExit(3)\n"
    )
    job = Job(cli, swarm, "--max-restarts", "1", "--", "large.py", trainers=1)
    assert "checkpoints/large" in job.until("disk_full")["error"]
    grow()
    assert job.end() == 0, job.err
    assert [cli.log(rank).count("found 40000000\n") for rank in (0, 1)] == [1, 1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_must_continue_without_a_host_whose_overlay_network_is_cut(cli, swarm):
    options = ["--min-trainers", "1", "--set", "grace=2s", "--set", "constraints=[node.hostname != host-1]"]
    job = Job(cli, swarm, *options, "--", "count.py", "until-restarted", trainers=2)
    job.until_step(30, rank=0)
    (last,) = [host for host in swarm.hosts[1:] if host is not job.where("master")[0]]
    (rank,) = job.on(last)
    (node,) = last.docker("ps", "-q").split()
    last.cut_nodes()
    job.until("generation_started", 2)
    assert swarm.states() == ["Ready"] * 3
    assert "count.py" not in last.docker("top", node)
    assert job.end(240) == 0, job.err
    assert_host_lost(job, [rank])


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("masters", [True, False], ids=["of the master", "of trainers"])
def test_a_partitioned_host_must_not_train_while_the_others_do(cli, swarm, masters):
    options = ["--set", "grace=2s", "--set", "constraints=[node.hostname != host-1]"]
    job = Job(cli, swarm, *options, "--", "count.py", "until-restarted")
    job.until_step(30, rank=0)
    (last,) = [host for host in swarm.hosts[1:] if (host is job.where("master")[0]) is masters]
    ranks = job.on(last)
    assert ranks
    nodes = last.docker("ps", "-q").split()
    last.cut()
    job.until("generation_started", 2)
    for node in nodes:  # their lease has expired by now
        assert "count.py" not in last.docker("top", node)
    last.heal()
    assert_succeeded(job)
    assert_host_lost(job, ranks)
    for rank in RANKS:  # from their checkpoints
        assert next(step for step, generation in job.steps(rank) if generation == 1) > 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_node_that_ends_while_its_last_files_are_copied_must_be_named(cli, swarm):
    (cli.folder / "writes.py").write_text(WRITES_MUCH)
    job = Job(cli, swarm, "--set", "grace=2s", "--", "writes.py", trainers=2)
    job.until("nodes_stopping")
    host, node = job.where("trainer-1")
    host.docker("kill", node)
    assert job.end(240) == 0, job.err
    assert "warning: the last files of trainer-1 may be missing: it ended before they were copied\n" in job.err
    sizes = [(cli.run_dir() / "job" / f"much-{rank}").stat().st_size for rank in (0, 2)]
    assert sizes == [200_000_000] * 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_host_that_is_lost_while_nodes_start_must_be_replaced(cli, swarm):
    (cli.folder / "work.py").write_text("print('worked')\n")
    swarm.hosts[2].kill()
    job = Job(cli, swarm, "--", "work.py", trainers=2)
    assert job.end(240) == 0, job.err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_files_on_nodes_that_are_cut_off_at_the_end_must_stay_there_until_they_can_be_copied(cli, swarm):
    (cli.folder / "writes.py").write_text(f"{WRITES_MUCH}print('written', flush=True)\nos.read(os.pipe()[0], 1)\n")
    elsewhere = ("--set", f"constraints=[node.hostname != {swarm.hosts[0].name}]")
    once = ("--set", "rules=[{cause: host lost, action: fail}]", "--set", "grace=2s")
    job = Job(cli, swarm, *elsewhere, *once, "--", "writes.py", trainers=1)
    eventually(lambda: any(job.has(rank, "written") for rank in (0, 1)))
    swarm.hosts[0].cut_nodes()  # the hosts stay ready
    assert job.end(240) == 1, job.err
    assert "warning: not all nodes were removed: the files of " in job.err
    swarm.hosts[0].heal()
    done = cli("stop", cli.run_dir().name)
    assert done.returncode == 0, done.stderr
    sizes = [(cli.run_dir() / "job" / f"much-{rank}").stat().st_size for rank in (0, 1)]
    assert sizes == [200_000_000] * 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_must_continue_without_a_node_that_does_not_respond(cli, swarm):
    options = ["--set", "grace=2s", "--set", "constraints=[node.hostname != host-1]"]
    job = Job(cli, swarm, *options, "--", "count.py", "until-restarted")
    job.until_step(30, rank=0)
    host, node = job.where("trainer-1")
    host.docker("pause", node)
    try:
        job.until("generation_started", 2)
    finally:
        host.docker("unpause", node)
    assert_succeeded(job)
    assert_host_lost(job, [1])
    assert "trainer-1 does not respond" in job.err and "trainer-1 has recovered" not in job.err
