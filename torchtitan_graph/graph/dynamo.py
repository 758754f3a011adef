"""A second way to capture a step: Dynamo takes its forward pass, and the tracer takes that graph and its backward.

Note [Two captures]
The tracer runs a function, and sees what ran: a flag that it read, a counter that it raised are lost in the graph, and
nobody is told. Dynamo reads the function's code instead. What it makes beside the graph is a list of guards, what of
Python's values the graph rests on, and of what the function changes. So `dynamo_capture` checks the first (before the
first step, and whenever parameters are bound again) and refuses the second.

Dynamo is given fake tensors in the places of the state. Its graph is then run under the tracer as the forward pass
would be: it finds parameters and arguments where the function found them. Of its nodes nothing is kept but the module
that they are of, annotations, and their lines of source where these are asked for. So signature, phases, DTensors and
refusals are the tracer's own, and the two captures can be compared node by node. Every block is captured: those that
are alike are not stamped.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter

from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.dynamic import DynamicShapes
from torchtitan_graph.graph.signature import layout_of
from torchtitan_graph.graph.state import is_traced, live_state
from torchtitan_graph.graph.torch_private import (
    FakeTensorMode,
    NotCaptured,
    StrictCapture,
    capture_strictly,
    dynamic_marks,
    fake_mode_for_dynamo,
    reparametrize,
)
from torchtitan_graph.graph.trace import Capture, InParts, TracedResult, fakes_of, make_fx_capture


def dynamo_capture(
    fn: Callable[..., Any],
    module: nn.Module,
    arguments: tuple[Any, ...],
    *,
    device: Any,
    blocks: Mapping[str, nn.Module] = types.MappingProxyType({}),
    stack_traces: bool = False,
    dynamic_shapes: DynamicShapes | None = None,
) -> TracedResult:
    """Let Dynamo take `fn`, or its forward if it is `InParts`: a `Capture`. `blocks` are captured one by one.

    Raises:
        UserError: what Dynamo or a graph can't hold, or what the function changes beside its result.
    """
    if torch.__version__ < "2.13":
        raise UserError(
            f"compile.capture = 'dynamo': needs torch 2.13 or newer, and this is {torch.__version__}; use 'make_fx'"
        )
    if dynamic_shapes or any(dynamic_marks(x) for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)):
        # It would decide by the size that it is given, and its guards are not checked at each call.
        raise UserError("compile.capture = 'dynamo': takes no dynamic dimensions; use 'make_fx', or remove the mark")
    in_make_fx = functools.partial(make_fx_capture, device=device, stack_traces=stack_traces)
    forward = fn.forward if isinstance(fn, InParts) else fn
    taken = arguments[: len(inspect.signature(forward).parameters)] if isinstance(fn, InParts) else arguments
    try:
        replay, guards = _captured(forward, module, taken, device, stack_traces)
    except UserError:
        raise
    except Exception as error:
        in_make_fx(fn, module, arguments)  # what it refuses too it tells in words of the function's author
        if isinstance(error, NotCaptured):
            raise UserError(f"compile.capture = 'dynamo': {error}; change that, or use 'make_fx'") from error
        raise
    traced = in_make_fx(fn.with_forward(replay) if isinstance(fn, InParts) else replay, module, arguments)
    return dataclasses.replace(traced, guards=lambda *args: guards(args[: len(taken)]))


def _captured(
    fn: Callable[..., Any], module: nn.Module, arguments: tuple[Any, ...], device: Any, stack_traces: bool
) -> tuple[Callable[..., Any], Callable[[tuple[Any, ...]], None]]:
    """Give Dynamo's graph, to be called as `fn` is, and what checks that it still holds for a call's arguments."""
    if not inspect.isfunction(fn):
        fn = functools.wraps(fn)(lambda *args, inner=fn: inner(*args))
    mode = fake_mode_for_dynamo()
    state = {name: _faked(x, mode, device) for (_, name), x in live_state(module, None).items()}
    fakes = pytree.tree_map_only(Tensor, lambda x: _faked(x, mode, device), arguments)
    with reparametrize(module, state):
        strict = capture_strictly(fn, fakes)
        found = strict.inputs(*fakes)
    names = {str(id(child)): name for name, child in module.named_modules()}
    if changed := sorted({_by_name(each) for each in strict.changed if not each.endswith("._parameters")}):
        raise UserError(
            f"compile.capture = 'dynamo': the captured function changes {', '.join(changed)}, which a graph would not: "
            "return the new value instead, and write it back outside"
        )
    _keep_metadata(strict.gm, names, stack_traces)
    # Tensors that the function takes from elsewhere are constants of the graph.
    constants = {i: x for i, x in enumerate(found) if isinstance(x, Tensor) and not is_traced(x)}

    @functools.wraps(fn)
    def replay(*args: Any) -> Any:
        values = Interpreter(strict.gm).run(*strict.inputs(*args), enable_io_processing=False)
        return strict.result(values, args)

    return replay, functools.partial(_check, strict, constants)


def _faked(tensor: Tensor, mode: FakeTensorMode, device: Any) -> Tensor:
    """Give a tensor without numbers like this one; on `device`, which Dynamo's graph names."""
    layout = layout_of(tensor)
    with mode:
        plain = [(x, (x.shape, x.stride())) for x in layout.flatten(tensor)]
        fake = layout.unflatten(fakes_of(plain, mode, device)).detach()
    return (
        nn.Parameter(fake, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else fake.requires_grad_(tensor.requires_grad)
    )


def _keep_metadata(gm: GraphModule, names: Mapping[str, str], stack_traces: bool) -> None:
    """Leave on nodes what the tracer is to take over. Dynamo keys its stack of modules by their identity, with a number
    behind it where one is called again. A node in a body (an autograd function's, a mask rule's) says nothing: the node
    that calls the body does."""
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            calls = (key.partition("@")[0] for key in node.meta.get("nn_module_stack", {}))
            stack = [names[call] for call in calls if call in names]
            words = {**node.meta.get("custom", {}), **({"module": stack[-1]} if stack else {})}
            kept = {"stack_trace": node.meta.get("stack_trace")} if stack_traces else {}
            node.meta = {"custom": words, **kept} if words else kept
    for body in gm.children():
        for inner in body.modules():
            for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
                node.meta = {}


def _check(strict: StrictCapture, constants: Mapping[int, Tensor], arguments: tuple[Any, ...]) -> None:
    """Refuse a call if something that the graph rests on is not as it was."""
    if failed := strict.violated(arguments):
        raise UserError(f"the graph rests on {_by_name(failed)}: set it back to what it was, or capture again")
    found = strict.inputs(*arguments)
    if replaced := [strict.sources[i] for i, x in constants.items() if found[i] is not x]:
        raise UserError(
            f"{', '.join(map(_by_name, replaced))} is another tensor than the one that was captured, which is a "
            "constant of the graph: write to it in place, make it a buffer, or capture again"
        )


def _by_name(source: str) -> str:
    """Write Dynamo's name of a value as the function's author does: model.layers.0 for L['model']._modules[...]."""
    source = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", source)
    source = re.sub(r"\.__dict__\['([^']+)'\]", r".\1", source)
    return re.sub(r"\b[LG]\['([^']+)'\]", r"\1", source)


CAPTURES: Mapping[str, Capture] = {"make_fx": make_fx_capture, "dynamo": dynamo_capture}
