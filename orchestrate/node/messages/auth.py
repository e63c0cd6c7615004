"""Lines between an orchestrator and a node: each carries a proof that its writer has the key of the job or cluster.

Workers and others on the job's network can reach the sockets of all nodes; none of them has the key.

Both sides begin with a nonce. The key and both nonces give the key of the connection; each line that follows is the
HMAC-SHA256 (RFC 2104) of the writing side, the line number and the text, then a space, then the text. Without the
key, a line cannot be forged, changed, repeated or left out unnoticed. Lines are not encrypted.

First the connecting side and then the listening side proves that it has the key, with a line without text.
"""

from __future__ import annotations

import hmac
import os
import re

NONCE = re.compile(rb"[0-9a-f]{32}")


class Signer:
    """One side of one connection."""

    def __init__(self, key: bytes, listens: bool) -> None:
        """`listens`: whether this side has accepted the connection."""
        self.key, self.listens, self.ready = key, listens, False
        self.nonce = os.urandom(16).hex().encode()
        self.counts = {True: 0, False: 0}  # lines of the listening side, and of the other

    def meet(self, nonce: bytes) -> None:
        """Receive the other side's nonce, its first line; raises ValueError if it is invalid."""
        if not NONCE.fullmatch(nonce):  # the format differs from a lease request, which a relay would answer
            raise ValueError("no nonce")
        nonces = self.nonce + nonce if self.listens else nonce + self.nonce
        self.key, self.ready = hmac.digest(self.key, b"link " + nonces, "sha256"), True

    def sign(self, text: bytes) -> bytes:
        """The line that carries `text`, without its end."""
        return self._proof(self.listens, text) + b" " + text

    def verify(self, line: bytes) -> bytes:
        """The text of the other side's next line; raises ValueError for anything else."""
        proof, _, text = line.partition(b" ")
        if not hmac.compare_digest(proof, self._proof(not self.listens, text)):
            raise ValueError("a line without its proof")
        return text

    def _proof(self, listens: bool, text: bytes) -> bytes:
        self.counts[listens] += 1
        return hmac.new(self.key, b"%d %d %b" % (listens, self.counts[listens], text), "sha256").hexdigest().encode()
