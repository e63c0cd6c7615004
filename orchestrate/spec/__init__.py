"""The request: what a job file and flags can say, checked and put together; knows nothing of nodes, engines or runs."""
