"""Jobs that attack their host, other jobs or their cluster, on the real engine, must not succeed."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from support.faults import ALONE, Background
from support.leftovers import docker
from support.waiting import eventually

from orchestrate.host import users
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import IMAGE

pytestmark = pytest.mark.docker
CANARY = "a-secret-of-another-job"
LOOKS = """
import json, os, subprocess, sys
found = {}
for folder, _, names in [*os.walk("/workspace"), *os.walk("/job/work")]:
    for name in names:
        try:
            found[os.path.join(folder, name)] = open(os.path.join(folder, name)).read()
        except OSError as error:
            found[os.path.join(folder, name)] = error.strerror
print("FOUND " + json.dumps({"files": found, "user": [os.getuid(), os.getgid()],
    "sockets": os.listdir("/run/orchestrate"), "job": sorted(os.listdir("/job")), "up": os.listdir("/job/..")}))
"""
ATTACKS = r"""
import os, json, pathlib
job = pathlib.Path(os.environ["JOB_DIR"])
victim = {"plan.json": "{}", "job.yaml": "command: evil.py", "report.json": json.dumps({"outcome": "succeeded"}),
          "supervisor.lock": "1 1",
          "events.jsonl": '{"event": "outcome_decided", "outcome": "succeeded", "reason": "x"}'}
for name, text in victim.items():
    for path in (job / name, job.parent / name, job / ".." / ".." / name):
        try:
            path.write_text(text)
        except OSError as error:
            print(name, error.strerror)
for name in ("logs", "checkpoints"):
    try:
        os.rename(job / name, job / f"{name}-moved")
        os.symlink("/etc", job / name)
    except OSError as error:
        print(name, error.strerror)
os.symlink("/etc/shadow", job / "metrics.jsonl")
with open(job / "program", "w") as file:
    os.fchmod(file.fileno(), 0o6755)
os.mkfifo(job / "pipe")
print("attacked", flush=True)
"""


def found(log: Path) -> dict:
    """What the script has found; empty until it has printed it."""
    lines = log.read_text().splitlines() if log.exists() else []
    return next((json.loads(line.removeprefix("FOUND ")) for line in lines if line.startswith("FOUND ")), {})


FILLS = r"""
import os
os.chdir("/run/orchestrate")
for depth in range(200):
    os.mkdir("d")
    os.chdir("d")
os.chdir("/run/orchestrate")
os.mkfifo("pipe")
os.symlink("/etc", "etc")
os.mkdir("closed")
os.chmod("closed", 0)
with open("large", "wb") as file:
    file.write(bytes(50 << 20))
print("filled", os.statvfs(".").f_fsid == os.statvfs("/job").f_fsid, flush=True)
"""


def test_files_next_to_a_nodes_socket_must_be_on_its_jobs_disk_and_be_removed(cli, docker_engine, nothing_left):
    (cli.folder / "fills.py").write_text(FILLS)
    done = cli(*ALONE, "--", "fills.py")
    assert done.returncode == 0, done.stderr
    assert "filled True" in cli.log(0)
    assert not (cli.run_dir() / "sockets").exists()


def test_a_node_must_not_see_runs_git_or_ignored_files_in_the_code_folder(cli, docker_engine, nothing_left):
    files = {".git/config": CANARY, ".env": CANARY, "keys/a/b": CANARY, "kept.txt": "kept", "x/runs/a": "kept"}
    files |= {"runs/other-0000/job.yaml": CANARY, "runs/other-0000/job/logs/rank-0.log": CANARY}
    for name, text in files.items():
        (cli.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (cli.folder / name).write_text(text)
    (cli.folder / ".dockerignore").write_text("# secrets\n.env\n**/keys\n*.pem\n__pycache__\n")
    (cli.folder / "a.pem").symlink_to("kept.txt")
    (cli.folder / "looks.py").write_text(LOOKS)
    done = cli(*ALONE, "--name", "mine", "--", "looks.py")
    assert done.returncode == 0, done.stderr
    (log,) = cli.folder.glob("runs/mine-*/logs/rank-0.log")
    assert CANARY not in log.read_text()
    seen = found(log)
    names = {os.path.relpath(name, "/workspace"): content for name, content in seen["files"].items()}
    assert (names["kept.txt"], names["x/runs/a"], names[".env"]) == ("kept", "kept", "")
    copied = {os.path.relpath(name, "/job/work"): content for name, content in seen["files"].items()}
    assert (copied["kept.txt"], copied["x/runs/a"]) == ("kept", "kept")
    assert not {".env", "keys/a/b"} & copied.keys()
    assert not any(name.startswith(("runs/", ".git/", "keys/")) for name in names)
    assert seen["job"] == [".status-token", "checkpoints", "generation", "logs", "work"] and len(seen["sockets"]) == 1
    assert "job.yaml" not in seen["up"] and "plan.json" not in seen["up"]


KEEPS = """
import pathlib
kept = pathlib.Path("/kept")
print("KEPT", sorted(path.name for path in kept.iterdir()), flush=True)
(kept / "folder").mkdir()
(kept / "folder" / "left").touch()
"""


@pytest.fixture
def declared(docker_engine):
    """An image that declares a volume and a health check."""
    name = f"declares-{os.getpid():x}:1"
    node = docker("create", "--user", "0:0", "--entrypoint", "install", IMAGE, "-d", "-m", "777", "/kept").strip()
    docker("start", "--attach", node)
    changes = ["VOLUME /kept", "HEALTHCHECK --interval=1s CMD exit 0"]
    docker("commit", *(word for change in changes for word in ("--change", change)), node, name)
    docker("rm", node)
    yield name
    docker("image", "rm", name)


def test_files_in_an_image_volume_must_not_reach_the_next_job_or_outlive_the_cluster(
    cli, declared, nothing_left
):  # nor may the image's health check run in the nodes: it could read the key of the cluster
    (cli.folder / "keeps.py").write_text(KEEPS)
    options = ("--engine", "docker", "--trainers", "0", "--gpus", "none", "--image", declared)
    name = cli("up", *options, "--set", "warm=false").stdout.strip()
    node = json.loads(docker("inspect", docker("ps", "--quiet", "--filter", f"name={name}-master").strip()))[0]
    assert "Health" not in node["State"]
    (volume,) = (mount["Name"] for mount in node["Mounts"] if mount["Destination"] == "/kept")
    for _ in range(2):
        done = cli("run", *options, "--", "keeps.py")
        assert done.returncode == 0, done.stderr
        job = max((cli.folder / "runs").glob("*/report.json"), key=lambda path: path.stat().st_mtime_ns).parent
        assert "KEPT []" in (job / "logs" / "rank-0.log").read_text()
    assert cli("down", name).returncode == 0
    assert volume not in docker("volume", "ls", "--quiet").split()


def test_nodes_started_by_root_must_run_as_another_user_unless_root_is_requested(cli, docker_engine, nothing_left):
    (cli.folder / "looks.py").write_text(LOOKS)
    own = (os.getuid(), os.getgid())
    for more, user in [
        ((), users.without_account() if own[0] == 0 else own),
        (("--set", "user=root"), (0, 0)),
        (("--set", "user=1234:5678"), (1234, 5678)),
    ]:
        if own[0] and user != own:
            assert cli(*ALONE, *more, "--", "looks.py").returncode == 2
            continue
        done = cli(*ALONE, *more, "--", "looks.py")
        assert done.returncode == 0, done.stderr
        assert tuple(found(cli.run_dir() / "logs" / "rank-0.log")["user"]) == user
        run = cli.run_dir()
        assert {(path.stat().st_uid, path.stat().st_gid) for path in (run / "job", run / "job" / "logs")} == {user}
        assert {path.stat().st_uid for path in (run, run / "plan.json", run / "report.json")} == {own[0]}
        assert cli("rm", run.name).returncode == 0


def test_a_job_that_forges_plans_reports_and_events_must_change_nothing(cli, docker_engine, nothing_left):
    (cli.folder / "attacks.py").write_text(ATTACKS + "\nraise SystemExit(3)\n")
    done = cli(
        "run", "--engine", "docker", "--trainers", "1", "--gpus", "none", "--max-restarts", "1", "--", "attacks.py"
    )
    assert done.returncode == 1 and "root:" not in done.stderr
    run = cli.run_dir()
    report = json.loads((run / "report.json").read_text())
    assert (report["outcome"], report["job_id"], report["final_metrics"]) == ("failed", run.name, {})
    paths = JobPaths(run)
    assert "evil" not in paths.spec.read_text() and json.loads(paths.plan.read_text())["job_id"] == run.name
    assert stat.S_IMODE((run / "job" / "program").stat().st_mode) == 0o755
    for command, code in [("wait", 1), ("attach", 1), ("logs", 0), ("stop", 0), ("rm", 0)]:
        again = cli(command, run.name)
        assert again.returncode == code and "root:" not in again.stdout + again.stderr, again.stderr
    assert not run.exists() and Path("/etc/passwd").exists()


def test_a_hostile_job_must_be_taken_over_with_its_original_plan(cli, docker_engine, nothing_left):
    wait = "import signal\nsignal.signal(15, lambda *_: exit(0))\nsignal.pause()\n"
    (cli.folder / "attacks.py").write_text(ATTACKS + wait)
    (cli.folder / "evil.py").write_text("open('/job/evil', 'w')")
    job = Background(cli, "docker", "--", "attacks.py", trainers=1)
    eventually(lambda: [*cli.folder.glob("runs/*/job/pipe")])
    job.process.kill()
    job.process.communicate()
    again = cli("stop", cli.run_dir().name)
    assert again.returncode == 0, again.stderr
    assert cli.report()["outcome"] == "stopped"
    assert not (cli.run_dir() / "job" / "evil").exists()


def both(cli) -> list[str]:
    names = sorted(path.name for path in cli.folder.glob("runs/*-*"))
    return names if len(names) == 2 else []


def test_two_jobs_must_neither_see_nor_reach_each_other(cli, docker_engine, nothing_left):
    (cli.folder / "looks.py").write_text(LOOKS + "\nimport signal\nsignal.pause()\n")
    first = Background(cli, "docker", "--name", "one", "--set", f"env.TOKEN={CANARY}", "--", "looks.py", trainers=0)
    second = cli.start(
        "run", "--engine", "docker", "--trainers", "0", "--gpus", "none", "--name", "two", "--", "looks.py"
    )
    logs = [cli.folder / "runs" / name / "logs" / "rank-0.log" for name in eventually(lambda: both(cli))]
    for log in logs:
        seen = eventually(lambda log=log: found(log))
        assert len(seen["sockets"]) == 1 and not any("/runs/" in name for name in seen["files"])
    assert CANARY not in logs[1].read_text()
    one, two = (path.parents[1].name for path in logs)
    inspected = docker("inspect", *docker("ps", "-q", "--filter", f"label=orchestrate.job={two}").split())
    sources = [mount["Source"] for node in json.loads(inspected) for mount in node["Mounts"] if mount.get("Source")]
    assert not [source for source in sources if one in source] and CANARY not in inspected
    for name in (one, two):
        assert cli("stop", name).returncode == 0
    first.end(), second.communicate()


def test_a_job_must_not_find_secrets_or_keys_of_other_jobs_wherever_they_are(cli, docker_engine, nothing_left):
    cli.env["XDG_STATE_HOME"] = str(cli.folder / "state")  # as if jobs were started from the home folder
    stays = "import signal\nsignal.signal(15, lambda *_: exit(0))\nprint('stays', flush=True)\nsignal.pause()\n"
    (cli.folder / "stays.py").write_text(stays)
    (cli.folder / "looks.py").write_text(
        "import os, time\nprint('began', flush=True)\n"
        f"while not os.path.exists('/job/finish'):\n    time.sleep(0.02)\n{LOOKS}"
    )
    same = ("--set", "user=root") if os.geteuid() == 0 else ()  # the user who owns those files
    runs_folder = cli.folder.with_name(f"{cli.folder.name}-away")
    process = cli.start(*ALONE, *same, "--runs", str(runs_folder), "--", "looks.py")
    try:
        eventually(lambda: [path for path in runs_folder.glob("*/logs/rank-0.log") if "began" in path.read_text()])
        assert not (cli.folder / "runs").exists()  # so it was not hidden at the start
        others = [(), ("--runs", "sub/runs")]
        for more in others:
            done = cli(*ALONE, *same, "--detach", "--set", f"env.TOKEN={CANARY}", *more, "--", "stays.py")
            assert done.returncode == 0, done.stderr
        runs = eventually(lambda: len(found := [*cli.folder.glob("**/runs/stays-*")]) == 2 and found)
        keys = [json.loads(path.read_text())["key"] for path in cli.folder.glob("state/orchestrate/*.json")]
        next(runs_folder.glob("*/job")).joinpath("finish").touch()
        output = process.communicate()
        assert process.returncode == 0, output
        (log,) = runs_folder.glob("*/logs/rank-0.log")
        names = found(log)["files"]
        for run in runs:
            assert f"/workspace/{run.relative_to(cli.folder)}/job.yaml" in names  # it did search there
        assert len(keys) == 3 and all(len(key) == 64 for key in keys)
        assert not [secret for secret in (CANARY, *keys) if secret in log.read_text()]
        assert not any("state/orchestrate" in name for name in names)
        for run in runs:
            done = cli("stop", run.name, "--runs", str(run.parent))
            assert done.returncode == 0, done.stderr
    finally:
        shutil.rmtree(runs_folder, ignore_errors=True)


SPEAKS = r"""
import glob, json, os, signal, socket
from hashlib import sha256
print("NODE_KEY" in os.environ)
for pid in ["1", *(path.split("/")[2] for path in glob.glob("/proc/[0-9]*/stat"))]:
    try:
        text = open(f"/proc/{pid}/environ", "rb").read()
        print(pid, b"NODE_KEY" in text)
    except OSError as error:
        print(pid, error.strerror)
if os.environ["RANK"] == "1":
    env = {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "7", "JOB_DIR": "/job"}
    start = {"ask": "start", "command": ["-c", "print('hijacked')"], "env": env, "inherit": True, "cwd": None}
    for path in glob.glob("/run/orchestrate/*") + ["/tmp/node.sock"]:
        for ask in ({"ask": "status"}, {"ask": "stop", "kill": True}, {"ask": "end"}, {"ask": "clean"}, start):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(10)
            sock.connect(path)
            word = sock.makefile("rb").readline()
            text = json.dumps(ask).encode()
            sock.sendall(word + sha256(text).hexdigest().encode() + b" " + text + b"\n" + text + b"\n")
            assert sock.recv(1000) == b"", "answered"
    for path in glob.glob("/run/orchestrate/*"):  # and listen in place of all nodes, for new clients
        os.rename(path, path + "-old")
        liar = socket.socket(socket.AF_UNIX)
        liar.bind(path)
        liar.listen()
    os.fork() or (os.setsid(), signal.pause())
    print("spoke", flush=True)
"""


def test_a_worker_must_not_impersonate_or_command_a_node_on_a_cluster(cli, docker_engine, nothing_left):
    (cli.folder / "speaks.py").write_text(SPEAKS)
    (cli.folder / "secret.py").write_text("import os\nprint(os.environ['TOKEN'][::-1], os.listdir('/run/orchestrate'))")
    name = cli("up", "--engine", "docker", "--trainers", "1", "--gpus", "none", "--set", "warm=false").stdout.strip()
    on = ("run", "--engine", "docker", "--trainers", "1", "--gpus", "none", "--max-restarts", "0")
    done = cli(*on, "--name", "evil", "--", "speaks.py")
    assert done.returncode == 0, done.stderr
    (log,) = cli.folder.glob("runs/evil-*/logs/rank-1.log")
    assert "spoke" in log.read_text() and "True" not in log.read_text()
    assert "hijacked" not in "".join(path.read_text() for path in log.parent.iterdir())
    done = cli(*on, "--name", "good", "--set", f"env.TOKEN={CANARY}", "--", "secret.py")
    assert done.returncode == 0, done.stderr
    for log in cli.folder.glob("runs/good-*/logs/rank-*.log"):
        assert CANARY[::-1] in log.read_text()
    assert cli("down", name).returncode == 0


@pytest.mark.parametrize("supervised", [True, False])
def test_a_job_with_a_paused_node_must_stop_gracefully(cli, docker_engine, nothing_left, supervised):
    (cli.folder / "saves.py").write_text(
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {15})\nprint('ready', flush=True)\n"
        "signal.sigwait({15})\nprint('saved')\n"
    )
    job = Background(cli, "docker", "--", "saves.py", trainers=1)
    for rank in (0, 1):
        cli.wait_for("ready", rank)
    docker("pause", job.node("trainer-1"))
    job.until("node_in_trouble")
    if not supervised:
        job.process.kill()
        job.process.communicate()
    done = cli("stop", cli.run_dir().name)
    assert done.returncode == 0, done.stderr
    assert cli.report()["outcome"] == "stopped" and "saved" in cli.log(1)
    if supervised:
        assert job.end() == 130


# --- clusters


def test_a_job_that_swaps_its_folder_on_a_cluster_must_not_affect_files_of_the_host(cli, docker_engine, nothing_left):
    victim = cli.folder / "victim"
    victim.mkdir(mode=0o777)
    (victim / "file").write_text("mine")
    (cli.folder / "swaps.py").write_text(
        "import os, sys\njob = os.environ['JOB_DIR']\nos.rename(job, job + '-moved')\n"
        f"os.symlink({str(victim)!r}, job)\nos.makedirs('/job/other-0000/logs')\nprint('swapped')\n"
        "sys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT']) == 0)\n"
    )
    name = cli("up", "--engine", "docker", "--trainers", "0", "--gpus", "none", "--set", "warm=false").stdout.strip()
    (mine := cli.folder / "runs" / "other-0000").write_text("a file of the user")
    done = cli(
        "run", "--engine", "docker", "--trainers", "0", "--gpus", "none", "--max-restarts", "1", "--", "swaps.py"
    )
    assert "Traceback" not in done.stderr
    assert [path.name for path in victim.iterdir()] == ["file"] and (victim / "file").read_text() == "mine"
    assert cli("down", name).returncode == 0
    assert mine.read_text() == "a file of the user" and victim.is_dir()
    assert [path.name for path in victim.iterdir()] == ["file"]
    assert not (cli.folder / "runs" / name).exists()
