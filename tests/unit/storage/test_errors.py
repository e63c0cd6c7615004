"""Messages about object stores: what failed, why, the next step, and never a secret."""

import importlib.abc
import logging
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from support.object_stores import KEY_ID, SECRET, use

from orchestrate.errors import ResourceError, StorageError, StorageLost, UsageError
from orchestrate.files.log_file import LOGGER
from orchestrate.storage.fetch import never
from orchestrate.storage.manifest import newest
from orchestrate.storage.remote import explained
from orchestrate.storage.store import open_store, parsed

URLS = [
    "s3://bucket",
    "s3://bucket/",
    "s3://bucket/some/prefix/",
    "gs://b/p",
    "az://c/p",
    "file:///folder",
    "file:///a b",
]


@pytest.mark.parametrize("url", URLS)
def test_a_valid_url_must_be_accepted(url):
    assert parsed(url)


WRONG = [
    "",
    "bucket/prefix",
    "/folder",
    "s3:bucket",
    "s3://",
    "s3:///x",
    "file://",
    "file://folder/x",
    "file:x",
    "file:///",
    "ftp://host/x",
    "http://bucket/x",
    "s3://b/../c",
    "s3://b/./c",
    "s3://b/a//b",
    "s3://b/%2e%2e/x",
    "s3://b/a b",
]
WRONG += ["s3://b/\n", "file:///a/../b", "file:///a\0", "s3://[/x", "s3://-b/x"]


@pytest.mark.parametrize("url", WRONG)
def test_an_invalid_url_must_be_refused(url):
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://{KEY_ID}:{SECRET}@b/x",
        f"s3://{KEY_ID}:{SECRET}",
        f"s3://{KEY_ID}/{SECRET}@b",
        f"s3://b/x?key={SECRET}",
        f"az://c/p#{SECRET}",
    ],
)
def test_credentials_in_a_url_must_be_refused_without_repeating_them(url):
    with pytest.raises(UsageError, match="URL must not contain credentials") as caught:
        open_store(url)
    assert SECRET not in f"{caught.value} {caught.value.hint}" and KEY_ID not in str(caught.value)
    assert caught.value.hint.startswith("set ")


def test_a_missing_package_must_be_reported_with_the_command_that_installs_it(monkeypatch, tmp_path):
    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name.split(".")[0] == "obstore":
                raise ImportError(name)
            return None

    for name in [name for name in sys.modules if name.split(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ResourceError, match="s3://b/x needs the package obstore") as caught:
        open_store("s3://b/x")
    assert caught.value.hint == "pip install 'torch-orchestrate[storage]'"


def shown(error: StorageError) -> str:
    """Everything about an error that may be displayed or logged."""
    assert error.__cause__ is None  # the library's message
    assert error.__context__ is None or error.__suppress_context__
    return f"{error} {error.hint}"


def failure(url: str = "s3://bucket/x") -> StorageError:
    with pytest.raises(StorageError) as caught:
        newest(open_store(url))
    assert SECRET not in shown(caught.value) and KEY_ID not in shown(caught.value)
    return caught.value


def test_wrong_credentials_must_be_named(rclone, monkeypatch, saved):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong := "wrong-secret-wrong")
    error = failure()
    assert str(error).startswith("s3://bucket/x/manifests: access denied (SignatureDoesNotMatch: ")
    assert "AWS_SECRET_ACCESS_KEY" in error.hint and wrong not in shown(error)
    saved.write("a", b"1")
    mirror = saved.mirror(open_store("s3://bucket/x"))
    mirror.start()
    state = mirror.close(0.2)
    assert "access denied" in state.error and "AWS_SECRET_ACCESS_KEY" in state.hint


def test_an_unknown_key_must_be_named(rclone, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWNUNKNOWN")
    error = failure()
    assert "access denied (InvalidAccessKeyId: " in str(error) and "AKIA" not in shown(error)


@pytest.mark.parametrize("action", ["list", "put"])
def test_a_missing_bucket_must_be_named(rclone, action):
    if action == "list":
        error = failure("s3://other/x")
    else:
        with pytest.raises(StorageError) as caught:
            open_store("s3://other/x").put("key", b"1")
        error = caught.value
    assert (str(error), error.hint) == (
        "s3://other/x: the bucket does not exist",
        "create it, or correct the URL",
    )


def test_an_endpoint_that_is_down_must_be_named(rclone):
    rclone.kill()
    error = failure()
    assert isinstance(error, StorageLost)
    assert str(error) == f"s3://bucket/x: 127.0.0.1:{rclone.port} does not respond (Connection refused)"
    assert "AWS_ENDPOINT_URL" in error.hint


@pytest.mark.parametrize(("action", "limit"), [("put", "REQUEST_TIMEOUT"), ("list", "READ_TIMEOUT")])
def test_a_store_that_does_not_answer_must_count_as_lost(rclone, monkeypatch, action, limit):
    monkeypatch.setattr(f"orchestrate.storage.remote.{limit}", timedelta(seconds=0.2))
    store = open_store("s3://bucket/x")
    rclone.hang()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(store.reach) if action == "list" else pool.submit(store.put, "key", b"1")
        try:
            with pytest.raises(StorageLost, match="does not respond"):
                answer.result(120)
        finally:
            rclone.kill()


@pytest.mark.parametrize("status", ["503 Service Unavailable", "500 Internal Server Error", "429 Too Many Requests"])
def test_an_overloaded_store_must_be_tried_again(status):
    answer = f"Server returned non-2xx status code: {status}: <Error><Code>SlowDown</Code></Error>"
    text = f"Generic S3 error: Error performing PUT https://s3.example.com/b/x in 1.5s - {answer}"
    error = explained("s3://b/x", "key", text)
    assert isinstance(error, StorageLost)
    assert str(error) == "s3://b/x: s3.example.com is overloaded or failing (SlowDown)"


def test_missing_credentials_must_be_named():
    """The library then asks a cloud machine's metadata service, whose answer would confuse."""
    text = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1s - HTTP error: timeout"
    error = explained("s3://b/x", "key", text)
    assert str(error) == "no credentials for s3://b/x" and "AWS_ACCESS_KEY_ID" in error.hint


def test_a_secret_in_a_librarys_message_must_not_be_repeated(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0c2VjcmV0")
    text = (
        "Generic Azure error: Error performing GET https://u:pw1234@a.net/c?sig=abcdef in 1s - Server returned 500 : "
        "c2VjcmV0c2VjcmV0 https://me:pw1234@a.net/c?sig=abcdef\n\nDebug source:\npw1234"
    )
    for sample in (text, text.replace(" - ", " ")):
        error = shown(explained("az://c/p", "key", sample))
        assert not [secret for secret in ("c2Vj", "pw1234", "abcdef") if secret in error]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("400 Bad Request: <Error><Code>ExpiredToken</Code></Error>", "az://c/p/key: access denied (ExpiredToken)"),
        ("404 Not Found: <Error><Code>ContainerNotFound</Code></Error>", "az://c/p: the bucket does not exist"),
        ("404 Not Found: ", "az://c/p/key does not exist"),
    ],
)
def test_the_answer_of_a_store_must_be_explained(answer, message):
    text = "Generic Azure error: Error performing GET https://a.net/c/p in 1s - Server returned non-2xx status code: "
    assert str(explained("az://c/p", "key", text + answer)) == message


@pytest.mark.parametrize("length", [10_000, 280])
def test_a_long_message_of_a_library_must_be_cut_but_not_within_a_secret(monkeypatch, length):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    message = str(explained("s3://b/x", "key", f"Generic S3 error: {'x' * length}{SECRET}"))
    assert len(message) < 400 and SECRET[:5] not in message


def test_an_object_that_is_already_gone_must_not_fail_its_deletion(store):
    store.put("files/last", b"1")
    store.delete(["files/none", "files/last"])
    assert not list(store.list("files"))


@pytest.mark.parametrize(
    ("limit", "most", "length", "why"),
    [("MAX_OBJECTS", 2, 1, "holds more than 2 objects"), ("MAX_NAMES", 500, 200, "or names of more than")],
)
def test_a_prefix_with_too_many_objects_or_long_names_must_be_refused(store, monkeypatch, limit, most, length, why):
    monkeypatch.setattr(f"orchestrate.storage.base.{limit}", most)
    for name in "abc":
        store.put(f"files/{name * length}", b"1")
    with pytest.raises(StorageError, match=why):
        list(store.list("files"))


def test_a_missing_object_must_be_named(store):
    with pytest.raises(StorageError, match=r"/files/none does not exist"):
        list(store.read("files/none"))


@pytest.mark.parametrize("endpoint", ["http://10.0.0.1:9000", "http://minio:9000"])
def test_an_endpoint_without_tls_must_be_confirmed_unless_it_is_this_machine(monkeypatch, endpoint):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(UsageError, match="without TLS") as caught:
        open_store("s3://b/x")
    assert "AWS_ALLOW_HTTP=true" in caught.value.hint
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert open_store("s3://b/x")


@pytest.mark.parametrize("endpoint", ["http://localhost:9000", "http://[::1]:9000", "http://127.1.2.3:9000"])
def test_an_endpoint_on_this_machine_needs_no_tls(monkeypatch, endpoint):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    assert open_store("s3://b/x")


@pytest.mark.parametrize("endpoint", ["localhost:9000", "ftp://x", "::", "http://"])
def test_an_endpoint_that_is_no_url_must_be_refused(monkeypatch, endpoint):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL must be a URL"):
        open_store("s3://b/x")


def test_the_endpoint_of_s3_must_take_precedence_over_the_general_one(rclone, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", rclone.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:1")  # which would also forbid plain HTTP
    store = open_store("s3://bucket/x")
    store.put("a", b"1")
    assert [*store.list("")] == [("a", 1)]


def test_a_folder_that_cannot_be_created_must_be_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"file://{tmp_path}/file/store: "):
        open_store(f"file://{tmp_path}/file/store")


def test_the_state_must_name_the_error_of_a_background_copy(rclone, saved, caplog, monkeypatch):
    monkeypatch.setattr(LOGGER, "propagate", True)
    caplog.set_level(logging.DEBUG, logger=LOGGER.name)
    rclone.kill()
    mirror = saved.mirror(open_store("s3://bucket/x"))
    with pytest.raises(StorageLost):
        mirror.sync(never)
    mirror.start()
    state = mirror.close(0.5)
    assert "does not respond" in state.error and state.hint and not state.complete
    assert "does not respond" in caplog.text and SECRET not in caplog.text


@pytest.mark.timeout(50)  # the library's own is a minute
def test_ctrl_c_must_end_the_wait_for_a_store_that_does_not_respond(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = open_store("s3://bucket")
        kept: list[socket.socket] = []

        def interrupt() -> None:
            kept.append(silent.accept()[0])
            os.kill(os.getpid(), signal.SIGINT)

        accepting = threading.Thread(target=interrupt)
        accepting.start()
        with pytest.raises(KeyboardInterrupt):
            store.reach()
        accepting.join()
        kept[0].close()
