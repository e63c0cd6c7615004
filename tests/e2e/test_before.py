"""A command that each node runs once before its workers start."""

import sys
import textwrap

import pytest
from support.waiting import eventually

OPTIONS = ("--trainers", "1", "--nproc-per-node", "2", "--gpus", "none")
PREPARE = textwrap.dedent("""
    import os, pathlib, sys
    print("preparing for rank", os.environ["RANK"], sys.argv[1])
    folder = pathlib.Path(os.environ["JOB_DIR"])
    with (folder / f"prepared-{os.environ['RANK']}").open("a") as file:
        file.write("x")
    sys.exit(7 * (folder / "broken").exists())
""")
WORK = textwrap.dedent("""
    import os, pathlib, sys, time
    folder = pathlib.Path(os.environ["JOB_DIR"])
    first = int(os.environ["RANK"]) // 2 * 2
    print("found", (folder / f"prepared-{first}").read_text())
    (folder / f"started-{os.environ['RANK']}").touch()
    while len([*folder.glob("started-*")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)  # a failure would end commands of other nodes, which run again then
    sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
""")


@pytest.fixture
def prepared(cli):
    (cli.folder / "prepare.py").write_text(PREPARE)
    (cli.folder / "work.py").write_text(WORK)
    return cli


def test_each_node_must_run_the_command_once_before_its_workers_also_across_restarts(prepared, engine):
    before = ("--set", "before=[python, prepare.py, $JOB_DIR]")
    done = prepared("run", "--engine", engine, *OPTIONS, *before, "work.py")
    assert done.returncode == 0, done.stderr
    assert "2 generations" in done.stderr
    for rank in range(4):
        assert "found x\n" in prepared.log(rank) and "found xx" not in prepared.log(rank)
        assert ("preparing for rank" in prepared.log(rank)) == (rank % 2 == 0)
    assert "preparing for rank 2 /" in prepared.log(2)  # variables are expanded


@pytest.mark.any_engine
def test_each_job_on_the_same_nodes_must_run_its_own_command(prepared, engine):
    cluster = prepared("up", "--engine", engine, *OPTIONS, "--set", "warm=false").stdout.strip()
    for name in ("one", "two"):
        before = ("--name", name, "--set", f"before=[python, prepare.py, {name}]")
        done = prepared("run", "--engine", engine, *OPTIONS, *before, "work.py")
        assert (done.returncode, f", on {cluster}\n" in done.stderr) == (0, True), done.stderr
        assert f"preparing for rank 2 {name}\n" in done.stdout
    assert prepared("down", cluster).returncode == 0


@pytest.mark.any_engine
def test_a_command_that_fails_must_be_the_root_cause_and_run_again(prepared, engine):
    (prepared.folder / "break.sh").write_text("touch $JOB_DIR/broken; exec python prepare.py x\n")
    before = ("--set", "before=sh break.sh", "--max-restarts", "1")
    done = prepared("run", "--engine", engine, *OPTIONS, *before, "work.py")
    assert done.returncode == 1, done.stderr
    report = prepared.report()
    assert report["generations"] == 2 and report["root_cause"]["exit_code"] == 7
    output = prepared.log(report["root_cause"]["rank"])
    assert "was not started: `sh break.sh` failed with exit code 7" in output
    assert "root cause: `before` on " in done.stderr and " exited with code 7\n" in done.stderr
    assert "preparing for rank" in output and "found" not in output
    tries = [path.read_text() for path in (prepared.run_dir() / "job").glob("prepared-*")]
    assert len("".join(tries)) >= 2  # in each generation, at least on the node that failed first


def test_a_job_must_be_stopped_while_the_command_runs(prepared, nothing_left):
    (prepared.folder / "long.sh").write_text("touch $JOB_DIR/begun; exec sleep 1000\n")
    process = prepared.start("run", "--engine", "process", *OPTIONS, "--set", "before=sh long.sh", "work.py")
    from support.waiting import eventually

    eventually(lambda: list(prepared.folder.glob("runs/*/job/begun")))
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_a_command_that_does_not_exist_must_be_reported(prepared, nothing_left):
    run = ("run", "--engine", "process", *OPTIONS, "--max-restarts", "0", "--set", "before=no-such-program", "work.py")
    done = prepared(*run)
    assert done.returncode == 1
    assert "did not start: No such file or directory: no-such-program" in prepared.log(
        prepared.report()["root_cause"]["rank"]
    )


SLOW = textwrap.dedent("""
    if [ $RANK != 0 ] && [ ! -e $JOB_DIR/failed ]; then
        touch $JOB_DIR/failed
        until [ -e $JOB_DIR/begun ]; do sleep 0.1; done
        exit 7
    fi
    trap 'until [ -e $JOB_DIR/next ]; do sleep 0.1; done; exit 143' TERM
    [ $TORCHELASTIC_RESTART_COUNT = 0 ] || { touch $JOB_DIR/next; exit 0; }
    touch $JOB_DIR/begun
    while :; do sleep 0.1; done
""")


def test_a_command_that_is_slow_to_stop_must_not_fail_the_next_generation(prepared, nothing_left):
    (prepared.folder / "slow.sh").write_text(SLOW)
    (prepared.folder / "work.py").write_text("print('worked')")
    done = prepared("run", "--engine", "process", *OPTIONS, "--set", "grace=2", "--set", "before=sh slow.sh", "work.py")
    assert done.returncode == 0 and "2 generations" in done.stderr, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="CPU times are only on Linux")
def test_a_command_that_computes_must_not_be_a_hang(prepared, nothing_left):
    computes = "import time; end = time.process_time() + 3\nwhile time.process_time() < end: pass\n"
    computes += "print('more than a pipe holds' * 10_000)"
    (prepared.folder / "computes.py").write_text(computes)
    (prepared.folder / "work.py").write_text("import json")
    hangs = ("--set", "hang_after=1", "--set", "preload=json", "--max-restarts", "0")
    done = prepared("run", "--engine", "process", *OPTIONS, *hangs, "--set", "before=python computes.py", "work.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.any_engine
def test_the_command_must_have_the_grace_period_when_a_job_is_stopped(prepared, engine):
    (prepared.folder / "long.sh").write_text(
        "trap 'echo cleaned up; exit 3' TERM\ntouch $JOB_DIR/begun-$RANK\nwhile true; do sleep 0.1; done\n"
    )
    process = prepared.start("run", "--engine", engine, *OPTIONS, "--set", "before=sh long.sh", "work.py")
    eventually(lambda: len(list(prepared.folder.glob("runs/*/job/begun-*"))) == 2)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert "cleaned up" in prepared.log(0) and "cleaned up" in prepared.log(2)
