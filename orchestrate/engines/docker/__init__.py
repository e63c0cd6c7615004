"""Containers of one Docker Engine as nodes."""
