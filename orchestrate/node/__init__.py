"""What runs as process 1 of every node. Standard library alone, Python 3.9 or later; started as `python PATH/node`."""
