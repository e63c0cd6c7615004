"""Every event of a Docker Engine must be received exactly once; with a simulated engine."""

import select
import threading
import time
from collections.abc import Iterator

import pytest
from support.waiting import eventually

from orchestrate.engines.docker import client as daemon_module
from orchestrate.engines.docker.client import Events


def event(second: int, action: str = "die", actor: str = "c1", nano: int = 0) -> dict:
    return {"time": second, "timeNano": second * 10**9 + nano, "Action": action, "Actor": {"ID": actor}}


@pytest.fixture
def events(daemon, monkeypatch) -> Iterator[Events]:
    sleep = time.sleep
    monkeypatch.setattr(daemon_module.time, "sleep", lambda seconds: sleep(0.01))
    stream = Events(daemon, lambda event: event["Actor"]["ID"] != "other")
    yield stream
    stream.close()
    for end in (stream.bell, stream._alarm):
        end.close()


def taken(events: Events, count: int) -> list[tuple[int, str]]:
    """Wait for a number of events; return their times and actions."""
    found: list[dict] = []
    eventually(lambda: found.extend(events.taken()) or len(found) >= count)
    return [(one["time"], one["Action"]) for one in found]


def test_events_must_arrive_once_in_order_and_wake_the_reader(answers, events):
    for one in (event(5), event(5, "other", "other"), event(5, "start"), event(5, nano=1), event(6)):
        answers.events.put(one)
    events.bell.settimeout(30)
    assert events.bell.recv(1) == b"!"
    events.bell.setblocking(False)
    assert taken(events, 4) == [(5, "die"), (5, "start"), (5, "die"), (6, "die")]
    assert list(events.taken()) == [] and events.broken == 0.0
    with pytest.raises(BlockingIOError):
        events.bell.recv(1)  # it rings only for new events


def test_an_event_must_be_there_when_its_reader_wakes(answers, events):
    for number in range(1, 1001):
        answers.events.put(event(number))
        assert select.select([events.bell], [], [], 30)[0] and [one["time"] for one in events.taken()] == [number]


def test_an_interrupted_event_stream_must_be_resumed_without_duplicates(answers, events):
    query_of = answers.query_of
    eventually(lambda: answers.requests("GET").count("GET /events") == 1)
    assert '["container", "network"]' in query_of("GET /events")[0]["filters"]
    assert abs(int(query_of("GET /events")[0]["since"]) - time.time()) < 600
    for one in (event(5, "start"), event(6, "kill"), event(6, "die", nano=1), None):
        answers.events.put(one)
    assert taken(events, 3) == [(5, "start"), (6, "kill"), (6, "die")]
    eventually(lambda: answers.requests("GET").count("GET /events") == 2)
    assert query_of("GET /events")[0]["since"] == "6" and events.broken > 0
    for one in (event(6, "kill"), event(6, "die", nano=1), event(6, "die", "c2", nano=1), event(6, "oom", nano=1)):
        answers.events.put(one)
    answers.events.put(event(7, "start"))
    assert taken(events, 3) == [(6, "die"), (6, "oom"), (7, "start")]


def test_the_event_stream_must_be_retried_until_it_is_closed(answers, events):
    eventually(lambda: answers.requests("GET").count("GET /events") == 1)
    answers.refusals["GET /events"] = 500, "not yet"
    answers.on_request = lambda request: len(answers.asked) % 2 and 1 / 0  # this ends the connection
    answers.events.put(None)
    eventually(lambda: answers.requests("GET").count("GET /events") > 3)
    assert events.broken > 0
    answers.on_request = lambda request: None
    answers.refusals.clear()
    answers.events.put(event(9))
    assert taken(events, 1) == [(9, "die")]
    listener = next(one for one in threading.enumerate() if one.name.endswith("(_listen)"))
    count = answers.requests("GET").count("GET /events")
    events.close()
    listener.join(30)
    assert not listener.is_alive() and answers.requests("GET").count("GET /events") == count


def test_events_must_be_kept_even_if_the_wake_up_socket_is_not_read(answers, daemon):
    seen = []
    events = Events(daemon, lambda one: not seen.append(one))
    for number in range(1, 1001):
        answers.events.put(event(number))
    eventually(lambda: len(seen) == 1000)
    assert [number for number, _ in taken(events, 1000)] == [*range(1, 1001)]
    events.close()
    for end in (events.bell, events._alarm):
        end.close()


def test_an_event_stream_that_is_closed_before_it_opens_must_not_stay_open(answers, daemon):
    opened, begin = threading.Event(), threading.Event()

    def open_late(request: str) -> None:
        opened.set()
        assert begin.wait(30)

    answers.on_stream = open_late
    before = {*threading.enumerate()}
    events = Events(daemon, lambda event: True)
    (listener,) = (one for one in {*threading.enumerate()} - before if one.name.endswith("(_listen)"))
    assert opened.wait(30)
    events.close()
    begin.set()
    listener.join(30)
    assert not listener.is_alive()
    for end in (events.bell, events._alarm):
        end.close()
