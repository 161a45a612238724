import os

import pytest
from hypothesis import given, strategies as st

from ronde.errors import LaunchError
from ronde.launch.messages import (
    MAX_FRAME_BYTES,
    FrameDecoder,
    FrameKind,
    MessageWriter,
    Output,
    PipeTransport,
    Stream,
    encode,
    encode_frame,
)

outputs = st.builds(
    Output,
    st.integers(0, 2**32 - 1),
    st.sampled_from(Stream),
    st.binary(max_size=300),
)
messages = st.lists(st.binary(max_size=300) | outputs, max_size=10)


@given(messages, st.lists(st.integers(1, 40), min_size=1))
def test_what_was_sent_is_received_however_it_is_cut(sent, cuts):
    stream = b"".join(
        encode_frame(FrameKind.CONTROL, m) if isinstance(m, bytes) else encode(m)
        for m in sent
    )
    decoder = FrameDecoder()
    received = []
    start = index = 0
    while start < len(stream):
        length = cuts[index % len(cuts)]
        received += decoder.feed(stream[start : start + length])
        start, index = start + length, index + 1
    assert received == sent


def test_the_longest_message_passes_and_no_longer_one():
    message = os.urandom(1024) * (MAX_FRAME_BYTES // 1024)
    stream = encode_frame(FrameKind.CONTROL, message[1:])
    assert FrameDecoder().feed(stream) == [message[1:]]
    with pytest.raises(LaunchError, match="control message must be at most"):
        encode_frame(FrameKind.CONTROL, message)


@given(st.binary(min_size=4, max_size=200))
def test_any_bytes_are_messages_or_an_error(garbage):
    try:
        received = FrameDecoder().feed(garbage)
    except LaunchError:
        return
    assert all(isinstance(message, bytes | Output) for message in received)


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_out_of_range_is_refused_before_its_body_comes(length):
    with pytest.raises(LaunchError, match="frame length must be in"):
        FrameDecoder().feed(length.to_bytes(4, "big"))


def test_an_unknown_kind_is_refused():
    with pytest.raises(LaunchError, match="frame kind must be one of"):
        FrameDecoder().feed(b"\0\0\0\2\x09x")


@pytest.mark.parametrize("body", [b"\0\0\0", b"\0\0\0\0\x07data"])
def test_a_broken_output_frame_is_refused(body):
    frame = (len(body) + 1).to_bytes(4, "big") + b"\3" + body
    with pytest.raises(LaunchError, match="output"):
        FrameDecoder().feed(frame)


def test_the_writer_keeps_order_when_the_pipe_is_full():
    read_fd, write_fd = os.pipe()
    try:
        writer = MessageWriter(PipeTransport(read_fd, write_fd).write)
        pieces = [bytes((i,)) * 50_000 for i in range(20)]
        for piece in pieces:
            writer.put(piece)
        assert writer.waiting_bytes > 0
        received = b""
        while len(received) < 20 * 50_000:
            received += os.read(read_fd, 65536)
            writer.flush()
        assert received == b"".join(pieces)
        assert writer.waiting_bytes == 0
    finally:
        os.close(read_fd)
        os.close(write_fd)


def test_the_writer_keeps_no_more_than_its_limit():
    read_fd, write_fd = os.pipe()
    try:
        writer = MessageWriter(
            PipeTransport(read_fd, write_fd).write, limit_bytes=100_000
        )
        # The pipe takes some of it, at most 64 KiB here.
        writer.put(bytes(100_000))
        with pytest.raises(LaunchError, match="unsent frames must stay under"):
            writer.put(bytes(70_000))
    finally:
        os.close(read_fd)
        os.close(write_fd)
