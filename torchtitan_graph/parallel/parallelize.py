"""The function that applies a compute layout to a model, before it is traced or sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan_graph.capture.step import Real
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.ops.route import Route
from torchtitan_graph.ops.wire import Wire
from torchtitan_graph.parallel.by_machine import by_machine
from torchtitan_graph.parallel.dispatch import Dispatch, Exchange, direct, dispatched
from torchtitan_graph.parallel.layout import CP, EP, EP_FAR, EP_NEAR, EXPERT_TP, TP, Layout, ParallelDims
from torchtitan_graph.parallel.plan import (
    MODULE_ROLES,
    ROLES,
    SEQUENCE_DIM,
    SPLIT_DIM,
    Plan,
    context_roles,
    expert_roles,
    table_style,
    tensor_roles,
)
from torchtitan_graph.parallel.sequence import Gathered, whole_rows


def parallelize(
    model: nn.Module, plan: Plan, layout: Layout, *, loss_parallel: bool, exchange: Exchange | None = None
) -> None:
    """Apply the plan to the model in place; without effect where every axis in it has one rank.

    The model is on the meta device: nothing is allocated or sent. Tied parameters stay tied. `check_plan` has passed.
    """
    modules, exchange = dict(model.named_modules()), exchange or Exchange()
    if layout.degree(CP) > 1:
        degree, group = layout.degree(CP), layout.group(CP).group_name
        for name in context_modules(model, plan):
            modules[name].forward = partial(_of_whole_rows, degree, group, modules[name].forward)
    tied = _tied_names(model)
    on_tp = tensor_roles(plan, layout.dims) if layout.degree(TP) > 1 else {}
    on_ep = expert_roles(plan) if layout.degree(EP) > 1 else {}
    # One mesh for all: comparing two of many ranks takes long.
    tp = layout.submesh(TP) if on_tp else layout.mesh
    experts = layout.expert_submesh(EP, EXPERT_TP) if on_ep else layout.mesh
    _cut_parameters(model, on_tp, on_ep, layout.degree(TP), tp, experts)
    for name, role in _by_name(modules, on_tp).items():
        module = modules[name]
        if role == "partial":
            module.forward = partial(_summed, tp, module.forward)
        elif role == "apart":
            module.forward = partial(_apart, layout.degree(TP), layout.rank(TP), module.forward)
        elif role == "gather":
            module.forward = partial(_gathered, layout.degree(TP), layout.group(TP).group_name, module.forward)
        elif role == "own part":
            module.forward = partial(_of_own_part, layout.degree(TP), layout.rank(TP), module.forward)
        else:
            parallelize_module(module, tp, table_style(role, loss_parallel))
    for name, role in _by_name(modules, on_ep).items():
        module, group = modules[name], layout.group(EP).group_name
        if role == "route":
            # w2's rows, which packed weights have too: their last dim is bytes.
            width = int(module.w2.shape[-2]) if exchange.float8 else 0  # type: ignore[union-attr]
            module.route = _route(layout, Dispatch(group, layout.degree(EP), Wire(width)), exchange)  # type: ignore[assignment]
        else:
            module.forward = partial(dispatched, Dispatch(group, layout.degree(EP), Wire()), module.forward)
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], parameter)


def _route(layout: Layout, dispatch: Dispatch, exchange: Exchange) -> Callable[..., Route]:
    """Return the function that makes routes to the experts of all ranks of `ep`."""
    if not (near := layout.dims.ep_near):
        return partial(direct, dispatch)
    between = 1 < near < dispatch.degree
    far, inside = (layout.group(axis).group_name if between else "" for axis in (EP_FAR, EP_NEAR))
    return partial(by_machine, dispatch, far, inside, near, exchange.exact)


def context_modules(model: nn.Module, plan: Plan) -> list[str]:
    """Return the names of the modules that gather attention's keys and values over the sequence."""
    return list(_by_name((name for name, _ in model.named_modules()), context_roles(plan)))


def _of_whole_rows(degree: int, group: str, forward: Callable[..., Any], *parts: Tensor) -> Any:
    return forward(*whole_rows(parts, degree, group))


def _by_name(names: Iterable[str], roles: Mapping[str, str]) -> dict[str, str]:
    """Return the role of each name that a pattern matches."""
    names = list(names)
    return {name: role for pattern, role in roles.items() for name in names if pattern_matches(pattern, name)}


def _cut_parameters(
    model: nn.Module,
    on_tp: Mapping[str, str],
    on_ep: Mapping[str, str],
    degree: int,
    tp: DeviceMesh,
    experts_mesh: DeviceMesh,
) -> None:
    """Replace each parameter that has a role by a DTensor; its owner computes with the local shard, a plain tensor."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tp_roles, experts = _by_name(names, on_tp), _by_name(names, on_ep)
    shared: dict[nn.Module, set[str]] = {}  # a module -> its parameters of role `share`; every owner has an entry
    for name in tp_roles | experts:
        owner, leaf, role = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], tp_roles.get(name)
        of_owner = shared.setdefault(owner, set())
        if role == "share":
            of_owner.add(leaf)
        placements: list[Placement] = [Shard(0)] if name in experts else []
        if role is not None:
            placements.append(Shard(SPLIT_DIM[role]) if role in SPLIT_DIM else Replicate())
        mesh = experts_mesh if name in experts else tp
        whole = owner.get_parameter(leaf)
        local = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
        setattr(owner, leaf, nn.Parameter(local, whole.requires_grad))
    for owner, of_owner in shared.items():
        owner.forward = partial(_on_locals, owner, owner.forward, of_owner, degree)


def _on_locals(
    module: nn.Module, forward: Callable[..., Any], shared: set[str], degree: int, *args: Any, **kwargs: Any
) -> Any:
    """Run a module's forward with local shards in place of its DTensor parameters; shared ones divided by `degree`."""
    held = dict(module._parameters)
    for leaf, parameter in held.items():
        if isinstance(parameter, DTensor):
            # Every rank contributes to the gradient of a replicated parameter.
            gradient = [Partial() if p.is_replicate() else p for p in parameter.placements]
            local = parameter.to_local(grad_placements=gradient)
            module._parameters[leaf] = local / degree if leaf in shared else local  # type: ignore[assignment]
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(held)


def _summed(tp: DeviceMesh, forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Gather `x` over the sequence, run, and reduce-scatter the (first) result to this rank's part of the sequence.

    A module's other results are the same on every rank (a count, an auxiliary loss); their gradient is divided by the
    degree, because the inner collectives sum the ranks' gradients. Rows of tokens (T, D) may come in any order.
    """
    sequence = Shard(SEQUENCE_DIM if x.dim() > 2 else 0)
    whole = DTensor.from_local(x, tp, [sequence], run_check=False).redistribute(placements=[Replicate()])
    result = forward(whole.to_local(grad_placements=[Partial()]), *args, **kwargs)
    y, others = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
    y = DTensor.from_local(y, tp, [Partial()], run_check=False).redistribute(placements=[sequence]).to_local()
    if others is None:
        return y
    return y, *pytree.tree_map_only(Tensor, partial(_with_shared_gradient, tp.size()), others)


def _with_shared_gradient(degree: int, x: Tensor) -> Tensor:
    return x / degree + (x - x / degree).detach() if x.requires_grad else x


def _apart(degree: int, rank: int, forward: Callable[..., Any], x: Tensor, real: Real | None = None) -> Any:
    """Run on this rank's part of the sequence, x. A loss among the other results is that part's alone: it is
    multiplied by `degree` when reported, as losses are averaged over tensor parallel's ranks; its gradient is not."""

    def reported(x: Tensor) -> Tensor:
        return x + (degree - 1) * x.detach() if x.requires_grad else x

    if real is not None:
        real = real._replace(is_token_BL=real.is_token_BL.chunk(degree, SEQUENCE_DIM)[rank])
    y, others = forward(x, real)
    return y, pytree.tree_map_only(Tensor, reported, others)


def _gathered(degree: int, group: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Run, and gather the ranks' results along the last dim. Each rank's gradient of the whole is its term of a sum."""
    return Gathered.apply(forward(*args, **kwargs), degree, group).movedim(0, -2).flatten(-2)  # type: ignore[no-any-return]


def _of_own_part(degree: int, rank: int, forward: Callable[..., Any], x: Tensor) -> Any:
    return forward(x.chunk(degree, -1)[rank])


def _tied_names(model: nn.Module) -> list[list[str]]:
    by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(parameter, []).append(name)
    return [names for names in by_parameter.values() if len(names) > 1]


def pattern_matches(pattern: str, name: str) -> bool:
    """Return whether a plan's pattern matches a name: part by part, `*` any one."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


def parameter_roles(model: nn.Module, plan: Plan) -> dict[str, dict[str, str]]:
    """Return by parameter its role on each axis of the plan, its own or (embedding, vocabulary) its module's."""
    found: dict[str, dict[str, str]] = {}
    for pattern, roles in plan.items():
        for axis, role in roles.items():
            wanted = f"{pattern}.weight" if role in ("embedding", "vocabulary") else pattern
            for name in (name for name, _ in model.named_parameters() if pattern_matches(wanted, name)):
                found.setdefault(name, {})[axis] = role
    return found


def check_plan(model: nn.Module, plan: Plan, dims: ParallelDims) -> None:
    """Check, before any mesh exists, that the plan fits the model and that the degrees divide the dims they shard.

    A pattern may match nothing: a plan covers every flavour of a family.

    Raises:
        UserError: an unknown axis or role, a parameter without a role, or a size that does not divide.
    """
    for pattern, roles in plan.items():
        axes = list(roles) if isinstance(roles, Mapping) else []
        if not axes or not set(axes) <= ROLES.keys():
            raise UserError(
                f"the plan gives {pattern!r} {roles!r}: what is legal is a role by axis, {{{TP!r}: 'shard 0'}}, on the "
                f"axes {', '.join(ROLES)}"
            )
        for axis, role in roles.items():
            if role not in ROLES[axis]:
                raise UserError(f"the plan gives {pattern!r} the role {role!r}: legal are {', '.join(ROLES[axis])}")
    experts = _check_expert_parallel(model, expert_roles(plan), dims.ep)
    _check_tensor_parallel(model, tensor_roles(plan, dims), dims.tp, experts)
    _check_context_parallel(model, plan, dims.cp)


def _check_expert_parallel(model: nn.Module, plan: Mapping[str, str], degree: int) -> set[str]:
    """Check expert parallelism's degree, and return the names of the experts' parameters."""
    parameters = dict(model.named_parameters())
    experts = {name for name, role in _by_name(parameters, plan).items() if role == "expert"}
    option = f"parallelism.expert_parallel_degree = {degree}"
    if degree > 1 and not experts:
        raise UserError(f"{option}: this model has no experts; leave it at 1, and use data_parallel_shard_degree")
    for name in sorted(experts):
        if parameters[name].shape[0] % degree:
            raise UserError(f"{option}: does not divide the {parameters[name].shape[0]} experts of {name}")
    return experts


def _check_tensor_parallel(model: nn.Module, plan: Mapping[str, str], degree: int, experts: set[str]) -> None:
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    covered = set(experts)
    for pattern, role in plan.items():
        named = filter(partial(pattern_matches, pattern), modules if role in MODULE_ROLES else parameters)
        for name in named:
            weights = [name] if role not in MODULE_ROLES else [f"{name}.weight"] * (role in SPLIT_DIM)
            covered.update(weights)
            for weight in weights:
                if role in SPLIT_DIM and parameters[weight].shape[SPLIT_DIM[role]] % degree:
                    _refuse(degree, f"size {parameters[weight].shape[SPLIT_DIM[role]]}", weight)
                _check_heads(modules, parameters, weight, degree)
            for count in ("num_heads", "num_kv_heads") if role == "partial" else ():
                if getattr(modules[name], count, degree) % degree:  # heads are not cut
                    _refuse(degree, f"{getattr(modules[name], count)} {count[4:].replace('_', ' ')}", name)
            if degree > 1 and role in ("shard 0", "shard 1", "shard 2", "share") and not _summed_over(plan, name):
                raise UserError(f"the plan splits {name} ({role!r}), but gives no module around it the role 'partial'")
    uncovered = [name for name in parameters if name not in covered]
    if uncovered and degree > 1:
        raise UserError(
            f"parallelism.tensor_parallel_degree = {degree}: the plan gives no role to {listed(uncovered, 5)}, and"
            " every parameter needs one; add them to the plan of a model of your own, or set this to 1 and use"
            " data_parallel_shard_degree"
        )


def _check_heads(modules: dict[str, nn.Module], parameters: dict[str, nn.Parameter], weight: str, degree: int) -> None:
    """Refuse to cut heads of another library's attention, whose module has their width alone."""
    layer = weight.removesuffix(".weight")
    around, _, leaf = layer.rpartition(".")
    width = getattr(modules.get(around), "head_dim", None)
    if leaf not in ("q_proj", "k_proj", "v_proj") or not isinstance(width, int):
        return
    number, rest = divmod(parameters[weight].shape[0], width)
    if number % degree and not rest:
        _refuse(degree, f"{number} heads", layer)


def _check_context_parallel(model: nn.Module, plan: Plan, degree: int) -> None:
    if degree > 1 and not context_modules(model, plan):
        raise UserError(
            f"parallelism.context_parallel_degree = {degree}: the plan gives no module a role on {CP}, so nothing gives"
            " attention the whole row's keys; see layers/attention.py, or leave the degree at 1"
        )


def _summed_over(plan: Mapping[str, str], name: str) -> bool:
    parts = name.split(".")
    around = [".".join(parts[:i]) for i in range(1, len(parts))]
    return any(
        role == "partial" and pattern_matches(pattern, each) for pattern, role in plan.items() for each in around
    )


def _refuse(degree: int, what: str, name: str) -> None:
    raise UserError(
        f"parallelism.tensor_parallel_degree = {degree}: does not divide the {what} of {name}; choose a degree "
        "that does (the size of embedding and output is the vocabulary's)"
    )
