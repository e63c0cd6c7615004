"""Run any PyTorch distributed program as a real multi-node job in containers."""

__version__ = "0.1.0"
__all__ = ["Job", "JobFailed", "OrchestrateError", "Result", "cluster", "run", "submit"]


def __getattr__(name: str) -> object:
    """Import what is used, as `__init__.pyi` describes it: the command line needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # only here: `-m` imports this module while the current folder is the first to be searched

    module = importlib.import_module("orchestrate.api.job")
    found: object = getattr(module, "Cluster" if name == "cluster" else name)
    return found
