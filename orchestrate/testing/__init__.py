"""Tests that run on every rank of a job: a plug-in for pytest. Nothing here is imported unless a test needs it."""
