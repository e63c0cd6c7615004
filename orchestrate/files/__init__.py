"""Files of jobs that nodes and other programs can write, opened safely; their names and records."""
