"""A real node that listens on TCP."""

import os
import socket
import subprocess
import sys
from typing import TypeVar

from orchestrate.engines.connection import NodeConnection
from orchestrate.node.messages import protocol
from support.ends import KEY
from support.ports import free_port
from support.repo import ROOT
from support.waiting import eventually

Report = TypeVar("Report")


class Node:
    """A node that listens on TCP, and its folder."""

    def __init__(self, folder):
        self.folder, self.job, self.port = folder, folder / "job", free_port()
        self.links: list[NodeConnection] = []
        settings = {"NODE_MODE": "agent", "NODE_SOCKET": str(folder / "s"), "NODE_KEY": KEY.hex()}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "orchestrate" / "node")],
            env=os.environ | settings | {"NODE_PORT": f"{self.port - 3}+3", "NODE_GRACE": "1"},
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )

    def end(self) -> None:
        for link in self.links:
            link.close()
        self.process.terminate()
        self.process.wait()

    def connect(self, name: str = "", key: bytes = KEY) -> NodeConnection | None:
        link = NodeConnection(eventually(self.dial), key=key)
        self.links.append(link)
        return link if link.greet(60) else None

    def dial(self) -> socket.socket | None:
        try:
            return socket.create_connection(("127.0.0.1", self.port))
        except OSError:
            return None

    def start(self, link: NodeConnection, code: str, rank: int = 0, generation: int = 0, log: int = 0) -> None:
        script = self.folder / f"script-{rank}-{generation}.py"
        script.write_text(code)
        env = {"RANK": str(rank), "WORLD_SIZE": "1", "JOB_ID": "job", "JOB_DIR": str(self.job)}
        env |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": str(generation)}
        link.send(protocol.Start([str(script)], env, inherit=True, cwd=str(self.folder), log=log))

    def until(self, link: NodeConnection, what: type[Report]) -> Report:
        while (reports := link.receive()) is not None:
            for report in reports:
                if isinstance(report, what):
                    return report
        raise AssertionError("the connection has ended")
