"""Process 1 of every node, started as `python PATH/node`. Uses the standard library only, on Python 3.9 or later."""
