"""Nodes as tasks of a job of Slurm, on machines that share a folder; its batch script is the supervisor."""
