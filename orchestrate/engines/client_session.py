"""What the sessions of all engines have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from orchestrate.engines.base import Stop, never
from orchestrate.engines.node_clients import NodeClients
from orchestrate.errors import EngineError, UsageError
from orchestrate.host import records
from orchestrate.plan.plan import Plan
from orchestrate.record.outcomes import Activity, Stack


def key_of(run: Path) -> bytes:
    """Return the key of the nodes that mount the folder `run`; raises EngineError if there is no record of it."""
    try:
        key = bytes.fromhex(records.need(run.parent).key)
    except UsageError as error:
        raise EngineError(f"cannot connect to the nodes: {error}", error.hint) from None
    if not key:
        raise EngineError(f"cannot connect to the nodes: {run.parent.name} has ended", "start the job or cluster again")
    return key


class ClientSession:
    """What sessions have in common, wherever their nodes run; see `Session`."""

    clients: NodeClients

    def wait_until_warm(self, nodes: Iterable[str], patience: float) -> bool:
        """Wait until nodes have imported the modules for workers, and close the connections to them."""
        try:
            return self.clients.wait_until_warm(nodes, patience)
        finally:
            for node in [*self.clients.connections]:
                self.clients.drop(node)

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Do nothing: nodes write to the job folder directly."""

    def start(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Start the workers of a plan."""
        self.clients.start(plan)

    def activity(self) -> dict[int, Activity]:
        """Report what the running workers are doing."""
        return self.clients.activity()

    def stacks(self) -> dict[int, Stack]:
        """Return the stacks of the running workers."""
        return self.clients.stacks()

    def stop(self, how: Stop) -> None:
        """Stop all workers."""
        self.clients.stop(how)
