"""Parameters are trained with the settings of the first entry that matches their name."""

import pytest
import torch
from torch import nn

from torchtitan_graph.config import job
from torchtitan_graph.config.job import ParamGroup
from torchtitan_graph.errors import UserError
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer, check_optimizer


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "out": nn.Linear(4, 3)})


def train(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    schedule = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=2), total_steps=5)
    for _ in range(4):
        for param in module.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        schedule.step()
    return list(module.parameters())


ENTRIES = [ParamGroup("*.bias", weight_decay=0.0), ParamGroup("norm.*", lr=1e-1, beta2=0.5), ParamGroup("out.*")]


def config(entries: list[ParamGroup]) -> job.Optimizer:
    return job.Optimizer(lr=1e-2, weight_decay=0.3, beta1=0.8, param_groups=entries)


@pytest.mark.parametrize("entries", [ENTRIES, [ENTRIES[1], ENTRIES[0], ENTRIES[2]]], ids=["as_written", "swapped"])
def test_steps_are_bitwise_those_of_torch_groups_and_the_first_match_wins(entries: list[ParamGroup]) -> None:
    ours, theirs = model(), model()
    named = dict(theirs.named_parameters())
    groups = [
        {"params": [named["norm.bias"], named["out.bias"]], "weight_decay": 0.0},
        {"params": [named["norm.weight"]], "lr": 1e-1, "betas": (0.8, 0.5)},
        {"params": [named["embed.weight"], named["out.weight"]]},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.3, betas=(0.8, 0.95), fused=True)
    pairs = zip(train(build_optimizer(ours, config(entries)), ours), train(reference, theirs), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) == (entries is ENTRIES)


def test_the_schedule_multiplies_every_groups_lr_and_the_rest_is_first() -> None:
    optimizer = build_optimizer(model(), config(ENTRIES))
    schedule = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=2), total_steps=5)
    assert schedule.get_last_lr() == [1e-2 / 2, 1e-2 / 2, 1e-1 / 2, 1e-2 / 2]
    assert [group["pattern"] for group in optimizer.param_groups] == ["", "*.bias", "norm.*", "out.*"]


def test_all_parameters_may_be_in_entries() -> None:
    module = model()
    train(build_optimizer(module, config([ParamGroup("*")])), module)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "out.wieght",
            "entry 2: pattern = 'out.wieght': matches no parameter; names are such as out.weight, matched in full",
        ),
        ("norm", "matches no parameter; names are such as"),
        ("*.bias", "the entries before it have all that it matches"),
    ],
)
def test_an_entry_without_parameters_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_optimizer(model().to("meta"), config([ParamGroup("*.bias"), ParamGroup(pattern)]))
    assert message in str(caught.value)


def test_a_part_of_a_model_need_not_have_what_an_entry_matches() -> None:
    """A pipeline's stage: the checks before any stage is made have seen the whole model."""
    part = model()
    del part["out"], part["norm"]
    entries = config([ParamGroup("out.*"), ParamGroup("embed.*", lr=1e-1)])
    optimizer = build_optimizer(part, entries, in_part=True)
    train(optimizer, part)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 0, 1]
