from hypothesis import HealthCheck, settings

# A machine that others use too may take a second over any one example.
settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")
