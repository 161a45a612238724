"""Run one training program on every slot of every node, in step.

Nothing is imported here: ``ronde run`` must start without waiting for torch.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ronde.status.reporter import progress

__all__ = ["progress"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "progress":
        from ronde.status.reporter import progress

        return progress
    raise AttributeError(f"module 'ronde' has no attribute {name!r}")
