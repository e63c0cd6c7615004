"""A job as data: its specification, plan, events, outcome and files."""
