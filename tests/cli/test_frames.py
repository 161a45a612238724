import os

import pytest
from hypothesis import given, strategies as st

from ronde.errors import LaunchError
from ronde.launch import (
    MAX_FRAME_BYTES,
    MessageDecoder,
    MessageWriter,
    Notice,
    Output,
    PipeTransport,
    Stream,
    encode,
)

outputs = st.builds(
    Output, st.integers(0, 2**32 - 1), st.sampled_from(Stream), st.binary(max_size=300)
)
notices = st.builds(Notice, st.text(max_size=300))
messages = st.lists(notices | outputs, max_size=10)


def reader():
    return MessageDecoder((Notice, Output))


@given(messages, st.lists(st.integers(1, 40), min_size=1))
def test_messages_arrive_in_any_segmentation(sent, cuts):
    stream = b"".join(map(encode, sent))
    made = reader()
    received = []
    start = index = 0
    while start < len(stream):
        length = cuts[index % len(cuts)]
        received += made.feed(stream[start : start + length])
        start, index = start + length, index + 1
    assert received == sent


def test_the_longest_message_passes_and_no_longer_one():
    longest = MAX_FRAME_BYTES - (len(encode(Notice(""))) - 4)
    assert reader().feed(encode(Notice("x" * longest))) == [Notice("x" * longest)]
    with pytest.raises(LaunchError, match="control message must be at most"):
        encode(Notice("x" * (longest + 1)))


@given(st.binary(min_size=4, max_size=200))
def test_any_bytes_are_messages_or_an_error(garbage):
    try:
        received = reader().feed(garbage)
    except LaunchError:
        return
    assert all(isinstance(message, Notice | Output) for message in received)


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_out_of_range_is_refused_before_its_body_comes(length):
    with pytest.raises(LaunchError, match="frame length must be in"):
        reader().feed(length.to_bytes(4, "big"))


def test_an_unknown_kind_is_refused():
    with pytest.raises(LaunchError, match="frame must be of kind"):
        reader().feed(b"\0\0\0\2\x09x")


@pytest.mark.parametrize("body", [b"\0\0\0", b"\0\0\0\0\x07data"])
def test_a_broken_output_frame_is_refused(body):
    frame = (len(body) + 1).to_bytes(4, "big") + b"\3" + body
    with pytest.raises(LaunchError, match=r"frame must be|output stream"):
        reader().feed(frame)


def test_the_writer_keeps_order_when_the_pipe_is_full():
    read_fd, write_fd = os.pipe()
    try:
        writer = MessageWriter(PipeTransport(read_fd, write_fd).write)
        sent = [Output(i, Stream.STDOUT, bytes((i,)) * 50_000) for i in range(20)]
        for output in sent:
            writer.send(output)
        assert writer.waiting_bytes > 0
        made, received = reader(), []
        while len(received) < 20:
            received += made.feed(os.read(read_fd, 65536))
            writer.flush()
        assert received == sent
        assert writer.waiting_bytes == 0
    finally:
        os.close(read_fd)
        os.close(write_fd)


def test_the_writer_keeps_no_more_than_its_limit():
    read_fd, write_fd = os.pipe()
    try:
        writer = MessageWriter(
            PipeTransport(read_fd, write_fd).write, limit_bytes=101_000
        )
        # The pipe takes some of it, at most 64 KiB here.
        writer.send(Output(0, Stream.STDOUT, bytes(100_000)))
        with pytest.raises(LaunchError, match="bytes are unsent"):
            writer.send(Output(0, Stream.STDOUT, bytes(70_000)))
    finally:
        os.close(read_fd)
        os.close(write_fd)
