"""Servers that answer in their own way, late, or without an end."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.object_stores import use
from support.scripted import Clock
from support.waiting import eventually

from orchestrate.errors import StorageError, StorageLost
from orchestrate.files.folder import Folder
from orchestrate.spec.spec import JobSpec
from orchestrate.storage.fetch import restore, retry
from orchestrate.storage.store import open_store
from orchestrate.supervise import open_stores


class Strict(BaseHTTPRequestHandler):
    """Refuses conditional writes, as some stores do that are compatible with S3 otherwise."""

    seen: list[tuple[str, str | None, bytes]] = []

    def do_PUT(self):
        condition, data = self.headers["If-None-Match"], self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append((self.path, condition, data))
        body = b"<Error><Code>NotImplemented</Code></Error>" if condition else b""
        self.send_response(501 if condition else 200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The endpoint of a server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Endless(Strict):
    """Lists nothing, in pages without end until `ends`; refuses to read in several lines."""

    ends = threading.Event()

    def do_GET(self):
        token = "" if self.ends.is_set() else "<NextContinuationToken>x</NextContinuationToken>"
        body = f"<ListBucketResult><Name>b</Name>{token}</ListBucketResult>"
        odd = "<Error><Code>Odd</Code><Message>no)\n\nsucceeded: 4 workers\n</Message></Error>"
        status, body = (200, body) if "list-type" in self.path else (400, odd)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


def test_a_server_that_lists_nothing_forever_must_count_as_lost(monkeypatch):
    monkeypatch.setattr("orchestrate.storage.remote.LIST_TIMEOUT", 0.2)
    with served(Endless) as endpoint:
        use(monkeypatch, endpoint)
        store = open_store("s3://bucket/x")
        with pytest.raises(StorageLost, match="has not listed its objects within 0.2 s"):
            next(store.list("files"), None)
        with pytest.raises(StorageLost, match="still has not listed its objects"):  # no second thread waits
            next(store.list("files"), None)
        Endless.ends.set()

        def is_listed() -> bool:
            with contextlib.suppress(StorageLost):
                return not [*store.list("files")]
            return False

        eventually(is_listed)


class Deaf(Strict):
    """Answers no request to delete before `ends`."""

    ends = threading.Event()

    def do_POST(self):
        self.ends.wait()

    do_DELETE = do_POST


def test_a_server_that_does_not_delete_must_not_be_waited_for(monkeypatch):
    monkeypatch.setattr("orchestrate.storage.remote.DELETE_TIMEOUT", 0.2)
    with served(Deaf) as endpoint:
        use(monkeypatch, endpoint)
        store = open_store("s3://bucket/x")
        with pytest.raises(StorageLost, match="has not deleted an object within 0.2 s"):
            store.delete(["files/a"])
        with pytest.raises(StorageLost, match="still has not deleted an object"):
            store.delete(["files/b"])
        Deaf.ends.set()


class Busy(Strict):
    """Is too busy to list its objects until it was asked often enough; answers nothing else."""

    left = 0

    def do_GET(self):
        Busy.left -= 1
        body = "<ListBucketResult><Name>b</Name></ListBucketResult>" if Busy.left < 0 else "<Error/>"
        self.send_response(200 if Busy.left < 0 else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


ASKS = 3  # requests of the library, with its own retries


@pytest.mark.parametrize("where", ["data", "checkpoints", "start"])
def test_a_busy_server_must_be_asked_again_for_its_list(monkeypatch, capsys, tmp_path, where):
    monkeypatch.setattr("orchestrate.storage.fetch.RETRY_INTERVAL", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Busy.left = 2 * ASKS
    with served(Busy) as endpoint:
        use(monkeypatch, endpoint)
        if where == "start":
            assert restore(open_store("s3://bucket/x"), Folder(tmp_path, "job"), "checkpoints") is None
        elif where == "checkpoints":
            open_stores.prepare(JobSpec(checkpoints="s3://bucket/x"))
        else:
            with pytest.raises(StorageError, match="has no objects"):
                open_stores.prepare(JobSpec(data={"d": "s3://bucket/x"}))
        assert Busy.left < 0
    warning = "status code: 503 Service Unavailable: <Error/>); trying again for two minutes"
    assert capsys.readouterr().err.count(warning) == (where != "start")


def test_a_server_that_is_not_there_must_not_be_waited_for(monkeypatch):
    with served(Busy) as endpoint:
        use(monkeypatch, endpoint)
    with pytest.raises(StorageLost, match="does not respond") as lost:
        open_stores.prepare(JobSpec(checkpoints="s3://bucket/x"))
    assert type(lost.value) is StorageLost


def test_an_answer_must_be_shown_in_one_line(monkeypatch):
    with served(Endless) as endpoint:
        use(monkeypatch, endpoint)
        with pytest.raises(StorageError) as caught:
            [*open_store("s3://bucket/x").read("key")]
    assert "\n" not in str(caught.value) and "succeeded: 4 workers" in str(caught.value)


@pytest.mark.parametrize(("url", "path"), [("s3://bucket/x", "/bucket/x/key"), ("az://bucket/x", "/me/bucket/x/key")])
def test_a_store_that_refuses_conditional_writes_must_be_usable(monkeypatch, url, path):
    azure = {"ACCOUNT_NAME": "me", "ACCOUNT_KEY": "c2VjcmV0", "USE_EMULATOR": "true"}
    for name, value in {f"AZURE_STORAGE_{name}": value for name, value in azure.items()}.items():
        monkeypatch.setenv(name, value)
    with served(Strict) as endpoint:
        use(monkeypatch, endpoint)
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", endpoint)
        open_store(url).create("key", b"data")
    assert Strict.seen[0] == (path, "*", b"data") and Strict.seen[-1] == (path, None, b"data")
    Strict.seen.clear()


@pytest.mark.parametrize(("lasts", "tries"), [(62.0, 3), (300.0, 9)])
def test_an_outage_must_count_from_the_last_progress_of_a_fetch(monkeypatch, lasts, tries):
    clock = Clock()
    monkeypatch.setattr("orchestrate.storage.fetch.SYSTEM", clock)
    attempts: list[int] = []

    def loses() -> None:
        clock.sleep(lasts)
        attempts.append(1)
        if len(attempts) < 9:
            raise StorageLost("down")

    with contextlib.suppress(StorageLost):
        retry(loses, lambda: False)
    assert len(attempts) == tries
