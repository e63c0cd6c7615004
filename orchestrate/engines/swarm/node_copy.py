"""How far the files of a node are copied to this machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrate.engines.connection import NodeConnection
from orchestrate.engines.swarm.fetch import Fetch
from orchestrate.node.files import Facts


@dataclass(eq=False)
class NodeCopy:
    """The state of copying from one node."""

    name: str
    logs: list[str]  # paths
    link: NodeConnection | None = None
    files: dict[str, Facts] = field(default_factory=dict)  # copied files; empty facts for links
    failed: dict[str, tuple[Facts, float]] = field(default_factory=dict)  # failed files, with facts and time
    fetching: Fetch | None = None
    due: set[str] | None = None  # files that the round is still to copy; None before its first list
    looks: int = 0  # number of rounds that have begun
    whole: int = 0  # number of the last one in which all was copied, or has failed for another reason than silence
    ends: dict[str, int] | None = None  # bytes of each log that the round is to copy; None before its first list
    blocked: bool = False  # whether something may be in the way that another node has, which has not listed its files
    heard: bool = False  # whether it answered in the last round
    given_up: bool = False  # whether nothing waits for it, as it does not respond
    trouble: str = ""  # the error, if not

    def drop(self) -> None:
        """Give up the file that is being fetched."""
        if self.fetching:
            self.fetching.drop()
        self.fetching = None
