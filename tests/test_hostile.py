"""A node that was taken over must reach nothing at home but files of its job."""

import base64
import json
import os
import socket
import stat
import threading
from pathlib import Path

from conftest import eventually

from orchestrate.engines.links import Link
from orchestrate.engines.mirror import Mirror
from orchestrate.node.sealed import Seal

KEY = b"a key of the test"


class Hostile(threading.Thread):
    """A node that has been taken over, and names files as it likes."""

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
        seal = Seal(KEY, listens=True)
        file.write(seal.word + b"\n")
        file.flush()
        seal.meet(file.readline().rstrip(b"\n"))
        while line := file.readline():
            asked = json.loads(seal.open(line.rstrip(b"\n")))
            if asked["ask"] == "news":
                facts = {path: [len(data), 1, 1, 0o4777] for path, data in self.files.items()}
                log = base64.b64encode(b"evil").decode()
                said = {"logs": {"../evil": log, "plan.json": log}, "files": facts, "links": self.links}
                said["gone"] = ["plan.json", "../victim", "way/victim", "", "."]
            else:
                data = self.files[asked["path"]]
                said = {"data": base64.b64encode(data).decode(), "facts": [len(data), 1, 1, 0o4777]}
            file.write(seal.close(json.dumps({"say": asked["ask"], **said}).encode()) + b"\n")
            file.flush()


def test_a_node_that_was_taken_over_must_write_nothing_but_files_of_the_job(tmp_path):
    home, outside = tmp_path / "home", tmp_path / "outside"
    (home / "logs").mkdir(parents=True)
    outside.mkdir()
    for victim in (outside / "victim", tmp_path / "victim"):
        victim.write_text("ours")
    (home / "plan.json").write_text("ours")
    (home / "events.jsonl").write_text("ours")
    (home / "way").symlink_to(outside)
    names = [
        "../evil",
        "/tmp/evil-of-a-test",
        "plan.json",
        "events.jsonl",
        ".key",
        "way/evil",
        "logs/rank-9.log",
        "a//b",
    ]
    names += ["a/../../evil", "", ".", "checkpoints/.hidden", ".cache/evil", "job.yaml", "report.json", "generation"]
    links = {
        "checkpoints/out": "../../..",
        "up": "..",
        "here": ".",
        "root": "/etc/passwd",
        "down": "logs/x",
        "last": "fine",
    }
    links |= {"plan.json": "fine", "way/link": "fine", "../link": "fine", "": "fine", ".hidden": "fine"}
    hostile = Hostile(dict.fromkeys(names, b"evil") | {"fine": b"fine"}, links)
    port = hostile.server.getsockname()[1]

    def connect(_: str) -> Link | None:
        link = Link(socket.create_connection(("127.0.0.1", port)), key=KEY)
        return link if link.greet(5) else None

    mirror = Mirror(home, "/job", {"master": [0]}, connect)
    try:
        eventually(lambda: (home / "fine").exists())
        mirror.catch_up(20)
    finally:
        mirror.close()
        hostile.join()
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_symlink() or not path.is_dir()}
    ours = {"home/plan.json", "home/events.jsonl", "outside/victim", "victim"}
    assert found == ours | {"home/way", "home/fine", "home/last"}
    assert {(tmp_path / name).read_text() for name in ours} == {"ours"}
    assert {path.name for path in home.iterdir() if path.is_symlink()} == {"way", "last"}
    assert (home / "last").readlink() == Path("fine") and (home / "way").readlink() == outside
    assert stat.S_IMODE((home / "fine").stat().st_mode) & 0o7022 == 0  # it said 4777
    assert not os.path.exists("/tmp/evil-of-a-test")
