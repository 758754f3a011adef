"""A module under hooks of data parallelism is refused by the wrapper's name, in both captures."""

from collections.abc import Callable

import pytest
import torch
from sized import CAPTURES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError

X = torch.ones(2, 3)


def sharded() -> nn.Module:
    return fully_shard(nn.Linear(3, 3), mesh=init_device_mesh("cpu", (1,)))


def inside() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), sharded())


def reduced() -> nn.Module:
    """It ran before, so that it has made what it makes first."""
    model = DistributedDataParallel(nn.Linear(3, 3))
    model(X).sum().backward()
    return model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (sharded, r"the module is wrapped by fully_shard, .* trace the module without it\..*training.step"),
        (inside, r"1 is wrapped by fully_shard"),
        (reduced, r"the module is wrapped by DistributedDataParallel, .* trace its .module\."),
    ],
)
def test_a_wrapper_is_named_with_what_works(make: Callable[[], nn.Module], message: str, capture: str) -> None:
    model = make()
    with pytest.raises(UserError, match=message):
        CAPTURES[capture](lambda x: model(x).sum(), model)(X)


@pytest.mark.usefixtures("one_rank")
def test_an_optimizer_of_a_sharded_module_is_traced() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]

    def step(gradients: list[Tensor]) -> None:
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        optimizer.step()

    gradients = [torch.ones_like(p).detach() for p in model.parameters()]
    run_traced(minimal_fx_tracer(step, model, optimizer)(gradients), model, optimizer)(gradients)
    assert all(torch.equal(p.to_local(), x - 0.5) for p, x in zip(model.parameters(), before, strict=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_module_that_torch_compiles_is_captured_as_itself(capture: str) -> None:
    """Its wrapper has a length that can't be asked for."""
    model = torch.compile(nn.Linear(3, 3), backend="eager")
    run = run_traced(CAPTURES[capture](lambda x: model(x), model)(X), model)
    assert torch.equal(run(X), model._orig_mod(X))
