"""The decoder that every family builds on: embedding, blocks, norm, output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_graph.capture.step import PADDING, Real, SideOutputs, takes_real
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.init import Initial, Residual, said_initial
from torchtitan_graph.models.layers.masks import (
    Mask,
    Rule,
    all_of,
    as_bias,
    begins_of,
    build_mask,
    causal,
    num_seen,
    same_document,
    sliding,
)
from torchtitan_graph.models.layers.moe import MoE, Routing, move_correction_bias
from torchtitan_graph.ops.varlen import segments_of
from torchtitan_graph.parallel.layout import TP
from torchtitan_graph.parallel.plan import Plan

ATTENTION = ("sdpa", "flex", "varlen")  # its implementations
TOKENS_AT_A_TIME = 2**20  # whose positions are counted
LOAD = ".load"  # suffix of the state's name with a mixture's slots per expert


def check_attn(attn: str) -> None:
    """Raise a UserError for a name that is none of ATTENTION."""
    if attn not in ATTENTION:
        raise UserError(f"attn = {attn!r}: a model computes attention by {' or '.join(ATTENTION)}")


class DecoderConfig(Protocol):
    """Fields of every family's config."""

    @property
    def dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def norm_eps(self) -> float: ...


def decoder_plan(**layers: Plan) -> dict[str, Mapping[str, str]]:
    """Return a family's plan from the plans of the layers in its blocks, by their names there. The roles are explained
    in parallel/plan.py."""
    plan: dict[str, Mapping[str, str]] = {
        "tok_embeddings": {"tp": "embedding"},
        "layers.*.attention_norm.weight": {"tp": "replicate"},
        "layers.*.ffn_norm.weight": {"tp": "replicate"},
        **{f"layers.*.{name}.weight": {"tp": "replicate"} for name in ("enorm", "hnorm", "eh_proj", "norm")},
        "norm.weight": {"tp": "replicate"},
        "output": {"tp": "vocabulary"},
    }
    for layer, roles in layers.items():
        plan |= {f"layers.*.{layer}.{name}".rstrip("."): by_axis for name, by_axis in roles.items()}
    return plan


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it, added to the residual stream.

    Args:
        feed_forward: any layer that returns (B, L, D), or a `MoE`; the block then returns its `Routing` as well.
        mask: name of its attention's rule in the model's `mask_rules`.
    """

    def __init__(self, dim: int, norm_eps: float, attention: nn.Module, feed_forward: nn.Module, mask: str = "causal"):
        super().__init__()
        self.mask = mask
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        # Two names: plans and checkpoints distinguish a layer of experts from a dense one.
        self.moe = feed_forward if isinstance(feed_forward, MoE) else None
        self.feed_forward = feed_forward if self.moe is None else None

    def forward(
        self, x_BLD: Tensor, *, rope: Any, mask: Mask, real: Real | None = None
    ) -> Tensor | tuple[Tensor, Routing]:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rope=rope, mask=mask)
        if self.feed_forward is not None:
            return x_BLD + self.feed_forward(self.ffn_norm(x_BLD))
        assert self.moe is not None
        y_BLD, routing = self.moe(self.ffn_norm(x_BLD), real)
        return x_BLD + y_BLD, routing


class AheadBlock(Block):
    """A multi-token-prediction block (DeepSeek-V3, section 2.2), one token further ahead than its input: it mixes that
    with the embedding of the token between. Its normalised result goes to the model's own output; unnormalised, to the
    next such block."""

    def __init__(self, dim: int, norm_eps: float, attention: nn.Module, feed_forward: nn.Module, mask: str = "causal"):
        super().__init__(dim, norm_eps, attention, feed_forward, mask)
        self.enorm = nn.RMSNorm(dim, eps=norm_eps)
        self.hnorm = nn.RMSNorm(dim, eps=norm_eps)
        self.eh_proj = nn.Linear(2 * dim, dim, bias=False)
        self.norm = nn.RMSNorm(dim, eps=norm_eps)

    def forward(  # type: ignore[override]
        self, x_BLD: Tensor, embedding_BLD: Tensor, *, rope: Any, mask: Mask, real: Real | None = None
    ) -> tuple[Tensor, Tensor, Routing | None]:
        """Run the block on the trunk's or previous block's result, and the embedding of each position's next token."""
        mixed_BLD = self.eh_proj(torch.cat((self.enorm(embedding_BLD), self.hnorm(x_BLD)), dim=-1))
        result = super().forward(mixed_BLD, rope=rope, mask=mask, real=real)
        y_BLD, routing = result if isinstance(result, tuple) else (result, None)
        return y_BLD, self.norm(y_BLD), routing


class Decoder(nn.Module):
    """A decoder-only transformer over packed documents.

    A family passes the blocks, and defines `rope(positions_BL)`. Where blocks see different positions, it extends
    `mask_rules`. Its own blocks have the arguments and results of `Block`.

    Raises:
        UserError: `attn` is none of ATTENTION.
    """

    projects_last = True  # the logits are what the output layer returns
    changes_scores = False  # attention changes its scores by a function, which only flex attention takes
    # Of another library's model under tensor parallelism: the ranks whose routers see parts of a row, and whether the
    # model sums their loads.
    routing_group: ProcessGroup | None = None
    sums_loads = False
    no_pipeline: str | None = None  # why such a model can't be cut into stages
    mixes_documents: str | None = None  # what in it mixes the tokens of a row, over the ends of documents
    longest_row: tuple[int, str] | None = None  # the most tokens of a row, and why not more
    trained_length: int | None = None  # of rows, where another library's model says it
    notes: Sequence[str] = ()  # what a user should know of another library's model, a line each
    source: Path | None = None  # of another library's model: the file or folder with its code
    lora = job.Lora()  # the options of its adapters, where it has some
    conversion: Any = None  # of another library's model: how the tensors of files become its own

    def __init__(self, config: DecoderConfig, attn: str, blocks: Sequence[nn.Module]):
        super().__init__()
        check_attn(attn)
        self.config: Any = config
        self.attn = attn
        self.ahead_weight = 0.0  # weight of the losses of `AheadBlock`s
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight

    @property
    def modules_in_order(self) -> list[str]:
        """The names of the modules in the order of forward: a pipeline stage has some of them."""
        return ["tok_embeddings", *self.blocks, "norm", "output"]

    def keep(self, names: Container[str]) -> None:
        """Drop all modules except those in `names`, which stay under their names.

        Where the output stays and is tied, the embedding does too: their shared weight has its name.
        """
        for name in self.modules_in_order:
            owner, _, leaf = name.rpartition(".")
            if name not in names and not (name == "tok_embeddings" and self.config.tied and "output" in names):
                self.layers._modules.pop(leaf) if owner else setattr(self, leaf, None)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks by their names in the whole model, in order."""
        return {f"layers.{number}": block for number, block in self.layers.named_children()}

    def after_step(self, state: Mapping[str, Tensor]) -> None:
        """Update the model from the `state` that an optimizer step returned, of all microbatches and ranks."""
        for name, load_E in state.items():
            moe = self.get_submodule(name.removesuffix(LOAD))
            assert isinstance(moe, MoE), name
            if moe.router.gate.weight.requires_grad:  # a frozen router's choice stays as it is
                move_correction_bias(moe.router.bias_E, moe.bias_update_speed, load_E)

    def plain_term(self, name: str, term_BL: Tensor) -> Tensor:
        """Return a term of `SideOutputs.losses` as a plain tensor: of logits or parameters that tensor parallelism
        shards, it is a DTensor.

        Raises:
            UserError: it is made of a parameter that eager mode shards at rest, so its gradient would be a rank's part.
        """
        if not isinstance(term_BL, DTensor):
            return term_BL
        if (axes := term_BL.device_mesh.mesh_dim_names) != (TP,):
            raise UserError(
                f"{type(self).__name__}: SideOutputs.losses: {name} is a DTensor over {axes}, of a parameter that "
                "eager mode shards at rest: its gradient would be a rank's part; compute the term in the forward of "
                "the parameter's block, or set compile.mode = 'graph'"
            )
        return term_BL.redistribute(placements=[Replicate()]).to_local()

    def rope(self, positions_BL: Tensor) -> Any:
        """Return the argument `rope` of every block's attention, from the positions."""
        raise NotImplementedError

    def initial_std(self, name: str) -> Initial:
        """Return the standard deviation of the initial values of parameter `name`; None means ones, 0 zeros. See Note
        [Initial values]."""
        if name == "output.weight" or (name == "tok_embeddings.weight" and self.config.tied):
            return self.config.dim**-0.5  # logits start near unit variance
        if name == "tok_embeddings.weight":
            return 1.0
        _, initial = said_initial(self, name)
        if isinstance(initial, Residual):
            return initial.std / (2 * self.config.num_layers) ** 0.5
        return initial

    def mask_rules(self, documents_BL: Tensor, positions_BL: Tensor) -> dict[str, Rule]:
        """Return the mask rules, by the names that blocks use."""
        return {"causal": all_of(causal, same_document(documents_BL))}

    def segments(self, documents_BL: Tensor, positions_BL: Tensor) -> dict[str, Tensor]:
        """Return, by rule, where segments begin (B, L): for rules by which a token sees its segment's tokens up to
        itself, or the last of them (`windows`), a segment being a document or a part of one. attn = "varlen" supports
        only these."""
        return {"causal": begins_of(documents_BL)}

    def windows(self) -> dict[str, int]:
        """Return, by rule, the most tokens that a token sees of its segment; others are seen whole."""
        return {}

    def not_in_segments(self) -> str | None:
        """Return why attn = "varlen" can't compute this model's attention; None if it can."""
        if self.changes_scores:
            return "this model changes attention's scores, which only 'flex' can"
        ends = [63 + window + i for window in self.windows().values() for i in (-1, 0, 1)]
        some_L = torch.tensor([*range(64), *(63 + 2**i for i in range(20)), *ends])  # an undeclared window, too
        places_L = torch.arange(int(some_L.max()) + 1)
        documents_BL = places_L.div(9, rounding_mode="floor").clamp(max=7).expand(2, -1)  # the last is long
        positions_BL = places_L.mul(777).expand(2, -1)  # far apart: chunks end among them, too
        segments = self.segments(documents_BL, positions_BL)
        pairs = torch.arange(2).view(2, 1, 1, 1), torch.zeros(1, dtype=torch.int64), some_L.unsqueeze(1), some_L
        for name, rule in self.mask_rules(documents_BL, positions_BL).items():
            if name not in segments:
                return (
                    f"the mask {name!r} of this model is not causal attention within documents, or parts of them"
                    " (`segments`)"
                )
            window = sliding(self.windows().get(name, len(places_L)))
            expected = all_of(causal, same_document(segments[name].cumsum(1)), window)
            if not torch.equal(*torch.broadcast_tensors(rule(*pairs), expected(*pairs))):
                return (
                    f"this model's `segments` and `windows` let other tokens be seen than the rule {name!r} of its"
                    " `mask_rules`: correct the one that is wrong"
                )
        return None

    def check_attention(self) -> None:
        """Raise a UserError if attn = "varlen" can't compute this model's attention."""
        if self.attn == "varlen" and (why := self.not_in_segments()):
            raise UserError(f"model.attn = 'varlen': {why}; use flex{'' if self.changes_scores else ' or sdpa'}")

    def num_visible(self, positions_BL: Tensor) -> dict[str, Tensor]:
        """Return, by rule, the number of positions that each position sees, for attention's FLOPs. Other rules are
        counted pair by pair."""
        return {"causal": positions_BL + 1}

    def visible_pairs(self, documents_BL: Tensor, positions_BL: Tensor) -> dict[str, float]:
        """Return, by block, the fraction of all pairs of positions that its attention sees, without padding's."""
        B, L = positions_BL.shape
        numbers = self.num_visible(positions_BL)
        for name, rule in self.mask_rules(documents_BL, positions_BL).items():
            if name not in numbers:
                numbers[name] = num_seen(rule, B, L, positions_BL.device)
        is_token_BL = documents_BL != PADDING
        fractions = {name: float((n * is_token_BL).sum()) / (B * L * L) for name, n in numbers.items()}
        return {name: fractions[getattr(block, "mask", "causal")] for name, block in self.blocks.items()}

    def visible_in_one_document(self, seq_len: int) -> dict[str, float]:
        """Return the same fractions for a row that is one document, which may be longer than memory has room for."""
        one = torch.zeros(1, 1, dtype=torch.int64)
        if self.mask_rules(one, one).keys() - self.num_visible(one).keys():
            positions_BL = torch.arange(seq_len).expand(1, -1)
            return self.visible_pairs(torch.zeros_like(positions_BL), positions_BL)
        numbers: Counter[str] = Counter()
        for begin in range(0, seq_len, TOKENS_AT_A_TIME):
            positions_BL = torch.arange(begin, min(begin + TOKENS_AT_A_TIME, seq_len))[None]
            numbers.update({name: int(n.sum()) for name, n in self.num_visible(positions_BL).items()})
        return {
            name: numbers[getattr(block, "mask", "causal")] / (seq_len * seq_len) for name, block in self.blocks.items()
        }

    def masks(
        self,
        documents_BL: Tensor,
        positions_BL: Tensor,
        places_L: Tensor | None = None,
        device: torch.device | None = None,
    ) -> dict[str, Mask]:
        """Build the attention masks of one batch, outside the graph, shared by all layers.

        Args:
            documents_BL: document number of each token.
            positions_BL: position of each token in its document.
            places_L: places of the queries in the row; None: one at each place.
            device: device of the masks; None: that of the documents. Segments are computed from documents in the
                host's memory: for others the host waits. See Note [Numbers of segments].
        """
        (B, L), device = documents_BL.shape, device or documents_BL.device
        if self.attn == "varlen":
            begins = self.segments(documents_BL, positions_BL)
            windows = self.windows()
            return {name: segments_of(each, device, windows.get(name, 0), places_L) for name, each in begins.items()}
        rules = self.mask_rules(documents_BL, positions_BL)
        return {name: build_mask(self.attn, rule, B, L, device, places_L) for name, rule in rules.items()}

    def forward(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor | None = None,
        masks: Mapping[str, Mask] | None = None,
        *,
        side_outputs: bool = False,
        only: Container[str] | None = None,
        loss: Callable[[nn.Module, Tensor, int], Tensor] | None = None,
        real: Real | None = None,
    ) -> Any:
        """Return the logits (B, L, V); with `side_outputs` also `SideOutputs`, for a training step.

        Args:
            only: run just the modules of these names, a pipeline stage's: the input is the previous stage's activation
                in place of tokens, the result this stage's in place of logits.
            loss: function of the output layer, its input, and the number of tokens further ahead that the logits are
                for; its results take the place of all logits, which nothing else reads.
            real: which positions are tokens, for experts; None: all.
        """

        def runs(name: str) -> bool:
            return only is None or name in only

        def project(x_BLD: Tensor, ahead: int = 0) -> Tensor:
            return self.output(x_BLD) if loss is None else loss(self.output, x_BLD, ahead)

        if positions_BL is None:
            positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device).expand_as(tokens_BL)
        if masks is None:
            masks = self.masks(torch.zeros_like(tokens_BL), positions_BL)
        rope = self.rope(positions_BL)
        x_BLD = self.tok_embeddings(tokens_BL) if runs("tok_embeddings") else tokens_BL
        masks = {name: as_bias(mask, x_BLD.dtype) for name, mask in masks.items()}
        state: dict[str, Tensor] = {}
        experts: list[Tensor] = []
        for name, block in self.blocks.items():
            if not isinstance(block, AheadBlock) and runs(name):
                more = _of_experts(block, real)
                result = block(x_BLD, rope=rope, mask=masks[getattr(block, "mask", "causal")], **more)
                x_BLD, routing = result if isinstance(result, tuple) else (result, None)
                _note(state, experts, name, routing)
        x_BLD = self.norm(x_BLD) if runs("norm") else x_BLD
        result = project(x_BLD) if runs("output") else x_BLD
        if not side_outputs:
            return result
        ahead = self._look_ahead(tokens_BL, x_BLD, rope, masks, state, experts, project, real)
        return result, SideOutputs({}, state, ahead, self.ahead_weight, experts)

    def _look_ahead(
        self,
        tokens_BL: Tensor,
        x_BLD: Tensor,
        rope: Any,
        masks: Mapping[str, Mask],
        state: dict[str, Tensor],
        experts: list[Tensor],
        project: Callable[[Tensor, int], Tensor],
        real: Real | None,
    ) -> list[Tensor]:
        """Return the logits of each `AheadBlock`, or their losses, for training."""
        ahead: list[Tensor] = []
        for name, block in self.blocks.items():
            if isinstance(block, AheadBlock):
                # The last position gets the row's first token here; it is in no loss, and no other position sees it.
                tokens_BL = tokens_BL.roll(-1, dims=1)
                embedding_BLD = self.tok_embeddings(tokens_BL)
                x_BLD, normed_BLD, routing = block(
                    x_BLD, embedding_BLD, rope=rope, mask=masks[block.mask], **_of_experts(block, real)
                )
                _note(state, experts, name, routing)
                ahead.append(project(normed_BLD, len(ahead) + 1))
        return ahead


def _of_experts(block: nn.Module, real: Real | None) -> dict[str, Real]:
    """Return the arguments of a block that only one with experts needs."""
    return {} if real is None or getattr(block, "moe", None) is None else {"real": real}


def check_experts_see_padding(model: Decoder) -> None:
    """Raise a UserError where a mixture of experts in a model could not be given which positions are padding."""
    for name, block in model.blocks.items():
        if mixtures := [module for module in block.modules() if isinstance(module, MoE)]:
            if getattr(block, "moe", None) is None:
                raise UserError(
                    f"{type(block).__name__}, the block {name}: has a {type(mixtures[0]).__name__}, and no attribute"
                    " `moe`: its forward would not be given the argument `real`, by which experts leave padding out;"
                    f" name the mixture `moe`; see docs/extend/family.md"
                )
            if lacking := [type(each).__name__ for each in (model, block, *mixtures) if not takes_real(each)]:
                raise UserError(
                    f"{lacking[0]}.forward: has no argument `real`, by which the experts of {name} leave padding out;"
                    f" add `real=None`, and pass it on as Decoder, Block and MoE do; see docs/extend/family.md"
                )


def _note(state: dict[str, Tensor], experts: list[Tensor], name: str, routing: Routing | None) -> None:
    """Add a block's routing to the state and the experts' losses."""
    if routing is not None:
        state[f"{name}.moe{LOAD}"] = routing.load_E
        if routing.loss is not None:
            experts.append(routing.loss)
