"""Tasks of Docker Swarm as nodes, on several hosts."""
