"""Run one training program on every slot of every node, in step.

Nothing is imported here: ``ronde run`` must start without waiting for torch.
"""

from typing import TYPE_CHECKING

from ronde.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ronde.status.reporter import progress

__all__ = ["progress"]
__version__ = "0.1.0"
__getattr__ = lazy_exports(__name__, {"status.reporter": "progress"})
