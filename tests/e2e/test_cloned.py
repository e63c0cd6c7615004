"""A cloned project that contains run directories, on a real engine."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.faults import Background
from support.leftovers import docker
from support.victims import facts

from orchestrate.record.paths import JobPaths

GIT = ("git", "-c", "user.name=me", "-c", "user.email=me@localhost", "-c", "init.defaultBranch=main")


# --- on a real engine


@pytest.mark.docker
def test_a_clone_that_contains_a_cluster_must_not_mount_anything_of_the_host(cli, docker_engine, nothing_left, victim):
    """The cluster was created with `up`; its files were then edited and committed."""
    origin = cli.folder / "origin"
    shutil.copytree(cli.folder, origin, ignore=shutil.ignore_patterns("origin", "victim"))
    options: tuple[str, ...] = ("--engine", "docker", "--trainers", "0", "--gpus", "none")
    options += ("--set", "user=root") if os.geteuid() == 0 else ()  # the owner of the link targets
    name = cli("up", *options, "--set", "warm=false", "--runs", "origin/runs").stdout.strip()
    cluster = JobPaths(origin / "runs" / name)
    shutil.copytree(cluster.root, cli.folder / "kept", symlinks=True, ignore=shutil.ignore_patterns("sockets", "nodes"))
    assert cli("down", name, "--runs", "origin/runs").returncode == 0
    shutil.copytree(cli.folder / "kept", cluster.root, symlinks=True)
    cluster.plan.write_text(cluster.plan.read_text().replace(str(cli.folder), str(cli.folder / "clone")))
    cluster.nodes.symlink_to("../../../victim/nodes")
    cluster.sockets.symlink_to(victim / "sockets")
    (origin / "look.py").write_text("import os, socket\nprint(socket.gethostname(), os.listdir('/job'))\n")
    for arguments in (("init", "-q"), ("add", "-A", "-f"), ("commit", "-qm", "evil")):
        subprocess.run([*GIT, *arguments], cwd=origin, check=True)
    clone = cli.folder / "clone"
    subprocess.run([*GIT, "clone", "-q", str(origin), str(clone)], check=True)
    assert (clone / "runs" / name / "nodes").is_dir()
    before = facts(victim)
    cli.folder = clone
    done = cli("run", *options, "--", "look.py")
    assert done.returncode == 0, done.stderr
    (log,) = clone.glob("runs/look-*/logs/rank-0.log")
    assert "file" not in log.read_text() and name not in done.stderr
    assert facts(victim) == before and not docker("ps", "-aq", "--filter", f"label=orchestrate.job={name}").strip()
    for project in (origin, clone):
        (project / "runs" / name / "sockets").unlink()
    cli.folder = clone.parent


@pytest.mark.parametrize("command", ["resume", "resume --detach"])
def test_links_that_a_pull_has_put_into_a_run_directory_must_not_be_written_through(cli, nothing_left, command):
    """Upstream knows the name of the job: its script has sent it."""
    (cli.folder / "fails.py").write_text(
        "import os, sys\nprint('line', flush=True)\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    options = ("--engine", "process", "--trainers", "0", "--gpus", "none", "--max-restarts", "0")
    assert cli("run", *options, "--", "fails.py").returncode == 1
    paths = JobPaths(cli.run_dir())
    victims = cli.folder / "victims"
    victims.mkdir()
    # Those of plan.json, job.yaml, report.json and events.jsonl that are not its own are found by its record.
    files = [paths.supervisor_log, paths.times, paths.orchestrate_log, paths.page, paths.copied, paths.usage]
    files += [paths.patch, paths.usage_asked, paths.stacks, paths.stacks_asked, paths.debugged, paths.services_log]
    for path in files:
        (victims / path.name).write_text("mine")
        path.unlink(missing_ok=True)
        path.symlink_to(victims / path.name)
    done = cli(*command.split(), paths.root.name)
    assert done.returncode == 0, done.stderr
    assert cli("wait", paths.root.name).returncode == 0
    assert {path.name: path.read_text() for path in victims.iterdir()} == {path.name: "mine" for path in files}


def files_of(folder: Path) -> dict[str, tuple[int, str]]:
    """The mode and content of everything in a folder."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_text() if path.is_file() else "")
        for path in folder.rglob("*")
    }


@pytest.mark.each_engine
def test_a_run_directory_that_a_pull_replaces_by_a_link_must_lead_nowhere(cli, engine, nothing_left):
    """If it is ignored, git removes the directory without a word."""
    victim = cli.folder / "victim"
    for name in ("report.json", "usage.json", "usage.asked", "job/work/count.py", "job/mine", "sockets/a"):
        (victim / name).parent.mkdir(parents=True, exist_ok=True)
        (victim / name).write_text("mine")
    (victim / "job" / "closed").mkdir()
    (victim / "job" / "closed").chmod(0)
    (victim / "sockets" / "a").chmod(0o6755)
    before = files_of(victim)
    store = cli.folder / "store"
    job = Background(cli, engine, "--set", f"output=file://{store}", "--", "count.py", "100000", trainers=1)
    job.until("workers_started")
    root = cli.run_dir()
    root.rename(cli.folder / "removed")
    root.symlink_to(victim)
    assert job.end() in (1, 3) and "was removed or replaced while the job ran" in job.err, job.err
    after = files_of(victim)
    if engine == "process":  # whose workers, of this account, go on writing to $JOB_DIR
        after = {name: facts for name, facts in after.items() if name in before}
    assert after == before
    assert not [path for path in store.rglob("*") if path.is_file() and path.read_text(errors="replace") == "mine"]
    root.unlink()


def test_a_link_in_a_run_directory_must_not_be_published(cli, nothing_left):
    (cli.folder / "secret").write_text("a key of the user")
    store = cli.folder / "store"
    job = Background(cli, "process", "--set", f"output=file://{store}", "--", "count.py", "until-asked", trainers=1)
    job.until("workers_started")
    JobPaths(cli.run_dir()).patch.symlink_to(cli.folder / "secret")
    cli.finish_jobs()
    assert job.end() == 0
    assert not [path for path in store.rglob("*") if path.is_file() and "a key of" in path.read_text(errors="replace")]


def test_a_job_must_keep_its_supervisor_if_a_pull_replaces_its_lock(cli, nothing_left):
    job = Background(cli, "process", "--", "count.py", "until-asked", trainers=1)
    job.until("workers_started")
    paths = JobPaths(cli.run_dir())
    paths.lock.unlink()
    paths.lock.touch()
    done = cli("rm", paths.root.name)
    assert done.returncode == 2 and "another process" in done.stderr, done.stderr
    cli.finish_jobs()
    assert job.end() == 0 and cli.report()["generations"] == 1
