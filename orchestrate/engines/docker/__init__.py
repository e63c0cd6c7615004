"""Nodes as containers of one Docker Engine."""
