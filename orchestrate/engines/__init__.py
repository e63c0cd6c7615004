"""Engines run nodes: Docker, Docker Swarm, or local processes."""
