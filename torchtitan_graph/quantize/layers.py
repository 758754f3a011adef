"""Float8 layers, and the quantization state of their weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torchtitan_graph.capture.calls import called_as
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.feed_forward import FeedForward
from torchtitan_graph.models.layers.moe import Experts
from torchtitan_graph.nearest import did_you_mean
from torchtitan_graph.quantize.grouped import grouped_linear
from torchtitan_graph.quantize.products import (
    DELAYED,
    E4M3,
    E5M2,
    SCALINGS,
    QuantizedInput,
    Recipe,
    as_autocast,
    largest_of_weight,
    linear,
    multiple_for,
    over,
    quantize,
    quantize_input,
    scale_for,
)

HISTORY = 16  # steps whose largest magnitudes delayed scaling stores


class Kept(nn.Module):
    """Per-weight quantization state.

    weight_q, weight_scale  its workspace; without, each call quantises the weight. Not saved
    amax, amax_history      with delayed scaling: the gradient of the first is the largest magnitudes of activations and
                            of the result's gradient, the second stores the last steps'. That is saved. See `linear`
    """

    weight_q: Tensor | None
    weight_scale: Tensor | None
    amax: Tensor | None
    amax_history: Tensor | None

    def __init__(self, recipe: Recipe, device: torch.device):
        super().__init__()
        _check(recipe)
        self.recipe = recipe
        is_delayed = recipe.scaling == DELAYED
        slot = torch.zeros(3, device=device) if is_delayed else None
        self.register_buffer("weight_q", None, persistent=False)
        self.register_buffer("weight_scale", None, persistent=False)
        self.register_buffer("amax", slot, persistent=False)
        self.register_buffer("amax_history", torch.zeros(HISTORY, 2, device=device) if is_delayed else None)
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Reset to the state before any step; a workspace is filled before it is used."""
        for buffer in self._buffers.values():
            if buffer is not None:
                buffer.zero_()
        if self.amax is not None:
            self.amax[2] = 1
            self.amax.requires_grad_()

    def add_workspace(self, weight: Tensor) -> None:
        """Add a workspace for this rank's shard of a weight; experts' has a scale for each."""
        self.weight_q = torch.empty_like(weight, dtype=E4M3, requires_grad=False)
        self.weight_scale = torch.empty(weight.shape[:-2], device=weight.device)
        self.fill_workspace(weight)

    @torch.no_grad()
    def fill_workspace(self, weight: Tensor) -> None:
        """Quantise a weight that is not sharded."""
        assert self.weight_q is not None and self.weight_scale is not None
        self.weight_scale.copy_(scale_for(largest_of_weight(weight), E4M3))
        self.weight_q.copy_(quantize(weight, over(self.weight_scale), E4M3))

    @torch.no_grad()
    def see(self, seen: Tensor) -> None:
        """Store a step's `amax`: the largest magnitudes of activations and of the result's gradient."""
        assert self.amax_history is not None
        self.amax_history.copy_(torch.cat([seen[None, :2], self.amax_history[:-1]]))

    def state(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return workspace, slot and past as arguments of functions of `products`."""
        past = None if self.amax_history is None else self.amax_history.amax(0)
        return self.weight_q, self.weight_scale, self.amax, past


class Linear(Kept):
    """A linear layer that multiplies in float8. Its parameters are those of the layer that it replaces.

    (..., D) -> (..., F)
    """

    @called_as("Linear(nn.Linear(in_features, out_features), Recipe())")
    def __init__(self, old: nn.Linear, recipe: Recipe):
        _expect("Linear", "old", old, nn.Linear)
        super().__init__(recipe, old.weight.device)
        (F, D), multiple = old.weight.shape, multiple_for(recipe)
        if F % multiple or D % multiple:
            raise UserError(f"Linear: old is {F} x {D}, and both sizes must be multiples of {multiple}")
        self.weight, self.bias = old.weight, old.bias

    def forward(self, x: Tensor, given: QuantizedInput | None = None) -> Tensor:
        """Return the layer's result; `given` is x quantised, where other layers read it as well."""
        y, *_ = linear(x, self.weight, self.recipe, *self.state(), given)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class LayerNormLinear(nn.Module):
    """A norm, such as RMSNorm or LayerNorm, and the linear layers that read its result, which is quantised once for
    all.

    (..., D) -> a tuple with (..., F) of each layer, in their order
    """

    @called_as("LayerNormLinear(norm, {'wq': wq, 'wk': wk}, Recipe())")
    def __init__(self, norm: nn.Module, layers: Mapping[str, nn.Linear], recipe: Recipe):
        super().__init__()
        _expect_norm("LayerNormLinear", norm)
        if not isinstance(layers, Mapping) or not layers or not all(str(name).isidentifier() for name in layers):
            raise UserError(f"LayerNormLinear: layers = {layers!r}: must be a dict of linear layers by name")
        self.norm = norm
        self.layers = nn.ModuleDict({name: Linear(old, recipe) for name, old in layers.items()})

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return _read_by(self.norm(x), *self.layers.values())


class LayerNormMLP(nn.Module):
    """A norm and the SwiGLU feed-forward layer that reads its result, which is quantised once for `w1` and `w3`.

    (..., D) -> (..., D)
    """

    INITIAL = FeedForward.INITIAL

    @called_as("LayerNormMLP(norm, feed_forward, Recipe())")
    def __init__(self, norm: nn.Module, old: FeedForward, recipe: Recipe):
        super().__init__()
        _expect_norm("LayerNormMLP", norm)
        _expect("LayerNormMLP", "old", old, FeedForward)
        self.norm, self.activation = norm, old.activation
        self.w1, self.w2, self.w3 = (Linear(each, recipe) for each in (old.w1, old.w2, old.w3))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.activation(*_read_by(self.norm(x), self.w1, self.w3)))


def _check(recipe: Recipe) -> None:
    if not isinstance(recipe, Recipe):
        raise UserError(f"recipe = {recipe!r}: must be a Recipe, such as Recipe({SCALINGS[0]!r})")
    if recipe.scaling not in SCALINGS:
        hint = did_you_mean(str(recipe.scaling), SCALINGS)
        raise UserError(f"Recipe: scaling = {recipe.scaling!r}: must be one of {', '.join(SCALINGS)}{hint}")
    if recipe.gradient not in (E4M3, E5M2):
        raise UserError(f"Recipe: gradient = {recipe.gradient!r}: must be {E5M2} or {E4M3}")


def _expect(layer: str, name: str, given: object, kind: type) -> None:
    if not isinstance(given, kind):
        raise UserError(f"{layer}: {name} is of class {type(given).__name__}: must be a {kind.__name__}")


def _expect_norm(layer: str, norm: object) -> None:
    _expect(layer, "norm", norm, nn.Module)
    if isinstance(norm, _NOT_BY_TOKEN):
        raise UserError(f"{layer}: norm is of class {type(norm).__name__}: must be one over a token, such as RMSNorm")


_NOT_BY_TOKEN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.GroupNorm)


def _read_by(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Return the results of layers of one recipe on x, quantised once. Delayed scaling's history of x is the same in
    all of them: the first one's."""
    first, x = layers[0], as_autocast(x)
    assert isinstance(first, Linear)
    given = quantize_input(x, first.recipe, first.state()[-1])
    return tuple(layer(x, given) for layer in layers)


class GroupedLinear(Kept):
    """A linear layer for each of E groups of rows, which multiplies in float8, without bias.

    rows (S, D) sorted by group, and where each group ends (E,) -> (S, F)

    The ends rise to S at most; rows behind the last group, such as padding, are zeros in the result and have no part in
    a gradient. Counts are no ends: of them, they are `torch.cumsum(counts, 0)`. With a GPU's kernel, for which nothing
    waits, the ends are not checked.
    """

    @called_as("GroupedLinear(weight_EFD, Recipe())")
    def __init__(self, weight_EFD: nn.Parameter, recipe: Recipe):
        _expect("GroupedLinear", "weight_EFD", weight_EFD, nn.Parameter)
        if weight_EFD.dim() != 3:
            raise UserError(f"GroupedLinear: weight_EFD has shape {[*weight_EFD.shape]}: must be experts x out x in")
        super().__init__(recipe, weight_EFD.device)
        self.weight = weight_EFD

    def forward(self, x_SD: Tensor, offsets_E: Tensor) -> Tensor:
        _expect("GroupedLinear", "offsets_E", offsets_E, Tensor)
        if offsets_E.shape != self.weight.shape[:1]:
            groups = len(self.weight)
            raise UserError(f"GroupedLinear: offsets_E has shape {[*offsets_E.shape]}: must be [{groups}]")
        if offsets_E.dtype not in (torch.int32, torch.int64):
            raise UserError(f"GroupedLinear: offsets_E is of {offsets_E.dtype}: must be torch.int32 or torch.int64")
        if x_SD.dim() != 2 or x_SD.shape[1] != self.weight.shape[2]:
            raise UserError(
                f"GroupedLinear: rows of shape {[*x_SD.shape]} do not fit a weight of shape {[*self.weight.shape]}:"
                " must be (rows, in), and (experts, out, in)"
            )
        x_SD = as_autocast(x_SD)
        y_SF, *_ = grouped_linear(x_SD, self.weight, offsets_E.int(), self.recipe, *self.state())
        return y_SF


class Float8Experts(Experts):
    """Experts that multiply in float8, with the parameters of those that they replace; each weight's quantization state
    is in `kept`, by its name."""

    def __init__(self, old: Experts, recipe: Recipe):
        nn.Module.__init__(self)
        self.activation, self.route = old.activation, old.route
        for name in ("w1", "w2", "w3", "b1", "b2", "b3"):
            setattr(self, name, getattr(old, name))
        self.kept = nn.ModuleDict({name: Kept(recipe, old.w1.device) for name in ("w1", "w2", "w3")})

    def product(self, x: Tensor, weight: str, offsets_E: Tensor) -> Tensor:
        kept = self.kept[weight]
        assert isinstance(kept, Kept)
        y, *_ = grouped_linear(x, getattr(self, weight), offsets_E, kept.recipe, *kept.state())
        return y


def kept_weights(model: nn.Module) -> dict[str, tuple[Kept, Tensor]]:
    """Return the quantization state of a model's float8 weights, by name, with the weights."""
    found: dict[str, tuple[Kept, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (Linear, GroupedLinear)):
            found[name] = module, module.weight
        elif isinstance(module, Float8Experts):
            for leaf, kept in module.kept.items():
                assert isinstance(kept, Kept)
                found[f"{name}.kept.{leaf}"] = kept, getattr(module, leaf)
    return found
