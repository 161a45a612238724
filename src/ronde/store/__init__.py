"""The key-value store through which the ranks of a job rendezvous."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "authentication": (
            "GREETING_BYTES MAGIC ProvenConnection FrameMac SharedKey HandshakeData "
            "dial_network read_secret user_key"
        ),
        "local_socket": "dial listen own_directories remove",
        "protocol": (
            "Limits MAX_FRAME_BYTES Op Splitter Status StoreState decode encode"
        ),
        "server": "PendingLimits serve_locally serve_network",
    },
)
