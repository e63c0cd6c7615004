"""Why a generation failed: the worker that is the cause, and what its last lines mean. Starts and stops nothing."""
