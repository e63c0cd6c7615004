"""The node's loop, driven by a test."""

import select


class ManualLoop:
    """The node's loop and clock, driven by the test."""

    def __init__(self) -> None:
        self.now, self.due, self.watched = 1000.0, [], {}

    def time(self) -> float:
        return self.now

    def watch(self, source, callback) -> None:
        self.watched[source] = callback

    def forget(self, source) -> None:
        del self.watched[source]

    def after(self, seconds: float, callback) -> None:
        self.due.append((self.now + seconds, callback))

    def turn(self, seconds: float = 0.0) -> None:
        """Advance by some seconds, run due timers, and handle readable sources."""
        self.now += seconds
        while due := [timer for timer in self.due if timer[0] <= self.now]:
            for timer in due:
                self.due.remove(timer)
                timer[1]()
        for source in list(self.watched):
            if source in self.watched and select.select([source], [], [], 0)[0]:
                self.watched[source]()
