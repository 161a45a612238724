"""A rank's side of elastic training."""

from ronde.torch.elastic.updates import HostUpdateResult, WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
