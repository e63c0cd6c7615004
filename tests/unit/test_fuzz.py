"""Any input from users or nodes must be accepted or refused by name; each input that once failed is an example."""

import contextlib
import json
import socket
import tempfile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import fuzzing
from support.commanded import Commands, Whole, create, watched
from support.ends import KEY, End, greeted
from support.scripted import ALL_WELL

from orchestrate.cli.options import FLAGS as OPTIONS
from orchestrate.engines.connection import NodeConnection
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files.lines import Lines
from orchestrate.host import records
from orchestrate.node.messages import protocol
from orchestrate.plan.plan import read_plan
from orchestrate.record import events, report, run_dir
from orchestrate.record.events import to_line
from orchestrate.record.logs import clean, last_lines
from orchestrate.record.outcomes import Outcome
from orchestrate.record.paths import JobPaths
from orchestrate.record.recorder import _mac
from orchestrate.show.screen import Display
from orchestrate.spec import layers, spec
from orchestrate.supervise import launch

slow = fuzzing.slow()
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
METRICS = ["step", "loss", "rank_seconds", "a"]
FORMS = [
    {"say": "started", "generation": 0, "rank": 0, "pid": 2},
    {"say": "ended", "generation": 0, "rank": 0, "code": 1, "at": 1.0, "hint": "", "stopping": False},
    {
        "say": "status",
        "generation": 0,
        "codes": {"0": 1},
        "hints": {"0": ""},
        "running": {"1": {"pid": 2, "state": "S", "cpu": 0.5}},
        "tags": {},
        "importing": False,
        "time": 1.0,
    },
    {"say": "cleaned"},
    {"say": "refused", "error": "no"},
    {"say": "failed", "error": "no"},
    {"say": "uploaded", "tags": {}},
    {"say": "changes", "logs": {}, "files": {"a": [1, 2, 3, 4]}, "links": {"b": "a"}, "gone": []},
    {"say": "piece", "data": "", "offset": 0, "facts": [1, 2, 3, 4]},
]


@st.composite
def mangled(draw, forms):
    """One of these forms, slightly changed."""
    value = json.loads(json.dumps(draw(st.sampled_from(forms))))
    for _ in range(draw(st.integers(0, 3))):
        holders = [value] + [inner for inner in value.values() if isinstance(inner, dict) and inner]
        holder = draw(st.sampled_from(holders))
        key = draw(st.sampled_from(sorted(holder)))
        if draw(st.booleans()):
            holder[key] = draw(values)
        elif len(holder) > 1:
            del holder[key]
    return value


# --- messages of nodes


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["say"])
def test_a_message_of_each_type_must_be_accepted(form):
    assert json.loads(protocol.encode(protocol.report(json.dumps(form).encode()))) == form


@given(st.binary(max_size=200) | values.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b'{"say": []}')
@example(b'{"say": "ended", "error": ["x"]}')
@example(b'{"say": "changes", "logs": {}, "files": {"a": [1, 2, 3, 1' + b"0" * 5000 + b']}, "links": {}, "gone": []}')
def test_a_line_must_be_parsed_as_a_message_or_refused(line):
    with contextlib.suppress(ValueError):
        assert type(protocol.report(line)) in protocol.REPORTS.values()


class Recorded(NodeConnection):
    """A connection whose other end has sent these lines and closed."""

    def __init__(self, lines: bytes) -> None:
        local, remote = socket.socketpair()
        super().__init__(local, KEY)
        node = End(remote, listens=True)
        greeted(self, node)
        for line in lines.splitlines():
            node.send(line)
        remote.close()


@given(st.lists(mangled(FORMS) | values, max_size=8))
def test_an_engine_must_survive_any_message_from_a_node(messages):
    from support.fake_nodes import Nodes, planned

    nodes = Nodes(0)
    link = Recorded("".join(json.dumps(message) + "\n" for message in messages).encode())
    nodes.connections["node-0"] = link
    nodes.selector.register(link.sock, 1, "node-0")
    plan = planned()
    nodes._reset(plan)
    exits = []
    for _ in range(3):
        exits += nodes.wait(0)
        nodes.activity()
    assert all(0 <= end.code <= 255 and end.rank in range(len(plan.workers)) for end in exits)
    nodes.selector.close()
    for connection in nodes.connections.values():
        connection.close()


# --- output of workers


@given(st.binary(max_size=300))
@example(b"\x1b]52;c;" + b"A" * 100)
@example(b"\x1b[" * 100)
def test_worker_output_must_not_control_the_terminal(line):
    text = clean(line)
    assert not any(ord(letter) < 32 and letter not in "\t\n" or 127 <= ord(letter) < 160 for letter in text)
    assert isinstance(last_lines(text, 1, 12), list)


@given(st.binary(max_size=400), st.integers(1, 50), st.integers(1, 20))
def test_all_bytes_of_a_log_must_be_returned_in_lines(monkeypatch_lines, content, longest, chunk):
    monkeypatch_lines(longest, chunk)
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        read = Lines()
        found = [*read.new(file), read.rest()]
    assert b"".join(found).replace(b"\n", b"") == content.replace(b"\n", b"")
    if longest > len(content):
        assert b"\n".join(found) == content


@pytest.fixture
def monkeypatch_lines(monkeypatch):
    def patch(longest: int, chunk: int) -> None:
        monkeypatch.setattr("orchestrate.files.lines.MAX_LINE", longest)
        monkeypatch.setattr("orchestrate.files.lines.CHUNK", chunk)

    return patch


@slow
@given(st.lists(st.dictionaries(st.sampled_from(METRICS), values, max_size=4), max_size=6))
@example([{"rank_seconds": [1, 1, 1e400]}] * 6)
@example([{"rank_seconds": [10**400] * 3}] * 6)
def test_a_report_must_be_created_from_any_metrics(tmp_path_factory, metrics):
    paths = create(JobPaths(tmp_path_factory.mktemp("runs") / "a-1"))
    paths.metrics.write_text("".join(json.dumps(value) + "\n" for value in metrics))
    data = launch.supervise(paths, Whole([ALL_WELL]), lambda: 0, watched(paths, Display(lambda _: None)))
    assert data["outcome"] == "succeeded" and run_dir.ended(paths) is not None
    assert isinstance(report.text(data), str)


# --- our files, changed by a disk failure or a user

FILES = ["events.jsonl", "plan.json", "job.yaml", "report.json", "supervisor.lock"]
EVENTS = [
    to_line(event)
    for event in (
        events.GenerationStarting(0, ("master",), 1, 29500),
        events.WorkerEnded(0, "master", 1, stopping=False),
        events.WorkersStopping("x", kill=False),
        events.HangFound({0: "S"}, 1.0),
        events.OutcomeDecided(Outcome.FAILED, "x"),
    )
]


@slow
@given(st.lists(mangled(EVENTS) | st.sampled_from(EVENTS) | values, max_size=6))
@example([{"event": "worker_ended", "time": "x"}])
@example([{"event": "outcome_decided"}])
@example([{"event": "generation_starting", "time": 1e308, "generation": "x"}])
def test_damaged_events_must_be_reported_with_their_file_and_the_job_must_stay_removable(tmp_path_factory, found):
    paths = create(JobPaths(tmp_path_factory.mktemp("runs") / "a-1"))
    key, mac, lines = bytes.fromhex(records.need(paths.root).events), "", []
    for event in found:
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            mac = _mac(key, mac, event)
            event = {**event, "mac": mac}
        lines.append(json.dumps(event) + "\n")
    paths.events.write_text("".join(lines))
    engine = Whole([ALL_WELL], [ALL_WELL])
    try:
        launch.supervise(paths, engine, lambda: 1, watched(paths, Display(lambda _: None)))
    except UsageError as error:
        assert str(paths.events) in str(error)
    except OrchestrateError:
        pass
    run_dir.remove(paths)


@slow
@given(st.binary(max_size=300), st.sampled_from(FILES))
@example(b'{"outcome": "succeeded"}', "report.json")
@example(b"\xff", "job.yaml")
@example(b"[" * 50_000, "plan.json")
@example(b"[" * 50_000, "job.yaml")
def test_commands_must_handle_any_content_of_a_jobs_files(make_job, content, name):
    do, paths = make_job()
    (paths.root / name).write_bytes(content)
    for command in (["logs", "a-1"], ["ps"], ["stop", "a-1"], ["wait", "a-1"], ["attach", "a-1"], ["rm", "a-1"]):
        code, out, err = do(*command)
        assert code in (0, 1, 2, 3, 5, 130), err
        assert "Traceback" not in "\n".join([*out, *err])
    assert not paths.root.exists()


@pytest.fixture
def make_job(tmp_path_factory, monkeypatch, capsys):
    """Create a job; return commands that find it, and its paths."""

    def make() -> tuple[Commands, JobPaths]:
        runs = tmp_path_factory.mktemp("runs")
        do = Commands(runs, monkeypatch, capsys)
        do.engine.generations = [[ALL_WELL]] * 3
        return do, create(JobPaths(runs / "a-1"))

    return make


@given(values)
@example({"job_id": "/etc", "nodes": ["../.."]})
def test_an_arbitrary_plan_must_be_refused(value):
    with pytest.raises((ValueError, TypeError, KeyError)):
        read_plan(json.dumps(value), {})


# --- input of users

KEYS = st.sampled_from([*spec.FIELDS, "env.A", "trainer", "", "a b"])
LINES = st.text(alphabet="abc:-[]{}#&*!|>'\"%@` \n\t0123456789.,~?\\eE_+\ufeff\x85", max_size=60)


@given(
    st.binary(max_size=200)
    | LINES.map(str.encode)
    | st.dictionaries(KEYS, values, max_size=4).map(json.dumps).map(str.encode)
)
@example(b"trainers: 2023-13-45")
@example(b"trainers: " + b"9" * 5000)
@example(b"trainers: !!int abc")
@example(b"env: {A: " + b"[" * 5000)
@example(b"&a [*a]")
@example(b"name: \xff")
@example(b"? [a]\n: b")
@example(b"grace: .inf")
@example(b"trainers: 1:30")
def test_a_job_file_must_be_accepted_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("file") / "job.yaml"
    path.write_bytes(content)
    try:
        resolved = layers.resolve(layers.read_file(path))
    except UsageError as error:
        assert str(error)
    else:
        again = path.with_name("again.yaml")
        again.write_text(resolved.to_yaml())
        assert layers.resolve(layers.read_file(again)) == resolved


@given(KEYS, values | st.text(max_size=30))
@example("command", ["\ud800"])
@example("env", {"A": "a\0b"})
@example("grace", "1e400")
@example("trainers", "１")
@example("memory", "9" * 50 + "g")
@example("optional", [[]])
def test_a_value_must_be_accepted_or_refused_with_its_key(key, value):
    try:
        resolved = layers.resolve({key: value})
    except UsageError as error:
        assert repr(key) in str(error) or key.split(".")[0] in str(error)
    else:
        assert isinstance(resolved, spec.JobSpec)


COMMANDS = ["plan", "logs", "wait", "stop", "rm", "down", "ps", "attach", "export", ""]
OTHERS = ["--set", "--runs", "--dry-run", "--rank", "-f", "--", "-m"]
FLAGS = [*(f"--{name.replace('_', '-')}" for name in OPTIONS), *OTHERS]
VALUES = ["0", "-1", "1e9", "auto", "all", "x=1", "env.A=b", "..", "/"]
ARGUMENTS = st.sampled_from([*FLAGS, *VALUES]) | st.text(max_size=12)


@slow
@given(st.sampled_from(COMMANDS), st.lists(ARGUMENTS, max_size=5))
@example("stop", [""])
@example("rm", [".."])
@example("rm", ["/"])
@example("logs", ["a-1", "--rank", "x"])
@example("export", ["kubernetes", "--form", "\0"])
def test_a_command_line_must_run_or_be_refused_without_a_traceback(make_job, command, arguments):
    do, paths = make_job()
    code, _, err = do(command, *arguments)
    assert code in (0, 1, 2, 3, 4, 5, 130), err
    assert "Traceback" not in "\n".join(err) and (code != 2 or any(line.startswith("error: ") for line in err))
    assert paths.root.exists() or command == "rm"
