"""What DiLoCo keeps of a model next to it: each parameter's value as of its last synchronisation, and the outer
optimizers' momentum."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torchtitan_graph.capture.state import local_part
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.parallel.chunk import Chunk, chunk_of

MOMENTUM = "momentum_buffer"  # torch's name of SGD's state


class Outer:
    """The fragments of this rank's part of a model, with the state of DiLoCo of each.

    modules     the trained parameters of each fragment
    originals   of each fragment, this rank's parts of its parameters as of its last synchronisation, in the host's
                memory
    optimizers  the outer optimizer of each fragment: SGD on the living parameters
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str], table: job.FaultTolerance) -> None:
        """Allocate the state, so that a checkpoint can be read into it, or another group's state.

        Raises UserError if this rank has fewer trained blocks than there are fragments.
        """
        self._named = fragments_of(model, blocks, table.num_fragments)
        self.modules = [nn.ParameterList(fragment.values()) for fragment in self._named]
        self.originals = [[_on_host(local_part(p)) for p in module] for module in self.modules]
        self.optimizers = [
            torch.optim.SGD(
                module.parameters(),
                lr=table.outer_lr,
                momentum=table.outer_momentum,
                nesterov=table.outer_nesterov and table.outer_momentum > 0,  # without momentum there is none to look at
                foreach=False,
            )
            for module in self.modules
        ]
        for optimizer, module in zip(self.optimizers, self.modules, strict=True):
            for p in module if table.outer_momentum else ():
                optimizer.state[p][MOMENTUM] = torch.zeros_like(p, requires_grad=False)

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the current parameters: they become those of the last synchronisation."""
        for module, originals in zip(self.modules, self.originals, strict=True):
            for p, original in zip(module, originals, strict=True):
                original.copy_(local_part(p))

    def chunks(self) -> dict[str, Chunk]:
        """Return this rank's parts of the state, by their names in a checkpoint: the live storage itself."""
        chunks = {}
        for fragment, originals, optimizer in zip(self._named, self.originals, self.optimizers, strict=True):
            for (name, p), original in zip(fragment.items(), originals, strict=True):
                chunks[f"outer.{name}.original"] = chunk_of(p)._replace(local=original)
                if p in optimizer.state:
                    chunks[f"outer.{name}.{MOMENTUM}"] = chunk_of(optimizer.state[p][MOMENTUM])
        return chunks


def fragments_of(model: nn.Module, blocks: Iterable[str], number: int) -> list[dict[str, nn.Parameter]]:
    """Divide the trained parameters, by name, into so many runs of blocks, as even as can be. What is before the blocks
    goes with the first, what is behind them with the last.

    Raises UserError if there are fewer blocks.
    """
    names = [*blocks]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    block_of_each = {name: block_of(name, names) for name in trained}
    order = [block for block in names if block in block_of_each.values()]
    if number > max(len(order), 1):
        raise UserError(
            f"fault_tolerance.num_fragments = {number}: a rank has {len(order)} blocks with trained parameters; set it"
            f" to at most {max(len(order), 1)}"
        )
    fragments: list[dict[str, nn.Parameter]] = [{} for _ in range(number)]
    outside = 0  # the fragment of what is in no block
    for name, p in trained.items():
        block = block_of_each[name]
        place = outside if block is None else order.index(block) * number // len(order)
        fragments[place][name] = p
        outside = number - 1 if block is not None else outside
    return fragments


def _on_host(part: Tensor) -> Tensor:
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
