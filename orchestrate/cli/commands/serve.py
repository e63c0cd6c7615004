"""`serve`: a local web page with all jobs: those that run, and the reports of those that have ended."""

from __future__ import annotations

import contextlib
import errno
import hmac
import io
import logging
import re
import secrets
import socket
import threading
import urllib.parse
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrate import errors
from orchestrate.cli import listing, options
from orchestrate.cli.args import Args
from orchestrate.cli.find import created_at
from orchestrate.cli.parser import Parser
from orchestrate.clock import SYSTEM, Clock
from orchestrate.console import flush, out, print_message, shortened
from orchestrate.errors import OrchestrateError, ResourceError, UsageError
from orchestrate.files.folder import content
from orchestrate.files.lines import last
from orchestrate.files.paths import NAME
from orchestrate.host import owners, records
from orchestrate.record import lock, report, run_dir
from orchestrate.record.logs import clean, rest, splitter
from orchestrate.record.paths import JobPaths
from orchestrate.show.feed import Feed, Recorded
from orchestrate.show.screen import Display
from orchestrate.show.tracking import TrackingScreen

if TYPE_CHECKING:
    from orchestrate.pages.curves import Curve


log = logging.getLogger(__name__)

HOST, PORT = "127.0.0.1", 6007
HTTP = 80  # browsers leave this port out
MAX_LINES, MAX_LINE = 200, 2000  # of output on the page of a running job, and characters of each
MAX_EVENTS = 20
MAX_BEHIND = 256 << 10  # bytes of a log that are read for a page, at most
MAX_SHARE = 10  # curves that take a second to read are read again after ten
MAX_ROWS = 10_000  # lines of a log that are shown
FILES = ("job.yaml", "plan.json", "report.json", "events.jsonl", "changes.patch")  # to which reports link
MAX_LOG = 4 << 20  # last bytes of a log that are shown
IDLE = 30.0  # seconds after which a silent connection is closed
MAX_STRANGERS = 64  # connections that have not sent the token yet
MAX_HEAD = 1 << 16  # bytes of the headers of a request
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'",
}


class LiveJobPage(TrackingScreen):
    """A running job, as its page shows it."""

    def __init__(self, paths: JobPaths, clock: Clock) -> None:
        """Start with the last lines of each rank; raises UsageError."""
        spec, plan = run_dir.load(paths)
        super().__init__(plan, paths, spec.mask(), clock)
        self.spec = spec
        self.curves: tuple[dict[str, Curve], str] = {}, ""  # and what they go over
        self.due = 0.0  # when the curves may be read again
        self.happened: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        self.watch = self.activity
        display = Display(lambda text: None, self._show, screen=self, phases=False)
        self.feed = Feed(paths, spec, plan, display, rest(paths, spec, plan))
        self.record = Recorded(paths, self.feed)

    def _show(self, text: str) -> None:
        self.lines.extend(shortened(line, MAX_LINE) for line in text.split("\n"))

    def event(self, event: Any) -> None:
        """Record an event."""
        super().event(event)
        if text := report.line(event):
            self.happened.append((event.seconds, text.partition("\n")[0]))

    def refresh(self, bars: Any) -> None:
        """Record progress bars and metrics."""
        self.catch_up(bars())

    def page(self) -> str:
        """Return the page of the job as it is now."""
        from orchestrate.pages import site
        from orchestrate.pages.job import curves_of

        self.feed.follower.near_end(MAX_BEHIND)
        self.record.turn()
        self.feed.turn()
        if self.clock.monotonic() > self.due:
            began = self.clock.monotonic()
            self.curves = curves_of(self.paths, self.spec, self.view.generation + 1)[1:]
            self.due = self.clock.monotonic() + MAX_SHARE * (self.clock.monotonic() - began)
        curves, axis = self.curves
        state = "running" if lock.supervisor(self.paths) else "no supervisor"
        seconds = self.clock.time() - created_at(self.paths)
        return site.live(self.view, state, seconds, curves, axis, self.happened, self.lines)


class Site:
    """The pages of the jobs in a folder."""

    def __init__(self, runs: Path, shown: Path, clock: Clock = SYSTEM) -> None:
        """`shown` is the folder as the user names it."""
        self.runs, self.shown, self.clock, self.lock = runs, shown, clock, threading.Lock()
        self.watches: dict[str, LiveJobPage] = {}

    def answer(self, path: str, query: dict[str, list[str]]) -> tuple[str, str]:
        """Return the content at a path, and its type; raises UsageError if there is none."""
        with self.lock:  # a single user does not need more
            if path == "":
                return self._jobs(), "text/html"
            if path == "compare":
                return self._compare(query.get("job", [])), "text/html"
            if match := re.fullmatch(r"jobs/([^/]+)/", path):
                return self._job(self._paths(match[1])), "text/html"
            if match := re.fullmatch(r"jobs/([^/]+)/logs/rank-([0-9]{1,7})\.log", path):
                return self._log(self._paths(match[1]), int(match[2])), "text/plain"
            if match := re.fullmatch(r"jobs/([^/]+)/([^/]+)", path):
                return self._file(self._paths(match[1]), match[2]), "text/plain"
            if match := re.fullmatch(r"jobs/([^/]+)/logs/", path):
                return self._logs(self._paths(match[1])), "text/html"
        raise UsageError("no such page")

    def _paths(self, name: str) -> JobPaths:
        """Return the files of a job of this account; raises UsageError."""
        paths = JobPaths(self.runs / name)
        if not NAME.fullmatch(name) or owners.foreign(paths.root) or not records.find(paths.root):
            self.watches.pop(name, None)
            raise UsageError("no such job")
        return paths

    def _jobs(self) -> str:
        from orchestrate.pages import site

        def shown(row: listing.Listed) -> site.Row:
            facts = row.name, row.state, listing.ago(row.started), row.seconds
            return site.Row(*facts, site.metrics(row.metrics), page=bool(row.run))

        running = {row.name: row for row in listing.current(self.runs) if row.run and row.run.parent == self.runs}
        rows = [*running.values(), *(row for row in listing.ended(self.runs) if row.name not in running)]
        rows = [row for row in rows if row.run and records.find(row.run) and not JobPaths(row.run).nodes.exists()]
        return site.jobs([shown(row) for row in (*listing.queued(), *rows)], str(self.shown))

    def _job(self, paths: JobPaths) -> str:
        name = paths.root.name
        if run_dir.ended(paths):
            self.watches.pop(name, None)
            return _report([paths], "../../")
        if name not in self.watches:
            self.watches[name] = LiveJobPage(paths, self.clock)
        return self.watches[name].page()

    def _compare(self, names: list[str]) -> str:
        if not names:
            raise UsageError("select jobs to compare")
        return _report([self._paths(name) for name in dict.fromkeys(names)], "./")

    def _file(self, paths: JobPaths, name: str) -> str:
        """Return a file that the supervisor has written, without secrets."""
        if name not in FILES:
            raise UsageError("no such file")
        try:
            if name == paths.spec.name:  # the URL of on_event may contain a token
                spec = run_dir.load_for_display(paths)[0]
                return spec.to_yaml(spec.mask())
            return content(paths.root / name)
        except OSError:
            raise UsageError("no such file") from None

    def _logs(self, paths: JobPaths) -> str:
        from orchestrate.pages import site

        return site.logs(paths.root.name, len(run_dir.load_for_display(paths)[1].workers))

    def _log(self, paths: JobPaths, rank: int) -> str:
        mask = run_dir.load_for_display(paths)[0].mask()
        try:
            with paths.folder.open(f"logs/rank-{rank}.log") as file:
                lines = deque(last(file, MAX_LOG, MAX_ROWS, splitter(mask)), MAX_ROWS)
                return "\n".join(mask(clean(line)) for line in lines)
        except OSError:
            raise UsageError("no such log") from None


def _report(jobs: list[JobPaths], home: str) -> str:
    from orchestrate.pages.job import load
    from orchestrate.pages.page import page

    return page([load(paths) for paths in jobs], [f"jobs/{paths.root.name}/" for paths in jobs], home)


class Server(ThreadingHTTPServer):
    """Serves a site to those who know its address, which contains a token."""

    daemon_threads = True

    def __init__(self, site: Site, port: int) -> None:
        """Listen on a port of the loopback interface; raises OSError."""
        self.site, self.token = site, secrets.token_urlsafe(16)
        self.strangers: dict[socket.socket, None] = {}  # connections that have not sent the token yet, oldest first
        super().__init__((HOST, port), Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request in a thread; others of this machine could otherwise take all threads, and never ask."""
        self.strangers[request] = None
        for oldest in [*self.strangers][:-MAX_STRANGERS]:
            self.strangers.pop(oldest, None)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.strangers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing for a browser that has gone."""
        log.debug("a request failed", exc_info=True)

    @property
    def address(self) -> str:
        """The address of the list of jobs."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    raw_requestline: bytes
    timeout = IDLE
    server_version, sys_version = "orchestrate", ""

    def parse_request(self) -> bool:
        """Read the headers of a request with the token, as far as they are short; return whether to answer it."""
        self.request_version, self.requestline, self.command = "HTTP/1.0", "", ""
        self.close_connection = True
        path, token = [*self.raw_requestline.split(b" "), b""][1], self.server.token.encode()
        if not hmac.compare_digest(path[: len(token) + 2], b"/%s/" % token):
            self._send(404, "open the address that `orchestrate serve` has printed\n")
            return False
        self.server.strangers.pop(self.connection, None)
        head = b""
        while (line := self.rfile.readline(MAX_HEAD)) not in (b"\r\n", b"\n", b""):
            head += line
            if len(head) > MAX_HEAD:
                self._send(431, "the headers are too long\n")
                return False
        self.rfile = io.BytesIO(head + b"\r\n")
        return super().parse_request()

    def do_GET(self) -> None:  # noqa: N802 (the name that http.server calls)
        """Answer with a page."""
        try:
            self._answer()
        except OSError:  # the browser has gone
            log.debug("no answer to %s", self.path, exc_info=True)
        except Exception:  # what jobs write may surprise any library
            log.exception("no answer to %s", self.path)
            self._send(500, "this page could not be made; --verbose prints why\n")

    def _answer(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        path = address.path.removeprefix("/").partition("/")[2]
        port = self.server.server_address[1]
        names = {f"{name}:{port}" if port != HTTP else name for name in (HOST, "localhost")}
        if self.headers.get("Host") not in names:  # a page of another site that has this address by DNS rebinding
            return self._send(403, "this page is served to this machine only\n")
        try:
            text, kind = self.server.site.answer(urllib.parse.unquote(path), urllib.parse.parse_qs(address.query))
        except UsageError as error:
            return self._send(404, f"{error}\n")
        except OrchestrateError as error:  # an engine that does not respond
            return self._send(503, f"{error}\n")
        self._send(200, text, kind)

    def _send(self, status: int, text: str, kind: str = "text/plain") -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `serve`."""
    parser.description = "Serve a web page on this machine that lists jobs, follows running ones, and shows reports."
    parser.add_argument(
        "--port", type=options.port, metavar="PORT", help="default: 6007, or if that is in use, a free one"
    )
    options.add_runs(parser)


def run(args: Args) -> int:
    """Serve the pages until Ctrl-C."""
    with _server(Site(args.runs, args.shown, args.clock), args.port) as server:
        out(server.address)
        flush()
        print_message("this address works on this machine only; Ctrl-C stops serving, and no job")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return errors.INTERRUPTED
    return errors.SUCCEEDED


def _server(site: Site, port: int | None) -> Server:
    """Listen on a port, by default on 6007 or, if that is in use, on a free one; raises ResourceError."""
    try:
        return Server(site, PORT if port is None else port)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return Server(site, 0)
        hint = "leave --port out for any that is free"
        raise ResourceError(f"cannot listen on port {port or PORT}: {error.strerror}", hint) from None
