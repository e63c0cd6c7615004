"""This machine and this account: GPUs, users, cores, records, private folders; knows nothing of jobs."""
