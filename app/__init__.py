"""What runs inside a node: the worked example of distributed training. Imports torch, never `orchestrate`."""
