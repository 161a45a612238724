import pytest
from hypothesis import given, strategies as st

from ronde.render import (
    HELD_BYTES,
    HELD_S,
    LineAssembler,
    RankLines,
    newest_part,
    printable,
)


def texts(lines: list[RankLines]) -> list[bytes]:
    return [line for each in lines for line in each.text.split(b"\n")]


def feed_all(assembler: LineAssembler, pieces: list[bytes]) -> list[bytes]:
    fed = [line for piece in pieces for line in texts(assembler.feed(piece, 0.0))]
    return fed + texts(assembler.end())


cuts = st.lists(st.integers(1, 7), min_size=1, max_size=20)


def pieces_of(raw: bytes, lengths: list[int]) -> list[bytes]:
    pieces, start, index = [], 0, 0
    while start < len(raw):
        length = lengths[index % len(lengths)]
        pieces.append(raw[start : start + length])
        start, index = start + length, index + 1
    return pieces


@given(st.lists(st.binary().filter(lambda b: not set(b) & set(b"\r\n"))), cuts)
def test_lines_come_out_whole_however_they_went_in(lines, lengths):
    raw = b"".join(line + b"\n" for line in lines)
    shown = feed_all(LineAssembler(), pieces_of(raw, lengths))
    assert shown == [printable(line) for line in lines]


@given(st.text(st.characters(exclude_characters="\r\n")), cuts)
def test_pieces_that_rested_never_cut_a_character(text, lengths):
    assembler = LineAssembler()
    shown: list[RankLines] = []
    now = 0.0
    for piece in pieces_of(text.encode("utf-8", "replace"), lengths):
        shown += assembler.feed(piece, now)
        now += HELD_S
        shown += assembler.rest(now)
    shown += assembler.end()
    assert b"".join(texts(shown)).decode() == text.encode("utf-8", "replace").decode()
    assert [line.is_continuation for line in shown] == [
        i > 0 for i in range(len(shown))
    ]


def test_a_half_line_is_held_until_it_has_rested():
    assembler = LineAssembler()
    assert assembler.feed(b"half", 10.0) == []
    assert assembler.due_s == 10.0 + HELD_S
    assert assembler.rest(10.0 + HELD_S / 2) == []
    assert assembler.rest(10.0 + HELD_S) == [RankLines(b"half")]
    assert assembler.feed(b" line\nnext\n", 13.0) == [
        RankLines(b" line\nnext", is_continuation=True)
    ]


def test_a_line_too_long_is_shown_in_pieces():
    raw = "ä".encode() * HELD_BYTES
    shown = feed_all(LineAssembler(), [b"x", raw, b"\n"])
    assert b"".join(shown) == b"x" + raw
    assert max(map(len, shown)) <= HELD_BYTES
    assert all(text.decode() for text in shown if text)


@given(
    st.lists(st.sampled_from([b"a", b" ", "ä".encode(), b"\r", b"\n", b"\xff"])), cuts
)
def test_the_newest_part_of_each_line_is_shown(words, lengths):
    raw = b"".join(words)
    *whole, rest = raw.split(b"\n")
    is_wiped = b"\r" in rest and not newest_part(rest).strip()
    lines = whole if not rest or is_wiped else [*whole, rest]
    expected = [printable(newest_part(line)) for line in lines]
    assert feed_all(LineAssembler(), [raw]) == expected
    assert feed_all(LineAssembler(), pieces_of(raw, lengths)) == expected


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"ok \xc3\xa4", "ok ä".encode()),
        (b"\xff\xfe", b"\\xff\\xfe"),
        (b"cut \xc3", b"cut \\xc3"),
        (b"\xed\xa0\x80", b"\\xed\\xa0\\x80"),
    ],
)
def test_bytes_that_are_no_text_are_escaped(raw, shown):
    assert printable(raw) == shown
