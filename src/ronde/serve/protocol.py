"""Messages between the front and rank 0 of a replica, as lines of JSON on a socket."""

from typing import NamedTuple

from ronde.plain_values import decode_message, encode_message
from ronde.serve.policy import Capacity
from ronde.serve.requests import InferenceRequest, Response, Statistics

MAX_LINE_BYTES = 8 << 20


class ReplicaConfig(NamedTuple):
    """The options of a replica's ranks; they get it as JSON."""

    model: str  # a folder
    engine: str = "transformers"  # or vllm, or MODULE:FACTORY
    dtype: str = ""  # the model's own if empty
    policy: str = "guaranteed_no_evict"
    max_requests: int = 64
    max_batch_tokens: int = 0  # of a step; 0: 2048, on CPUs 128
    kv_blocks: int = 0  # 0: by ``kv_memory``
    kv_memory: float = 0.0  # share of a rank's free memory; 0: 0.9, on CPUs 0.3
    max_model_len: int = 0  # tokens of a prompt and its answer; 0: the model's own
    socket: str = ""  # the front's
    front: tuple[int, int] = (0, 0)  # pid and start time of the front


class Orders(NamedTuple):
    """The front's orders for the next step."""

    add: tuple[InferenceRequest, ...] = ()
    cancel: tuple[int, ...] = ()
    is_last: bool = False  # the ranks end once all requests have


class ReplicaReady(NamedTuple):
    """The first message of rank 0: all ranks have loaded and tried the model."""

    process: int
    generation: int  # of this start's workers, from 0
    cause: str  # the reason that the generation before has ended
    capacity: Capacity


class StepReport(NamedTuple):
    """The answers of a step; without any it shows that the ranks are alive."""

    responses: tuple[Response, ...] = ()
    statistics: Statistics | None = None


FrontMessage = Orders
RankMessage = ReplicaReady | StepReport


def encode_line(message: FrontMessage | RankMessage) -> bytes:
    return encode_message(message).encode() + b"\n"


def decode_from_front(line: bytes) -> FrontMessage:
    return decode_message(line, (Orders,))


def decode_from_rank(line: bytes) -> RankMessage:
    return decode_message(line, (ReplicaReady, StepReport))
