"""A job as data: what the user asks, the plan, how it ends, and what is kept of it."""
