"""How fast folders are that hosts write to, where the user asks for it."""

from ronde.check.steps.panel import Panel


def run(panel: Panel) -> None:
    """Measure each folder on each host, if ``settings`` has ``storage_speed``."""
    if panel.settings.get("storage_speed"):
        raise NotImplementedError
