"""Where nodes run: Docker, Docker Swarm, or local processes."""
