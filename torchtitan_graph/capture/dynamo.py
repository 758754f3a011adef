"""A second way to capture a step: Dynamo takes its forward pass, and the tracer takes that graph and its backward.

Note [Two captures]
The tracer runs a function, and sees what ran: a flag that it read, a counter that it raised are lost in the graph, and
nobody is told. Dynamo reads the function's code instead. What it makes beside the graph is a list of guards, what of
Python's values the graph rests on, and of what the function changes. So `dynamo_capture` checks the first (before the
first step, and whenever parameters are bound again) and refuses the second.

Dynamo is given fake tensors in the places of the state. Its graph is then run under the tracer as the forward pass
would be: it finds parameters and arguments where the function found them. Of its nodes nothing is kept but the module
that they are of, annotations and their lines of source. So signature, phases, DTensors and
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
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from torchtitan_graph.capture.arguments import positional_parameters, take_call
from torchtitan_graph.capture.calls import called_as, expect_arguments, expect_function, expect_state
from torchtitan_graph.capture.dimensions import DynamicShapes
from torchtitan_graph.capture.dynamic import Compared, Sizes, compare
from torchtitan_graph.capture.state import is_traced, live_state
from torchtitan_graph.capture.trace import Capture, InParts, fakes_of, make_fx_capture
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.signature import layout_of
from torchtitan_graph.graph.torch_private.dynamo import (
    WRAPPERS,
    NotCaptured,
    StrictCapture,
    capture_strictly,
    fake_mode_for_dynamo,
    run_wrapped,
)
from torchtitan_graph.graph.torch_private.fake import FakeTensorMode
from torchtitan_graph.graph.torch_private.sizes import is_symbolic, require
from torchtitan_graph.graph.torch_private.tracing import made_for, reparametrize

_CALL = "dynamo_capture(fn, module=model)(*arguments)"


@called_as(_CALL)
def dynamo_capture(
    fn: Callable[..., Any],
    module: nn.Module | None = None,
    *,
    device: Any = None,
    blocks: Mapping[str, nn.Module] = types.MappingProxyType({}),
    stack_traces: bool = False,
    dynamic_shapes: DynamicShapes | None = None,
    call_hierarchy: bool = False,
) -> Callable[..., TracedResult]:
    """Return a callable that lets Dynamo take `fn`, or its forward if it is `InParts`, for the arguments that it is
    called with: a `Capture`. `blocks` are captured one by one.

    Raises:
        UserError: what Dynamo or a graph can't hold, or what the function changes beside its result.
    """
    expect_state(_CALL, module, None)
    expect_function(_CALL, fn, module, device, blocks)
    if torch.__version__ < "2.13":
        raise UserError(
            f"compile.capture = 'dynamo': needs torch 2.13 or newer, and this is {torch.__version__}; use 'make_fx'"
        )
    if call_hierarchy:
        raise UserError(
            "compile.record_call_hierarchy = true (call_hierarchy=True): not with compile.capture = 'dynamo', which"
            " runs no function of the model's while it captures; use 'make_fx' (minimal_fx_tracer)"
        )
    in_make_fx = functools.partial(
        make_fx_capture, device=device, stack_traces=stack_traces, dynamic_shapes=dynamic_shapes
    )

    def capture(*args: Any, **kwargs: Any) -> TracedResult:
        expect_arguments(fn, args, kwargs)
        given = take_call(positional_parameters(fn), args, kwargs)
        sizes = Sizes(given.by_name, dynamic_shapes)
        mode = fake_mode_for_dynamo(sizes.env)
        leaves = [
            _faked(x, mode, device, sizes.strided(name, x)) if isinstance(x, Tensor) else sizes.number(name, x)
            for name, x in zip(given.names, given.leaves, strict=True)
        ]
        fake_args, fake_kwargs = pytree.tree_unflatten(leaves, given.in_spec)
        call = _Call.of(fn, args, kwargs)
        try:
            fakes = call.by_position(fake_args, fake_kwargs)
            replay, strict, constants = _captured(call, module or nn.Module(), fakes, mode, device)
            traced = in_make_fx(fn.with_forward(replay) if isinstance(fn, InParts) else replay, module)(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            in_make_fx(fn, module)(*args, **kwargs)  # what it refuses too it tells in words of the function's author
            if isinstance(error, NotCaptured):
                raise UserError(f"compile.capture = 'dynamo': {error}; change that, or use 'make_fx'") from error
            if "modified by an inplace operation" in str(error):
                raise UserError(
                    "compile.capture = 'dynamo': a checkpointed region writes in place to a value of the function"
                    " around it, which Dynamo makes its input, and backward computes the region again from that; write"
                    " to a copy in it, or use 'make_fx'"
                ) from error
            raise
        return dataclasses.replace(traced, guards=Guards(strict, constants, call))

    return capture


class _Call(NamedTuple):
    """A call of a function as Dynamo takes it: all arguments by position, first those of its parameters in their order,
    then those that can only be given by name.

    fn         the function that Dynamo takes
    whole      the function that is called; if it is `InParts`, Dynamo takes its forward
    num_taken  how many of the arguments `fn` takes
    keywords   the names of the last ones
    """

    fn: Callable[..., Any]
    whole: Callable[..., Any]
    num_taken: int
    keywords: tuple[str, ...]

    @property
    def replaced(self) -> Callable[..., Any]:
        """The function in whose place Dynamo's graph is called."""
        return self.whole.forward if isinstance(self.whole, InParts) else self.whole

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
        positional, by_name = _bound(fn, args, kwargs)
        num_given, keywords = len(positional) + len(by_name), tuple(by_name)
        if not isinstance(fn, InParts):
            return cls(_by_position(fn, len(positional), keywords), fn, num_given, keywords)
        kinds = [each.kind for each in inspect.signature(fn.forward).parameters.values()]
        num_taken = num_given if inspect.Parameter.VAR_POSITIONAL in kinds else min(num_given, len(kinds))
        return cls(_by_position(fn.forward, num_taken, ()), fn, num_taken, keywords)

    def by_position(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what of a call's arguments `fn` takes."""
        positional, by_name = _bound(self.whole, args, kwargs)
        return (*positional, *(by_name[name] for name in self.keywords))[: self.num_taken]


def _bound(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments by position as far as they can be, and those that are left by name, sorted."""
    if not kwargs:
        return args, {}  # a builtin has no signature to look at
    bound = inspect.signature(fn).bind(*args, **kwargs)
    return bound.args, dict(sorted(bound.kwargs.items()))


def _by_position(fn: Callable[..., Any], num_positional: int, keywords: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function in Python, which is what Dynamo reads, that takes all arguments by position."""
    if keywords:

        def call(*args: Any) -> Any:
            return fn(*args[:num_positional], **dict(zip(keywords, args[num_positional:], strict=True)))

        return call
    if inspect.isfunction(fn):
        return fn
    call_it: Callable[..., Any] = lambda *args, function=fn: function(*args)  # noqa: E731
    return functools.wraps(fn)(call_it) if positional_parameters(fn) else call_it  # names of arguments, for messages


def _captured(
    call: _Call, module: nn.Module, fakes: tuple[Any, ...], mode: FakeTensorMode, device: Any
) -> tuple[Callable[..., Any], StrictCapture, dict[int, Tensor]]:
    """Give Dynamo's graph, to be called as the function is, what Dynamo says of it, and which of its inputs are
    constants."""
    fn = call.fn
    state = {name: _faked(x, mode, device) for (_, name), x in live_state(module, None).items()}
    with reparametrize(module, state):
        strict = capture_strictly(fn, fakes, Compared)
        found = strict.inputs(*fakes)
    names = {str(id(child)): name for name, child in module.named_modules()}
    # Tensor parallelism's wrapper (parallel/parallelize.py) lets a module have its local parts during a call.
    found_changed = {each: line for each, line in strict.changed.items() if not line.endswith(" in _on_locals")}
    if changed := {_by_name(each): line for each, line in found_changed.items()}:
        told = ", ".join(f"{each} ({line})" if line else each for each, line in sorted(changed.items()))
        raise UserError(
            f"compile.capture = 'dynamo': the captured function changes {told}, which a graph would not: "
            "return the new value instead, and write it back outside"
        )
    _drop_sizes_of_rules(strict.gm)
    _keep_metadata(strict.gm, names)
    # Tensors that the function takes from elsewhere are constants of the graph.
    constants = {i: x for i, x in enumerate(found) if isinstance(x, Tensor) and not is_traced(x)}

    @functools.wraps(call.replaced)
    def replay(*args: Any, **kwargs: Any) -> Any:
        taken = args if isinstance(call.whole, InParts) else call.by_position(args, kwargs)
        for relation, where in strict.holds(taken):
            compare(relation, where)
        return strict.result(_run(strict.gm, *strict.inputs(*taken)), taken)

    return replay, strict, constants


def _faked(tensor: Tensor, mode: FakeTensorMode, device: Any, strided: Any = None) -> Tensor:
    """Give a tensor without numbers like this one; on `device`, which Dynamo's graph names. A plain one has the sizes
    and strides of `strided`."""
    layout = layout_of(tensor)
    with mode:
        parts = layout.flatten(tensor)
        plain = [(x, strided if x is tensor and strided else (x.shape, x.stride())) for x in parts]
        fake = layout.unflatten(fakes_of(plain, mode, device)).detach()
    return (
        nn.Parameter(fake, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else fake.requires_grad_(tensor.requires_grad)
    )


def _drop_sizes_of_rules(gm: GraphModule) -> None:
    """Drop the sizes that Dynamo hands, beside each tensor, to what flex attention's functions close over.

    flex_attention(q, k, v, score, (..., rule), scale, options, (n, bias), (n, m, documents))
    flex_attention(q, k, v, score, (..., rule), scale, options, (bias,), (documents,))
    """
    for inner in gm.modules():
        nodes = inner.graph.nodes if isinstance(inner, GraphModule) else ()
        for node in (each for each in nodes if each.target is torch.ops.higher_order.flex_attention):
            args: Any = node.args
            *first, of_score, of_rule = args
            given = []
            for body, lifted in ((args[3], of_score), (args[4][-1], of_rule)):
                function: Any = getattr(inner, body.target)
                kept = []
                places = function.graph.find_nodes(op="placeholder")[-len(lifted) :] if lifted else []
                for x, place in zip(lifted, places, strict=True):
                    if place.users or not is_symbolic(x.meta["example_value"]):
                        kept.append(x)
                    else:
                        function.graph.erase_node(place)
                function.recompile()
                given.append(tuple(kept))
            node.args = (*first, *given)


def _keep_metadata(gm: GraphModule, names: Mapping[str, str]) -> None:
    """Leave on nodes what the tracer is to take over. Dynamo keys its stack of modules by their identity, with a number
    behind it where one is called again. What a region computes is kept alike; but a node in another body (an autograd
    function's, a mask rule's) says nothing: the node that calls the body does."""
    regions = [getattr(gm, node.args[0].target) for node in gm.graph.nodes if node.target in WRAPPERS]
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            calls = (key.partition("@")[0] for key in node.meta.get("nn_module_stack", {}))
            stack = [names[call] for call in calls if call in names]
            words = {**node.meta.get("custom", {}), **({"module": stack[-1]} if stack else {})}
            kept = {"stack_trace": node.meta["stack_trace"]} if node.meta.get("stack_trace") else {}
            node.meta = {"custom": words, **kept}
    for body in gm.children():
        if any(body is region for region in regions):
            _keep_metadata(body, names)  # type: ignore[arg-type]
            continue
        for inner in body.modules():
            for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
                node.meta = {}


class Guards:
    """What a graph rests on beside its inputs: called with a call's arguments, it refuses what is not as it was.

    Args:
        constants: of the tensors that Dynamo's graph takes, those that are constants of ours, by number.
        call: how a call's arguments become those of the function that Dynamo took.
    """

    def __init__(self, strict: StrictCapture, constants: Mapping[int, Tensor], call: _Call) -> None:
        self._strict, self._constants, self._call = strict, constants, call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        taken = self._call.by_position(args, kwargs)
        if failed := self._strict.violated(taken):
            raise UserError(f"the graph rests on {_by_name(failed)}: set it back to what it was, or capture again")
        found = self._strict.inputs(*taken)
        if replaced := [self._strict.sources[i] for i, x in self._constants.items() if found[i] is not x]:
            raise UserError(
                f"{', '.join(map(_by_name, replaced))} is another tensor than the one that was captured, which is a "
                "constant of the graph: write to it in place, make it a buffer, or capture again"
            )

    @property
    def values(self) -> list[str]:
        """The values among them, as `model.layers.0.flag == False (the line that reads it)`, but for types and such."""
        return [_by_name(each) for each in self._strict.guards if re.match(r"(not )?[LG]\[[^ ]* ==", each)]


class _Replay(Interpreter):
    """Runs a graph of Dynamo's under the tracer, regions in their places: the graph that comes of it has none."""

    def run_node(self, n: Node) -> Any:
        with made_for(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return getattr(self, n.op)(n.target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in WRAPPERS:
            return run_wrapped(target, args, kwargs, _run)
        if target is torch.ops.aten._assert_scalar.default:  # what Dynamo makes of it
            return require(args[0])
        return super().call_function(target, args, kwargs)


def _run(gm: GraphModule, *inputs: Any) -> Any:
    return _Replay(gm).run(*inputs, enable_io_processing=False)


def _by_name(source: str) -> str:
    """Write Dynamo's name of a value as the function's author does: model.layers.0 for L['model']._modules[...]."""
    source = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", source)
    source = re.sub(r"\.__dict__\['([^']+)'\]", r".\1", source)
    source = re.sub(r"\b[LG]\['([^']+)'\]", r"\1", source)
    return re.sub(r"\b__import_(\w+)", lambda found: found[1].replace("_dot_", "."), source)


CAPTURES: Mapping[str, Capture] = {"make_fx": make_fx_capture, "dynamo": dynamo_capture}
