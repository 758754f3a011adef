"""The attention, masks and experts that models of transformers compute with here, called through its registries."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchtitan_graph.capture.step import Real
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.attention import Seen, attend
from torchtitan_graph.models.layers.lora import add_adapter
from torchtitan_graph.models.layers.masks import Mask, as_bias
from torchtitan_graph.models.layers.moe import in_turn, without_padding
from torchtitan_graph.ops.experts import every_second, grouped_add, grouped_mm, permuted
from torchtitan_graph.ops.route import slots_of
from torchtitan_graph.transformers_private import documents_by_masks, register, rule_of

CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")

# Arguments of its attention that say what the mask, or our own attention, says already.
_KNOWN = (
    *("sliding_window", "position_ids", "is_causal", "output_router_logits", "deterministic", "layer_idx"),
    *("cache_position", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k"),
)


@dataclasses.dataclass
class Running:
    """A forward pass that runs.

    names   of the model's blocks
    masks   by rule
    real    which positions are tokens, as routers see them; None: all
    found   in the first one, on meta: a stand-in for the mask of each rule that the model asks for
    calls   in the first one: each module that attends, and the rule of its mask
    capped  in the first one: whether attention has a soft cap of its scores
    loads   number of slots of each expert, by the experts' name
    losses  of routers
    """

    names: Mapping[nn.Module, str]
    masks: Mapping[str, Mask] = dataclasses.field(default_factory=dict)
    real: Real | None = None
    found: dict[str, Tensor] | None = None
    calls: list[tuple[nn.Module, str]] = dataclasses.field(default_factory=list)
    capped: bool = False
    loads: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    losses: list[Tensor] = dataclasses.field(default_factory=list)


_running: list[Running] = []  # transformers' functions take no argument of ours


@dataclasses.dataclass
class _Routing:
    """Of a block that runs: which positions of its input (B, L, D) are tokens, None: all; its latest router's logits,
    and its results as in `Running`."""

    x_BLD: Tensor
    real: Real | None = None
    logits_TE: Tensor | None = None
    loads: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    losses: list[Tensor] = dataclasses.field(default_factory=list)


_routing: list[_Routing] = []


@contextlib.contextmanager
def run_with(running: Running) -> Iterator[None]:
    """Set the forward pass that the functions below read their masks from, and record in."""
    _running.append(running)
    try:
        with documents_by_masks():
            yield
    finally:
        _running.pop()


def mask_of(
    *_: Any, mask_function: Callable[..., Any], local_size: int | None = None, dtype: torch.dtype, **__: Any
) -> Mask:
    """Return the mask of the batch for the rule that transformers describes."""
    rule, running = rule_of(mask_function, local_size), _running[-1]
    if running.found is not None:
        return running.found.setdefault(rule, torch.zeros(1, 1, 8, 8, device="meta"))
    return as_bias(running.masks[rule], dtype)


def attention_of(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Return the attention (B, L, N, H) of queries (B, N, L, H) and keys and values with as many heads or fewer.

    Raises:
        UserError: it has no mask, dropout, or arguments of another attention.
    """
    if unknown := [name for name, x in more.items() if x is not None and x is not False and name not in _KNOWN]:
        raise UserError(f"its attention is given {', '.join(unknown)}, which is not supported here")
    if dropout:
        raise UserError("its attention has dropout, which draws random numbers: a graph can't")
    q_BLNH, k_BLKH, v_BLKH = (x.transpose(1, 2) for x in (query, key, value))
    running = _running[-1] if _running else None  # none where backward computes a block again
    if running is not None and running.found is not None:
        rule = next((rule for rule, mask in running.found.items() if mask is attention_mask), None)
        if rule is None:
            raise UserError(f"{type(module).__name__} attends without a mask, or with one of its own")
        running.calls.append((module, rule))
        running.capped |= softcap is not None
        return q_BLNH.new_empty(*q_BLNH.shape[:3], v_BLKH.shape[-1]), None
    cap = None if softcap is None else lambda score, b, h, q, kv: softcap * torch.tanh(score / softcap)
    k_BLKH, v_BLKH = module.seen(k_BLKH, v_BLKH)  # type: ignore[operator]
    assert attention_mask is not None
    out_BLNH = attend(q_BLNH, k_BLKH, v_BLKH, attention_mask, scale=scaling, sinks_N=s_aux, score=cap)
    return out_BLNH, None


class _AnyRows(TorchFunctionMode):
    """Takes every second column, of gates and values that alternate, by an operator for any number of rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and args[0].dim() == 2 and isinstance(args[1], tuple) and len(args[1]) == 2:
            dots, columns = args[1]
            if dots is Ellipsis and columns in (slice(None, None, 2), slice(0, None, 2), slice(1, None, 2)):
                return every_second(args[0], columns.start or 0)
        return func(*args, **(kwargs or {}))


class InDouble(TorchFunctionMode):
    """Leaves numbers in fp64 where a model would compute in fp32 for a while: it is meant to be wider, not narrower."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in kwargs.items()}
        return func(*args, **kwargs)


class Rows(nn.Module):
    """The experts' own part: products of rows that lie by expert. Its parameters are the experts module's; expert
    parallelism exchanges rows around it."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.of: Any = (experts,)  # in a tuple: not a module inside of this one

    def forward(self, x_SD: Tensor, load_E: Tensor) -> Tensor:
        experts, offsets_E = self.of[0], load_E.cumsum(0).to(torch.int32)

        def linear(x: Tensor, name: str) -> Tensor:
            y = grouped_mm(x, getattr(experts, name), offsets_E, transposed=not experts.is_transposed)
            y = add_adapter(experts, name, x, y, offsets_E)
            return grouped_add(y, getattr(experts, f"{name}_bias"), offsets_E) if experts.has_bias else y

        if experts.has_gate:
            gate_up_SF = linear(x_SD, "gate_up_proj")
            with nullcontext() if experts.is_concatenated else _AnyRows():
                inner_SF = experts._apply_gate(gate_up_SF)
        else:
            inner_SF = experts.act_fn(linear(x_SD, "up_proj"))
        y_SD = linear(inner_SF, "down_proj")
        return experts.post_expert_norm(y_SD) if experts.has_post_expert_norm else y_SD


def experts_of(experts: nn.Module, x_TD: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts' results. See Note [Experts in a static graph]."""
    routing, E = _routing[-1], int(experts.all_experts)  # type: ignore[arg-type]
    is_token_BL = None if routing.real is None else routing.real.is_token_BL
    if experts.forced_balance:
        chosen_TA = in_turn(chosen_TA.shape[0], chosen_TA.shape[1], E, chosen_TA.device, is_token_BL)
    if is_token_BL is not None:
        weights_TA, chosen_TA = without_padding(weights_TA, chosen_TA, is_token_BL, E)
    _, order_S, inverse_S, load_E = slots_of(chosen_TA, E)
    routing.loads[experts.name] = load_E  # type: ignore[index]
    loss: Any = getattr(experts, "auxiliary_loss", None)
    if loss is not None and torch.is_grad_enabled():  # evaluation reports the cross entropy alone
        logits_TE = routing.logits_TE
        if logits_TE is None or logits_TE.shape[-1] != E:
            raise UserError(f"the router of {experts.name} gives no logits of each token, so it has no [moe] loss")
        logits_TE = logits_TE.reshape(-1, E).to(torch.promote_types(logits_TE.dtype, torch.float32))
        real = routing.real or Real.of(torch.ones_like(routing.x_BLD[..., 0], dtype=torch.bool))
        routing.losses.append(loss(logits_TE, logits_TE.softmax(-1), chosen_TA, load_E, real))
    y_SD = experts.rows(permuted(x_TD, order_S, inverse_S, chosen_TA.shape[1]), load_E)  # type: ignore[operator]
    y_TAD = permuted(y_SD, inverse_S, order_S).unflatten(0, chosen_TA.shape)
    return (y_TAD * weights_TA.unsqueeze(-1)).sum(1).to(x_TD.dtype)


def adapt_block(block: nn.Module, router: tuple[type[nn.Module], int] | None) -> None:
    """Set the attributes that `experts_of` reads on a block's experts, and wrap the block's forward.

    A block is traced by itself, some in backward, so what leaves it must be among its results, and it enters `InDouble`
    itself: the wrapper of a block with experts returns their loads and losses too, and a hook after it records them
    and returns the block's own result.

    Args:
        router: the class of its routers, and which of their results are the logits, where they have a loss.
    """
    every = dict(block.named_modules())
    experts = {name: module for name, module in every.items() if hasattr(module, "_is_expert_parallel")}
    routers = [module for module in every.values() if router is not None and isinstance(module, router[0])]
    biases = [(m, name) for m in every.values() for name in CORRECTION_BIASES if name in m._buffers]
    for name, module in experts.items():
        module.name, module.all_experts, module.rows = name, module.num_experts, Rows(module)  # type: ignore[assignment]
        module.forced_balance = False  # type: ignore[assignment]
        if len(routers) == len(experts):
            module.auxiliary_loss = None  # type: ignore[assignment]
        if len(biases) == len(experts) == 1:
            module.bias_of, module.bias_update_speed = biases[0], 0.0  # type: ignore[assignment]
            module.chooser = [_chooser(every, biases[0][0])]  # type: ignore[assignment]
    for module in routers if len(routers) == len(experts) else ():
        assert router is not None
        module.forward = partial(_note_logits, module.forward, router[1])
    block.forward = partial(_in_double, block.forward)
    if experts:
        block.forward = partial(_with_routing, block.forward)
        block._forward_hooks[-1] = _take_routing
        block._forward_pre_hooks[-1] = _give_real
        block._forward_pre_hooks_with_kwargs[-1] = True


def correction_bias(experts: nn.Module) -> Tensor | None:
    """Return the buffer that corrects the scores of a mixture's choice, where it has one."""
    if not hasattr(experts, "bias_of"):
        return None
    module, name = experts.bias_of  # type: ignore[misc]
    return module._buffers[name]  # type: ignore[no-any-return]


def is_router_trained(experts: nn.Module) -> bool:
    """Return whether what chooses a mixture's experts, by a correction bias, has parameters that take gradients."""
    chooser: list[nn.Module] = experts.chooser  # type: ignore[assignment]
    return any(p.requires_grad for p in chooser[0].parameters())


def _chooser(every: dict[str, nn.Module], holder: nn.Module) -> nn.Module:
    """Return the module that chooses experts: the innermost around a correction bias that has parameters."""
    name = next(name for name, module in every.items() if module is holder)
    while name and not any(True for _ in every[name].parameters()):
        name = name.rpartition(".")[0]
    return every[name]


def _note_logits(forward: Callable[..., Any], at: int, *args: Any, **kwargs: Any) -> Any:
    results = forward(*args, **kwargs)
    _routing[-1].logits_TE = results if isinstance(results, Tensor) else results[at]
    return results


def _in_double(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with InDouble() if _input_of(args, kwargs).dtype == torch.float64 else nullcontext():
        return forward(*args, **kwargs)


def _input_of(args: Any, kwargs: Any) -> Tensor:
    return args[0] if args else next(x for x in kwargs.values() if isinstance(x, Tensor))


def _give_real(block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs | {"real": _running[-1].real if _running else None}


def _with_routing(
    forward: Callable[..., Any], *args: Any, real: Real | None = None, **kwargs: Any
) -> tuple[Any, Any, Any]:
    _routing.append(_Routing(_input_of(args, kwargs), real))
    try:
        return forward(*args, **kwargs), _routing[-1].loads, _routing[-1].losses
    finally:
        _routing.pop()


def _take_routing(block: nn.Module, args: Any, result: Any) -> Any:
    y, loads, losses = result
    if _running:
        running = _running[-1]
        running.loads |= {f"{running.names[block]}.{experts}": load_E for experts, load_E in loads.items()}
        running.losses += losses
    return y


def adapt_attention(modules: list[nn.Module]) -> None:
    """Insert into each module that attends the `Seen` at which context parallelism gathers keys and values."""
    for module in modules:
        module.seen = Seen()


register(attention_of, mask_of, experts_of)
