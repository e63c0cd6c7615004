"""A compromised node must be able to write only files of its job in the run directory."""

import base64
import json
import os
import socket
import stat
import threading
from pathlib import Path

from support.ends import KEY
from support.messages import encoded
from support.synced import FakeNode, sync_master
from support.waiting import eventually

from orchestrate.engines.connection import NodeConnection
from orchestrate.engines.swarm.sync import FileSync
from orchestrate.node.messages.auth import Signer
from orchestrate.record.paths import JobPaths


class Hostile(threading.Thread):
    """A compromised node that reports arbitrary file names."""

    def __init__(self, files: dict[str, bytes], links: dict[str, str]):
        super().__init__(daemon=True)
        self.files, self.links = files, links
        self.server = socket.create_server(("127.0.0.1", 0))
        self.start()

    def run(self):
        sock, _ = self.server.accept()
        with sock, self.server, sock.makefile("rwb") as file:
            self.serve(file)

    def serve(self, file):
        signer = Signer(KEY, listens=True)
        file.write(signer.nonce + b"\n")
        file.flush()
        signer.meet(file.readline().rstrip(b"\n"))
        assert signer.verify(file.readline().rstrip(b"\n")) == b""
        file.write(signer.sign(b"") + b"\n")
        file.flush()
        while line := file.readline():
            request = json.loads(signer.verify(line.rstrip(b"\n")))
            if request["ask"] == "changes":
                facts = {path: [len(data), 1, 1, 0o4777] for path, data in self.files.items()}
                log = base64.b64encode(b"evil").decode()
                report = {"logs": {"../plan.json": log, "generation": log}, "files": facts, "links": self.links}
                report["gone"] = ["generation", "../plan.json", "../../victim", "way/victim", "", "."]
            else:
                data = self.files[request["path"]]
                report = {
                    "data": base64.b64encode(data).decode(),
                    "offset": request["offset"],
                    "facts": [len(data), 1, 1, 0o4777],
                }
            file.write(
                signer.sign(encoded({"changes": "changes", "read": "piece"}[request["ask"]], **report).rstrip()) + b"\n"
            )
            file.flush()


def test_a_compromised_node_must_write_only_files_of_the_job(tmp_path):
    paths, outside = JobPaths(tmp_path / "j"), tmp_path / "outside"
    paths.create()
    shared = paths.shared
    outside.mkdir()
    for victim in (outside / "victim", tmp_path / "victim", paths.plan, paths.events, paths.fence):
        victim.write_text("ours")
    (shared / "way").symlink_to(outside)
    names = [
        "../evil",
        "/tmp/evil-of-a-test",
        *(f"../{path.name}" for path in (paths.plan, paths.events, paths.spec, paths.report, paths.lock)),
        "../../victim",
        "generation",
        "way/evil",
        "logs/rank-9.log",
        "a//b",
    ]
    names += ["a/../../evil", "", ".", "checkpoints/.hidden", ".cache/evil"]
    links = {
        "checkpoints/out": "../../..",
        "up": "..",
        "here": ".",
        "root": "/etc/passwd",
        "down": "logs/x",
        "last": "fine",
    }
    links |= {"generation": "fine", "way/link": "fine", "../link": "fine", "": "fine", ".hidden": "fine"}
    links |= {"../report.json": "fine"}
    hostile = Hostile(dict.fromkeys(names, b"evil") | {"fine": b"fine"}, links)
    port = hostile.server.getsockname()[1]

    def connect(_: str) -> NodeConnection | None:
        link = NodeConnection(socket.create_connection(("127.0.0.1", port)), KEY)
        return link if link.greet(5) else None

    sync = FileSync(shared, "/job", {"master": [0]}, connect)
    try:
        eventually(lambda: (shared / "fine").exists())
        sync.catch_up(20)
    finally:
        sync.close()
        hostile.join()
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_symlink() or not path.is_dir()}
    own_files = {"j/plan.json", "j/events.jsonl", "j/job/generation", "outside/victim", "victim"}
    links_to_job = {"j/logs", "j/checkpoints", "j/metrics.jsonl"}  # links into the job folder
    assert found == own_files | links_to_job | {"j/job/way/evil", "j/job/way/link", "j/job/fine", "j/job/last"}
    assert {(tmp_path / name).read_text() for name in own_files} == {"ours"}
    assert {path.name for path in shared.iterdir() if path.is_symlink()} == {"last"}
    assert (shared / "last").readlink() == Path("fine") and (shared / "way").is_dir()  # in place of the link
    assert stat.S_IMODE((shared / "fine").stat().st_mode) & 0o7022 == 0  # it reported 4777
    assert not os.path.exists("/tmp/evil-of-a-test")


def test_a_list_of_many_links_must_neither_be_placed_whole_nor_keep_copying_from_ending(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrate.engines.swarm.sync.MAX_LINKS", 100)
    node = FakeNode()
    node.links = {f"link-{number}": "target" for number in range(150)}
    sync = sync_master(tmp_path, lambda name: node)
    assert sync.catch_up(60)
    (warning,) = sync.warnings()
    sync.close()
    assert not any(thread.is_alive() for thread in sync.threads)
    assert "some files are not copied" in warning and "more than 100 links" in warning
    assert len([*tmp_path.iterdir()]) == 100
