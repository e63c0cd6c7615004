"""A job on disk: its files, events, metrics, logs, and how it ended; starts and shows nothing."""
