"""Elastic training, whatever the framework."""

from ronde.torch.elastic.objects import ObjectState, State
from ronde.torch.elastic.running import run_fn
from ronde.torch.elastic.updates import (
    WorkerNotificationManager,
    notification_manager,
)

__all__ = [
    "ObjectState",
    "State",
    "WorkerNotificationManager",
    "notification_manager",
    "run_fn",
]
