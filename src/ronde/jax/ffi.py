"""A handler of XLA's foreign function interface, written with ctypes.

Note [Handler]
    XLA calls a handler with a call frame, which has the addresses of the arguments, of
    the results and of the attributes. The attribute ``operation`` selects a registered
    operation. Tensors over the addresses copy nothing, and results of reductions are
    in the memory of their arguments: XLA copies an argument before, if it is used
    again. Layouts are those of the header ``xla/ffi/api/c_api.h``, API 0.3. XLA also
    calls the handler when it is registered, to ask for the version of its API.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ronde.errors import UsageError
from ronde.session.frameworks import import_framework

jax: Any = import_framework("jax")

TARGET = "ronde_collective"
API_MAJOR, API_MINOR = 0, 3
_METADATA, _EXECUTE, _INTERNAL = 1, 3, 13  # of the header's enumerations
_logger = logging.getLogger("ronde")
_Size, _Int64, _Pointer = ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p
Addresses = list[int]
Operation = Callable[[Addresses, Addresses], None]
"""Computes results from arguments; both may be at the same addresses."""
_operations: dict[int, Operation] = {}
_checked: set[type[ctypes.Structure]] = set()


class _Sized(ctypes.Structure):
    """The beginning of most structures."""

    _fields_ = (("struct_size", _Size), ("extension_start", _Pointer))


class MetadataExtension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = (
        ("struct_size", _Size),
        ("type", ctypes.c_int),
        ("next", _Pointer),
        ("metadata", _Pointer),
    )


class ApiVersion(_Sized):
    """XLA_FFI_Api_Version."""

    _fields_ = (("major_version", ctypes.c_int), ("minor_version", ctypes.c_int))


class Metadata(ctypes.Structure):
    """XLA_FFI_Metadata, without its last field."""

    _fields_ = (
        ("struct_size", _Size),
        ("api_version", ApiVersion),
        ("traits", ctypes.c_uint32),
    )


class ErrorCreateArgs(_Sized):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = (("message", ctypes.c_char_p), ("errc", ctypes.c_int))


_CreateError = ctypes.CFUNCTYPE(_Pointer, ctypes.POINTER(ErrorCreateArgs))


class Api(_Sized):
    """The beginning of XLA_FFI_Api."""

    _fields_ = (
        ("api_version", ApiVersion),
        ("internal_api", _Pointer),
        ("error_create", _CreateError),
    )


class Buffer(_Sized):
    """XLA_FFI_Buffer."""

    _fields_ = (
        ("dtype", ctypes.c_int),
        ("data", _Pointer),
        ("rank", _Int64),
        ("dims", ctypes.POINTER(_Int64)),
    )


_DATA = Buffer.data.offset


class Args(_Sized):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (
        ("size", _Int64),
        ("types", _Pointer),
        ("args", ctypes.POINTER(ctypes.POINTER(Buffer))),
    )


class Scalar(ctypes.Structure):
    """XLA_FFI_Scalar, with an integer."""

    _fields_ = (("dtype", ctypes.c_int), ("value", ctypes.POINTER(_Int64)))


class Attrs(_Sized):
    """XLA_FFI_Attrs with scalars only."""

    _fields_ = (
        ("size", _Int64),
        ("types", _Pointer),
        ("names", _Pointer),
        ("attrs", ctypes.POINTER(ctypes.POINTER(Scalar))),
    )


class CallFrame(ctypes.Structure):
    """XLA_FFI_CallFrame, without its last field."""

    _fields_ = (
        ("struct_size", _Size),
        ("extension_start", ctypes.POINTER(MetadataExtension)),
        ("api", ctypes.POINTER(Api)),
        ("ctx", _Pointer),
        ("stage", ctypes.c_int),
        ("args", Args),
        ("rets", Args),
        ("attrs", Attrs),
    )


def size_of(structure: type[ctypes.Structure]) -> int:
    """Return the offset of the end of the last field, as XLA counts sizes."""
    field = getattr(structure, structure._fields_[-1][0])
    return field.offset + field.size


def _require_size(structure: Any) -> None:
    """Refuse a smaller structure than the header's; each kind is checked once."""
    kind: Any = structure.__class__
    if kind not in _checked:
        given, least = structure.struct_size, size_of(kind)
        if given < least:
            raise UsageError(
                f"XLA's {kind.__name__} must have {least} bytes or more, got {given}."
            )
        _checked.add(kind)


def _handle(address: int) -> int | None:
    frame = CallFrame.from_address(address)
    try:
        _require_size(frame)
        extension = frame.extension_start
        if extension and extension.contents.type == _METADATA:
            _describe(frame, Metadata.from_address(extension.contents.metadata))
        elif frame.stage == _EXECUTE:
            for part in (frame.args, frame.rets, frame.attrs):
                _require_size(part)
            operation = _operations[frame.attrs.attrs[0].contents.value[0]]
            operation(_addresses(frame.args), _addresses(frame.rets))
    except BaseException as error:  # noqa: BLE001  XLA raises it
        text = f"{type(error).__name__}: {error}".encode()
        args = ErrorCreateArgs(size_of(ErrorCreateArgs), None, text, _INTERNAL)
        return frame.api.contents.error_create(ctypes.byref(args))
    return None


_handler = ctypes.CFUNCTYPE(_Pointer, _Pointer)(_handle)


def _describe(frame: CallFrame, metadata: Metadata) -> None:
    """Answer with the version of this handler's API; refuse other versions."""
    _require_size(frame.api.contents)
    version = frame.api.contents.api_version
    metadata.api_version.major_version = API_MAJOR
    metadata.api_version.minor_version = API_MINOR
    if version.major_version != API_MAJOR:
        raise UsageError(
            f"XLA's FFI API must be version {API_MAJOR}, got {version.major_version}."
            f"{version.minor_version}."
        )


def _addresses(buffers: Args) -> Addresses:
    """Return the addresses of arrays, 0 for one without memory such as a token."""
    if Buffer not in _checked:
        _require_size(buffers.args[0].contents)
    first = ctypes.addressof(buffers.args.contents)
    at = (_Pointer * buffers.size).from_address(first)[:]
    return [_Pointer.from_address(each + _DATA).value or 0 for each in at]


@lru_cache(maxsize=8192)  # XLA reuses memory
def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor over memory of XLA, to be used while XLA holds it."""
    num_bytes = prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def register_operation(number: int, operation: Operation) -> None:
    """Make an operation known to the handler; an equal number means an equal one."""
    _operations[number] = operation


@cache
def is_usable() -> bool:
    """Register the handler for CPUs; return False if this XLA has another API."""
    jax.default_backend()  # before it is, XLA would not ask for the version yet
    try:
        capsule = jax.ffi.pycapsule(_handler)
        jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
    except Exception as error:  # noqa: BLE001  JAX's classes differ by version
        _logger.warning("Callbacks replace the XLA handler, which is faster: %s", error)
        return False
    return True


def lowering(aliases: Sequence[int], *, has_effect: bool) -> Callable[..., Any]:
    """Return JAX's lowering to a call of the handler; aliases are written in place."""
    return jax.ffi.ffi_lowering(
        TARGET,
        has_side_effect=has_effect,
        operand_output_aliases={index: index for index in aliases},
    )
