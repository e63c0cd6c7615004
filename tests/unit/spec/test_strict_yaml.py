"""Invalid job files and `--set` values: each must raise a UsageError with its position, at once."""

import os
import re

import pytest
import yaml

from orchestrate.errors import UsageError
from orchestrate.spec import strict_yaml
from orchestrate.spec.layers import read_file, read_set, resolve
from orchestrate.spec.spec import JobSpec
from orchestrate.spec.strict_yaml import MAX_FILE

DIGITS = "9" * 5000


def refused(path, content: bytes) -> UsageError:
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        resolve(read_file(path))
    assert len(str(caught.value)) < 500, "a message that fits on a screen"
    return caught.value


@pytest.fixture
def path(tmp_path):
    return tmp_path / "job.yaml"


@pytest.mark.parametrize(
    "value",
    [
        "2023-13-45",
        "2023-01-01",
        DIGITS,
        f"-{DIGITS}",
        f"{DIGITS}.5",
        f"0x{'f' * 5000}",
        "1_000",
        "0o17",
        "0x10",
        "0b1",
        "1:30",
        "1e3",
        ".inf",
        "-.inf",
        ".nan",
        "=",
        "<<",
        '"\\ud800"',
        '"1\\0"',
        "[" * 9 + "]" * 9,
        "{a: {b: c}}",
        "yes",
        "3.0",
        "+3",
    ],
    ids=lambda value: value[:12],
)
@pytest.mark.parametrize("key", ["trainers", "max_run", "gpus", "cpus", "memory", "warm", "rules"])
def test_an_invalid_value_must_be_refused_with_its_key(path, key, value):
    allowed = {("max_run", "3.0"): 3.0, ("cpus", "3.0"): 3.0, ("warm", "yes"): True}
    if (key, value) in allowed:
        path.write_text(f"{key}: {value}\n")
        assert getattr(resolve(read_file(path)), key) == allowed[key, value]
        return
    error = refused(path, f"name: a\n{key}: {value}\n".encode())
    assert re.match(rf"{re.escape(str(path))}:2:1: {key} must be ", str(error)), error
    with pytest.raises(UsageError, match=f"^{key} must be "):
        resolve(read_set([f"{key}={value}"]))


@pytest.mark.parametrize("place", ["VALUE", "env: {A: VALUE }", "command: [VALUE ]", "rules: [{log: VALUE , a: b}]"])
@pytest.mark.parametrize(
    "value",
    [
        "!!int abc",
        "!!int 5",
        "!!float x",
        "!!timestamp x",
        "!!binary '***'",
        "!!bool x",
        "!!null x",
        "!!set {a}",
        "!!omap [a: b]",
        "!!python/object:os.system {}",
        "!!python/name:os.system",
        "!mine x",
        "!<tag:yaml.org,2002:int> abc",
    ],
)
def test_a_tag_must_be_refused_with_its_position(path, place, value):
    before, after = place.split("VALUE")
    error = refused(path, f"# a job\n{before}{value}{after}\n".encode())
    assert str(error).startswith(f"{path}:2:{len(before) + 1}: the tag ")


def test_the_tag_str_must_be_accepted(path):
    path.write_text("name: !!str 2024-01-01\nenv: {A: !!str 010, B: ! 1}\n")
    assert resolve(read_file(path)) == JobSpec(name="2024-01-01", env={"A": "010", "B": "1"})


@pytest.mark.parametrize(
    "opening", ["[", "{a: ", "- ", "[[], ", "? ", "{? "], ids=["list", "map", "block", "second", "key", "in a map"]
)
def test_nesting_that_is_too_deep_must_be_refused(path, opening):
    assert f"{path}:1:" in (error := str(refused(path, f"a: {opening * 10_000}".encode()))) or f"{path}:2:" in error
    refused(path, f"rules:\n  {opening * 10_000}".encode())
    with pytest.raises(UsageError, match="^rules must be "):
        resolve(read_set([f"rules={opening * 10_000}"]))


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"trainers: 1\nname: \0", ":2:7"),
        (b"trainers: 1\nname: a\x1b[2Jb\n", ":2:8"),
        (b"trainers: 1\r\nname: \x7f\r\n", ":2:7"),
        ("\nname: \x85\x9b".encode(), ":3:1"),  # NEL ends a line in YAML
        (b"name: '\xed\xa0\x80'\n", ""),  # a surrogate half in UTF-8
        ("name: a\n".encode("utf-16"), ""),
        ("name: a\n".encode("utf-16-le"), ":1:2"),
        (b"name: \xff\n", ""),
        (b'name: "\\U00110000"\n', ":1:"),
        (b'name: "\\UFFFFFFFF"\n', ":1:"),
        (b"%YAML " + DIGITS.encode() + b".1\n--- {}\n", ":1:"),
        (b"%YAML 9.1\n--- {}\n", ":1:1"),
        (b"%TAG ! tag:yaml.org,2002:\n--- !int abc\n", ":2:5"),
        (b"? {a: b}\n: c\n", ":1:3"),
        (b"? [a]\n: c\n", ":1:3"),
        (b"env:\n  ? [a]\n  : c\n", ":2:5"),
        (b"env: {[a]: c}\n", ":1:7"),
        (b"env: {{a: b}: c}\n", ":1:7"),
        (b"- &a [*a]\n", ":1:7"),
        (b"name: *none\n", ":1:7"),
        (b"a" * 2000 + b": 1\n", ":1:"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_invalid_yaml_must_be_refused_with_its_position(path, content, place):
    assert str(refused(path, content)).startswith((f"{path}{place}:", f"{path}{place}")) and place in str(path) + place
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", str(refused(path, content)))


def test_a_utf_8_byte_order_mark_must_be_accepted(path):
    path.write_bytes(b"\xef\xbb\xbfname: \xc3\xa9\n")
    assert resolve(read_file(path)).name == "é"


def test_a_job_file_must_be_read_as_utf_8_in_every_locale(path, monkeypatch):
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ascii")
    path.write_bytes("name: é\n".encode())
    assert resolve(read_file(path)).name == "é"


@pytest.mark.parametrize("key", ["yes", "on", "null", "~", "1", "1.5", "2023-13-45", "=", "!!str 1"])
def test_a_key_must_be_text_even_if_it_looks_like_another_type(path, key):
    refused(path, f"{key}: 1\n".encode())
    path.write_text(f"env: {{{key}: 1}}\n")
    if key in ("yes", "on", "null"):
        assert resolve(read_file(path)).env == {key: "1"}
    else:
        assert "env must be" in str(refused(path, path.read_bytes()))
    refused(path, f"rules: [{{{key}: 1, action: fail}}]\n".encode())


def test_values_in_set_env_must_stay_as_written():
    assert resolve(read_set(["env={A: yes, B: 1.10, C: 2024-01-01}"])).env == {
        "A": "yes",
        "B": "1.10",
        "C": "2024-01-01",
    }


def test_text_that_looks_like_a_date_must_stay_text(path):
    path.write_text("name: 2024-01-01\nenv: {A: 2023-13-45}\ncommand: [x.py, 2023-13-45, 1:30]\n")
    spec = resolve(read_file(path), read_set(["env.B=2023-13-45"]))
    assert (spec.name, spec.env) == ("2024-01-01", {"A": "2023-13-45", "B": "2023-13-45"})
    assert spec.command == ("x.py", "2023-13-45", "1:30")


# --- files that cannot be read


def test_a_job_file_that_is_too_large_must_be_refused_before_it_is_parsed(path, monkeypatch):
    monkeypatch.setattr("yaml.reader.Reader.__init__", lambda *_: pytest.fail("was parsed"))
    for content in (b"name: a\n# " + b"x" * MAX_FILE, b"trainers: 1\n" * (20 << 17)):
        assert f"{path} is larger than 1 MiB" in str(refused(path, content))


def test_a_job_file_of_the_maximum_size_must_be_read(path):
    path.write_bytes((b"name: a\n" + b"#" * MAX_FILE)[:MAX_FILE])
    assert resolve(read_file(path)).name == "a"


def test_a_job_file_that_is_not_a_regular_file_must_be_refused_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for name in ("/dev/zero", "/dev/null", str(tmp_path / "fifo")):
        with pytest.raises(UsageError, match=f"cannot read job file {name}: not a regular file"):
            read_file(type(tmp_path)(name))
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(UsageError, match="cannot read job file"):
            read_file(tmp_path / name)


def test_a_job_file_may_be_a_link(tmp_path, path):
    path.write_text("name: a\n")
    (tmp_path / "link").symlink_to(path)
    assert resolve(read_file(tmp_path / "link")).name == "a"


# --- values


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "a\udfffb"], ids=ascii)
@pytest.mark.parametrize("key", ["env", "command", "name", "image", "volume", "constraints", "preload"])
def test_text_that_cannot_be_passed_to_a_process_must_be_refused(key, text):
    values = {"env": {"A": text}, "command": ["x.py", text], "constraints": [f"a=={text}"], "preload": [text]}
    with pytest.raises(UsageError, match=f"^{key} must be ") as caught:
        resolve({key: values.get(key, text)})
    str(caught.value).encode()


def test_utf_8_arguments_must_be_decoded_in_every_locale():
    raw = os.fsencode("é").decode("ascii", "surrogateescape")
    spec = resolve({"command": ["x.py", raw]}, {"env.A": raw})
    assert (spec.command, spec.env) == (("x.py", "é"), {"A": "é"})
    with pytest.raises(UsageError, match="^command must be .*UTF-8"):
        resolve({"command": ["x.py", "\udcff"]})


def test_escapes_and_newlines_must_reach_the_script():
    command = ("x.py", "a\nb\t\x1b[0m", "é", "\U0001f600")
    assert resolve({"command": command, "env": {"A": command[1]}}) == JobSpec(command=command, env={"A": command[1]})


@pytest.mark.parametrize("key", ["name", "image", "volume"])
@pytest.mark.parametrize("control", ["\n", "\x1b[2J", "\x9b2J", "\x7f"], ids=ascii)
def test_a_name_with_control_characters_must_be_refused(key, control):
    with pytest.raises(UsageError, match=f"^{key} must be "):
        resolve({key: f"/a{control}b"})


def test_a_name_must_have_at_most_200_characters():
    assert resolve({"name": "x" * 200}).name == "x" * 200
    with pytest.raises(UsageError, match="^name must be text of at most 200 characters") as caught:
        resolve({"name": "x" * 10_000})
    assert len(str(caught.value)) < 300


SECRET = "hf_very_secret"


@pytest.mark.parametrize(
    "value",
    [
        SECRET,
        [f"HF_TOKEN={SECRET}"],
        {"HF_TOKEN": [SECRET]},
        {"HF_TOKEN": {"a": SECRET}},
        {"RANK": "1", "HF_TOKEN": SECRET},
        {"a b": SECRET},
        {"HF_TOKEN": f"{SECRET}\0"},
        {"HF_TOKEN": f"{SECRET}\ud800"},
        {"HF_TOKEN": None},
    ],
    ids=ascii,
)
def test_values_of_env_must_not_be_printed(path, value):
    with pytest.raises(UsageError, match="^env must be ") as caught:
        resolve({"env": value})
    assert SECRET not in f"{caught.value} {caught.value.hint}"
    if isinstance(value, dict):
        assert next(reversed(value)) in str(caught.value) or "RANK" in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [f"env.1A={SECRET}", f"env.A B={SECRET}", f"env.RANK={SECRET}", f"env={SECRET}", f"env.HF_TOKEN:{SECRET}"]
    + [f"env.=={SECRET}", f"env={{HF_TOKEN: [{SECRET}", f"env.HF_TOKEN {SECRET}"],
)
def test_values_of_env_in_set_must_not_be_printed(setting):
    with pytest.raises(UsageError) as caught:
        resolve(read_set([setting]))
    assert SECRET not in f"{caught.value} {caught.value.hint}"


def test_values_of_env_in_a_job_file_must_not_be_printed(path):
    for line in (f"HF_TOKEN={SECRET}", f"- HF_TOKEN={SECRET}", f"HF TOKEN: {SECRET}", f"HF_TOKEN: [{SECRET}]"):
        assert SECRET not in str(refused(path, f"env:\n  {line}\n".encode()))


# --- limits


@pytest.mark.parametrize(
    ("key", "most"),
    [("grace", "1d"), ("max_run", "3650d"), ("restart_window", "3650d"), ("hang_after", "3650d")],
)
def test_a_duration_must_be_within_its_limits(key, most):
    assert getattr(resolve({key: most}), key) == int(most[:-1]) * 86400
    longer = f"{int(most[:-1])}.001d"
    for value in (
        longer,
        "9" * 400,
        f"{'9' * 5000}d",
        float("inf"),
        float("nan"),
        1e300,
        10**20,
        "1e5",
        0.0001,
        "0.0001s",
    ):
        with pytest.raises(UsageError, match=f"^{key} must be a duration .*from 1 ms to "):
            resolve({key: value})
    assert getattr(resolve({key: "0.001"}), key) == 0.001


@pytest.mark.parametrize(
    ("key", "most", "wrong"),
    [
        ("cpus", "10000", ["0.001", "10001", "9" * 400, float("inf")]),
        ("memory", "8589934591g", ["9" * 5000, "9" * 20, "9223372036854775808", "9007199254740992k", "8589934592g"]),
        ("shm_size", "8796093022207m", ["9" * 5000, "0" * 5000 + "1", "8796093022208M"]),
    ],
    ids=["cpus", "memory", "shm_size"],
)
def test_a_quantity_must_be_within_the_limits_of_the_engine(key, most, wrong):
    assert str(getattr(resolve({key: most}), key)).removesuffix(".0") == most
    for value in wrong:
        with pytest.raises(UsageError, match=f"^{key} must be "):
            resolve({key: value})


@pytest.mark.parametrize("log", ["(" * 5000, "a{99999999999}", "(?P<a>" * 200, "(?i" * 999], ids=lambda log: log[:6])
def test_a_pattern_that_does_not_compile_must_be_refused(log):
    with pytest.raises(UsageError, match="^rules must be "):
        resolve({"rules": [{"log": log, "action": "fail"}]})


def test_rule_values_that_are_not_text_must_be_refused():
    for rule in ({"action": ["fail"], "log": "x"}, {"action": "fail", "cause": ["x"]}, {"action": {}, "log": "x"}):
        with pytest.raises(UsageError, match="^rules must be "):
            resolve({"rules": [rule]})


def test_a_job_file_that_is_a_link_out_of_its_folder_must_not_be_quoted(tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    (tmp_path / "private").write_text("hunter2: [")
    link = tmp_path / "project" / "job.yaml"
    link.symlink_to("../private")
    with pytest.raises(UsageError, match=f"cannot read job file {link}: it is a link out of its folder") as caught:
        strict_yaml.read(link)
    assert caught.value.hint == f"use its target: {tmp_path}/private"
    (tmp_path / "project" / "own.yaml").write_text("nodes: 2\n")
    link.unlink()
    link.symlink_to("own.yaml")
    assert strict_yaml.read(link) == "nodes: 2\n"


def test_a_document_of_many_values_must_be_refused_early():
    text = f"pip: [{'a,' * 20_000}]"
    with pytest.raises(yaml.MarkedYAMLError, match="there are more than 20,000 values"):
        strict_yaml.parse(text)
    assert strict_yaml.parse(f"pip: [{'a,' * 10_000}]")[0] == {"pip": ["a"] * 10_000}
