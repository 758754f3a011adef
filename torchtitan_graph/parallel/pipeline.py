"""Execution of a pipeline step: this rank's actions, in order, on the parts of its stages' graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn

from torchtitan_graph.capture.state import BoundState, sharing_memory
from torchtitan_graph.capture.step import AddGradients, StepOutput, combine
from torchtitan_graph.capture.traced import TracedResult, run_traced
from torchtitan_graph.graph.signature import inputs_of, signature_of
from torchtitan_graph.parallel.layout import PP, Layout
from torchtitan_graph.parallel.schedule import COMPUTING, Schedule
from torchtitan_graph.runtime.observe import Watchable
from torchtitan_graph.runtime.partition import Part, Parts

Inputs = Callable[[], tuple[Any, ...]]  # returns a microbatch: batch, masks, num_tokens
# Parts of a whole model's step that run in place of others, and prefixes of names in them: of sums over the earlier
# microbatches, and of the next microbatch's values.
FIRST, LAST = "first", "last"
BACKWARD, PAIR = ("backward", "backward_and_add"), ("pair", "pair_and_add")  # of the first microbatch, of later ones
EARLIER, NEXT = "earlier_", "next_"


def beside(place: int) -> str:
    """Return the name of the part that runs a stage's forward alongside backward of a stage of the same rank, given the
    latter's place among the rank's stages."""
    return f"beside_{place}"


class StageGraph(NamedTuple):
    """A stage's final graphs; nothing is allocated yet.

    parts         of the training step
    train         that step before it was cut
    evaluate      the stage's evaluation step, if there is one
    passed        example of the activation sent between stages, on meta: in training, and in evaluation; empty where
                  there is one stage
    reduce_dtype  of the sum of gradients over the microbatches
    joined        of a whole model: FIRST is `gather` alongside `forward`, BACKWARD `backward` alongside the sums of its
                  gradients with the earlier ones, PAIR that alongside the next microbatch's `forward`, where pairs are
                  to run, and LAST `backward` beside the last sums and `reduce`. Of a pipeline's stage: `forward` beside
                  backward of the rank's other stages, by `beside`, as the schedule's pairs ask
    """

    parts: Parts
    train: TracedResult
    evaluate: TracedResult | None
    passed: Tensor
    eval_passed: Tensor | None
    reduce_dtype: torch.dtype
    joined: Mapping[str, Part] = MappingProxyType({})

    @property
    def all_parts(self) -> dict[str, Part]:
        """The parts, and the joined ones."""
        return {**self.parts.by_name, **self.joined}

    @property
    def in_pairs(self) -> bool:
        """Whether microbatches of a whole model run in pairs."""
        return PAIR[0] in self.joined


class Stage:
    """A stage's parts bound to the live parameters, with the values its microbatches keep between them."""

    def __init__(self, graph: StageGraph, model: nn.Module, read: nn.Module) -> None:
        self.graph, self.parts, train = graph, graph.all_parts, graph.train
        signature, inputs = signature_of(train.gm), inputs_of(train.gm)
        self._input_names = [node.name for slot, node in inputs if slot.kind == "input"]
        self._state_names = [node.name for slot, node in inputs if slot.kind != "input"]
        state = tuple(slot for slot in signature.inputs if slot.kind != "input")
        self._state = BoundState(state, train.options, train.modes, train.classes, read, None)
        self._guarded: list[Tensor] | None = None  # the state that was bound when guards were last checked
        self._layouts = {slot.name: slot.layout for slot in signature.outputs if slot.kind == "grad"}
        self._run = {name: Watchable(part.gm) for name, part in self.parts.items()}
        self._reads = {name: frozenset(part.reads) for name, part in self.parts.items()}
        self._backward = [name for name in ("backward", "input", "weight") if name in self.parts]
        self._add = AddGradients(model)
        self.evaluate = run_traced(graph.evaluate, module=model) if graph.evaluate is not None else None
        self._common: dict[str, Tensor] = {}  # values that all microbatches of the step read
        self._held: dict[int, dict[str, Tensor]] = {}  # by microbatch
        self._sums: dict[str, Tensor] = {}
        self._shared: set[str] | None = None  # terms of sums that share memory: the same ones in every microbatch
        self.losses: list[Tensor] = []
        self.state: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Begin a step: gather the weights, if that is done once a step; a whole model does it in the first forward."""
        self._bound = self._state.tensors()
        self._common = dict(zip(self._state_names, self._bound, strict=True))
        if FIRST not in self.graph.joined:
            self._common |= self._call("gather", {})
        self._sums, self.losses, self.state = {}, [], {}

    def forward(self, i: int, inputs: Inputs, *x: Tensor | None) -> Tensor | None:
        """Run forward on microbatch `i` and, in a pipeline, the activation of the stage before; return this stage's."""
        held = self._given(*inputs(), *x)
        made = self._call("forward", held, self._backward)
        self._hold(i, held, made)
        return made.get(self.graph.parts.outputs["output"].get("y", ""))

    def first_forward(self, inputs: Inputs) -> None:
        """Gather a whole model's weights, and run forward on the first microbatch."""
        held = self._given(*inputs())
        made = self._call(FIRST, held, self._backward)
        self._common |= {name: made.pop(name) for name in self.parts["gather"].gives}
        self._hold(0, held, made)

    def backward(self, i: int) -> None:
        """Run backward on microbatch `i` of a whole model, and add its gradients to the sums."""
        held = self._held.pop(i) | self._earlier()  # which the call empties
        self._take_sums(i, self._call(BACKWARD[i > 0], held), held)

    def pair(self, i: int, following: Inputs) -> None:
        """Do so alongside forward on the next microbatch."""
        theirs = self._given(*following())
        held = self._held.pop(i) | {NEXT + name: x for name, x in theirs.items()} | self._earlier()
        given = self._call(PAIR[i > 0], held)
        names = [name for name in given if name.startswith(NEXT)]
        self._hold(i + 1, theirs, {name.removeprefix(NEXT): given.pop(name) for name in names})
        self._take_sums(i, given, held)

    def last_backward(self, i: int) -> None:
        """Run backward on the last microbatch of a whole model, and reduce the sums of all."""
        given = self._call(LAST, self._held.pop(i) | self._earlier())
        self._take_state(given)
        self._finish(given)

    def _earlier(self) -> dict[str, Tensor]:
        """Return the sums as inputs of a part that adds to them."""
        earlier, self._sums = self._sums, {}
        return {EARLIER + name: x for name, x in earlier.items()}

    def _take_sums(self, i: int, given: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        """Keep the sums that microbatch `i` made; the first one's are its gradients."""
        self._take_state(given)
        if i:
            self._sums = {name: given[name] for name in self.graph.parts.sums}
        else:
            self._add_up(given, held)

    def _given(self, *arguments: Any) -> dict[str, Tensor]:
        """Return a microbatch's inputs by their values' names."""
        if self.graph.train.guards is not None and self._guarded is not self._bound:
            self.graph.train.guards(*arguments)
            self._guarded = self._bound
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        # dy, the last, comes later.
        names = self._input_names[:-1] if "y" in self.graph.parts.outputs["output"] else self._input_names
        return dict(zip(names, tensors, strict=True))

    def _hold(self, i: int, inputs: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> None:
        """Keep what a microbatch's forward made, and what backward reads."""
        self._take_state(made)
        self.losses += [made[value] for value in self.graph.parts.outputs["loss"].values()]
        self._held[i] = {name: x for name, x in {**inputs, **made}.items() if self._is_read(name, self._backward)}

    def forward_beside(
        self, i: int, inputs: Inputs, x: Tensor | None, place: int, other: Stage, j: int, dy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run forward on microbatch `i` alongside backward of the rank's stage at `place`, `other`, on microbatch `j`,
        and add its gradients to the sums; return the results of both."""
        theirs, mine = other._held.pop(j), self._given(*inputs(), x)
        if dy is not None:
            theirs[other._input_names[-1]] = dy
        held = theirs | {NEXT + name: value for name, value in mine.items()}
        common = other._common | {NEXT + name: value for name, value in self._common.items()}
        given = self._call(beside(place), held, common=common)
        made = {name.removeprefix(NEXT): given.pop(name) for name in [n for n in given if n.startswith(NEXT)]}
        self._hold(i, mine, made)
        other._take_state(given)
        other._add_up(given, held | given)
        y, dx = self.graph.parts.outputs["output"].get("y", ""), other.graph.parts.outputs["output"].get("dx", "")
        return made.get(y), given.get(dx)

    def backward_input(self, i: int, dy: Tensor | None) -> Tensor | None:
        """Run backward on the gradient of `forward`'s result; return that of its input. Unless backward is split, it is
        all of backward."""
        held = self._held[i]
        if dy is not None:
            held[self._input_names[-1]] = dy
        given = self._call(self._backward[0], held, self._backward[1:])
        self._take_state(given)
        dx = self.graph.parts.outputs["output"].get("dx", "")
        kept = {*self.graph.parts.sums, *(name for name in given if self._is_read(name, self._backward[1:]))}
        kept |= {dx} if self._shared is None else set()  # it may be in transit while a sum is written to
        held |= {name: x for name, x in given.items() if name in kept}
        return given.get(dx)

    def backward_weight(self, i: int) -> None:
        """Add a microbatch's weight gradients: as FSDP2, in the dtype of the reduction, in the order of execution."""
        held = self._held.pop(i)
        for part in self._backward[1:]:
            given = self._call(part, held)
            self._take_state(given)
            held |= given
        self._add_up(held, held)

    def _add_up(self, given: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        """Add a microbatch's gradients to the sums; `held` are all its values that are still alive."""
        if self._shared is None:
            sums = set(self.graph.parts.sums)
            others = [x for name, x in {**held, **self._common}.items() if name not in sums]
            self._shared = sharing_memory({name: given[name] for name in self.graph.parts.sums}, others)
        for name in self.graph.parts.sums:
            made, earlier = given[name], self._sums.get(name)
            if earlier is not None and torch.promote_types(earlier.dtype, made.dtype) == earlier.dtype:
                earlier += made  # which casts each number as it adds it
                continue
            term = made if name in self.graph.parts.reduced else made.to(self.graph.reduce_dtype)
            if earlier is not None:
                earlier += term
            else:
                self._sums[name] = made.clone() if term is made and name in self._shared else term

    def _take_state(self, given: Mapping[str, Tensor]) -> None:
        there = self.graph.parts.outputs["state"].items()
        self.state = combine(self.state, {name: given[value] for name, value in there if value in given})

    def reduce(self) -> None:
        """Reduce the gradients to this rank's shards, and add them to the live parameters'."""
        values = self.graph.parts.outputs["grad"]
        given = {name: self._sums[name] for name in values.values() if name in self._sums}
        given |= self._call("reduce", self._sums)
        self._finish(given)

    def _finish(self, given: Mapping[str, Tensor]) -> None:
        """Add the step's gradients, by their values' names, to the live parameters'."""
        values = self.graph.parts.outputs["grad"]
        self._add({name: layout.unflatten([given[values[name]]]) for name, layout in self._layouts.items()}, ())
        self._sums, self._common = {}, {}

    def _call(
        self, part: str, held: dict[str, Tensor], later: Sequence[str] = (), common: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Run a part on a microbatch's values and the common ones; drop those that no later part reads."""
        inputs, common = [], self._common if common is None else common
        for name in self.parts[part].reads:
            if name not in held:
                inputs.append(common[name])
            elif self._is_read(name, later):
                inputs.append(held[name])
            else:
                inputs.append(held.pop(name))
        return dict(zip(self.parts[part].gives, self._run[part](inputs), strict=True))

    def _is_read(self, name: str, parts: Sequence[str]) -> bool:
        return any(name in self._reads[part] for part in parts)


class Accumulation:
    """A whole model, a single stage, whose microbatches share what is done once a step, or run in pairs. See Note [Once
    a step]."""

    def __init__(self, graph: StageGraph, model: nn.Module, state: nn.Module) -> None:
        """Bind the graph to the live parameters of `model`, and to all state that a step reads: that of `state`."""
        self._stage = Stage(graph, model, state)

    @torch.no_grad()
    def train(self, microbatches: Sequence[Inputs]) -> StepOutput:
        """Add a step's gradients to the live parameters' `.grad`, which is None; return the loss and the state."""
        stage, last = self._stage, len(microbatches) - 1
        stage.begin()
        stage.first_forward(microbatches[0])
        for i in range(last):
            if PAIR[0] in stage.parts:
                stage.pair(i, microbatches[i + 1])
            else:
                stage.backward(i)
                stage.forward(i + 1, microbatches[i + 1])
        stage.last_backward(last)
        return StepOutput(sum(stage.losses[1:], stage.losses[0]), stage.state)


class Pipeline:
    """A rank's pipeline stages, and their execution by a schedule."""

    def __init__(
        self,
        schedule: Schedule,
        graphs: Mapping[int, StageGraph],
        model: nn.Module,
        tied: Tensor | None,
        layout: Layout,
        device: torch.device,
        fewer: Mapping[int, Schedule] = MappingProxyType({}),
    ) -> None:
        """Bind the stages' graphs. `fewer`: other schedules of the same stages, by the number of microbatches."""
        self.schedule, self.fewer, self.layout = schedule, fewer, layout
        self.stages = {number: Stage(graph, model, model) for number, graph in graphs.items()}
        self.num_stages, self.rank = len(schedule.stages), layout.rank(PP)
        self._ends = schedule.rank_of[0], schedule.rank_of[-1]
        self._tied = tied if self._ends[0] != self._ends[1] and self.rank in self._ends else None
        # Names of parameters that an earlier rank holds too.
        is_repeated = self._tied is not None and self.rank != self._ends[0]
        self.repeated = [name for name, p in model.named_parameters() if p is self._tied] if is_repeated else []
        self._device = device  # parameters may be on the host
        passed = next(iter(graphs.values())).passed
        self._zero = torch.zeros((), dtype=torch.promote_types(passed.dtype, torch.float32), device=self._device)

    @torch.no_grad()
    def train(self, microbatches: Sequence[Inputs]) -> StepOutput:
        """Add a step's gradients to the live parameters' `.grad`, which is None; return the loss and the state of this
        rank's stages."""
        for stage in self.stages.values():
            stage.begin()
        schedule = self.fewer.get(len(microbatches), self.schedule)
        messages = _Messages(schedule.rank_of, self.layout, self._device)
        num_left = dict.fromkeys(self.stages, len(microbatches))
        together = {*schedule.pairs.values()}
        through: list[Stage] = []  # stages after their last backward: sends to other ranks go before their reductions
        for action in schedule.actions[self.rank]:
            (kind, number, i), stage = action, self.stages[action.stage]
            if kind in COMPUTING:
                _reduce(through)
            step = 1 if kind.endswith("F") else -1  # from the sending stage to the receiving one
            if kind.startswith("SEND"):
                messages.send(kind[-1], number + step, i)
            if kind.startswith("RECV"):
                messages.receive(kind[-1], number, i, number - step, stage.graph.passed)
            x = messages.take("F", number, i) if kind == "F" and number else None
            if action in schedule.pairs:
                _, other, j = schedule.pairs[action]
                dy = messages.take("B", other, j) if other < self.num_stages - 1 else None
                place = list(self.stages).index(other)
                y, dx = stage.forward_beside(i, microbatches[i], x, place, self.stages[other], j, dy)
                messages.put("F", number + 1, i, y)
                messages.put("B", other - 1, j, dx)
            elif kind == "F":
                messages.put("F", number + 1, i, stage.forward(i, microbatches[i], x))
            if kind in ("B", "I") and action not in together:
                dy = messages.take("B", number, i) if number < self.num_stages - 1 else None
                messages.put("B", number - 1, i, stage.backward_input(i, dy))
            if kind in ("B", "W"):
                if action not in together:
                    stage.backward_weight(i)
                num_left[number] -= 1
                if not num_left[number]:
                    through.append(stage)
        _reduce(through)
        messages.wait()
        self._add_tied_gradient()
        losses = [loss for stage in self.stages.values() for loss in stage.losses]
        loss = sum(losses[1:], losses[0]) if losses else self._zero.clone()
        return StepOutput(loss, {name: x for stage in self.stages.values() for name, x in stage.state.items()})

    @torch.no_grad()
    def evaluate(self, inputs: Inputs) -> Tensor:
        """Return the loss of a batch, on all stages."""
        messages, y = _Messages(self.schedule.rank_of, self.layout, self._device), None
        for number, stage in self.stages.items():
            if number and number - 1 not in self.stages:
                messages.receive("F", number, 0, number - 1, stage.graph.eval_passed)
            assert stage.evaluate is not None, "built when the options have eval_rows"
            y = stage.evaluate(*inputs(), messages.take("F", number, 0) if number else None)
            messages.put("F", number + 1, 0, y)
            if number + 1 < self.num_stages and number + 1 not in self.stages:
                messages.send("F", number + 1, 0)
        messages.wait()
        loss = y if y is not None and self.num_stages - 1 in self.stages else self._zero.clone()
        dist.all_reduce(loss, group=self.layout.group(PP))
        return loss

    def _add_tied_gradient(self) -> None:
        """Sum the two gradients of a weight that the first and the last stage share, where these are on two ranks.

        Both ranks hold the weight and take the same steps, so it stays equal.
        """
        if self._tied is None:
            return
        gradient: Tensor = self._tied.grad.to_local()  # type: ignore[union-attr]
        mine = gradient.to(self._device)
        other, group, peer = torch.empty_like(mine), self.layout.group(PP), sum(self._ends) - self.rank
        # One sends while the other receives: NCCL runs two ranks' messages one by one, in order.
        exchange = [partial(dist.isend, mine, group_dst=peer), partial(dist.irecv, other, group_src=peer)]
        for start in exchange if self.rank == self._ends[0] else reversed(exchange):
            _wait(start(group=group))
        gradient += other.to(gradient.device)


def _reduce(stages: list[Stage]) -> None:
    while stages:
        stages.pop(0).reduce()


class _Messages:
    """Activations and gradients passed between stages in a step: on one rank, or as messages.

    Two ranks' messages match by their order alone: NCCL has no tags.
    """

    def __init__(self, rank_of: Sequence[int], layout: Layout, device: torch.device) -> None:
        self._rank_of, self._group, self._device = rank_of, layout.group(PP), device
        self._there: dict[tuple[str, int, int], tuple[Tensor, dist.Work | None]] = {}  # F or B, to stage, microbatch
        # Kept alive until they are sent; gloo never reports that before `wait`.
        self._sent: list[tuple[Tensor, dist.Work | None]] = []

    def put(self, what: str, stage: int, microbatch: int, x: Tensor | None) -> None:
        if x is not None:
            self._there[what, stage, microbatch] = x, None

    def take(self, what: str, stage: int, microbatch: int) -> Tensor:
        x, work = self._there.pop((what, stage, microbatch))
        _wait(work)
        return x

    def send(self, what: str, stage: int, microbatch: int) -> None:
        """Send the value at hand for a stage of another rank."""
        x = self.take(what, stage, microbatch).contiguous()
        self._sent = [(tensor, work) for tensor, work in self._sent if work and not work.is_completed()]
        self._sent.append((x, dist.isend(x, group=self._group, group_dst=self._rank_of[stage])))

    def receive(self, what: str, stage: int, microbatch: int, source: int, like: Tensor | None) -> None:
        """Start receiving from the stage `source` of another rank."""
        assert like is not None, "built for training, and for evaluation when the options have eval_rows"
        x = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        work = dist.irecv(x, group=self._group, group_src=self._rank_of[source])
        self._there[what, stage, microbatch] = x, work

    def wait(self) -> None:
        """Wait until all messages are sent."""
        for _, work in self._sent:
            _wait(work)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
