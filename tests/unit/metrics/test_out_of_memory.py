"""What is said when memory runs out."""

import pytest
import torch
from torch import Tensor, nn

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.config import JobConfig
from torchtitan_graph.metrics.out_of_memory import is_out_of_memory, report
from torchtitan_graph.runtime.observe import Watchable


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 64, bias=False)

    def forward(self, x: Tensor, size: int) -> Tensor:
        y = self.wide(x).tanh()
        return y.sum() + y.new_empty((size,)).sum()


def fail(size: int) -> tuple[BaseException, Model, torch.optim.Optimizer]:
    """Take a step, then run a graph that needs `size` floats at once."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(128, 8), 1).backward()
    optimizer.step()
    x = torch.ones(128, 8)
    gm = minimal_fx_tracer(lambda x: model(x, size), module=model)(x).gm
    with pytest.raises(RuntimeError) as caught:
        Watchable(gm)([model.wide.weight.detach(), x])
    return caught.value, model, optimizer


def test_the_report_says_when_what_and_what_would_help() -> None:
    error, model, optimizer = fail(2**50)
    assert is_out_of_memory(error)
    lines = report(error, "after 3 steps", model, optimizer, JobConfig()).splitlines()
    assert lines[0].startswith("after 3 steps: out of memory: ")
    assert lines[1].startswith("held: parameters 0.000 GiB, gradients 0.000 GiB, optimizer 0.000 GiB, values of the")
    largest = [line.split("GiB  ")[1] for line in lines[3 : lines.index("what takes less memory:")]]
    assert largest[0] == "values of the step: forward wide mm  float32[128, 64]" or "tanh" in largest[0]
    assert "parameters: wide.weight  float32[64, 8]" in largest
    assert "gradients: wide.weight  float32[64, 8]" in largest
    assert "optimizer: wide.weight exp_avg  float32[64, 8]" in largest
    assert lines[lines.index("what takes less memory:") + 1].startswith('  activation_checkpoint.mode = "full" (now')


def test_what_is_in_use_already_is_no_advice() -> None:
    error, model, optimizer = fail(2**50)
    config = JobConfig()
    config.activation_checkpoint.mode = "full"
    config.training.local_batch_size = 1
    text = report(error, "", model, optimizer, config)
    assert "activation_checkpoint.mode" not in text and "local_batch_size" not in text
    assert "training.seq_len below 2048" in text


def test_other_errors_are_none() -> None:
    assert not is_out_of_memory(RuntimeError("shapes don't match"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
