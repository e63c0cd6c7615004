"""Helpers that tests share: fake engines and nodes, the far ends of connections, jobs in the background."""
