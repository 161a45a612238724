"""Text streams as it is decoded whole and stops at stop strings; chats are rendered."""

import json

import pytest
from hypothesis import given, strategies as st
from tests.serve.local import EOS, TEMPLATE, make_tokenizer, write_model
from tokenizers import Tokenizer, decoders, models, processors

from ronde.errors import UsageError
from ronde.serve import ModelText, TextStream

BYTES = make_tokenizer()
SPECIAL = frozenset(range(4))
WORDS = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁中", "é"]
FALLBACK = Tokenizer(
    models.BPE({w: i for i, w in enumerate(WORDS)}, [], byte_fallback=True)
)
FALLBACK.add_special_tokens(["<s>"])
FALLBACK.decoder = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
PIECES = Tokenizer(models.WordPiece({"[UNK]": 0, "un": 1, "##do": 2, "it": 3, ".": 4}))
PIECES.decoder = decoders.WordPiece()


def pieces_of(tokenizer, tokens, stops=(), special=SPECIAL):
    stream, pieces = TextStream(tokenizer, special, stops), []
    for token in tokens:
        pieces.append(stream.add(token))
        if stream.is_stopped:
            return pieces, True
    pieces.append(stream.end())
    return pieces, stream.is_stopped


@given(st.lists(st.integers(0, BYTES.get_vocab_size() + 9), max_size=40))
def test_any_tokens_are_streamed_as_they_are_decoded_whole(tokens):
    pieces, _ = pieces_of(BYTES, tokens)
    assert "".join(pieces) == BYTES.decode(tokens)


# A special token begins with "<".
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<\ufffd")))
def test_no_piece_ends_within_a_character(text):
    pieces, _ = pieces_of(BYTES, BYTES.encode(text).ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


@given(
    st.lists(
        st.sampled_from(["▁", "▁a", "b", "▁中", "é", "<s>", "🙂", "ß"]), max_size=12
    )
)
def test_characters_of_several_byte_tokens_are_whole(words):
    tokens = []
    for word in words:
        number = FALLBACK.token_to_id(word)
        codes = [f"<0x{byte:02X}>" for byte in word.encode()]
        tokens += (
            [FALLBACK.token_to_id(c) for c in codes] if number is None else [number]
        )
    pieces, _ = pieces_of(FALLBACK, tokens, special=frozenset({0}))
    assert "".join(pieces) == FALLBACK.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


def test_words_of_pieces_and_invalid_bytes():
    assert pieces_of(PIECES, [1, 2, 3, 4], special=()) == (
        ["un", "do", " it", ".", ""],
        False,
    )
    run = [FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in b"\xe4\xb8\xad\x80"]
    pieces, _ = pieces_of(FALLBACK, [*run, FALLBACK.token_to_id("b")])
    assert "".join(pieces) == "中\ufffdb"
    invalid = BYTES.token_to_id("Ģ")  # the byte 0x80
    pieces, _ = pieces_of(BYTES, [invalid] * 1000)
    assert len([piece for piece in pieces if piece]) > 10  # no text is held for ever
    assert "".join(pieces) == "\ufffd" * 1000


@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3),
)
def test_text_ends_before_the_first_stop_string(text, stops):
    pieces, is_stopped = pieces_of(BYTES, BYTES.encode(text).ids, stops)
    found = [stop for stop in stops if stop in text]
    assert is_stopped == bool(found)
    got = "".join(pieces)
    assert got == (text[: len(got)] if found else text)
    if found:
        assert not any(stop in got for stop in stops)
        assert any(text[len(got) :].startswith(stop) for stop in stops)


LOOP = """{% for m in messages %}
{% if loop.index == 2 %}{% break %}{% endif %}
  {% generation %}{{ m.content | tojson }}{% endgeneration %}{{ eos_token }}
{% endfor %}"""
CHAT = [{"role": "user", "content": "a ü </b>"}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (TEMPLATE, "<s><|user|>a ü </b><|assistant|>c<|assistant|>"),
        (LOOP, '"a ü </b>"</s>\n'),
        ("{{ strftime_now('%%') }}{{ messages | tojson(indent=1) | length }}", "%98"),
        (
            [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}],
            "d",
        ),
    ],
)
def test_chats_are_rendered(tmp_path, template, text):
    write_model(tmp_path, template)
    assert ModelText(f"{tmp_path}").render_chat(CHAT) == text
    (tmp_path / "chat_template.jinja").write_text("of a file")
    assert ModelText(f"{tmp_path}").render_chat(CHAT) == "of a file"
    (tmp_path / "own").write_text("own")
    assert ModelText(f"{tmp_path}", f"{tmp_path}/own").render_chat(CHAT) == "own"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "messages must be for a model with a chat template.*--chat-template"),
        ("{{ raise_exception('no tools') }}", "chat template: no tools"),
        ("{{ messages[7].content }}", "suit the model's chat template"),
        ("{{ messages + 1 }}", "suit the model's chat template"),
        ("{{ ''.__class__.__mro__ }}", "suit the model's chat template"),
    ],
)
def test_chats_that_a_template_refuses(tmp_path, template, message):
    write_model(tmp_path, template)
    with pytest.raises(UsageError, match=message):
        ModelText(f"{tmp_path}").render_chat(CHAT)


def test_special_tokens_are_added_as_the_model_has_it(tmp_path):
    write_model(tmp_path)
    text = ModelText(f"{tmp_path}")
    assert text.encode("ab") == tuple(BYTES.encode("ab").ids)
    assert text.stop_ids == (EOS,)
    assert text.token_text(EOS) == "</s>"
    tokenizer = make_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(1)
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    text = ModelText(f"{tmp_path}")
    assert text.encode("ab") == (0, *BYTES.encode("ab").ids)
    assert text.encode("ab", adds_special=False) == tuple(BYTES.encode("ab").ids)
    assert text.stop_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert ModelText(f"{tmp_path}").stop_ids == (8, 9)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json must be there and valid"),
        ("tokenizer.json", "{}", "tokenizer.json must be there and valid"),
        ("tokenizer_config.json", "{", "tokenizer_config.json must be there and valid"),
        (
            "tokenizer_config.json",
            "[]",
            "tokenizer_config.json must be there and valid",
        ),
        (
            "generation_config.json",
            "\udc80",
            "generation_config.json must be there and valid",
        ),
        (
            "chat_template.jinja",
            "{% if %}",
            "chat_template.jinja must be there and valid",
        ),
        (
            "chat_template.jinja",
            "\udc80",
            "chat_template.jinja must be there and valid",
        ),
    ],
)
def test_wrong_files_are_refused(tmp_path, name, content, message):
    write_model(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=message):
        ModelText(f"{tmp_path}")


def test_a_template_that_is_not_there_is_refused(tmp_path):
    write_model(tmp_path)
    with pytest.raises(
        UsageError, match=r"none.jinja must be there and valid: .*No such file"
    ):
        ModelText(f"{tmp_path}", f"{tmp_path}/none.jinja")
