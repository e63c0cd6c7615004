"""A node in mode `wait` for tests, and clients that talk to it."""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrate.node.messages.auth import Signer
from support.ends import KEY
from support.optional import not_none
from support.repo import ROOT
from support.waiting import eventually

NODE = str(ROOT / "orchestrate" / "node")
PIPE = str(ROOT / "orchestrate" / "node" / "programs" / "pipe.py")
PRELOAD = "colorsys"  # a module that nothing else imports: if it is already imported, the worker was forked
IS_FORKED = f"import sys\nprint('{PRELOAD}' in sys.modules)"
BEFORE = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from orchestrate.node.messages import channel
from orchestrate.node import lease, loop, warm, worker
{{before}}
runpy.run_path({NODE!r}, run_name="__main__")
"""


class Pipe:
    """A client that talks to a node through `command`, which runs inside the node's container if it has one."""

    def __init__(self, env: dict[str, str], command: Sequence[str] = (sys.executable, "-I", "-S", PIPE)) -> None:
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.heard: list[dict] = []
        self.partial, self.signer = b"", Signer(KEY, listens=False)

    def ask(self, request: str, **facts) -> None:
        self.send(json.dumps({"ask": request, **facts}).encode() + b"\n")

    def send(self, text: bytes) -> None:
        """Send complete lines to the node."""
        if not self.signer.ready:
            self.signer.meet(self._lines()[0])
            self._write(self.signer.nonce + b"\n" + self.signer.sign(b"") + b"\n")
        self._write(b"".join(self.signer.sign(line) + b"\n" for line in text.splitlines()))

    def _write(self, text: bytes) -> None:
        not_none(self.process.stdin).write(text)
        not_none(self.process.stdin).flush()

    def _lines(self) -> list[bytes]:
        """The next lines; none if the node has ended."""
        *lines, self.partial = self.partial.split(b"\n")
        while not lines:
            assert select.select([not_none(self.process.stdout)], [], [], 60)[0], f"nothing after {self.heard}"
            chunk = os.read(not_none(self.process.stdout).fileno(), 1 << 16)
            if not chunk:
                return []
            *lines, self.partial = (self.partial + chunk).split(b"\n")
        return lines

    def until(self, say: str, **facts: object) -> Any:
        """The first matching message, including those received before; None if the node ends without it."""
        wanted = {"say": say, **facts}
        while not (found := [message for message in self.heard if wanted.items() <= message.items()]):
            if not (lines := self._lines()):
                return None
            self.heard += [json.loads(text) for text in map(self.signer.verify, lines) if text]
        return found[0]

    def status(self) -> dict:
        self.heard = [message for message in self.heard if message["say"] != "status"]
        self.ask("status")
        status = self.until("status")
        return {key: status[key] for key in ("generation", "codes", "hints", "running")}

    def close(self, code: int = 0) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            not_none(stream).close()
        assert self.process.wait(timeout=150) == code


class Waiting:
    """A node in mode `wait`, and a client that starts workers in it."""

    def __init__(self, tmp_path, preload: str = "", before: str = "", **env: str) -> None:
        """`before` is code that runs in the node's process before the node starts, such as `lease.LEASE = 1`."""
        self.folder = tmp_path
        self.env = os.environ | {"NODE_MODE": "agent", "NODE_SOCKET": str(tmp_path / "s"), "JOB_DIR": str(tmp_path)}
        self.env |= {"NODE_KEY": KEY.hex(), "NODE_PRELOAD": preload, **env}
        self.out = tmp_path / "stdout"
        self.pipe = Pipe(self.env)  # before the node listens
        with self.out.open("wb") as out:
            command = [sys.executable, "-c", BEFORE.format(before=before)] if before else [sys.executable, "-I", NODE]
            self.node = subprocess.Popen(command, env=self.env, stdout=out, cwd=tmp_path)

    def start(self, rank: int, code: str, generation: int = 0) -> None:
        script = self.folder / f"{rank}.py"
        script.write_text(code)
        self.command(rank, str(script), "--flag", "x y", TORCHELASTIC_RESTART_COUNT=str(generation))

    def command(self, rank: int, *arguments: str, **env: str) -> None:
        own = {"RANK": str(rank), "ONLY_HERE": "1", **env}
        self.pipe.ask("start", command=arguments, env=own, inherit=True, cwd=None)

    def code(self, rank: int, generation: int = 0) -> int | None:
        """The exit code of a worker; None if the node ends first."""
        ended = self.pipe.until("ended", rank=rank, generation=generation)
        return ended and ended["code"]

    def run(self, rank: int, code: str, generation: int = 0) -> int | None:
        self.start(rank, code, generation)
        return self.code(rank, generation)

    def status(self) -> dict:
        return self.pipe.status()

    def log(self, rank: int) -> str:
        path = self.folder / "logs" / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def end(self) -> None:
        self.node.terminate()
        try:
            assert self.node.wait(timeout=150) == 0
        finally:
            self.node.kill()
            self.node.wait()
            self.pipe.close()


@pytest.fixture(params=["", PRELOAD], ids=["fresh", "warm"])
def waiting(tmp_path, request):
    node = Waiting(tmp_path, request.param)
    yield node
    node.end()
    assert not (tmp_path / "s").exists()


def dial(path: Path) -> socket.socket:
    """Connect to a node, which may not be listening yet."""

    def connected() -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(30)
        try:
            sock.connect(str(path))
            return sock
        except OSError:
            sock.close()
            return None

    return eventually(connected)


# Drops all capabilities of the node's process, as in a container; its child processes have none either.
WITHOUT_CAPABILITIES = """
import ctypes
libc = ctypes.CDLL(None)
for number in range(64):
    libc.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP
assert not libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
"""
