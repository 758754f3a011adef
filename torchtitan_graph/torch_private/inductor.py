"""Compile a graph by Inductor."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def compile_by_inductor(
    gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], options: Mapping[str, Any]
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Compile a graph that returns a tuple of tensors, for inputs of these layouts; nothing is allocated.

    The compiled function takes the inputs as a list, which it empties: an input without other references is freed after
    its last use inside. `standalone_compile`, which is public, holds them all till it returns.

    `torch.fx.passes.regional_inductor` would find and compile regions, but sorts the whole graph again (undoing the
    placement of collectives), gives adjacent regions one set of options, and compiles equal ones again. `torch.compile`
    would trace, and guard, a graph again.
    """
    import torch._inductor.config  # with Dynamo it is a third of the trainer's import time

    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    with fake_mode:
        fakes: list[Any] = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
    for node, fake in zip(gm.graph.find_nodes(op="placeholder"), fakes, strict=True):
        node.meta["val"] = fake
    from torch._dynamo.utils import GmWrapper  # both take long to import, and few runs need them
    from torch._inductor.compile_fx import compile_fx

    with tracing(TracingContext(fake_mode)), torch._inductor.config.patch(dict(options)), _same_bits_each_run():
        run: Any = compile_fx(GmWrapper(gm, list), fakes)  # type: ignore[arg-type]

    def compiled(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:  # FX calls torch's own functions by their names
        return run(inputs)

    return compiled


@contextlib.contextmanager
def _same_bits_each_run() -> Iterator[None]:
    """Forbid atomic additions, whose order differs from run to run, and on a GPU reductions chosen by timing."""
    was = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only_warns)
