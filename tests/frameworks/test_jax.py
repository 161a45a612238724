"""``ronde.jax``: every check is in a program of few ranks, since JAX starts slowly."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.launch import own_environment

HERE = Path(__file__).parent
PSUM = """
import socket
import jax, ronde.jax as hvd
from jax._src.distributed import global_state
if {is_ours}:
    hvd.init(distributed=True)
else:
    jax.distributed.initialize()
mesh = jax.make_mesh((2,), ("r",))
spec = jax.P("r")
values = jax.make_array_from_process_local_data(
    jax.NamedSharding(mesh, spec), jax.numpy.ones(1) + jax.process_index()
)
total = jax.shard_map(lambda x: jax.lax.psum(x, "r"), mesh=mesh, in_specs=spec,
                      out_specs=jax.P())
assert jax.jit(total)(values) == 3
address = global_state.coordinator_address.split(":")
jax.distributed.shutdown()
if jax.process_index() == 0:
    try:
        socket.create_server((address[0], int(address[1]))).close()
    except OSError:
        pass  # still reserved
    else:
        raise SystemExit("another program could have taken the port")
assert hvd.is_initialized() is {is_ours}
"""


def run(num_ranks: int, *words: str, **environment: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "ronde", "run", "-n", str(num_ranks)]
    done = subprocess.run(
        [*command, sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=own_environment() | environment,
        timeout=HANG_S,
        check=False,
        text=True,
    )
    return done.returncode, done.stdout


def test_three_ranks():
    code, text = run(3, str(HERE / "jax_rank.py"))
    assert code == 0, text
    assert "Callbacks replace" not in text


def test_callbacks_replace_a_handler_of_another_version():
    code, text = run(2, str(HERE / "jax_rank.py"), "fallback")
    assert code == 0, text
    lines = [line for line in text.splitlines() if "Callbacks replace" in line]
    assert len(lines) == 2, text
    assert all("API must be version 99, got 0." in line for line in lines)


def test_a_killed_peer():
    code, text = run(2, str(HERE / "jax_failing.py"), "killed")
    assert code == 137, text
    assert "raised INTERNAL: PeerLostError: " in text
    assert "Rank 1 is gone" in text


def test_a_stalled_peer():
    limits = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2",
    }
    code, text = run(2, str(HERE / "jax_failing.py"), "stalled", **limits)
    assert code == 1, text
    assert "1: [allreduce.lasting]" in text
    assert "raised INTERNAL: CollectiveError: " in text


@pytest.mark.parametrize("is_ours", [pytest.param(False, marks=pytest.mark.long), True])
def test_psum_of_jax(is_ours: bool):  # noqa: FBT001
    code, text = run(2, "-c", PSUM.format(is_ours=is_ours))
    assert code == 0, text


def test_structures_are_those_of_the_installed_header():
    """Compare fields and versions with the header that jaxlib ships."""
    import jax

    from ronde.jax import ffi

    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    for name, number in (("MAJOR", ffi.API_MAJOR), ("MINOR", ffi.API_MINOR)):
        assert f"#define XLA_FFI_API_{name} {number}\n" in header
    names = {
        ffi.ApiVersion: "Api_Version",
        ffi.Metadata: "Metadata",
        ffi.ErrorCreateArgs: "Error_Create_Args",
        ffi.Buffer: "Buffer",
        ffi.Args: "Args",
        ffi.Scalar: "Scalar",
        ffi.Attrs: "Attrs",
        ffi.CallFrame: "CallFrame",
    }
    for structure, name in names.items():
        match = re.search(
            rf"struct XLA_FFI_{name} \{{(.*?)^\}}", header, re.DOTALL | re.MULTILINE
        )
        assert match, name
        fields = re.findall(r"^  ([^/\n]+?)(\w+);", match[1], re.MULTILINE)
        own = [*all_fields(structure)]
        assert [field for field, _ in own] == [field for _, field in fields][: len(own)]
        for (field, kind), (c_type, _) in zip(own, fields, strict=False):
            assert ctypes.sizeof(kind) == size_of(c_type.strip(), names), field
    assert "XLA_FFI_ExecutionStage_EXECUTE = 3" in header
    assert "XLA_FFI_Extension_Metadata = 1" in header


def all_fields(structure):
    for each in reversed(structure.__mro__):
        yield from vars(each).get("_fields_", ())


def size_of(c_type, names):
    """Return the size of a C type of the header, by its name."""
    if c_type.endswith("*"):
        return ctypes.sizeof(ctypes.c_void_p)
    known = {"size_t": 8, "int64_t": 8, "int": 4, "uint32_t": 4, "XLA_FFI_TypeId": 8}
    sizes = {f"XLA_FFI_{name}": ctypes.sizeof(each) for each, name in names.items()}
    sizes["XLA_FFI_Rets"] = sizes["XLA_FFI_Args"]
    enumeration = 4
    return (known | sizes).get(c_type, enumeration)
