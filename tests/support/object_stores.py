"""Object stores that run on this machine, and folders to copy."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from orchestrate.errors import StorageError
from orchestrate.files.folder import Folder
from orchestrate.storage.base import Store
from orchestrate.storage.fetch import never, restore
from orchestrate.storage.mirror import Mirror
from orchestrate.storage.store import open_store
from support.processes import MARK, die_with_parent
from support.repo import ROOT, SCRIPTS
from support.waiting import eventually

KEY_ID, SECRET = "THEKEYID", "the/secret+of=this-test"


class Server:
    """A server on a free port of this machine, which can be killed and started again."""

    def __init__(self, folder: Path, *command: str) -> None:
        """`{port}` in the command is replaced by the port."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.folder, self.command = folder, [part.format(port=self.port) for part in command]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                env=os.environ | {MARK: str(self.folder), "RCLONE_CONFIG": os.devnull},
                preexec_fn=die_with_parent,
            )
        eventually(self.accepts)

    def accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def hang(self) -> None:
        """Stop it without closing its connections; returns once all of its threads have stopped."""
        assert self.process
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """End it as a loss of power would."""
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Connect to this endpoint, with the right credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def rclone(tmp_path, monkeypatch) -> Iterator[Server]:
    """S3 with plain files in `served/bucket`, which outlives the server; without conditional writes."""
    (tmp_path / "served" / "bucket").mkdir(parents=True)
    program = Path(sysconfig.get_path("scripts")) / "rclone"
    credentials = ["--auth-key", f"{KEY_ID},{SECRET}"]
    server = Server(
        tmp_path, str(program), "serve", "s3", "--addr", "127.0.0.1:{port}", *credentials, f"{tmp_path}/served"
    )
    server.start()
    use(monkeypatch, server.endpoint)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def moto_server(tmp_path_factory) -> Iterator[Server]:
    server = Server(
        tmp_path_factory.mktemp("moto"), sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "{port}"
    )
    server.start()
    yield server
    server.kill()


@pytest.fixture
def moto(moto_server, tmp_path, monkeypatch) -> str:
    """The URL of an empty bucket of S3 with conditional writes."""
    use(monkeypatch, moto_server.endpoint)
    name = f"b-{abs(hash(tmp_path)):x}"
    urllib.request.urlopen(urllib.request.Request(f"{moto_server.endpoint}/{name}", method="PUT")).close()
    return f"s3://{name}/checkpoints"


@pytest.fixture(params=["file", "rclone", "moto"])
def store(request, tmp_path) -> Store:
    """Each kind of store, empty."""
    if request.param == "file":
        return open_store(f"file://{tmp_path}/store")
    other = request.getfixturevalue(request.param)
    return open_store("s3://bucket/some/prefix" if request.param == "rclone" else other)


class Saved:
    """A job folder with checkpoints."""

    def __init__(self, path: Path) -> None:
        self.folder, self.path = Folder(path, "job"), path / "job" / "checkpoints"
        self.path.mkdir(parents=True)

    def write(self, name: str, data: bytes) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def files(self) -> dict[str, bytes]:
        """All regular files, by path."""
        found = [path for path in self.path.rglob("*") if path.is_file() and not path.is_symlink()]
        return {str(path.relative_to(self.path)): path.read_bytes() for path in found}

    def clear(self) -> None:
        shutil.rmtree(self.path)
        self.path.mkdir()

    def mirror(self, store: Store, job: str = "first-1", **options) -> Mirror:
        return Mirror(store, self.folder, "checkpoints", job, **options)

    def copy(self, store: Store) -> Mirror:
        """Copy everything, as another process would."""
        mirror = self.mirror(store)
        assert mirror.sync(never, final=True)
        return mirror


@pytest.fixture
def saved(tmp_path) -> Saved:
    return Saved(tmp_path / "here")


@pytest.fixture
def elsewhere(tmp_path) -> Saved:
    """A job folder on another machine."""
    return Saved(tmp_path / "elsewhere")


def fetched(store: Store, there: Saved) -> dict[str, bytes]:
    """The files that a job would continue from."""
    there.clear()
    restore(store, there.folder, "checkpoints")
    return there.files()


class Trigger:
    """Does something once, at the n-th time that a copy asks whether to stop: for each file and each MiB."""

    def __init__(self, number: int, action) -> None:
        self.left, self.action = number, action

    def __call__(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.action()
        return False


MIB = 1 << 20
BIG = 64 * MIB


def run_mirror(store, saved, *arguments) -> subprocess.CompletedProcess:
    """Copy in another process."""
    command = [sys.executable, str(SCRIPTS / "mirror.py"), store.url, str(saved.path), *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


URL = "s3://bucket/train"


@pytest.fixture
def bucket(rclone, tmp_path, monkeypatch):
    """A folder of a bucket with two files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "served" / "bucket" / "train"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("A")
    (folder / "sub" / "b").write_text("B")
    return folder


@contextlib.contextmanager
def undeletable(store: Store, prefix: str) -> Iterator[None]:
    """A store whose deletions fail for objects with keys that begin with `prefix`."""
    delete = store.delete

    def refuses(keys: Sequence[str]) -> None:
        if keys[0].startswith(prefix):
            raise StorageError("the connection was lost")
        delete(keys)

    store.delete = refuses  # type: ignore[assignment]
    try:
        yield
    finally:
        store.delete = delete
