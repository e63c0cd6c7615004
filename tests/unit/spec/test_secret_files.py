"""Secrets that workers get as files: what is refused."""

import os

import pytest

from orchestrate.errors import UsageError
from orchestrate.spec import folders, secret_files
from orchestrate.spec.layers import resolve

CANARY = "canary-0d4f6a3e"


@pytest.mark.parametrize(
    ("secrets", "message"),
    [
        ({"A": "env"}, "secrets.A: A is not set in this shell"),
        ({"EMPTY": "env"}, "secrets.EMPTY: EMPTY is empty in this shell"),
        ({"A": "none"}, "secrets.A: cannot read its file: No such file or directory"),
        ({"A": "."}, "secrets.A: cannot read its file: not a regular file"),
        ({"A": "pipe"}, "secrets.A: cannot read its file: not a regular file"),
        ({"A": "large"}, "the secrets are larger than 128 KiB"),
        ({"A": "text"}, "the secrets are larger than 128 KiB"),
        ({"A": "most", "B": "most"}, "the secrets are larger than 128 KiB"),
    ],
)
def test_a_secret_that_cannot_be_read_must_be_refused_without_its_source(secrets, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMPTY", "")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(secret_files.MAX_SIZE + 1))
    (tmp_path / "most").write_bytes(bytes(secret_files.MAX_SIZE - 1))
    (tmp_path / "text").write_text("漢" * (secret_files.MAX_SIZE // 2))
    with pytest.raises(UsageError, match=message) as caught:
        secret_files.with_contents(folders.with_absolute(resolve({"secrets": secrets})))
    assert "none" not in f"{caught.value} {caught.value.hint}"


def test_the_content_of_a_secret_must_be_masked_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LICENSE", "open sesame")
    (tmp_path / "file").write_text("swordfish\n")
    spec = secret_files.with_contents(folders.with_absolute(resolve({"secrets": {"LICENSE": "env", "NOTE": "file"}})))
    assert spec.mask()("say open sesame or swordfish") == "say *** or ***"


def test_secrets_of_the_maximum_size_must_be_read_whatever_their_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_bytes(content := b"\xff" * secret_files.MAX_SIZE)
    spec = secret_files.with_contents(folders.with_absolute(resolve({"secrets": {"KEY": "key"}})))
    assert spec.contents["KEY"].encode(errors="surrogateescape") == content


def test_secrets_of_a_list_must_be_variables_and_an_unusual_source_must_be_refused_without_its_value():
    assert resolve({"env": {"A": "x"}, "secrets": ["A"]}).files == {}
    assert resolve({"secrets": {"A": "env"}}, {"secrets.B": "file"}).files == {"A": "env", "B": "file"}
    with pytest.raises(UsageError) as caught:
        resolve({"secrets": {"A": f"{CANARY}\n"}})
    assert CANARY not in str(caught.value) and "the source of A" in str(caught.value)


def test_a_variable_with_the_path_of_a_secret_must_not_be_set_as_well():
    assert resolve({"secrets": ["A"], "env": {"A": "x", "A_FILE": "/x"}}).files == {}
    with pytest.raises(UsageError, match="env.A_FILE contradicts secrets.A"):
        resolve({"secrets": {"A": "env"}, "env": {"A_FILE": "/x"}})
