"""Messages between an orchestrator and a node: JSON, one message per line.

They use a Unix socket or TCP; each line has a proof (auth.py). An orchestrator sends requests, `{"ask": "start", …}`;
the node sends reports, `{"say": "started", …}`, to every client that has sent a request. A client may disconnect; its
workers continue, and the node keeps their exit codes.

Messages are checked as a whole before anything is done, on both sides: what a node receives may come from any process
in its container, or any container on its network; what a node sends may come from untrusted code.

They are named tuples, since importing dataclasses would take a node ten milliseconds.
"""

import functools
import json
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from orchestrate.node.command import LAUNCHERS, named
from orchestrate.node.messages import checks
from orchestrate.node.messages.checks import Check, Refused, shown, up_to

MAX_GREETING = 1 << 7  # bytes of each line at the start of a signed connection
SEND_TIMEOUT = 5.0  # seconds after which a node closes a connection whose peer does not read
LEASE_TIMEOUT = 8.0  # seconds without an answer after which a node on another machine ends its workers; see lease.py
RENEW_INTERVAL = 1.0  # seconds between two requests to renew a lease
STARTING, UNABLE, SILENT = "starting", "unable", "silent"  # why there is no stack of a worker
MAX_STACK = 1 << 15  # bytes of a stack; Python writes 100 frames at most
MAX_DIGITS = 18  # digits of a number, which is then below 2^63
MAX_REPORT = 16 << 20  # bytes of a report: the list of all files of a node is one
MAX_VALUES = 2_500_000  # in a report: each file has six
# Prefixes of reports that may be long; maximum bytes of any other report.
LONG_REPORTS, MAX_SHORT_REPORT = (b'{"say": "changes", ', b'{"say": "piece", '), 1 << 20

Flag = Annotated[bool, checks.flag]
Text = Annotated[str, checks.text]
AnyText = Annotated[str, checks.any_text]
Number = Annotated[int, checks.whole]
TextByPath = Annotated[dict[str, str], checks.mapping(checks.any_text, checks.path)]
Lengths = Annotated[dict[str, int], checks.lengths]
Rank = Annotated[int, up_to(1 << 20)]
Code = Annotated[int, up_to(255)]
Generation = Annotated[int, checks.generation]
Time = Annotated[float, checks.time]
_hint = checks.one_of(("", "oom", "ending", "cut off"))
Hint = Annotated[str, _hint]
Tags = Annotated[dict[str, str], checks.mapping(checks.any_text)]  # the digest of the last upload, by folder
Environment = Annotated[dict[str, str], checks.environment]


def _use(value: Any) -> str:
    """What a worker has used, as in `traffic.Use`."""
    if not isinstance(value, dict) or not {"exchanged", "connected", "sampled", "gpu", "torch"} <= value.keys():
        return " must be the use of a worker"
    times = checks.time(value["connected"]) or checks.time(value["sampled"])
    flags = checks.flag(value["gpu"]) or checks.flag(value["torch"])
    names = checks.version(value.get("version", "")) or _launcher(value.get("launcher", ""))
    return up_to(1 << 62)(value["exchanged"]) or times or flags or names


def _launcher(value: Any) -> str:
    """A launcher that starts workers of its own; empty for none."""
    return "" if value in ("", *map(named, LAUNCHERS)) else " must be a launcher"


Facts = Annotated[list[int], checks.facts]  # size, time of change in nanoseconds, inode, mode


# --- requests


class Start(NamedTuple):
    """Start a worker."""

    command: Annotated[list[str], checks.command]
    env: Environment
    inherit: Flag  # whether `env` is added to the node's own environment
    cwd: Text | None = None
    log: Number | None = None  # bytes of its log that were downloaded
    filtered: Flag | None = None  # only if the node's network has its packet filter: a restarted container has none
    folders: TextByPath | None = None  # only if these have the given identities: others could have replaced them
    secrets: TextByPath | None = None  # files
    before: Annotated[list[str], checks.command] | None = None  # a command to run first, once in each node


class Stop(NamedTuple):
    """Stop all workers: SIGTERM, then SIGKILL after the grace period, or SIGKILL at once."""

    kill: Flag
    leftovers: Flag = False  # whether also what ended workers have left running is killed


class Freeze(NamedTuple):
    """Suspend all workers (SIGSTOP)."""


class Dump(NamedTuple):
    """Make all workers print their stacks and abort (SIGABRT)."""


class Clean(NamedTuple):
    """Clean up for another job. A node that cannot be cleaned ends."""


class End(NamedTuple):
    """Stop all workers, and end the node."""


class GetStatus(NamedTuple):
    """Report the state of the workers."""


class GetStacks(NamedTuple):
    """Report the stack of each worker, which goes on."""


class Lease(NamedTuple):
    """End the workers if this relay stops responding; see lease.py."""

    relay: Annotated[tuple[str, int], checks.address]


class Upload(NamedTuple):
    """Append to a tar file. The last piece has a tag, the SHA-256 of the whole, which then replaces the folder."""

    folder: Text
    data: Text  # base64
    offset: Number
    tag: Text


class GetChanges(NamedTuple):
    """List what is new in a folder."""

    folder: Text
    have: Lengths  # how many bytes of each log are downloaded already


class Read(NamedTuple):
    """Read the next piece of a file."""

    folder: Text
    path: Text
    offset: Number


# --- reports


class Started(NamedTuple):
    """A worker has started."""

    generation: Generation
    rank: Rank
    pid: Annotated[int, up_to(1 << 31)]


class Listening(NamedTuple):
    """The node listens where workers expect torch's store."""

    generation: Generation


class Ended(NamedTuple):
    """A worker has ended."""

    generation: Generation
    rank: Rank
    code: Code
    at: Time  # in seconds since 1970
    hint: Hint  # `oom`: the kernel has killed a process; `ending`: the node ends; `cut off`: its lease has expired
    stopping: Flag  # whether the node had sent it SIGTERM
    use: Annotated[dict[str, Any], _use] | None = None  # what it has used, if known; see traffic.py


class Status(NamedTuple):
    """The workers of the newest generation."""

    generation: Generation
    codes: Annotated[dict[str, int], checks.mapping(up_to(255), checks.numeral)]  # by rank, of those that have ended
    hints: Annotated[dict[str, str], checks.mapping(_hint, checks.numeral)]
    running: Annotated[dict[str, dict[str, Any]], checks.mapping(checks.doing, checks.numeral)]  # by rank
    tags: Tags
    time: Time  # by the node's clock
    importing: Flag  # whether the node imports modules that its workers will need
    uses: Annotated[dict[str, dict[str, Any]], checks.mapping(_use, checks.numeral)] | None = None  # by rank, if known


class Stack(NamedTuple):
    """The stack of a worker's main thread, as Python's fault handler prints it, or why there is none."""

    generation: Generation
    rank: Rank
    text: AnyText
    why: Annotated[str, checks.one_of(("", STARTING, UNABLE, SILENT))]


class Cleaned(NamedTuple):
    """The node is ready for another job."""


class Refusal(NamedTuple):
    """Why a request was not executed; to its sender only."""

    error: AnyText


class Uploaded(NamedTuple):
    """A piece has arrived, and the last one is unpacked."""

    tags: Tags


class Changes(NamedTuple):
    """What is new in a folder. Hidden files are not listed, nor are uploaded files that have not changed."""

    logs: Annotated[dict[str, str], checks.mapping(checks.any_text)]  # new bytes in base64, without holes, by path
    files: Annotated[dict[str, list[int]], checks.mapping(checks.facts, checks.path)]
    links: Annotated[dict[str, str], checks.mapping(checks.path, checks.path)]
    gone: Annotated[list[str], checks.list_of(checks.path)]  # uploaded files that have been removed
    ends: Lengths | None = None  # bytes of each log, of which a list has only the next


class Piece(NamedTuple):
    """The next piece of a file, after a hole if there is one."""

    data: AnyText  # base64
    offset: Annotated[int, up_to(1 << 63)]
    facts: Facts


class Failed(NamedTuple):
    """Why a request for files failed."""

    error: AnyText


# --- between the containers of a plain `docker compose up` (rendezvous.py)


class Hello(NamedTuple):
    """A trainer joins."""

    name: Text
    host: Text
    cpus: Annotated[int, up_to(1 << 20)]
    gpus: Annotated[list[str], checks.texts]


class Exited(NamedTuple):
    """A worker of a trainer has ended."""

    rank: Number
    code: Code


class Run(NamedTuple):
    """Start a worker for each environment."""

    envs: Annotated[list[dict[str, str]], checks.environments]


Request = Start | Stop | Freeze | Dump | Clean | End | GetStatus | GetStacks | Lease | Upload | GetChanges | Read
Report = Started | Listening | Ended | Status | Stack | Cleaned | Refusal | Uploaded | Changes | Piece | Failed
REQUESTS: dict[str, type] = {
    "start": Start,
    "stop": Stop,
    "freeze": Freeze,
    "dump": Dump,
    "clean": Clean,
    "end": End,
    "status": GetStatus,
    "stacks": GetStacks,
    "lease": Lease,
    "upload": Upload,
    "changes": GetChanges,
    "read": Read,
}
REPORTS: dict[str, type] = {
    "started": Started,
    "listening": Listening,
    "ended": Ended,
    "status": Status,
    "stack": Stack,
    "cleaned": Cleaned,
    "refused": Refusal,
    "uploaded": Uploaded,
    "changes": Changes,
    "piece": Piece,
    "failed": Failed,
}
TO_MASTER: dict[str, type] = {"hello": Hello, "exited": Exited}
TO_TRAINER: dict[str, type] = {"run": Run, "end": End}
_NAMES = {
    **{kind: ("say", word) for word, kind in {**REPORTS, **TO_MASTER}.items()},
    **{kind: ("ask", word) for word, kind in {**TO_TRAINER, **REQUESTS}.items()},
}


def encode(message: Any) -> bytes:
    """Encode a message as a line, without its end."""
    kind, word = _NAMES[type(message)]
    facts = {name: value for name, value in message._asdict().items() if value is not None}
    return json.dumps({kind: word, **facts}).encode()


def _digits(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise Refused(f"a number has more than {MAX_DIGITS} digits")
    return int(digits)


def wait_at_most(sock: socket.socket, seconds: float) -> None:
    """Let a socket fail if it cannot send or receive for some seconds.

    Python's timeouts need poll(2), which fails once a process has set our limit of descriptors to 0.
    """
    sock.setblocking(True)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(int(seconds * 1e6), 10**6)))


def parsed(line: bytes, parse_int: Callable[[str], int] | None = _digits) -> dict[str, Any]:
    """Parse the JSON object in a line; raises Refused."""
    try:
        message = json.loads(line, parse_int=parse_int)
    except Refused:
        raise
    except RecursionError:
        raise Refused("the message is nested too deeply") from None
    except ValueError:
        raise Refused("the message is not JSON") from None
    if not isinstance(message, dict):
        raise Refused("the message is not a JSON object")
    return message


def decode(message: Mapping[str, Any], known: Mapping[str, type], key: str = "ask") -> Any:
    """Decode a message of one of the `known` kinds, which the field `key` names; raises Refused."""
    word = message.get(key)
    if not isinstance(word, str):
        raise Refused("the message has no request in it")
    if word not in known:
        raise Refused(f"unknown request {shown(word)}")
    facts = {name: value for name, value in message.items() if name != key}
    if unknown := facts.keys() - known[word]._fields:  # type: ignore[attr-defined]
        raise Refused(f"{word}: unknown field {shown(min(unknown))}")
    return _checked(known[word], word, facts)


def report(line: bytes) -> Any:
    """Decode the report in a line, ignoring unknown fields; raises ValueError if it is not a report."""
    if len(line) > MAX_SHORT_REPORT and not line.startswith(LONG_REPORTS):
        raise ValueError("too long")
    if checks.has_more_values(line, MAX_VALUES):
        raise ValueError("too many values")
    message = parsed(line, parse_int=None)  # file systems may report large numbers
    word = message.get("say")
    if not isinstance(word, str) or word not in REPORTS:
        raise ValueError("not a report")
    if len(line) > MAX_SHORT_REPORT and not line.startswith(f'{{"say": "{word}"'.encode()):  # it says two things
        raise ValueError("too long")
    kind = REPORTS[word]
    return _checked(kind, word, {name: message[name] for name in kind._fields if name in message})  # type: ignore[attr-defined]


def reason(error: str) -> str:
    """A node's error for display: on one line, without control characters, and truncated."""
    return " ".join("".join(each if each.isprintable() else " " for each in error[:1000]).split())[:200]


def _checked(kind: Any, word: str, facts: Mapping[str, Any]) -> Any:
    for name in kind._fields:
        if name not in facts and name not in kind._field_defaults:
            raise Refused(f"{word}: {name} is missing")
        value = facts.get(name)
        if not (value is None and name in kind._field_defaults) and (why := _check(kind, name)(value)):
            raise Refused(f"{word}: {name}{why}")
    return kind(**facts)


@functools.cache
def _check(kind: Any, name: str) -> Check:
    """The check in the annotation of a field, which may be optional."""
    annotation = kind.__annotations__[name]
    if not hasattr(annotation, "__metadata__"):
        annotation = next(each for each in annotation.__args__ if hasattr(each, "__metadata__"))
    found: Check = annotation.__metadata__[0]
    return found
