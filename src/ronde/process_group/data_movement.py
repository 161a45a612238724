"""torch's collectives that move data without computing."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ronde.collectives import Work
from ronde.process_group.base import GroupBase, Options, Works
from ronde.process_group.tensor_lists import (
    copy_apart,
    copy_if_needed,
    flattened,
    joined,
    memory_of,
    only,
    received,
    require_count,
    require_dtype,
    require_lengths,
    require_ratio,
    require_rows,
)
from ronde.process_group.works import GroupWork


class DataMovement(GroupBase):
    """The collectives from broadcast to all-to-all, as torch calls them."""

    def broadcast(self, tensors: Sequence[Tensor], opts: Options = None) -> GroupWork:
        tensor = only(tensors, "tensors")

        def start() -> Works:
            return [self._communicator.broadcast(tensor.data, opts.rootRank)]

        return self._start("broadcast", start, lambda _: [tensor], opts)

    def allgather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Options = None,
    ) -> GroupWork:
        counts: list[list[int]] = [[] for _ in inputs]

        def start() -> Works:
            for targets, tensor in zip(outputs, inputs, strict=True):
                require_count(targets, self._size, "tensor_list")
                require_dtype(targets, tensor, "tensor_list")
            gather = self._communicator.all_gather
            return [
                gather(flattened(tensor), counts=sent)
                for tensor, sent in zip(inputs, counts, strict=True)
            ]

        def finish(results: list[Any]) -> list[Tensor]:
            for result, sent, targets in zip(results, counts, outputs, strict=True):
                require_lengths(sent, [target.numel() for target in targets])
                copy_apart(result, targets)
            return [target for targets in outputs for target in targets]

        return self._start("all_gather", start, finish, opts)

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Options = None,
    ) -> GroupWork:
        by_input = [list(each) for each in zip(*outputs, strict=True)]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(
        self, output: Tensor, tensor: Tensor, opts: Options = None
    ) -> GroupWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> GroupWork:
        def start(output: Tensor, tensor: Tensor) -> Work[Any]:
            require_dtype([output], tensor, "output")
            require_ratio(output, tensor, self._size, "output", "input")
            out = memory_of(output)
            return self._communicator.all_gather(flattened(tensor), out=out)

        return self._start_each(
            "all_gather", start, copy_if_needed, (outputs, inputs), opts
        )

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Options = None,
    ) -> GroupWork:
        tensor, root = only(inputs, "tensor"), opts.rootRank
        targets = list(outputs[0]) if self._rank == root else []

        def start() -> Works:
            if self._rank == root:
                require_count(targets, self._size, "gather_list")
                require_dtype(targets, tensor, "gather_list")
            data = flattened(tensor)
            splits = [data.numel() if r == root else 0 for r in range(self._size)]
            return [self._communicator.all_to_all(data, splits)]

        lengths = [target.numel() for target in targets] or [0] * self._size
        return self._start(
            "gather", start, lambda r: received(r, targets, lengths), opts
        )

    def scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: Options = None,
    ) -> GroupWork:
        output, is_root = only(outputs, "tensor"), self._rank == opts.rootRank

        def start() -> Works:
            data, splits = flattened(output)[:0], [0] * self._size
            if is_root:
                require_count(inputs[0], self._size, "scatter_list")
                require_dtype(inputs[0], output, "scatter_list")
                data = joined(inputs[0])
                splits = [each.numel() for each in inputs[0]]
            return [self._communicator.all_to_all(data, splits)]

        lengths = [0] * self._size
        lengths[opts.rootRank] = output.numel()
        return self._start(
            "scatter", start, lambda r: received(r, [output], lengths), opts
        )

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> GroupWork:
        def start() -> Works:
            for tensors, name in ((outputs, "output_list"), (inputs, "input_list")):
                require_count(tensors, self._size, name)
                require_dtype(tensors, inputs[0], name)
            splits = [each.numel() for each in inputs]
            return [self._communicator.all_to_all(joined(inputs), splits)]

        targets = list(outputs)
        return self._start("all_to_all", start, lambda r: received(r, targets), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Options = None,
    ) -> GroupWork:
        def start() -> Works:
            require_dtype([output], tensor, "output")
            taken = require_rows(output, output_splits, self._size, "output")
            splits = require_rows(tensor, input_splits, self._size, "input")
            row = tensor.shape[1:].numel()
            lengths.extend(count * output.shape[1:].numel() for count in taken)
            numels = [count * row for count in splits]
            return [self._communicator.all_to_all(flattened(tensor), numels)]

        lengths: list[int] = []
        return self._start(
            "all_to_all", start, lambda r: received(r, [output], lengths), opts
        )

    alltoall_base = all_to_all_single
