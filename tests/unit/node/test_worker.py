"""What a node knows of its workers' processes."""

import os

from orchestrate.node.worker import activity


def test_the_memory_of_a_session_must_be_in_bytes():
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[1]) * page
    found = activity(os.getsid(0))["memory"]  # this process is part of the session, and may be its only one
    assert own / 2 < found < page * os.sysconf("SC_PHYS_PAGES")
