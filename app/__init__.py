"""The default job, a worked example of distributed training. Imports torch, never `orchestrate`."""
