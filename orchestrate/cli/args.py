"""What a command line says, with its types."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrate.clock import Clock


class Args:
    """The arguments of a command; it has those that its parser adds, and for some of the others a default.

    The keys of a job file are not listed: their values are text, and are read by name.
    """

    command: str
    verbose: bool
    clock: Clock  # on which commands wait
    script: list[str] | None  # the job's own command; None if there is none
    separated: bool  # whether that comes after `--`

    # which jobs
    runs: Path  # absolute; before `find.resolve_runs`, as it was given, or None
    shown: Path  # the same as it was given
    job: str = ""
    others: list[str]
    cluster: str | None
    all: bool = False

    # a new job, besides the keys of its file
    file: Path | None = None
    env: list[str]
    data: list[str]
    secret: list[str]
    set: Sequence[str] = ()
    dry_run: bool
    detach: bool = False
    queue: bool = False
    batch: bool
    until_eof: bool

    # what is shown
    progress: str = "auto"
    quiet: bool = False
    json: bool = False
    print_path: bool
    junit_xml: Path | None = None
    junit_folder: int | None = None  # a descriptor of its folder
    ranks: str | None
    timestamps: bool
    follow: bool
    tail: int | None
    since: float | None
    grep: Any  # a compiled pattern
    merge: bool
    once: bool

    # which worker, and what else single commands take
    rank: int | None
    node: str | None
    topic: str | None
    target: str = ""
    form: str | None
    shell: str | None
    install: bool
    older_than: float
    caches: bool
    quick: bool
    port: int | None

    def of(self, job: str) -> Args:
        """Return the same arguments for another job."""
        other = Args()
        vars(other).update(vars(self), job=job)
        return other
