"""Conversion of named tuples and dataclasses to values of JSON, and back with checks.

A message is JSON with the name of its class in the field ``is``. Nothing is evaluated
or unpickled, and unknown fields are refused.
"""

import json
from contextlib import suppress
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, cast

T = TypeVar("T")


class PlainValueError(ValueError):
    """A plain value does not have the expected form."""


def encode_message(message: object) -> str:
    plain = cast("dict[str, object]", to_plain(message))
    return json.dumps({"is": type(message).__name__, **plain})


def decode_message(raw: str | bytes, kinds: tuple[type[T], ...]) -> T:
    """Decode a message as one of ``kinds``; raise ``PlainValueError`` if none fits."""
    try:
        decoded: object = json.loads(raw)
    except ValueError as error:
        raise PlainValueError(f"message is not JSON: {error}.") from None
    if not isinstance(decoded, dict):
        raise PlainValueError(f"message must be an object, got {shorten(decoded)}.")
    values = cast("dict[str, object]", decoded)
    name = values.pop("is", None)
    for kind in kinds:
        if kind.__name__ == name:
            return from_plain(kind, values)
    names = ", ".join(kind.__name__ for kind in kinds)
    raise PlainValueError(f"message must be one of {names}, got {shorten(name)}.")


def to_plain(value: object) -> object:
    """Convert a value to JSON's types; named tuples and dataclasses become objects."""
    if _is_record(type(value)):
        return {n: to_plain(getattr(value, n)) for n in type(value).__annotations__}
    if isinstance(value, tuple):
        return [to_plain(item) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, dict):
        found = cast("dict[str, object]", value)
        return {name: to_plain(item) for name, item in found.items()}
    return value


def from_plain(kind: type[T], plain: object, where: str = "") -> T:
    """Convert a plain value to ``kind``, a named tuple or dataclass.

    ``where`` is the name of the value in messages.
    """
    where = where or kind.__name__
    if not isinstance(plain, dict):
        raise PlainValueError(f"{where} must be an object, got {shorten(plain)}.")
    values = cast("dict[str, object]", plain)
    wanted: dict[str, Any] = kind.__annotations__
    if wanted.keys() != values.keys():
        raise PlainValueError(
            f"{where} must have the fields {sorted(wanted)}, got {sorted(values)}."
        )
    return kind(**{n: _checked(values[n], wanted[n], f"{where}.{n}") for n in wanted})


def shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_record(kind: Any) -> bool:  # noqa: ANN401 - an annotation is any object
    return hasattr(kind, "_fields") or hasattr(kind, "__dataclass_fields__")


def _checked(value: object, wanted: Any, where: str) -> object:  # noqa: ANN401
    """Convert a value to a type: lists to tuples, strings to enumeration members."""
    if isinstance(wanted, UnionType):
        wanted = _chosen(value, wanted)
    outer = getattr(wanted, "__origin__", wanted)
    if _is_record(outer) and isinstance(value, dict):
        return from_plain(wanted, cast("object", value), where)
    if outer is dict and isinstance(value, dict):
        entries, inner = cast("dict[str, object]", value), wanted.__args__[1]
        return {k: _checked(v, inner, f"{where}[{k!r}]") for k, v in entries.items()}
    if outer is tuple and isinstance(value, list):
        return _checked_items(cast("list[object]", value), wanted.__args__, where)
    if outer is float and type(value) is int:
        value = float(value)
    if wanted is Any or type(value) is outer:
        return value
    return _member(value, wanted, where)


def _member(value: Any, wanted: Any, where: str) -> object:  # noqa: ANN401
    """Return the enumeration member that has this value; refuse other values."""
    name = wanted.__name__ if isinstance(wanted, type) else str(wanted)
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        with suppress(ValueError):
            return wanted(value)
        name = f"one of {', '.join(str(member.value) for member in wanted)}"
    raise PlainValueError(f"{where} must be {name}, got {shorten(value)}.")


def _chosen(value: object, union: UnionType) -> Any:  # noqa: ANN401
    """Return the type in a union that fits a value, for a record by its fields."""
    own, fields = type(value), None
    if isinstance(value, dict):
        fields = cast("dict[object, object]", value).keys()
    for kind in union.__args__:
        if kind is own or (_is_record(kind) and kind.__annotations__.keys() == fields):
            return kind
    return float if own is int and float in union.__args__ else union


def _checked_items(
    items: list[object], wanted: tuple[Any, ...], where: str
) -> tuple[object, ...]:
    """Convert items for ``tuple[T, ...]``, or for a tuple with a type per item."""
    if wanted[-1] is Ellipsis:
        wanted = (wanted[0],) * len(items)
    if len(wanted) != len(items):
        message = f"{where} must have {len(wanted)} items, got {len(items)}."
        raise PlainValueError(message)
    pairs = enumerate(zip(items, wanted, strict=True))
    return tuple(_checked(item, kind, f"{where}[{i}]") for i, (item, kind) in pairs)
