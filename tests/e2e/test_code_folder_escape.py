"""Ways out of the code folder, on the real engine: sockets, pipes and kernel file systems."""

import contextlib
import os
import subprocess

import pytest
from support.ends import listening
from support.faults import ALONE

pytestmark = pytest.mark.docker
CONNECT = """
import os, socket
for name in ("agent.sock", "sub/agent.sock"):
    try:
        socket.socket(socket.AF_UNIX).connect(name)
        print("CONNECTED", name, flush=True)
    except OSError as error:
        print(name, error.strerror, flush=True)
os.write(os.open("pipe", os.O_RDWR | os.O_NONBLOCK), b"from the job")
"""


def test_a_job_must_not_reach_sockets_and_pipes_in_the_code_folder(cli, docker_engine, nothing_left):
    (cli.folder / "sub").mkdir()
    (cli.folder / "connect.py").write_text(CONNECT)
    os.mkfifo(cli.folder / "pipe")
    (cli.folder / "pipe").chmod(0o666)
    with contextlib.ExitStack() as stack:
        for name in ("agent.sock", "sub/agent.sock"):
            stack.enter_context(listening((cli.folder / name).parent, "agent.sock"))
            (cli.folder / name).chmod(0o666)
        reader = os.open(cli.folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, reader)
        cli(*ALONE, "--name", "mine", "--", "connect.py")
        (log,) = cli.folder.glob("runs/mine-*/logs/rank-0.log")
        assert "sub/agent.sock" in log.read_text() and "CONNECTED" not in log.read_text()
        assert os.read(reader, 100) == b""


ROOTS = """
import pathlib
for root in pathlib.Path("rootfs/proc").glob("[0-9]*/root"):
    try:
        print("REACHED", root, len([*root.iterdir()]), flush=True)
    except OSError as error:
        print(root, error.strerror)
print("done")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a file system")
def test_a_job_must_not_reach_files_of_processes_through_a_proc_in_the_code_folder(cli, docker_engine, nothing_left):
    (cli.folder / "roots.py").write_text(ROOTS)
    (cli.folder / "rootfs" / "proc").mkdir(parents=True)
    subprocess.run(["mount", "-t", "proc", "proc", cli.folder / "rootfs" / "proc"], check=True)
    try:
        done = cli(*ALONE, "--name", "mine", "--", "roots.py")
    finally:
        subprocess.run(["umount", cli.folder / "rootfs" / "proc"], check=True)
    (log,) = cli.folder.glob("runs/mine-*/logs/rank-0.log")
    assert done.returncode == 0 and log.read_text() == "done\n"
