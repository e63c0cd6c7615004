"""Run any PyTorch distributed program as a real multi-node job in containers."""

__version__ = "0.1.0"
