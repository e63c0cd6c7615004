"""Lines between an orchestrator and a node: each carries a proof that its writer has the key of the job or cluster.

Workers can reach the sockets of all nodes of a job, as can others on its network; none of them has the key.

Both sides begin with a random word. From the key and both words comes a key of this connection; each line that follows
is the HMAC-SHA256 (RFC 2104) of the side that writes it, its number and its text, a space, and the text. So nobody
without the key can make up, change, leave out or repeat a line. Reading it is for the network to prevent.

First the side that has connected and then the other one proves that it has the key, by a line without text.
"""

from __future__ import annotations

import hmac
import os
import re

WORD = re.compile(rb"[0-9a-f]{32}")


class Seal:
    """One side of one connection."""

    def __init__(self, key: bytes, listens: bool) -> None:
        """`listens`: this is the side that has accepted the connection."""
        self.key, self.listens, self.met = key, listens, False
        self.word = os.urandom(16).hex().encode()
        self.counts = {True: 0, False: 0}  # lines of the listening side, and of the other

    def meet(self, word: bytes) -> None:
        """Take in the first line of the other side; raises ValueError for what is no word."""
        if not WORD.fullmatch(word):  # a relay answers what somebody asks, and must not be asked for this
            raise ValueError("no word")
        words = self.word + word if self.listens else word + self.word
        self.key, self.met = hmac.digest(self.key, b"link " + words, "sha256"), True

    def close(self, text: bytes) -> bytes:
        """The line that carries `text`, without its end."""
        return self._proof(self.listens, text) + b" " + text

    def open(self, line: bytes) -> bytes:
        """The text of the other side's next line; raises ValueError for anything else."""
        proof, _, text = line.partition(b" ")
        if not hmac.compare_digest(proof, self._proof(not self.listens, text)):
            raise ValueError("a line without its proof")
        return text

    def _proof(self, listens: bool, text: bytes) -> bytes:
        self.counts[listens] += 1
        return hmac.new(self.key, b"%d %d %b" % (listens, self.counts[listens], text), "sha256").hexdigest().encode()
