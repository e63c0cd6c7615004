"""Safe access to files that nodes and other programs can write; file names and records of jobs."""
