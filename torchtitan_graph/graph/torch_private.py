"""Every private torch name that the project uses: why, and what would replace it. Differences between releases end here."""

import contextlib
import datetime
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.flex_attention import flex_attention as _flex_attention
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "FakeTensorMode",
    "StridedShard",
    "flex_attention_op",
    "init_fake_process_group",
    "is_traceable_wrapper_subclass",
    "make_dtensor",
    "reparametrize",
    "set_timeout",
    "trace_to_graph",
]

# FSDP2's name for "sharded on dim 0 over data parallel, inside a shard of tensor parallel on the same dim".
# Replaced by a public placement when torch makes it public.
StridedShard = _StridedShard


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    """Wrap a local tensor whose global shape is known. `DTensor.from_local` does the same through an autograd function,
    at six times the cost, which is paid for every gradient of every step."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor(local, DTensorSpec(mesh, placements, TensorMeta(shape, stride, local.dtype)), requires_grad=False)


def reparametrize(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> contextlib.AbstractContextManager:
    """Swap `state` (by name) into the live module; tied names follow. `torch.func.functional_call` would replace it
    if it could run a function that closes over the module instead of the module's own forward."""
    return _reparametrize_module(module, state, tie_weights=True)


@contextlib.contextmanager
def _marked_backward() -> Iterator[None]:
    """Let every node made by the autograd engine carry `phase: backward` and the sequence number of its forward op.

    The engine is entered at one place, `torch.autograd._engine_run_backward`, by `grad` and `backward` alike. Public
    hooks on autograd nodes can't see the sequence number; the AOT helper that does is the same from 2.11 to 2.15.
    """
    inner = torch.autograd._engine_run_backward

    def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # A leaf or a gradient edge has no grad_fn; the engine reports it better than we could.
        setup_stacktrace_preservation_hooks([t.grad_fn for t in tensors if getattr(t, "grad_fn", None) is not None])
        with fx_traceback.annotate({"phase": "backward"}):
            return inner(tensors, *args, **kwargs)

    torch.autograd._engine_run_backward = run
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = inner


@contextlib.contextmanager
def _marked_modules(module: torch.nn.Module | None) -> Iterator[None]:
    """Let every node carry the name of the innermost submodule whose call made it, forward hooks included.

    `make_fx(record_module_stack=True)` records nothing for modules that are called from a plain function.
    """
    if module is None:
        yield
        return
    names = {id(child): name for name, child in module.named_modules()}
    inner = torch.nn.Module.__call__

    @functools.wraps(inner)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(self))
        if name is None:
            return inner(self, *args, **kwargs)
        with fx_traceback.annotate({"module": name}):
            return inner(self, *args, **kwargs)

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = inner  # type: ignore[method-assign]


def trace_to_graph(
    fn: Callable[..., Any],
    fake_inputs: list[torch.Tensor],
    fake_mode: FakeTensorMode,
    module: torch.nn.Module | None,
    stack_traces: bool,
) -> torch.fx.GraphModule:
    """Run `fn` on fake plain tensors under `make_fx`, forward and backward marked.

    The tracing context lets higher-order ops give equal subgraphs one name. Multithreaded autograd would lose the
    thread-local marks. Nested traces happen inside flex attention, which traces its own subgraphs.
    """
    with (
        fake_mode,
        tracing(TracingContext(fake_mode)),
        fx_traceback.preserve_node_meta(),
        torch.autograd.set_multithreading_enabled(False),
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
        _marked_backward(),
        # Code is generated when the graph first runs, not after every pass: a third of the time to build a large one.
        _use_lazy_graph_module(True),
    ):

        def marked(*flat: torch.Tensor) -> Any:
            # Inside the trace: make_fx patches `Module.__call__` itself and would drop a patch made before.
            with _marked_modules(module):
                return fn(*flat)

        return make_fx(marked, record_stack_traces=stack_traces)(*fake_inputs)


def flex_attention_op(q_BNLH: torch.Tensor, k_BNLH: torch.Tensor, v_BNLH: torch.Tensor, mask: BlockMask) -> torch.Tensor:
    """Run flex attention's own higher-order operator, without the public function around it.

    The public function refuses gradients on a CPU, although the uncompiled operator has them, and compiles its own
    call, which can't happen inside a trace. The block mask's rule may close over tensors (a batch's document ids):
    they are handed to the operator by name, so that a graph takes them from its inputs.
    """
    closed_over, rule = _open_rule(mask.mask_mod)
    out_BNLH, *_ = _flex_attention(
        q_BNLH,
        k_BNLH,
        v_BNLH,
        _no_score_change,
        (*mask.as_tuple()[:-1], rule),
        q_BNLH.shape[-1] ** -0.5,
        {"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False},
        (),
        closed_over,
    )
    return out_BNLH


def _no_score_change(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any, *closed_over: torch.Tensor) -> torch.Tensor:
    return score


def _open_rule(rule: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Split a mask rule into the tensors it closes over and the same rule with those as further arguments."""
    cells = rule.__closure__ or ()

    def opened(b: Any, h: Any, q: Any, kv: Any, *tensors: torch.Tensor) -> torch.Tensor:
        given = iter(tensors)
        closed = tuple(types.CellType(next(given)) if isinstance(c.cell_contents, torch.Tensor) else c for c in cells)
        return types.FunctionType(rule.__code__, rule.__globals__, closure=closed)(b, h, q, kv)

    return tuple(c.cell_contents for c in cells if isinstance(c.cell_contents, torch.Tensor)), opened


def init_fake_process_group(world_size: int) -> None:
    """Start a process group of any size in which this process is rank 0 and nothing is sent. Tests' own, so far."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def set_timeout(group: torch.distributed.ProcessGroup, seconds: int) -> None:
    """Change how long a collective of a live group may take: public API sets it only at the start."""
    _set_pg_timeout(datetime.timedelta(seconds=seconds), group)
