"""A worker for T7 that does nothing."""
