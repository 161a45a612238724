import json

import pytest
from hypothesis import given, strategies as st

from ronde.addresses import InterfaceAddress
from ronde.errors import LaunchError
from ronde.launch import (
    FROM_AGENT,
    TO_AGENT,
    Exited,
    Finished,
    JobResult,
    LostHost,
    NodeJob,
    ProcessStack,
    RankEnd,
    Ready,
    StatusText,
    WorkerSpec,
    WorkerText,
    decode_message,
    encode_message,
)
from ronde.topology import Core, Machine

# An environment may hold any bytes; Python shows those that are no text as surrogates.
text = st.text(st.characters(exclude_characters="\0"), max_size=20)
env = st.dictionaries(text, text, max_size=4)
jobs = st.builds(
    NodeJob,
    epoch=st.integers(0, 9),
    job_marker=text,
    argv=st.lists(text, max_size=4).map(tuple),
    env=env,
    workers=st.lists(
        st.builds(
            WorkerSpec,
            st.integers(0, 99),
            env,
            st.lists(st.integers(0, 999)).map(tuple),
        )
    ).map(tuple),
    cwd=text,
    grace_s=st.floats(0, 1e6),
    address=text,
    master_port=st.integers(0, 65535),
    max_ranks=st.integers(0, 99),
)


@given(jobs)
def test_a_job_arrives_as_it_was_sent(order):
    assert decode_message(encode_message(order), TO_AGENT) == order


MACHINE = Machine(
    cores=(Core((0, 2), 0), Core((1,), 1)),
    cpu_limit=1.5,
    gpus=(),
    mbit_per_s={"eth0": 1000},
)
LOST = LostHost("b", (2, 3), "gone", 69, 3.0)
END = RankEnd(0, "a", 7, -9, 1.5, was_stopped=False, stderr_tail=("x",))
SAMPLES = {
    int: 3,
    float: 0.5,
    bool: True,
    str: "x",
    tuple[str, ...]: ("a", "b"),
    tuple[WorkerText, ...]: (WorkerText(7, "x"),),
    tuple[StatusText, ...]: (StatusText(7, "{}", 0.25),),
    tuple[ProcessStack, ...]: (ProcessStack(7, "sh", "sleeps", ""),),
    Machine: MACHINE,
    tuple[InterfaceAddress, ...]: (InterfaceAddress("eth0", "10.0.0.1", 24),),
}


@pytest.mark.parametrize("kind", FROM_AGENT)
def test_every_answer_arrives_as_it_was_sent(kind):
    sent = kind(**{n: SAMPLES[t] for n, t in kind.__annotations__.items()})
    assert decode_message(encode_message(sent), FROM_AGENT) == sent


@pytest.mark.parametrize("cause", [None, LOST, END])
def test_a_job_result_arrives_as_it_was_sent(cause):
    result = JobResult(3, cause, (END,), (), None, (LOST,))
    assert decode_message(encode_message(result), (JobResult,)) == result


def said(**changes) -> bytes:
    good = json.loads(encode_message(Exited(1, 0, 0.5, 0.4, 0.0, "")))
    return json.dumps(good | changes).encode()


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"\xff", "message is not JSON: .* Run the same"),
        (b"[]", "message must be an object"),
        (b"{}", "message must be one of Hello"),
        (said(worker="1"), "Exited.worker must be int, got '1'"),
        (said(worker=True), "Exited.worker must be int, got True"),
        (
            json.dumps({"is": "Refused", "reason": "no", "is_usage": 0}).encode(),
            "Refused.is_usage must be bool, got 0",
        ),
        (said(more=1), "Exited must have the fields"),
        (
            json.dumps({"is": "Finished", "num_swept": 0, "stuck": [1]}).encode(),
            r"Finished.stuck\[0\] must be str",
        ),
    ],
)
def test_a_word_that_is_wrong_is_named(raw, complaint):
    with pytest.raises(LaunchError, match=complaint):
        decode_message(raw, FROM_AGENT)


def test_an_order_is_no_answer():
    with pytest.raises(LaunchError, match="message must be one of NodeJob"):
        decode_message(encode_message(Finished(0, ())), TO_AGENT)
    assert decode_message(encode_message(Ready(2)), FROM_AGENT) == Ready(2)
