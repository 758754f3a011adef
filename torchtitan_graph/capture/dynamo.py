"""The second capture of a step: Dynamo captures its forward pass, and the tracer traces that graph and its backward.

Note [Two captures]
The tracer records the operators that ran: a flag that the function read, a counter that it incremented are lost in the
graph, silently. Dynamo reads the function's code instead. In addition to the graph it returns guards, the Python values
that the graph depends on, and the function's side effects. So `dynamo_capture` checks the first (before the first step,
and whenever parameters are bound again) and refuses the second.

Dynamo gets fake tensors in place of the state. Its graph is then run under the tracer as the forward pass would be: it
reads parameters and arguments from the same places as the function. Only its nodes' module, annotations and source
lines are kept. So signature, phases, DTensors and refusals are the tracer's own, and the two captures can be compared
node by node. Every block is captured: blocks that are alike are not stamped.
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
from torchtitan_graph.torch_private.dynamo import (
    WRAPPERS,
    NotCaptured,
    StrictCapture,
    capture_strictly,
    fake_mode_for_dynamo,
    run_wrapped,
)
from torchtitan_graph.torch_private.fake import FakeTensorMode
from torchtitan_graph.torch_private.sizes import is_symbolic, require
from torchtitan_graph.torch_private.tracing import annotated_as, refuse_wrapper, reparametrize

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
    """Return a callable that captures `fn`, or its forward if it is `InParts`, by Dynamo for the arguments of the call:
    a `Capture`. `blocks` are captured one by one.

    Raises:
        UserError: names what Dynamo or a graph can't contain, or a side effect of the function.
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
    for name, child in module.named_modules() if module is not None else ():
        refuse_wrapper(name, child)  # Dynamo reads the hooks of some, and leaves out those in C++
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
            replay, strict, constants = _captured(call, nn.Module() if module is None else module, fakes, mode, device)
            traced = in_make_fx(fn.with_forward(replay) if isinstance(fn, InParts) else replay, module)(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            in_make_fx(fn, module)(*args, **kwargs)  # what it also refuses gets its error, in terms of the user's code
            if isinstance(error, NotCaptured):
                what = "change that, or use 'make_fx'"
                if "autograd.grad`" in str(error) or "backward()`" in str(error):
                    what = "pass a function with a backward in it as InParts(whole, forward), or use 'make_fx'"
                raise UserError(f"compile.capture = 'dynamo': {error}; {what}") from error
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
    """A call of a function in Dynamo's form: all arguments by position, first those of its parameters in their order,
    then the keyword-only ones.

    fn         the function that Dynamo captures
    whole      the called function; if it is `InParts`, Dynamo captures its forward
    num_taken  the number of `fn`'s arguments
    keywords   the names of the last ones
    """

    fn: Callable[..., Any]
    whole: Callable[..., Any]
    num_taken: int
    keywords: tuple[str, ...]

    @property
    def replaced(self) -> Callable[..., Any]:
        """The function that Dynamo's graph replaces."""
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
        """Return the arguments of `fn` in a call's arguments."""
        positional, by_name = _bound(self.whole, args, kwargs)
        return (*positional, *(by_name[name] for name in self.keywords))[: self.num_taken]


def _bound(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments by position as far as possible, and the others by name, sorted."""
    if not kwargs:
        return args, {}  # a builtin has no signature
    bound = inspect.signature(fn).bind(*args, **kwargs)
    return bound.args, dict(sorted(bound.kwargs.items()))


def _by_position(fn: Callable[..., Any], num_positional: int, keywords: tuple[str, ...]) -> Callable[..., Any]:
    """Return a Python function, as Dynamo needs it, with all arguments by position."""
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
    """Return a function that runs Dynamo's graph with the original's signature, Dynamo's capture, and the graph's
    inputs that are constants."""
    fn = call.fn
    state = {name: _faked(x, mode, device) for (_, name), x in live_state(module, None).items()}
    with reparametrize(module, state):
        strict = capture_strictly(fn, fakes, Compared)
        found = strict.inputs(*fakes)
    module_names = {str(id(child)): name for name, child in module.named_modules()}
    # Tensor parallelism's wrapper (parallel/parallelize.py) replaces a module's parameters by local ones during a call,
    # and a step of the user's may turn adapters off (layers/lora.py): both put back what was there.
    put_back = (" in _on_locals", " in adapters_off")
    found_changed = {each: line for each, line in strict.changed.items() if not line.endswith(put_back)}
    if changed := {_by_name(each): line for each, line in found_changed.items()}:
        names = ", ".join(f"{each} ({line})" if line else each for each, line in sorted(changed.items()))
        raise UserError(
            f"compile.capture = 'dynamo': the captured function changes {names}, which a graph would not: "
            "return the new value instead, and write it back outside"
        )
    _drop_sizes_of_rules(strict.gm)
    _keep_metadata(strict.gm, module_names)
    # Tensors that are neither arguments nor state are constants of the graph.
    constants = {i: x for i, x in enumerate(found) if isinstance(x, Tensor) and not is_traced(x)}

    @functools.wraps(call.replaced)
    def replay(*args: Any, **kwargs: Any) -> Any:
        taken = args if isinstance(call.whole, InParts) else call.by_position(args, kwargs)
        for relation, where in strict.holds(taken):
            compare(relation, where)
        return strict.result(_run(strict.gm, *strict.inputs(*taken)), taken)

    return replay, strict, constants


def _faked(tensor: Tensor, mode: FakeTensorMode, device: Any, strided: Any = None) -> Tensor:
    """Return a fake tensor like this one, on `device`, which Dynamo's graph names. A plain one has the sizes and
    strides of `strided`."""
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
    """Remove the sizes that Dynamo passes, with each tensor, to the closures of flex attention's functions.

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
    """Keep only the nodes' metadata that the tracer reads. Dynamo keys its stack of modules by their identity, with a
    suffix for repeated calls. Nodes of a region keep theirs; nodes of other bodies (an autograd function's, a mask
    rule's) have none: the node that calls the body has it."""
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
    """The Python values that a graph depends on: a call with a call's arguments raises a UserError if one has changed.

    Args:
        constants: the inputs of Dynamo's graph that are constants of ours, by index.
        call: maps a call's arguments to those of the function that Dynamo captured.
    """

    def __init__(self, strict: StrictCapture, constants: Mapping[int, Tensor], call: _Call) -> None:
        self._strict, self._constants, self._call = strict, constants, call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        taken = self._call.by_position(args, kwargs)
        if failed := self._strict.violated(taken):
            raise UserError(f"the graph depends on {_by_name(failed)}: set it back to what it was, or capture again")
        found = self._strict.inputs(*taken)
        if replaced := [self._strict.sources[i] for i, x in self._constants.items() if found[i] is not x]:
            raise UserError(
                f"{', '.join(map(_by_name, replaced))} is another tensor than the one that was captured, which is a "
                "constant of the graph: write to it in place, make it a buffer, or capture again"
            )

    @property
    def values(self) -> list[str]:
        """The guards on values, as `model.layers.0.flag == False (the line that reads it)`, without those on types and
        such."""
        return [_by_name(each) for each in self._strict.guards if re.match(r"(not )?[LG]\[[^ ]* ==", each)]


class _Replay(Interpreter):
    """Runs Dynamo's graph under the tracer, with its regions inlined: the resulting graph has none."""

    def run_node(self, n: Node) -> Any:
        with annotated_as(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return getattr(self, n.op)(n.target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in WRAPPERS:
            return run_wrapped(target, args, kwargs, _run)
        if target is torch.ops.aten._assert_scalar.default:  # Dynamo's form of it
            return require(args[0])
        return super().call_function(target, args, kwargs)


def _run(gm: GraphModule, *inputs: Any) -> Any:
    return _Replay(gm).run(*inputs, enable_io_processing=False)


def _by_name(source: str) -> str:
    """Return Dynamo's name of a value in the user's form: model.layers.0 for L['model']._modules[...]."""
    source = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", source)
    source = re.sub(r"\.__dict__\['([^']+)'\]", r".\1", source)
    source = re.sub(r"\b[LG]\['([^']+)'\]", r"\1", source)
    return re.sub(r"\b__import_(\w+)", lambda found: found[1].replace("_dot_", "."), source)


CAPTURES: Mapping[str, Capture] = {"make_fx": make_fx_capture, "dynamo": dynamo_capture}
