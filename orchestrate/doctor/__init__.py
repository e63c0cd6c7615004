"""Checks for problems that keep jobs from running."""
