"""Text of a model: chats and prompts to token ids, and tokens back to text."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from ronde.errors import UsageError

_CUT = "\ufffd"  # at the end of a text that ends within a character
_MOST_HELD = 64  # tokens; text that stays invalid is returned as it is


class ModelText:
    """The tokenizer and the chat template in a model's folder.

    ``chat_template`` is a file in place of the model's own. ``stop_ids`` are the tokens
    that end an answer, as for transformers' ``generate()``.

    Raises:
        UsageError: A file is missing or invalid.
    """

    def __init__(self, folder: str, chat_template: str = "") -> None:
        path = Path(folder)
        try:
            self._tokenizer = Tokenizer.from_file(f"{path / 'tokenizer.json'}")
        except Exception as error:  # noqa: BLE001  the library raises no other type
            raise UsageError(
                f"{folder} must have a valid tokenizer.json, got: {error}. Save the "
                "model's tokenizer there with save_pretrained()."
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(number for number, token in added if token.special)
        config = _read_json(path / "tokenizer_config.json")
        self._words: dict[str, Any] = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        eos: Any = self._tokenizer.token_to_id(self._words.get("eos_token", ""))
        for name in ("config.json", "generation_config.json"):
            eos = _read_json(path / name).get("eos_token_id", eos)
        eos = cast("list[Any]", eos if isinstance(eos, list) else [eos])
        self.stop_ids = tuple(int(number) for number in eos if number is not None)
        self._words |= {"raise_exception": _refuse, "strftime_now": _now}
        self._template = _read_template(path, chat_template, config)

    def encode(self, text: str, *, adds_special: bool = True) -> tuple[int, ...]:
        """Return the ids of a text, with special tokens as the model's own adds them.

        Other threads run meanwhile.
        """
        [found] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=adds_special
        )
        return tuple(found.ids)

    def render_chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        """Return the prompt of a chat; it has its special tokens.

        Raises:
            UsageError: The template is missing or refuses the messages.
        """
        if self._template is None:
            raise UsageError(
                "messages must be for a model with a chat template, and this one has "
                "none. Call /v1/completions, or serve with --chat-template FILE."
            )
        words = self._words | {"messages": messages, "add_generation_prompt": True}
        try:
            return self._template.render(words)
        except Exception as error:  # noqa: BLE001  a template is a program
            rule = "messages must suit the model's chat template"
            raise UsageError(f"{rule}: {error}.") from None

    def stream(self, stops: Sequence[str] = ()) -> "TextStream":
        return TextStream(self._tokenizer, self._special, stops)

    def token_text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


class TextStream:
    """The text of tokens as they come, up to the first stop string.

    No piece ends within a character or with the first part of a stop string. All pieces
    together are the text of all tokens, without special ones.
    """

    def __init__(
        self, tokenizer: Tokenizer, special: frozenset[int], stops: Sequence[str]
    ) -> None:
        self._tokenizer, self._special, self._stops = tokenizer, special, stops
        # A decoder needs the tokens before: the first have been returned as ``_done``.
        self._tokens: list[int] = []
        self._num_done, self._done = 0, ""
        self._held = ""  # may be the first part of a stop string
        self.is_stopped = False  # a stop string has come

    def add(self, token: int) -> str:
        """Return the text that is certain with one token more."""
        if token in self._special:
            return ""
        self._tokens.append(token)
        text, num_held = self._decoded(0), len(self._tokens) - self._num_done
        if text.endswith(_CUT) and num_held < _MOST_HELD:
            return ""
        return self._cut(self._advance(text))

    def end(self) -> str:
        """Return the rest."""
        return self._cut(self._advance(self._decoded(0))) + self._held

    def _decoded(self, start: int) -> str:
        return self._tokenizer.decode(self._tokens[start:])

    def _advance(self, text: str) -> str:
        new = text.removeprefix(self._done)
        if not text.startswith(self._done):  # invalid bytes have changed those before
            new = self._decoded(self._num_done)
        self._tokens = self._tokens[self._num_done :]
        self._num_done, self._done = len(self._tokens), self._decoded(0)
        return new

    def _cut(self, new: str) -> str:
        """Return the text before a stop string, or the part that begins none."""
        text, self._held = self._held + new, ""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self.is_stopped = bool(found)
        lengths = {
            num
            for stop in self._stops
            for num in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:num]) and not found
        }
        end = min(found, default=len(text) - max(lengths, default=0))
        if not found:
            self._held = text[end:]
        return text[:end]


class _Generation(Extension):
    """The tag ``generation``, for training; the text is that without it."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found: object = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} must be valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{file} must be a JSON object.")
    return cast("dict[str, Any]", found)


def _read_template(folder: Path, own: str, config: dict[str, Any]) -> Template | None:
    """Return the chat template, in an environment like that of transformers."""
    file = Path(own) if own else folder / "chat_template.jinja"
    source: Any = config.get("chat_template")
    if isinstance(source, list):  # several, with names
        named = cast("list[dict[str, str]]", source)
        source = {each["name"]: each["template"] for each in named}.get("default")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    try:
        if own or file.exists():
            source = file.read_text(encoding="utf-8")
        return None if source is None else environment.from_string(source)
    except (OSError, ValueError, TemplateError) as error:
        raise UsageError(f"chat template {file} must be valid: {error}.") from None


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
