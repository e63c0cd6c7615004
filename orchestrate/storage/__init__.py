"""Copies of a job's files in an object store."""
