"""Named collectives, negotiated between all ranks with Horovod's semantics."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "control.channel": "ControlChannel connect_channel",
        "control.doorbell": "Doorbell",
        "control.gloo": "GlooTransport",
        "coordinator": "CoordinationOptions Coordinator",
        "execution": "FusionTuning",
        "messages": "Loss Tree",
        "node": "FailCommand JoinedCommand RunCommand",
        "requests": "NamedOperation OpKind Request",
        "waits": "StallReport describe_stall",
    },
)
