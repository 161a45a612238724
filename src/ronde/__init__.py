"""Run one training program on every slot of every node, in step.

Nothing is imported here: ``ronde run`` must start without waiting for torch.
"""

__version__ = "0.1.0"
