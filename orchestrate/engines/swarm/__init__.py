"""Nodes as tasks of Docker Swarm, on several hosts."""
