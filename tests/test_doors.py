"""What leads out of the folder of code, on the real engine: sockets, pipes, and file systems of the kernel."""

import contextlib
import os
import subprocess

import pytest
from test_connection import listening
from test_rogue import ALONE

pytestmark = pytest.mark.docker

TALKS = """
import os, socket
for name in ("agent.sock", "sub/agent.sock"):
    try:
        socket.socket(socket.AF_UNIX).connect(name)
        print("TALKS", name, flush=True)
    except OSError as error:
        print(name, error.strerror, flush=True)
os.write(os.open("pipe", os.O_RDWR | os.O_NONBLOCK), b"from the job")
"""


def test_a_job_must_not_talk_to_what_listens_in_the_folder_of_code(cli, docker_engine, nothing_left):
    (cli.folder / "sub").mkdir()
    (cli.folder / "talks.py").write_text(TALKS)
    os.mkfifo(cli.folder / "pipe")
    (cli.folder / "pipe").chmod(0o666)
    with contextlib.ExitStack() as stack:
        for name in ("agent.sock", "sub/agent.sock"):
            stack.enter_context(listening((cli.folder / name).parent, "agent.sock"))
            (cli.folder / name).chmod(0o666)
        reader = os.open(cli.folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, reader)
        cli(*ALONE, "--name", "mine", "--", "talks.py")
        (log,) = cli.folder.glob("runs/mine-*/logs/rank-0.log")
        assert "sub/agent.sock" in log.read_text() and "TALKS" not in log.read_text()
        assert os.read(reader, 100) == b""


ROOTS = """
import pathlib
for root in pathlib.Path("rootfs/proc").glob("[0-9]*/root"):
    try:
        print("REACHED", root, len([*root.iterdir()]), flush=True)
    except OSError as error:
        print(root, error.strerror)
print("looked")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="takes root to mount a file system")
def test_a_job_must_not_reach_the_files_of_processes_by_a_proc_in_the_folder_of_code(cli, docker_engine, nothing_left):
    (cli.folder / "roots.py").write_text(ROOTS)
    (cli.folder / "rootfs" / "proc").mkdir(parents=True)
    subprocess.run(["mount", "-t", "proc", "proc", cli.folder / "rootfs" / "proc"], check=True)
    try:
        done = cli(*ALONE, "--name", "mine", "--", "roots.py")
    finally:
        subprocess.run(["umount", cli.folder / "rootfs" / "proc"], check=True)
    (log,) = cli.folder.glob("runs/mine-*/logs/rank-0.log")
    assert done.returncode == 0 and log.read_text() == "looked\n"
