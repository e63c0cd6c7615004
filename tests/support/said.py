"""What lines of output say about the progress of a worker."""

from orchestrate.record.progress import Progress, parse


def said(*lines: str) -> list[Progress]:
    return [found for line in lines if (found := parse(line))]
