"""How many examples generated tests try: few, always the same ones; with --all many, with random seeds."""

from hypothesis import HealthCheck, settings

PROFILES = {  # examples, and whether they are the same in each run
    "few": settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)),
    "many": settings(max_examples=400, print_blob=True, deadline=None, suppress_health_check=list(HealthCheck)),
}


def load(every: bool) -> None:
    """Select the number of examples before tests are collected."""
    for name, profile in PROFILES.items():
        settings.register_profile(name, profile)
    settings.load_profile("many" if every else "few")


def slow() -> settings:
    """Settings for a test whose examples take long: a quarter of the examples."""
    return settings(max_examples=settings().max_examples // 4)
