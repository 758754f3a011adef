"""A traced function in a file: the same numbers and the same refusals after it is read; a forged file is refused."""

import copy
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtitan_graph.capture.dynamo import dynamo_capture
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import TracedResult, run_traced
from torchtitan_graph.errors import UserError
from torchtitan_graph.formats.traced_file import load_traced, save_traced
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.cleanup_update import cleanup_update

X = torch.arange(6.0).view(2, 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def traced(model: nn.Module) -> TracedResult:
    def step(batch: dict[str, Tensor], *, scale: float) -> Any:
        loss = model(batch["x"]).square().mean() * scale
        return loss, {"grads": torch.autograd.grad(loss, list(model.parameters()))}, None

    return minimal_fx_tracer(step, module=model)({"x": X}, scale=2.0)


def flat(result: Any) -> list[Any]:
    loss, found, nothing = result
    return [loss, *found["grads"], nothing]


@pytest.mark.parametrize("edit", [lambda gm: gm, cleanup])
def test_what_is_loaded_runs_as_what_was_saved(edit: Callable, tmp_path: Path) -> None:
    model = net()
    step = traced(model)
    edit(step.gm)
    save_traced(step, tmp_path / "step.json")
    again = load_traced(tmp_path / "step.json", {"x": torch.zeros(2, 3)}, scale=2.0)
    mine, theirs = (flat(run_traced(each, model)({"x": X}, scale=2.0)) for each in (step, again))
    assert mine.pop() is theirs.pop() is None
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_what_is_loaded_refuses_what_the_trace_refuses(tmp_path: Path) -> None:
    save_traced(traced(net()), tmp_path / "step.json")
    again = load_traced(tmp_path / "step.json", {"x": X}, scale=2.0)
    with pytest.raises(UserError, match="scale is 3.0, traced with 2.0"):
        run_traced(again, net())({"x": X}, scale=3.0)
    with pytest.raises(UserError, match="the module is a torch.nn.modules.linear.Bilinear.*, traced as .*Linear"):
        run_traced(again, like_a_linear())
    for args, scale in ((({"y": X},), 2.0), (({"x": X},), 3.0), (({"x": X}, X), 2.0)):
        with pytest.raises(UserError, match="load_traced: .*step.json: (not what was|was traced)"):
            load_traced(tmp_path / "step.json", *args, scale=scale)


def like_a_linear() -> nn.Module:
    model = nn.Bilinear(1, 1, 3)
    model.weight, model.bias = net().weight, net().bias
    return model


def test_an_optimizers_step_is_saved_with_its_options(tmp_path: Path) -> None:
    def stepped(is_loaded: bool) -> list[Tensor]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step(X)
        found = minimal_fx_tracer(step, model, optimizer)(X)
        if is_loaded:
            with pytest.raises(UserError, match="a mark for profilers, which the pass cleanup_update drops"):
                save_traced(found, tmp_path / "step.json")
            cleanup_update(found.gm)
            save_traced(found, tmp_path / "step.json")
            found = load_traced(tmp_path / "step.json", X)
        run_traced(found, model, optimizer)(X)
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(stepped(False), stepped(True), strict=True))


def test_autocast_is_saved(tmp_path: Path) -> None:
    model = net()
    with torch.autocast("cpu", torch.bfloat16):
        save_traced(minimal_fx_tracer(lambda x: model(x), model)(X), tmp_path / "f.json")
        run = run_traced(load_traced(tmp_path / "f.json", X), model)
        assert torch.equal(run(X), model(X))
    with pytest.raises(UserError, match="torch.autocast is off, traced with"):
        run(X)


@pytest.mark.parametrize("write", [pickle.dumps, copy.deepcopy, copy.copy])
def test_pickling_and_copying_are_refused_with_what_to_write(write: Callable) -> None:
    with pytest.raises(UserError, match=r"lose its signature. Write save_traced\(traced, path\)"):
        write(traced(net()))


HELD = torch.ones(100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: minimal_fx_tracer(lambda x: x + HELD)(torch.ones(100)), "that the model closes over"),
        (lambda: minimal_fx_tracer(lambda x: x * x.sum().item())(X), "numbers that it reads"),
        (lambda: minimal_fx_tracer(lambda x: {1: x})(X), "a result in other containers|among a graph's constants"),
        pytest.param(
            lambda: dynamo_capture(lambda x: x * 2)(X),
            "guards of Dynamo",
            marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo captures from torch 2.13 on"),
        ),
    ],
)
def test_what_can_not_be_saved_is_refused_by_name(
    make: Callable[[], TracedResult], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"save_traced: .*({message}).*can't be stored; trace again"):
        save_traced(make(), tmp_path / "f.json")
    assert not list(tmp_path.iterdir())


def test_a_wrong_file_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="save_traced: traced is|traced is of class Tensor"):
        save_traced(X, tmp_path / "f.json")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"save_traced: .*nowhere/f.json can't be written"):
        save_traced(traced(net()), tmp_path / "nowhere" / "f.json")
    with pytest.raises(UserError, match=r"load_traced: .*f.json: can't be read: .*No such file"):
        load_traced(tmp_path / "f.json", X)


FORGED: list[Callable[[dict[str, Any]], Any]] = [
    lambda found: found.clear(),
    lambda found: found.update(format=1),
    lambda found: found.update(autocast={"cpu": "os"}),
    lambda found: found.update(options={"lr": {"list": []}}),
    lambda found: found.update(device="os.system"),
    lambda found: found.update(arguments="*"),
    lambda found: found["step"].update(targets=["os::system"]),
    lambda found: found["step"]["graph"]["nodes"].pop(),
    lambda found: found["step"]["inputs"].pop(),
]


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return a file's content with the digest that fits."""
    text = json.dumps({**content, "digest": ""}, separators=(",", ":"))
    return {**content, "digest": hashlib.sha256(text.encode()).hexdigest()}


def test_a_changed_number_or_operator_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    save_traced(minimal_fx_tracer(lambda x: x * 2.5 + 1)(X), path)
    good = path.read_text()
    for old, new in (("2.5", "7.5"), ("aten::add.Tensor", "aten::sub.Tensor")):
        path.write_text(good.replace(old, new))
        with pytest.raises(UserError, match="load_traced: .*step.json: is no file of save_traced: it is damaged"):
            load_traced(path, X)
    path.write_text(good)
    assert torch.equal(run_traced(load_traced(path, X))(X), X * 2.5 + 1)


@pytest.mark.parametrize("number", range(len(FORGED)))
def test_a_forged_file_is_refused(number: int, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    save_traced(traced(net()), path)
    content = json.loads(path.read_text())
    FORGED[number](content)
    path.write_text(json.dumps(sealed(content)))
    with pytest.raises(UserError, match="load_traced: .*step.json: (is no file of|not what was|was traced for)"):
        load_traced(path, {"x": X}, scale=2.0)


def test_arguments_of_another_shape_or_dtype_are_refused_where_the_file_is_read(tmp_path: Path) -> None:
    save_traced(minimal_fx_tracer(lambda x: x.sum(0))(torch.ones(2, 3)), tmp_path / "f.json")
    for other, said in ((torch.ones(4, 3), r"\[4, 3\]"), (torch.ones(2, 3).double(), "torch.float64")):
        with pytest.raises(UserError, match=rf"load_traced: .*f.json: x has shape .*{said}.*, traced with \[2, 3\]"):
            load_traced(tmp_path / "f.json", other)
