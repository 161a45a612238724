"""The kind of work that a sampled stack shows, and the line of user code it is for."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ronde.monitor.inspection import StackFrame

_LOADER = "/torch/utils/data/dataloader.py"
_IN_PROCESS = "/torch/utils/data/_utils/fetch.py"  # else only worker processes run it
_DDP = "/torch/nn/parallel/distributed.py"
_GENERATED = ("", "<string>")  # code of named tuples; what py-spy cannot name
_IMPORT = "<frozen importlib"
_ENGINE = re.compile(r"/ronde/collectives/engines/(\w+)")
_SYNC_CALL = re.compile(r"\.(item|cpu|tolist|numpy|synchronize|nonzero)\(|\.to\(.cpu")

# The innermost frame that is listed decides. Others are neutral: ``decorate_context``
# of torch, or the optimizer of ronde, are on the stacks of several kinds.
_KINDS = (
    ("/ronde/torch/elastic/checkpoint.py", "checkpoint"),
    ("/ronde/torch/parallel/checkpoints.py", "checkpoint"),
    ("/ronde/collectives/", "communication"),
    ("/ronde/coordination/", "communication"),
    ("/ronde/data_parallel/", "communication"),
    ("/ronde/process_group/", "communication"),
    ("/ronde/session/", "communication"),
    ("/ronde/torch/mpi_ops.py", "communication"),
    ("/ronde/torch/functions.py", "communication"),
    ("/torch/distributed/distributed_c10d.py", "communication"),
    ("/torch/distributed/_functional_collectives.py", "communication"),
    ("/torch/distributed/checkpoint/", "checkpoint"),
    ("/torch/serialization.py", "checkpoint"),
    ("/safetensors/", "checkpoint"),
    ("/numpy/lib/_npyio_impl.py", "checkpoint"),
    ("/numpy/lib/npyio.py", "checkpoint"),
    ("/h5py/", "checkpoint"),
    ("/shutil.py", "checkpoint"),
    ("/torch/cuda/streams.py", "sync"),
    ("/torchdata/", "input"),
    ("/webdataset/", "input"),
    ("/torch/nn/", "compute"),
    ("/torch/optim/", "compute"),
)


class StackKind(NamedTuple):
    """The kind of a stack, a field of ``ProfileShares``, and its line of user code."""

    kind: str
    line: tuple[str, int, str] | None  # file, line, function
    loop: tuple[str, int] | None = None  # of a DataLoader: the line that iterates it


def _has_line(frame: StackFrame) -> bool:
    return frame.is_user and frame.file not in _GENERATED


class StackReader:
    """Finds the kinds of stacks, and traits of the program on the way.

    Args:
        source: Returns the lines of a file. It is for programs on GPUs, where a call
            such as ``.item()`` waits; it is C code, so only its line shows it.
    """

    def __init__(self, source: Callable[[str], Sequence[str]] | None) -> None:
        self._source = source
        self.engine = ""
        self.is_loading_itself = False
        self._has_ddp = self._is_hooked = False

    @property
    def is_ddp_opaque(self) -> bool:
        """True if DDP runs and no collective is seen inside ``backward()``."""
        return self._has_ddp and not self._is_hooked

    def read(self, frames: Sequence[StackFrame]) -> StackKind:
        """Return the kind of a stack, the innermost frame first."""
        users = [i for i, frame in enumerate(frames) if _has_line(frame)]
        inner = frames[users[0]] if users else None
        line = (inner.file, inner.line, inner.function) if inner else None
        called = frames[: users[0]] if users else frames
        if any(frame.file.startswith(_IMPORT) for frame in called):
            return StackKind("other", line)
        loaders = [i for i, frame in enumerate(frames) if _LOADER in frame.file]
        # It wraps the model's forward().
        self._has_ddp |= any(_DDP in f.file and "forward" in f.function for f in frames)
        if loaders:
            # Its user frames are the data set's; those outside iterate the loader.
            outer = [frames[index] for index in users if index > loaders[-1]]
            is_own = any(_IN_PROCESS in frame.file for frame in frames[: loaders[-1]])
            self.is_loading_itself |= is_own
            loop = (outer[0].file, outer[0].line) if outer else None
            return StackKind("input", line, loop)
        kind = self._kind(called, inner)
        if kind == "communication":
            names = [_ENGINE.search(frame.file) for frame in frames]
            found = [name[1] for name in names if name]
            self.engine = found[0] if found else self.engine
            self._is_hooked |= any("_run_backward" in f.function for f in frames)
        return StackKind(kind, line)

    def _kind(self, called: Sequence[StackFrame], user: StackFrame | None) -> str:
        for frame in called:
            if "/torch/cuda/" in frame.file and "synchronize" in frame.function:
                return "sync"
            for part, kind in _KINDS:
                if part in frame.file:
                    return kind
        if user is None:
            return "other"
        lines = self._source(user.file) if self._source and not called else ()
        text = "".join(lines[user.line - 1 : user.line]) if user.line else ""
        return "sync" if _SYNC_CALL.search(text) else "compute"
