"""A web server on this machine that gets notifications."""

import http.server
import json
import threading
from contextlib import suppress

import pytest

from orchestrate.supervise import notify


class Received:
    """A web server that records requests, and answers with the statuses of `answers`, then with 200."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict, str]] = []
        self.types: list[str] = []  # of their content
        self.credentials: list[str | None] = []
        self.answers: list[int] = []
        self.endless, self.sent = False, 0  # whether bodies have no end, and bytes of them that were sent
        received = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # noqa: N802
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status = received.answers.pop(0) if received.answers else 200
                received.requests.append((json.loads(body or b"{}"), self.headers.get(notify.SIGNATURE, "")))
                received.types.append(self.headers.get("Content-Type", ""))
                received.credentials.append(self.headers.get("Authorization"))
                received.body = body
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                with suppress(OSError):
                    while received.endless:
                        self.wfile.write(bytes(1 << 20))
                        received.sent += 1 << 20

            do_GET = do_POST  # of a client that follows a redirection

            def log_message(self, *arguments: object) -> None:
                pass

        self.body = b""
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def kinds(self) -> list[str]:
        return [data.get("event", "") for data, _ in self.requests]


@pytest.fixture
def server():
    found = Received()
    yield found
    found.server.shutdown()
    found.server.server_close()
