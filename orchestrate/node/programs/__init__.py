"""Programs that run by their path, in a node or beside it; none imports another module of `orchestrate`."""
