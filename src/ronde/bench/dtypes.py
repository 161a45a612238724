"""The types of elements by nccl-tests' names, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from ronde.errors import UsageError


class Kind(Enum):
    """What the bits of an element are."""

    SIGNED = auto()
    UNSIGNED = auto()
    FLOAT = auto()


@dataclass(frozen=True, slots=True)
class DType:
    """One type of elements.

    Attributes:
        name: nccl-tests' name, such as ``half``.
        torch_name: Name of torch's dtype.
        num_bytes: Of one element.
        kind: What its bits are.
        significand_bits: Of a float, the hidden one included; 0 for integers.
        max_exponent: Of a float: the greatest power of two below which all
            significands are finite; 0 for integers.
    """

    name: str
    torch_name: str
    num_bytes: int
    kind: Kind
    significand_bits: int = 0
    max_exponent: int = 0

    @property
    def is_float(self) -> bool:
        """Whether it has an exponent."""
        return self.kind is Kind.FLOAT


_ALL = (
    DType("int8", "int8", 1, Kind.SIGNED),
    DType("uint8", "uint8", 1, Kind.UNSIGNED),
    DType("int32", "int32", 4, Kind.SIGNED),
    DType("uint32", "uint32", 4, Kind.UNSIGNED),
    DType("int64", "int64", 8, Kind.SIGNED),
    DType("uint64", "uint64", 8, Kind.UNSIGNED),
    DType("half", "float16", 2, Kind.FLOAT, 11, 15),
    DType("float", "float32", 4, Kind.FLOAT, 24, 127),
    DType("double", "float64", 8, Kind.FLOAT, 53, 1023),
    DType("bfloat16", "bfloat16", 2, Kind.FLOAT, 8, 127),
    # Its largest number is 1.75 * 2**8: not every significand fits that exponent.
    DType("f8e4m3", "float8_e4m3fn", 1, Kind.FLOAT, 4, 7),
    DType("f8e5m2", "float8_e5m2", 1, Kind.FLOAT, 3, 15),
)

DTYPES: Mapping[str, DType] = MappingProxyType({each.name: each for each in _ALL})
"""By nccl-tests' name, in the order in which ``-d all`` takes them."""

_ALIASES = {each.torch_name: each for each in _ALL} | {"bf16": DTYPES["bfloat16"]}

OPS = ("sum", "prod", "max", "min", "avg", "mulsum")
"""The operations, in the order in which ``-o all`` takes them."""

_OP_ALIASES = {"product": "prod", "average": "avg"}


def parse_dtypes(text: str) -> tuple[DType, ...]:
    """Read ``-d``: a name of nccl-tests' or of torch's, or ``all``.

    Raises:
        UsageError: There is no such type.
    """
    if text == "all":
        return _ALL
    dtype = DTYPES.get(text) or _ALIASES.get(text)
    if dtype is None:
        raise UsageError(
            f"-d/--dtype must be all or one of {', '.join(DTYPES)}, got {text!r}."
        )
    return (dtype,)


def parse_ops(text: str) -> tuple[str, ...]:
    """Read ``-o``: a name, or ``all``.

    Raises:
        UsageError: There is no such operation.
    """
    if text == "all":
        return OPS
    name = _OP_ALIASES.get(text, text)
    if name not in OPS:
        raise UsageError(f"-o/--op must be all or one of {', '.join(OPS)}, got {text}.")
    return (name,)
