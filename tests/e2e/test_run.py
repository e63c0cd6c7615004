"""`python -m orchestrate run` on each engine, without fakes: what the documentation promises to users."""

import json
import os
import signal

import pytest
from support.faults import OPTIONS, node_pid
from support.leftovers import docker
from support.printed import printed
from support.waiting import eventually

from orchestrate.host import users

RUN = ("run", "--gpus", "none", "--max-restarts", "0")


def ordered(trainers: int) -> list[str]:
    return ["master", *(f"trainer-{number}" for number in range(1, trainers + 1))]


def run(cli, engine, *arguments, **env):
    options = [] if "--trainers" in arguments else ["--trainers", "2"]
    return cli("run", "--engine", engine, "--gpus", "none", "--max-restarts", "0", *options, *arguments, **env)


def on_ready(ready, *arguments: str, **options):
    """Run a job of three workers on nodes that are up already."""
    own = ("--engine", ready.engine, "--max-restarts", "0", "--trainers", "2", *OPTIONS)
    return ready("run", *own, *arguments, **options)


def test_every_worker_must_get_its_environment_and_the_scripts_arguments(cli, engine):
    shell = {"RANK": "7", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "3", "MINE": "y"}  # must not affect the job
    options = ("--nproc-per-node", "2", "--set", "env.MINE=x", "--", "probe.py", "--flag", "a b")
    done = run(cli, engine, *options, **shell)
    assert done.returncode == 0, done.stderr
    seen = [json.loads(cli.log(rank)) for rank in range(6)]
    plan = json.loads((cli.run_dir() / "plan.json").read_text())
    for rank, worker in enumerate(seen):
        assert worker["args"] == ["--flag", "a b"]
        assert worker["env"]["MINE"] == "x"
        assert (worker["env"]["RANK"], worker["env"]["NODE_RANK"]) == (str(rank), str(rank // 2))
        assert worker["env"].items() >= plan["workers"][rank]["env"].items()


def test_stdout_must_be_the_output_of_workers_and_files_must_belong_to_the_caller_or_nodes(cli, engine):
    done = run(cli, engine, "--name", "My Job", "--", "probe.py")
    assert done.returncode == 0, done.stderr
    folder = cli.run_dir()
    assert done.stderr.splitlines()[-1] == f"runs/{folder.name}"
    assert {line.partition("]")[0] for line in done.stdout.splitlines()} == {"[0", "[1", "[2"}
    assert folder.name.startswith("my-job-")
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    ours = {"job.yaml", "plan.json", "events.jsonl", "report.json", "report.html", "orchestrate.log", "supervisor.lock"}
    ours |= {"times.jsonl", "job/generation"} | ({"copied.json"} if engine == "docker" else set())
    theirs = {
        "job",
        "job/.status-token",
        "job/logs",
        "job/checkpoints",
        *(f"job/logs/rank-{rank}.log" for rank in range(3)),
    }
    copy = {"work"} if engine == "docker" else set()
    theirs |= {f"job/{name}" for name in copy}
    links = {name: os.readlink(folder / name) for name in ("logs", "checkpoints", "metrics.jsonl", *copy)}
    assert names == ours | theirs | links.keys()
    assert links == {name: f"job/{name}" for name in links}
    nodes, _ = users.without_account()
    owners = {user: {name for name in names if (folder / name).lstat().st_uid == user} for user in (os.getuid(), nodes)}
    if engine == "docker" and not os.getuid():  # its nodes do not run as root
        assert owners == {0: ours | links.keys(), nodes: theirs}
    else:
        assert owners[os.getuid()] == names
    report = cli.report()
    assert (report["outcome"], report["world_size"], report["generations"]) == ("succeeded", 3, 1)
    assert (report["root_cause"], report["checkpoints"], report["final_metrics"]) == (None, [], {})


def test_files_that_the_script_writes_must_be_in_the_run_directory_and_the_report(ready):
    (ready.folder / "train.py").write_text(
        "import os, pathlib\nfolder = pathlib.Path(os.environ['JOB_DIR'])\n"
        "if os.environ['RANK'] == '0':\n"
        "    (folder / 'checkpoints' / 'last.pt').write_text('weights')\n"
        '    (folder / \'metrics.jsonl\').write_text(\'{"step": 1, "loss": 2}\\n{"step": 2}\\n{"ste\')\n'
    )
    done = on_ready(ready, "--", "train.py")
    assert done.returncode == 0, done.stderr
    report = ready.report()
    assert report["checkpoints"] == [str(ready.run_dir() / "checkpoints" / "last.pt")]
    assert report["final_metrics"] == {"step": 2, "loss": 2}


@pytest.mark.any_engine
def test_the_written_job_file_must_run_the_same_job_again(cli, engine):
    assert run(cli, engine, "--", "probe.py", "again").returncode == 0
    first = cli.run_dir().rename(cli.folder / "first")
    done = cli("run", str(first / "job.yaml"))
    assert done.returncode == 0, done.stderr
    assert json.loads(cli.log(2))["args"] == ["again"]


@pytest.mark.any_engine
def test_ranks_must_follow_the_numbers_of_more_than_nine_trainers(cli, engine):
    done = run(cli, engine, "--trainers", "10", "--", "probe.py")
    assert done.returncode == 0, done.stderr
    plan = json.loads((cli.run_dir() / "plan.json").read_text())
    assert plan["nodes"] == [worker["node"] for worker in plan["workers"]] == ordered(10)
    assert [json.loads(cli.log(rank))["env"]["NODE_RANK"] for rank in range(11)] == [str(rank) for rank in range(11)]


@pytest.mark.any_engine
def test_a_job_of_one_node_must_run(cli, engine):
    done = run(cli, engine, "--trainers", "0", "--", "probe.py")
    assert done.returncode == 0, done.stderr
    assert json.loads(cli.log(0))["env"]["WORLD_SIZE"] == "1"


def test_one_failing_worker_must_end_the_job_and_be_named_with_its_last_lines(ready):
    done = on_ready(ready, "--", "steps.py", "1=3")
    assert done.returncode == 1
    log = ready.run_dir() / "logs" / "rank-1.log"
    assert "root cause: rank 1 on trainer-1 exited with code 3\n    pid " in done.stderr
    assert f"    last words\nfull log: {log}\nhint: " in done.stderr
    root = ready.report()["root_cause"]
    assert (root["rank"], root["node"], root["exit_code"]) == (1, "trainer-1", 3)


@pytest.mark.any_engine
def test_a_killed_worker_must_be_distinguished_from_one_that_failed(cli, engine):
    job = cli.start(*RUN, "--engine", engine, "--trainers", "2", "--", "steps.py")
    cli.wait_for("stepping", rank=2)
    cli.kill_worker(2, signal.SIGKILL)
    _, err = job.communicate(timeout=150)
    assert job.returncode == 1
    assert "root cause: rank 2 on trainer-2 was killed by SIGKILL (exit code 137)" in err


def test_a_module_that_a_script_is_missing_must_be_reported_with_a_hint(ready):
    (ready.folder / "train.py").write_text("import nonesuch\n")
    done = on_ready(ready, "--", "train.py")
    assert done.returncode == 1
    elsewhere = "in the image" if ready.engine == "docker" else "installed"
    hint = f"hint: nonesuch is neither in your folder nor {elsewhere}\n"
    assert hint in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.any_engine
def test_a_request_to_stop_must_end_the_job_gracefully(cli, engine, number):
    job = cli.start(*RUN, "--engine", engine, "--trainers", "1", "--", "steps.py")
    cli.wait_for("stepping", rank=1)
    job.send_signal(number)
    out, err = job.communicate(timeout=150)
    assert (job.returncode, cli.report()["outcome"]) == (130, "stopped")
    assert "stopping: workers have 30 s to exit" in err
    assert "stepping" in printed(out, 1) and err.endswith(f"\nruns/{cli.run_dir().name}\n")


def test_ctrl_c_while_the_nodes_start_must_leave_nothing(cli, engine):
    job = cli.start(*RUN, "--engine", engine, "--trainers", "1", "--", "steps.py")
    events = "runs/*/events.jsonl"
    eventually(lambda: any("nodes_starting" in path.read_text() for path in cli.folder.glob(events)))
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=150)
    assert (job.returncode, cli.report()["outcome"]) == (130, "stopped")


@pytest.mark.any_engine
def test_a_second_ctrl_c_must_kill_workers_that_ignore_sigterm(cli, engine):
    (cli.folder / "ignore_sigterm.py").write_text(
        "import signal\nsignal.signal(15, lambda *_: print('asked'))\nprint('stepping')\nwhile True: signal.pause()\n"
    )
    job = cli.start(*RUN, "--engine", engine, "--trainers", "1", "--", "ignore_sigterm.py")
    for rank in (0, 1):
        cli.wait_for("stepping", rank)
    job.send_signal(signal.SIGINT)
    for rank in (0, 1):
        cli.wait_for("asked", rank)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=25)  # less than the grace period
    assert job.returncode == 130


@pytest.mark.any_engine
def test_the_maximum_run_time_must_end_the_job(cli, engine):
    done = run(cli, engine, "--max-run", "1s", "--", "steps.py")
    assert (done.returncode, cli.report()["reason"]) == (124, "max_run was reached")


@pytest.mark.any_engine
def test_the_other_commands_must_work_from_another_shell(cli, engine):
    name = f"a{os.getpid():x}"
    job = cli.start(*RUN, "--engine", engine, "--trainers", "1", "--name", name, "--", "steps.py")
    cli.wait_for("stepping", rank=1)
    job_id = cli.run_dir().name
    assert cli.ps() == [[job_id, engine, "2", "running", f"runs/{job_id}"]]
    assert "[0] stepping\n" in cli("logs", job_id).stdout
    assert cli("logs", f"{name}-", "--rank", "1").stdout == cli.log(1)
    follower = cli.start("logs", job_id, "-f")
    stopped = cli("stop", job_id)
    assert stopped.returncode == 0, stopped.stderr
    job.communicate(timeout=150)
    assert job.returncode == 130
    assert "[1] stepping\n" in follower.communicate(timeout=150)[0]
    assert not cli.ps()
    assert cli("stop", job_id).stderr == f"{job_id} has already ended\n"


@pytest.mark.any_engine
def test_stop_must_clean_up_what_a_killed_orchestrator_left(cli, engine):
    job = cli.start(*RUN, "--engine", engine, "--trainers", "1", "--", "steps.py")
    cli.wait_for("stepping", rank=1)
    job.kill()
    job.communicate()
    job_id = cli.run_dir().name
    assert cli.ps() == [[job_id, engine, "2", "no supervisor", f"runs/{job_id}"]]
    stopped = cli("stop", cli.run_dir().name)
    assert stopped.returncode == 0, stopped.stderr
    assert not cli.ps()


@pytest.mark.any_engine
def test_two_jobs_at_once_must_not_interfere(cli, engine):
    jobs = [
        cli.start(*RUN, "--engine", engine, "--trainers", "1", "--name", name, "--", "probe.py")
        for name in ("one", "two")
    ]
    assert [job.wait(timeout=150) for job in jobs] == [0, 0]
    for job in jobs:
        job.communicate()
    seen = {json.loads(path.read_text())["env"]["JOB_ID"] for path in cli.folder.glob("runs/*/logs/rank-*.log")}
    assert len(seen) == 2


def test_a_dead_node_must_be_distinguished_from_a_dead_worker(cli, engine):
    job = cli.start(*RUN, "--engine", engine, "--trainers", "1", "--", "steps.py")
    cli.wait_for("stepping", rank=1)
    if engine == "docker":
        docker("rm", "-f", cli.container("trainer-1"))
    else:
        os.kill(node_pid("process", cli.run_dir().name, "trainer-1"), signal.SIGKILL)
    _, err = job.communicate(timeout=150)
    assert job.returncode == 1
    how = {
        "docker": "was terminated with its node, which was stopped",
        "process": "was lost with its node, which exited",
    }
    assert f"root cause: rank 1 on trainer-1 {how[engine]}" in err


@pytest.mark.any_engine
def test_an_early_failure_must_end_workers_that_are_still_being_started(cli, engine):
    (cli.folder / "early.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(5)\ntime.sleep(1000)\n"
    )
    done = run(cli, engine, "--trainers", "3", "--", "early.py", timeout=25)  # less than the grace period
    assert done.returncode == 1
    assert "root cause: rank 0 on master exited with code 5" in done.stderr


def test_links_and_pipes_that_a_script_creates_must_not_reach_files_of_the_host(ready):
    victim = ready.folder / "victim"
    victim.write_text("untouched")
    (ready.folder / "plant.py").write_text(
        "import os\nfolder = os.environ['JOB_DIR']\nif os.environ['RANK'] == '0':\n"
        f"    for name in ('report.json', '.report.json'): os.symlink({str(victim)!r}, folder + '/' + name)\n"
        "    os.mkfifo(folder + '/metrics.jsonl')\n"
        f"    os.symlink({str(victim)!r}, folder + '/checkpoints/x')\n"
    )
    done = on_ready(ready, "--", "plant.py", timeout=150)
    assert done.returncode == 0, done.stderr
    assert victim.read_text() == "untouched"
    assert (ready.report()["outcome"], ready.report()["checkpoints"], ready.report()["final_metrics"]) == (
        "succeeded",
        [],
        {},
    )


def test_a_script_that_is_a_link_must_see_its_own_name_and_the_files_beside_it(ready, engine):
    for folder in ("shared", "mine"):
        (ready.folder / folder).mkdir()
    (ready.folder / "shared" / "real.py").write_text(
        "import os, sys\nprint(os.path.basename(__file__), os.path.basename(sys.argv[0]))\n"
        "print(open(os.path.join(os.path.dirname(__file__), 'config')).read())\n"
    )
    (ready.folder / "mine" / "config").write_text("of the link")
    (ready.folder / "mine" / "train.py").symlink_to("../shared/real.py")
    done = run(ready, engine, "--", "mine/train.py")
    assert done.returncode == 0, done.stderr
    assert ready.log(0) == "train.py train.py\nof the link\n"


def test_the_users_own_app_must_take_precedence_over_the_projects(cli, engine):
    (cli.folder / "app").mkdir()
    (cli.folder / "app" / "__init__.py").touch()
    (cli.folder / "app" / "train.py").write_text("print('mine')\n")
    done = run(cli, engine, "--", "-m", "app.train")
    assert done.returncode == 0, done.stderr
    assert cli.log(0) == "mine\n"


@pytest.mark.parametrize("warm", ["true", pytest.param("false", marks=pytest.mark.exhaustive)])
def test_a_pinned_worker_must_be_bound_to_its_cores(cli, engine, warm):
    workers = min(2, len(os.sched_getaffinity(0)))
    (cli.folder / "train.py").write_text(
        "import os\nif False:\n    import torch\n"
        "print(','.join(map(str, sorted(os.sched_getaffinity(0)))) == os.environ['WORKER_CORES'])\n"
    )
    options = ["--trainers", str(workers - 1), "--set", "pin=true", "--set", f"warm={warm}"]
    done = run(cli, engine, *options, "--", "train.py")
    assert done.returncode == 0, done.stderr
    assert [cli.log(rank) for rank in range(workers)] == ["True\n"] * workers
    plan = json.loads((cli.run_dir() / "plan.json").read_text())
    cores = [core for worker in plan["workers"] for core in worker["cores"]]
    assert sorted(cores) == sorted(set(cores))


def test_each_worker_must_have_its_own_values_in_the_command_which_can_be_any_program(ready):
    (ready.folder / "args.py").write_text("import sys\nprint(sys.argv[1:])\n")
    done = on_ready(ready, "--", "args.py", "--out=$JOB_DIR/x", "${RANK} of $WORLD_SIZE", "$HOME $$")
    assert done.returncode == 0, done.stderr
    own = ready.run_dir() / "job" if ready.engine == "process" else f"/job/{ready.run_dir().name}"
    for rank in range(3):
        assert ready.log(rank) == f"{[f'--out={own}/x', f'{rank} of 3', '$HOME $$']}\n"
    (ready.folder / "go.sh").write_text('#!/bin/sh\necho "$RANK: $1"\n')
    (ready.folder / "go.sh").chmod(0o755)
    for command in (["go.sh", "a b"], ["sh", "go.sh", "a b"], ["sh", "-c", 'echo "$0: a b"', "$RANK"]):
        assert on_ready(ready, "--name", "go", "--", *command).returncode == 0
        (folder,) = ready.folder.glob("runs/go-*")
        assert [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(3)] == [
            f"{rank}: a b\n" for rank in range(3)
        ]
        assert ready("rm", folder.name).returncode == 0
