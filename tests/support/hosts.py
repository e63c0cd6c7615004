"""Several hosts on one machine: a network namespace and a dockerd each, joined by a bridge; a Swarm of them."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO, BinaryIO

from support.images import command, share_image
from support.processes import descendants, die_with_parent, gone
from support.waiting import eventually

SLOTS = 16  # swarms on this machine at once, each of a different test run
VXLAN = ("-p", "udp", "--dport", "4789")  # traffic of overlay networks


class Host:
    """A host: a network namespace with a dockerd."""

    def __init__(self, number: int, slot: int, folder: Path, template: Path) -> None:
        """Create the namespace; `start` starts the engine, on images hard-linked from `template`."""
        self.name, self.address = f"host-{number}", f"{subnet(slot)}.{number}"
        self.space, self.folder = f"orch{slot}-{number}", folder / f"h{number}"
        self.link = f"orch{slot}-v{number}"
        self.socket = f"unix://{self.folder}/docker.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.folder.mkdir()
        command("cp", "--archive", "--link", str(template), str(self.folder / "data"))
        command("ip", "netns", "add", self.space)
        far = f"orch{slot}-p{number}"
        command("ip", "link", "add", self.link, "type", "veth", "peer", "name", far)
        command("ip", "link", "set", far, "netns", self.space)
        command("ip", "link", "set", self.link, "master", bridge(slot), "up")
        self.inside("ip", "link", "set", far, "name", "eth0")
        self.inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.inside("ip", "link", "set", "eth0", "up")
        self.inside("ip", "link", "set", "lo", "up")
        self.inside("ip", "route", "add", "default", "via", f"{subnet(slot)}.254")

    def inside(self, *arguments: str) -> str:
        return command("nsenter", f"--net=/run/netns/{self.space}", *arguments)

    def start(self) -> None:
        with (self.folder / "dockerd.log").open("ab") as log:
            self.process = self.engine(log)
        eventually(self.answers)

    def engine(self, log: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *("nsenter", f"--net=/run/netns/{self.space}", "unshare", "--uts"),
                *("sh", "-c", f'hostname {self.name} && exec "$@"', "sh"),
                *("dockerd", "--host", self.socket, "--data-root", str(self.folder / "data")),
                *("--node-generic-resource", f"NVIDIA-GPU=GPU-{self.name}-a"),
                *("--node-generic-resource", f"NVIDIA-GPU=GPU-{self.name}-b"),
                *("--exec-root", str(self.folder / "exec"), "--pidfile", str(self.folder / "pid")),
                *("--dns", "127.0.0.1"),  # refuses at once: this machine's server cannot be reached from here
                *("--init-path", shutil.which("tini-static") or "docker-init"),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def answers(self) -> bool:
        assert self.process and self.process.poll() is None, (self.folder / "dockerd.log").read_text()[-2000:]
        return not subprocess.run(["docker", "--host", self.socket, "info"], capture_output=True).returncode

    def docker(self, *arguments: str) -> str:
        return command("docker", "--host", self.socket, *arguments)

    def cut(self) -> None:
        """Cut it off from the others."""
        command("ip", "link", "set", self.link, "down")

    def cut_nodes(self) -> None:
        """Cut off only its containers; the engines still hear each other."""
        self.inside("iptables", "-I", "INPUT", *VXLAN, "-j", "DROP")

    def heal(self) -> None:
        command("ip", "link", "set", self.link, "up")
        drop = ["nsenter", f"--net=/run/netns/{self.space}", "iptables", "-D", "INPUT", *VXLAN, "-j", "DROP"]
        subprocess.run(drop, capture_output=True)  # if there is such a rule

    def processes(self) -> list[int]:
        """The processes whose command line names this host's folder: the engine and its helpers."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.folder) in path.joinpath("cmdline").read_text():
                    found.append(int(path.name))
        return found

    def kill(self) -> None:
        """Kill the engine and all its containers at once, without a last message, as a power failure does."""
        self.cut()
        engine = self.processes()
        children = descendants(*engine)
        for pid in {*engine, *children}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self.process
        self.process.wait()
        eventually(lambda: all(gone(pid) for pid in children))
        # A new dockerd would take whatever has these process ids by then for its own, and kill it.
        for name in ("pid", "exec/containerd/containerd.pid"):
            (self.folder / name).unlink()

    def restore(self) -> None:
        """Reconnect the host and restart its engine if needed."""
        self.heal()
        if self.process is None or self.process.poll() is not None:
            self.start()

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        for pid in self.processes():  # left by a killed engine
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        self.stop()
        command("ip", "netns", "del", self.space)
        with open("/proc/mounts") as file:
            mounts = [line.split()[1] for line in file if line.split()[1].startswith(str(self.folder))]
        for mount in sorted(mounts, reverse=True):
            subprocess.run(["umount", "--lazy", mount], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


class Swarm:
    """Three hosts; the first is the manager, the one that `orchestrate` talks to."""

    def __init__(self, count: int = 3) -> None:
        # On the disk of the engine's data folder; the tests' own folders may be on another one.
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        template = self.folder / "template"
        share_image(template)
        self.lock, self.slot = free_slot()
        slot, name = self.slot, bridge(self.slot)
        command("ip", "link", "add", name, "type", "bridge")
        command("ip", "addr", "add", f"{subnet(slot)}.254/24", "dev", name)
        command("ip", "link", "set", name, "up")
        command("iptables", "-I", "FORWARD", "-i", name, "-o", name, "-j", "ACCEPT")
        self.hosts: list[Host] = []
        try:
            for number in range(1, count + 1):
                self.hosts.append(Host(number, slot, self.folder, template))
                self.hosts[-1].start()
            first = self.hosts[0]
            first.docker("swarm", "init", "--advertise-addr", first.address)
            token = first.docker("swarm", "join-token", "--quiet", "worker").strip()
            for host in self.hosts[1:]:
                host.docker("swarm", "join", "--token", token, f"{first.address}:2377")
        except BaseException:
            self.remove()
            raise

    def states(self) -> list[str]:
        """The states of the hosts, as the manager reports them."""
        lines = self.hosts[0].docker("node", "ls", "--format", "{{json .}}").splitlines()
        return [
            status for _, status in sorted((json.loads(line)["Hostname"], json.loads(line)["Status"]) for line in lines)
        ]

    def well(self) -> None:
        """Wait until all hosts are ready."""
        eventually(lambda: self.states() == ["Ready"] * len(self.hosts))

    def left(self) -> dict[str, str]:
        """Everything that a job has left, by host and kind."""
        networks = "network ls --filter driver=overlay --format {{.Name}}"
        lists = {"containers": "ps -aq", "networks": networks, "volumes": "volume ls -q"}
        found = {f"{host.name} {kind}": host.docker(*ls.split()) for host in self.hosts for kind, ls in lists.items()}
        for kind in ("service", "secret"):
            found[kind] = self.hosts[0].docker(kind, "ls", "-q")
        return {kind: names for kind, names in found.items() if names.strip() not in ("", "ingress")}

    def clear(self) -> bool:
        """Remove what a job has left; return whether nothing is left, which can take several attempts."""
        first = self.hosts[0]
        for kind in ("service", "secret", "network"):
            ask = ["--filter", "driver=overlay"] if kind == "network" else []
            for name in first.docker(kind, "ls", "-q", *ask).split():
                subprocess.run(["docker", "--host", first.socket, kind, "rm", name], capture_output=True)
        for host in self.hosts:
            remove = ["docker", "--host", host.socket, "rm", "--force", "--volumes"]
            if found := host.docker("ps", "-aq").split():
                subprocess.run([*remove, *found], capture_output=True)
        return not self.left()

    def remove(self) -> None:
        for host in self.hosts:
            host.remove()
        remove_bridge(self.slot)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.close()


def bridge(slot: int) -> str:
    """The bridge between the hosts of a swarm."""
    return f"orch{slot}-hosts"


def subnet(slot: int) -> str:
    """The first three numbers of the hosts' addresses."""
    return f"10.213.{7 + slot}"


def remove_bridge(slot: int) -> None:
    """Remove the bridge between the hosts of a swarm, and the rule for it."""
    rule = ["FORWARD", "-i", bridge(slot), "-o", bridge(slot), "-j", "ACCEPT"]
    subprocess.run(["iptables", "-D", *rule], capture_output=True)
    subprocess.run(["ip", "link", "del", bridge(slot)], capture_output=True)


def free_slot() -> tuple[IO[str], int]:
    """Reserve a slot number that no other test run uses; returns the lock that holds it until closed, and the number.

    What a killed run has left in that slot is removed.
    """
    for slot in range(SLOTS):
        lock = open(f"/tmp/orchestrate-test-hosts-{slot}.lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        for space in Path("/run/netns").glob(f"orch{slot}-*"):
            command("ip", "netns", "del", space.name)
        for link in Path("/sys/class/net").glob(f"orch{slot}-v*"):  # of a namespace in which a process still runs
            subprocess.run(["ip", "link", "del", link.name], capture_output=True)
        if Path("/sys/class/net", bridge(slot)).exists():
            remove_bridge(slot)
        return lock, slot
    raise AssertionError(f"{SLOTS} other swarms are on this machine")
