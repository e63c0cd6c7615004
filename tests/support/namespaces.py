"""Network namespaces that stand in for the networks around a node: outside hosts, or another kernel."""

import itertools
import os
import shutil
import subprocess
import sys

import pytest

from support.leftovers import DOCKER_REQUIRED
from support.processes import die_with_parent

LISTENS = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
print("ready", flush=True)
while True:
    server.accept()
"""
NUMBERS = itertools.count()  # a removed namespace and its links disappear some time later


def command(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout


def possible() -> None:
    """Skip a test if network namespaces cannot be created."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "nsenter"))):
        why = "network namespaces need root and iproute2"
        pytest.fail(f"ORCHESTRATE_REQUIRE_DOCKER=1, and {why}") if DOCKER_REQUIRED else pytest.skip(why)


class Space:
    """A namespace, and a cable from it to another one or to this machine's."""

    def __init__(self, here: tuple[str, ...], there: tuple[str, ...], other: "Space | None" = None) -> None:
        """`here` and `there` are the addresses of the near and the far end of the cable; `other` holds the near end."""
        self.name, self.processes = f"space-{os.getpid()}-{next(NUMBERS)}", []
        self.cable = self.name.replace("space", "sp")
        command("ip", "netns", "add", self.name)
        try:
            command("ip", "link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            if other:
                command("ip", "link", "set", self.cable, "netns", other.name)
            run = other.run if other else command
            for end, link, addresses in ((run, self.cable, here), (self.run, "eth0", there)):
                for address in addresses:
                    end("ip", "addr", "add", address, "dev", link, *(["nodad"] if ":" in address else []))
                end("ip", "link", "set", link, "up")
            self.run("ip", "link", "set", "lo", "up")
        except BaseException:
            self.remove()
            raise

    def run(self, *arguments: str) -> str:
        return command("nsenter", f"--net=/run/netns/{self.name}", *arguments)

    def listen(self, address: str, port: int) -> None:
        """Accept connections."""
        arguments = ["nsenter", f"--net=/run/netns/{self.name}", sys.executable, "-c", LISTENS, address, str(port)]
        self.processes.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, preexec_fn=die_with_parent))
        assert self.processes[-1].stdout.readline() == b"ready\n"

    def remove(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        command("ip", "netns", "delete", self.name)
