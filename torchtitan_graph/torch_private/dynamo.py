"""Capture a function as one graph by Dynamo, with the guards of that graph."""

import contextlib
import functools
import importlib
import inspect
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._higher_order_ops.wrap import tag_activation_checkpoint, wrap
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from torchtitan_graph.torch_private.fake import FakeTensorMode


def fake_mode_for_dynamo(env: ShapeEnv) -> FakeTensorMode:
    """Return a mode whose fake tensors Dynamo accepts as a function's arguments and state; `env` has the symbols of
    their sizes. Dynamo replaces these by others."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)


# Left out: guards on tensors, as a graph's signature states more of them; on sizes, see `StrictCapture.holds`; the last
# is of the state set around a call, see below.
_NOT_GUARDED = {"TENSOR_MATCH", "DIMENSION_DYNAMIC_MARKING_GUARD", "NO_TENSOR_ALIASING", "DUPLICATE_INPUT"}
_NOT_GUARDED |= {"DTENSOR_SPEC_MATCH", "SHAPE_ENV", "GLOBAL_STATE"}

# Parts of that state: the graph runs under `no_grad` and without autocast, which the tracer checks; threads change
# nothing.
_MAY_CHANGE = {"grad_mode", "autocast_state", "num_threads"}


class NotCaptured(Exception):
    """The reason why Dynamo can't capture a function as one graph, and the line."""


class StrictCapture(NamedTuple):
    """Dynamo's capture of a function.

    gm        the graph
    sources   for each of its inputs, an expression of the function's names in L and globals in G
    changed   the same for side effects that are no result, and the line
    guards    the graph's conditions, each an expression of these names and the line that reads them
    inputs    (*arguments) -> the graph's inputs
    result    (the graph's outputs, arguments) -> the function's result
    holds     (arguments) -> for each assumption on sizes, whether these arguments meet it, and the line that needs it
    violated  (arguments) -> one violated guard; empty if there is none
    """

    gm: torch.fx.GraphModule
    sources: list[str]
    changed: dict[str, str]
    guards: list[str]
    inputs: Callable[..., tuple[Any, ...]]
    result: Callable[[Any, tuple[Any, ...]], Any]
    holds: Callable[[tuple[Any, ...]], list[tuple[Any, str]]]
    violated: Callable[[tuple[Any, ...]], str]


def capture_strictly(
    fn: Callable[..., Any], arguments: tuple[Any, ...], new_guards: Callable[[], list[Any]]
) -> StrictCapture:
    """Capture a function as one graph by Dynamo, from torch 2.13 on. `torch.export` would replace it if it kept guards
    and accepted a function that closes over its module; `torch.compile(fullgraph=True)` if it returned its graph.

    Args:
        new_guards: returns the list to which Dynamo appends its guards on sizes; `where` lists their lines.

    Raises:
        NotCaptured: why Dynamo can't.
    """
    import torch._dynamo.config  # late, for it takes a second
    import torch._dynamo.output_graph as dynamo_output
    import torch._dynamo.variables.builder as dynamo_builder
    from torch._dynamo.convert_frame import _get_frame, fullgraph_capture
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.functional_export import create_fx_graph_from_captured_output
    from torch._dynamo.hooks import Hooks
    from torch._dynamo.utils import dynamo_timed, get_metrics_context
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    def new_env(**options: Any) -> ShapeEnv:
        env = ShapeEnv(**options)
        env.guards = new_guards()
        return env

    call_apply = _keeping_context(AutogradFunctionVariable.call_apply)
    regions = importlib.import_module("torch._higher_order_ops.invoke_subgraph")  # an operator has the module's name
    strict: dict[str, Any] = dict(specialize_int=True, specialize_float=True, automatic_dynamic_shapes=False)
    strict |= dict(skip_nnmodule_hook_guards=False)  # a hook that is added later must violate a guard
    strict |= dict(replay_side_effects=False, side_effect_replay_policy="warn")  # reported by `_seen_changes`
    strict |= dict(skip_fwd_side_effects_in_bwd_under_checkpoint=True)  # else a region may not append to a list
    with (
        torch._dynamo.config.patch(strict),
        mock.patch.object(regions, "invoke_subgraph_placeholder", _call),
        mock.patch.object(dynamo_builder, "is_invoke_subgraph", lambda value: False),
        mock.patch.object(dynamo_output, "ShapeEnv", new_env),
        mock.patch.object(AutogradFunctionVariable, "call_apply", call_apply),
        warnings.catch_warnings(),
        _seen_changes() as changed,
        get_metrics_context(),
        dynamo_timed("fullgraph_capture"),
    ):
        warnings.simplefilter("ignore")
        try:
            out = fullgraph_capture(fn, arguments, {})
        # A RuntimeError: a region's result can't be its graph's output, such as a set of tensors.
        except (TorchDynamoException, RuntimeError) as error:
            raise NotCaptured(_why(error)) from error
        if out.backend_input is None:
            raise NotCaptured("the function computes nothing of tensors")
        found = out.graph_capture_output
        gm: Any = create_fx_graph_from_captured_output(out, fn, arguments, {})
        hooks = Hooks(guard_filter_fn=lambda guards: [_is_of_python(each) for each in guards])
        manager = found.build_guards(fn.__code__, hooks=hooks).guard_manager
    state, env = found.output_graph.global_state_guard, found.output_graph.shape_env
    guards: Any = env.guards  # as `new_guards` made it

    def holds(arguments: tuple[Any, ...]) -> list[tuple[Any, str]]:
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        scope = {"L": _get_frame(fn, arguments).locals, "G": found.f_globals}
        symbols = {symbol for guard in guards for symbol in guard.expr.free_symbols}
        sizes = {symbol: eval(env.var_to_sources[symbol][0].name, scope) for symbol in symbols}  # Dynamo's own text
        compared = [sympy_interp(PythonReferenceAnalysis, sizes, guard.expr) for guard in guards]
        return [*zip(compared, guards.where, strict=True)]

    def violated(arguments: tuple[Any, ...]) -> str:
        if changed := set(() if state.check() else state.reason().split()) - _MAY_CHANGE:
            return f"another {', '.join(sorted(changed))} of torch"
        names = _get_frame(fn, arguments).locals
        checked = manager.check_verbose(names)
        scope = {"L": names, "G": found.f_globals}
        return "" if checked.result else _with_value(checked.verbose_code_parts[0], scope)

    return StrictCapture(
        gm,
        [node._dynamo_source.name for node in gm.graph.find_nodes(op="placeholder")],
        changed,
        ["".join(_with_line(each)) for each in _conditions(manager.root)],
        gm._dynamo_bytecode_flatten,
        gm._dynamo_bytecode_unflatten,
        holds,
        violated,
    )


def _call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a `nested_compile_region` as it runs without Dynamo: then it may return and change anything. Dynamo's
    operator would name all layers as the first one, and recompute forward in backward."""
    return fn(*args, **kwargs)


def _keeping_context(call_apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return Dynamo's call of an autograd function, mended: where nothing takes gradients, it leaves the context out if
    there are as many arguments as forward has parameters. With a context and `*tensors` that may be so by chance."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable
    from torch.autograd.function import _is_setup_context_defined

    def call(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        forward = self.fn_cls.forward
        tensors: list[Any] = []
        kinds = [each.kind for each in inspect.signature(forward).parameters.values()]
        VariableTracker.visit(lambda each: tensors.append(each) if each.is_tensor() else None, (args, kwargs))
        takes_gradients = torch.is_grad_enabled() and any(each.requires_grad is not False for each in tensors)
        is_by_chance = inspect.Parameter.VAR_POSITIONAL in kinds and len(args) == len(kinds) and not kwargs
        if takes_gradients or not is_by_chance or _is_setup_context_defined(self.fn_cls.setup_context):
            return call_apply(self, tx, args, kwargs)
        context = AutogradFunctionContextVariable.create(tx, args, kwargs)
        source = self.source and AttrSource(self.source, "forward")
        return VariableTracker.build(tx, forward, source=source, realize=True).call_function(tx, [context, *args], {})

    return call


WRAPPERS = (tag_activation_checkpoint, wrap)  # Dynamo's operators that take a graph, and return its results


def run_wrapped(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
    """Return `run(graph, *inputs)` for one of these operators, a checkpointed region's by `torch.utils.checkpoint` as
    without Dynamo. torch's own kernel of that region, made for `torch.compile`, recomputes more than backward needs,
    and fails where the region writes to a value of its own.
    """
    body, *inputs = args
    run = functools.partial(run, body)
    if target is wrap:
        return run(*inputs)
    chosen = {"context_fn": found} if (found := body.meta.get("_checkpoint_context_fn")) else {}
    return checkpoint(run, *inputs, **kwargs, **chosen)


def _why(error: Any) -> str:
    """Return one or two sentences of Dynamo's long error message, and the author's line."""
    first, *more = str(error).strip().splitlines()
    explained = [line.strip().removeprefix("Explanation: ") for line in more if "Explanation: " in line]
    where = _line(getattr(error, "real_stack", None) or ())
    return f"{' '.join([f'{first}:', *explained[:1]]).rstrip(':.')} (Dynamo{where and ', '}{where})"


def _line(frames: Iterable[Any]) -> str:
    """Return the author's line in one of Dynamo's stacks, "" if it has none."""
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(torch.__file__).parent)]
    return "".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in own[-1:])


@contextlib.contextmanager
def _seen_changes() -> Iterator[dict[str, str]]:
    """Yield a dictionary of side effects of the functions that Dynamo captures meanwhile: an attribute, or a list or
    dict itself, and its line.

    Dynamo warns of the objects alone, and discards the rest at the end.
    """
    from torch._dynamo.output_graph import OutputGraph

    found: dict[str, str] = {}
    of_torch = OutputGraph.get_replayed_side_effect_source_refs

    def seen(graph: Any, **options: bool) -> list[str]:
        sources, effects = of_torch(graph, **options), graph.side_effects
        for x in effects._get_modified_vars():
            with contextlib.suppress(NotImplementedError):  # an object that the function itself made has no name
                if x.source is not None and x.source.name in sources:
                    names = [f"{x.source.name}.{name}" for name in effects.store_attr_mutations.get(x, ())]
                    line = _line(next(reversed(effects.mutation_user_stacks.get(x, [])), ()))
                    found.update(dict.fromkeys(names or [x.source.name], line))
        return sources

    OutputGraph.get_replayed_side_effect_source_refs = seen  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        OutputGraph.get_replayed_side_effect_source_refs = of_torch  # type: ignore[method-assign]


def _conditions(manager: Any) -> list[str]:
    """Return the conditions in a tree of guards."""
    own = [each for guard in manager.get_leaf_guards() for each in guard.verbose_code_parts()]
    pairs = manager.get_key_value_managers().values() if hasattr(manager, "get_key_value_managers") else ()
    below = [*manager.get_child_managers(), *(each for pair in pairs for each in pair if each is not None)]
    return [*own, *(each for child in below for each in _conditions(child))]


def _is_of_python(guard: Any) -> bool:
    """Return whether a Dynamo guard is on Python state: not on a tensor, nor on attributes of parameters (they are
    stored in another layout than they are captured in), nor on the function that `_call` replaces."""
    left_out = r"\._(parameters|buffers)\['[^']+'\]|invoke_subgraph_placeholder"
    is_tensor = isinstance(guard.value, torch.Tensor)
    return guard.guard_type not in _NOT_GUARDED and not is_tensor and not re.search(left_out, guard.orig_guard.name)


def _with_line(guard: str) -> tuple[str, str]:
    """Return a guard's expression, and in brackets the author's line if it has one."""
    code, *comments = re.split(r"\s+# ", re.sub(r"\s*\(HINT: .*\)$", "", guard.strip()))
    comments = [re.sub(r"[^ ]*/([^ /]+/[^ /]+:)", r"\1", each) for each in comments]  # shorten paths to folder and file
    return code, f" ({', '.join(comments)})" if comments else ""


def _with_value(guard: str, scope: dict[str, Any]) -> str:
    """Return a violated guard as text: the expression, the author's line, the current value."""
    code, where = _with_line(guard)
    if identity := re.match(r"___check_(type|obj)_id\((.+), \d+\)(?:, type=(.+))?", code):
        what, subject, kind = identity.groups()
        return f"{subject} being {f'a {kind}' if what == 'type' else 'the same object'}{where}"
    if own := re.match(r"not ___dict_contains\('(\w+)', (.+)\.__dict__\)", code):
        return f"{own[2]}.{own[1]} being that of its class{where}"
    if gone := re.match(r"(?:KeyError|AttributeError|IndexError) on (.+)", code):
        return f"{gone[1]}{where}, which is gone"
    code = re.sub(r"^(len\(.+\)) != ", r"\1 == ", code)  # for a dict Dynamo returns the reason, not the guard
    try:
        value = eval(re.split(r" (?:==|is) ", code.removeprefix("not "))[0], scope)  # Dynamo's own text
    except Exception:  # it uses Dynamo's own names
        return f"{code}{where}"
    return f"{code}{where}, and it is {reprlib.repr(value)} now"
