"""A job from its launch to its end: nodes, generations, failures and restarts."""
