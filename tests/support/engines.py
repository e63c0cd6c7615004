"""A private Docker Engine for a test, in its own network namespace, which can be stopped and restarted."""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from support.images import share_image
from support.leftovers import DOCKER_REQUIRED
from support.processes import die_with_parent
from support.waiting import eventually


class Engine:
    """A dockerd; `options` are additional flags. With `image`, it has the image of nodes."""

    def __init__(self, *options: str, image: bool = False) -> None:
        if os.geteuid() or not all(map(shutil.which, ("dockerd", "unshare"))):
            why = "a private engine needs root, dockerd and unshare"
            pytest.fail(f"ORCHESTRATE_REQUIRE_DOCKER=1, and {why}") if DOCKER_REQUIRED else pytest.skip(why)
        folder = Path(tempfile.mkdtemp(prefix="engine-"))  # a short path, since it holds containerd's sockets
        self.folder, self.host = folder, f"unix://{folder}/docker.sock"
        if image:
            share_image(folder / "data")
        init = shutil.which("docker-init") or shutil.which("tini-static")
        # In its own network namespace: an engine removes bridges that seem to be left from an earlier engine.
        self.command = ["unshare", "--net", "dockerd", "--host", self.host, "--bridge=none", "--iptables=false"]
        self.command += ["--ip6tables=false", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
        self.command += ["--pidfile", f"{folder}/pid", *([f"--init-path={init}"] if init else []), *options]
        self.start()

    def start(self) -> None:
        with (self.folder / "log").open("a") as log:
            self.daemon = subprocess.Popen(self.command, stdout=log, stderr=log, preexec_fn=die_with_parent)
        eventually(self.answers)

    def answers(self) -> bool:
        assert self.daemon.poll() is None, (self.folder / "log").read_text()[-2000:]
        return subprocess.run(["docker", "-H", self.host, "info"], capture_output=True).returncode == 0

    def docker(self, *arguments: str, content: bytes | None = None) -> str:
        """Run a `docker` command with `content` as its stdin."""
        done = subprocess.run(["docker", "-H", self.host, *arguments], input=content, capture_output=True, check=True)
        return done.stdout.decode()

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.daemon.send_signal(number)
        self.daemon.wait(timeout=60)

    def remove(self) -> None:
        """Stop the engine, with all containers, and remove its files."""
        if self.daemon.poll() is not None:
            self.start()
        if found := self.docker("ps", "-aq").split():
            self.docker("rm", "-f", *found)
        self.stop()
        for mount in reversed(Path("/proc/mounts").read_text().splitlines()):
            if mount.split()[1].startswith(f"{self.folder}/"):
                subprocess.run(["umount", mount.split()[1]], check=False)
        shutil.rmtree(self.folder)
