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
from functools import cache
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
_TOKEN = 17  # a dtype without data
_logger = logging.getLogger("ronde")
_Size, _Int64, _Pointer = ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p
_TORCH_DTYPES = {
    1: torch.bool,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.uint8,
    7: torch.uint16,
    8: torch.uint32,
    9: torch.uint64,
    10: torch.float16,
    11: torch.float32,
    12: torch.float64,
    15: torch.complex64,
    16: torch.bfloat16,
    18: torch.complex128,
}
"""By XLA's number; 8-bit floats and integers of fewer bits are not supported."""
Operation = Callable[[list[Tensor], list[Tensor]], None]
"""Computes results from arguments; both may share memory."""
_operations: dict[int, Operation] = {}


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


_SIZES = {each: size_of(each) for each in (CallFrame, Api, Args, Buffer, Attrs)}


def _require_size(structure: Any) -> None:
    given, least = structure.struct_size, _SIZES[type(structure)]
    if given < least:
        name = type(structure).__name__
        raise UsageError(f"XLA's {name} must have {least} bytes or more, got {given}.")


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
            operation(_tensors(frame.args), _tensors(frame.rets))
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


def _tensors(buffers: Args) -> list[Tensor]:
    given = [buffers.args[i].contents for i in range(buffers.size)]
    return [_tensor(each) for each in given if each.dtype != _TOKEN]


def _tensor(buffer: Buffer) -> Tensor:
    """Return a tensor over an XLA buffer."""
    _require_size(buffer)
    dims = buffer.dims[: buffer.rank]
    dtype = _TORCH_DTYPES.get(buffer.dtype)
    if dtype is None:
        raise UsageError(
            "arrays must be of a dtype that torch has, except 8-bit floats, got XLA's "
            f"type {buffer.dtype}. Convert them with astype()."
        )
    num_bytes = prod(dims) * dtype.itemsize
    if not num_bytes:
        return torch.empty(dims, dtype=dtype)
    memory = (ctypes.c_char * num_bytes).from_address(buffer.data)
    return torch.frombuffer(memory, dtype=dtype).view(dims)


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
