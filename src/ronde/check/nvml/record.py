"""All that NVML answers, as a value that JSON can hold."""

from collections.abc import Callable

from ronde.check.facts import Value
from ronde.check.nvml.questions import GpuQuestion, HostQuestion, Nvml, RefusedError


def record(nvml: Nvml) -> dict[str, Value]:
    """Ask everything; return the answers.

    Returns:
        ``host`` has the answers by question, ``gpus`` a list of the same. A refusal is
        an object with ``error``, NVML's number, and ``reason``.
    """
    host = {q.value: _answer(lambda q=q: nvml.ask_host(q)) for q in HostQuestion}
    count = host[HostQuestion.NUM_GPUS]
    numbers = range(count if isinstance(count, int) else 0)
    return {"host": host, "gpus": [_record_gpu(nvml, number) for number in numbers]}


def _record_gpu(nvml: Nvml, number: int) -> dict[str, Value]:
    return {q.value: _answer(lambda q=q: nvml.ask_gpu(q, number)) for q in GpuQuestion}


def _answer(ask: Callable[[], Value]) -> Value:
    try:
        return ask()
    except RefusedError as error:
        return {"error": error.code, "reason": str(error)}
