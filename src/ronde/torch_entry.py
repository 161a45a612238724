"""What ``import torch`` calls of ronde: it must never raise, and import nothing."""


def register() -> None:
    """Have ``init_process_group("ronde")`` work without an import."""
    from torch import distributed

    if distributed.is_available() and not hasattr(distributed.Backend, "RONDE"):
        distributed.Backend.register_backend(
            "ronde", _make, extended_api=True, devices=["cpu", "cuda"]
        )


def _make(given: object, options: object) -> object:
    from ronde.process_group.creation import make

    return make(given, options)  # pyright: ignore[reportArgumentType]
