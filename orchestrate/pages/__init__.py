"""Pages about jobs that have ended."""
