"""The trainer of a replica group: it meets the others in each step, or at the end of rounds."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchtitan_graph import stop
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.capture.state import local_part
from torchtitan_graph.capture.step import StepOutput
from torchtitan_graph.checkpoint import Checkpointer, tensors_of
from torchtitan_graph.checkpoint.folder import TMP
from torchtitan_graph.data.batches import Deal
from torchtitan_graph.data.feed import Feed, Microbatches
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.metrics import Metrics
from torchtitan_graph.replicas import TrainingState
from torchtitan_graph.replicas.outer import Outer
from torchtitan_graph.runtime.gradients import taking
from torchtitan_graph.steps.reading import Read
from torchtitan_graph.trainer import Trainer, position_of_all

if TYPE_CHECKING:
    from torchtitan_graph.replicas.replicas import Replicas
    from torchtitan_graph.replicas.rounds import Rounds


def make_trainer(blueprint: Blueprint) -> Trainer:
    """Return the trainer that the configuration asks for. Raises UserError as `Trainer`."""
    table = blueprint.config.fault_tolerance
    if not table.enable:
        return Trainer(blueprint)
    return StepwiseTrainer(blueprint) if table.semi_sync_method is None else RoundsTrainer(blueprint)


class _ReplicaTrainer(Trainer):
    """What both ways to meet the other groups have in common."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._position: dict[str, Any] = {}  # this rank's part, after the last step that counts
        super().__init__(blueprint)

    def _new_checkpointer(self, **of_replicas: Any) -> Checkpointer:
        return super()._new_checkpointer(unfinished=f"{TMP}-{self.config.fault_tolerance.replica}", **of_replicas)

    def _among_others(self) -> AbstractContextManager[Any]:
        self.replicas = self._join()
        return closing(self.replicas)

    def _join(self) -> Replicas:
        """Announce this group to the others."""
        raise NotImplementedError

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        assert self.replicas is not None
        return self.replicas.gather(numbers)

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return this rank's parts of all state, by name."""
        return {name: local_part(x).detach() for name, x in tensors_of(self.model, self.optimizer).items()}

    def _give(self) -> dict[str, Any]:
        """Return the rest of this rank's state."""
        return {"schedule": self.lr_scheduler.state_dict(), "data": self._position, **self._own_state()}

    def _take(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Load the state of another replica's same rank."""
        with torch.no_grad():
            for name, x in self._own_tensors().items():
                x.copy_(tensors[name])
        self.lr_scheduler.load_state_dict(rest.pop("schedule"))
        self._position = rest.pop("data")
        self._load_train_state(rest)

    def _training_state(self) -> TrainingState:
        return TrainingState(self._own_tensors, self._give, self._take)

    def _go_to(self, position: dict[str, Any]) -> None:
        """Read on from a position of all ranks, with the deal of now."""
        assert self.replicas is not None
        self.train_data.deal = Deal(self.replicas.place, len(self.replicas.living), self.blueprint.num_microbatches)
        self.train_data.load_state_dict(position)
        self.feed.go_back()

    def _patience(self) -> int:
        # A rank may learn later than the others of its group that a replica is lost.
        return super()._patience() + self.config.fault_tolerance.timeout_seconds


class StepwiseTrainer(_ReplicaTrainer):
    """A replica group that meets the others in each step. See Note [Replicas]."""

    def _new_feed(self, **of_replicas: Any) -> Feed:
        return super()._new_feed(gather=self._gather, **of_replicas)

    def _join(self) -> Replicas:
        from torchtitan_graph.replicas.replicas import Replicas  # torchft is not everywhere

        self._position = self.train_data.state_dict()
        config = self.config
        return Replicas(
            config.fault_tolerance, Path(config.job.dump_folder), self.device, self._training_state(), self.step
        )

    def _compute(self, metrics: Metrics) -> tuple[Microbatches, StepOutput] | None:
        """Compute a step's gradients with the replicas that live, again until this one has lost none of them."""
        replicas, run = self.replicas, self.run
        assert replicas is not None and run is not None
        is_behind = False  # whether the position in the data is another than that before the step
        while True:
            with run.during("waiting"), self.hang.paused():
                changed = replicas.join()
            begin = time.monotonic()
            if changed or is_behind:
                self._go_to(position_of_all(self._position, self.layout))
            self.stop_signal = replicas.stop_signal
            if self.stop_signal or self._is_over():  # as of the replica that this one healed from
                return None
            sums_early = taking(replicas.begin_sum, self.train_data.deal.own)
            with sums_early if self.steps.is_one_graph else nullcontext():
                found = super()._compute(metrics)
            if found is None:
                return None
            batches, output = found
            output = replicas.sum(self.model, output)
            if replicas.commit():
                self._position = self.train_data.state_dict()
                return batches, output
            self.optimizer.zero_grad()
            is_behind = True
            run.lose(time.monotonic() - begin)


class RoundsTrainer(_ReplicaTrainer):
    """A replica group that meets the others at the end of rounds. See Note [Rounds].

    outer   the state of DiLoCo, None for LocalSGD
    rounds  the groups, once it trains
    """

    outer: Outer | None = None
    rounds: Rounds | None = None

    def _new_feed(self, **of_replicas: Any) -> Feed:
        return super()._new_feed(keep_empty=True, **of_replicas)

    def _new_checkpointer(self, **of_replicas: Any) -> Checkpointer:
        self.outer = self._new_outer()
        outer = {} if self.outer is None else self.outer.chunks()
        return super()._new_checkpointer(outer=outer, **of_replicas)

    def _new_outer(self) -> Outer | None:
        """Return the state of DiLoCo, None for LocalSGD.

        Raises UserError if a step changes state of the model that no synchronisation averages.
        """
        table, speed = self.config.fault_tolerance, self.config.moe.bias_update_speed
        parameters = dict(self.model.named_parameters())
        if speed and (others := [name for name in self.model.state_dict() if name not in parameters]):
            raise UserError(
                f"fault_tolerance.semi_sync_method = {table.semi_sync_method!r}: each group would move {others[0]} by"
                " loads of its own; set moe.bias_update_speed = 0, and a balance loss in [moe], or leave"
                " semi_sync_method out"
            )
        return Outer(self.model, self.model.blocks, table) if table.semi_sync_method == "diloco" else None

    def _resume(self) -> None:
        super()._resume()
        if self.outer is not None and not self.checkpointer.loaded_optimizer:
            self.outer.begin()

    def _join(self) -> Replicas:
        from torchtitan_graph.replicas.rounds import Rounds

        config = self.config
        self.rounds = Rounds(
            config.fault_tolerance,
            Path(config.job.dump_folder),
            self.device,
            self._training_state(),
            model=self.model,
            optimizer=self.optimizer,
            outer=self.outer,
            counted=self._counts(),
        )
        return self.rounds

    def _own_tensors(self) -> dict[str, Tensor]:
        outer = {} if self.outer is None else self.outer.chunks()
        return super()._own_tensors() | {name: chunk.local for name, chunk in outer.items()}

    def _give(self) -> dict[str, Any]:
        assert self.rounds is not None
        tokens, *by_source = self.rounds.counted
        counts = {"tokens_seen": tokens, "tokens_by_source": self._named(by_source)}
        return {**super()._give(), "data": self.train_data.state_dict(), **counts}

    def _take(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        super()._take(tensors, rest)
        self.train_data.rewind()  # what this group has read since it met others last does not count
        assert self.rounds is not None
        self.rounds.counted, self.rounds.own = self._counts(), [0] * len(self._counts())

    def _counts(self) -> list[int]:
        """Return the targets so far: in all, and of each corpus of a mixture."""
        names = self.train_data.source_names
        return [self.tokens_seen, *(self.tokens_by_source.get(name, 0) for name in names if len(names) > 1)]

    def _named(self, by_source: list[int]) -> dict[str, int]:
        return dict(zip(self.train_data.source_names, by_source, strict=True)) if by_source else {}

    def train_step(self, metrics: Metrics) -> bool:
        """Run an optimizer step of this group alone; meet the others before the first, and after it where that is
        due. Return False if there is no step to do."""
        assert self.rounds is not None
        if not self.rounds.is_training and not (self._meet(self.rounds) and not self._is_over()):
            return False
        return super().train_step(metrics)

    def _count(self, read: Read) -> None:
        """Count a step of this group, and meet the others where that is due."""
        super()._count(read)
        rounds = self.rounds
        assert rounds is not None
        rounds.own = [n + int(more) for n, more in zip(rounds.own, [read.num_tokens, *read.by_source], strict=True)]
        deal = self.train_data.deal  # the others' targets are known after a synchronisation; till then as many as here
        self.tokens_seen = rounds.counted[0] + rounds.own[0] * deal.total // deal.own
        rounds.is_synchronised = False
        if rounds.is_due(self.step) and not self._meet(rounds):
            return
        if self.stop_signal and not rounds.is_synchronised:
            logger.info(f"{stop.name(self.stop_signal)}: the run stops after the next synchronisation of the replicas")
            self.stop_signal = 0

    def _can_stop(self, last: bool) -> bool:
        return super()._can_stop(last) and self.rounds is not None and self.rounds.is_synchronised

    def _meet(self, rounds: Rounds) -> bool:
        """Meet the other groups: to start with them, and where a synchronisation begins or ends, again until the vote
        is a yes. Return False if there is no step to do, or by a signal."""
        with self.hang.paused():
            while True:
                if not rounds.is_sent:
                    changed = rounds.meet(self.step)
                    if rounds.stop_signal:
                        self.stop_signal = rounds.stop_signal
                        return False
                    if rounds.is_starting and self._is_over():  # as of the group that this one healed from
                        return False
                    totals = self._exchange(rounds, changed, rounds.healed)
                    if rounds.is_starting:
                        rounds.begin()
                        if rounds.is_training:
                            return True
                        continue
                    rounds.send(self.step)
                    if not rounds.ends_round(self.step):
                        return True
                else:
                    totals = self._exchange(rounds, changed=False, healed=False)
                if rounds.end(self.step):
                    rounds.counted = [a + b for a, b in zip(rounds.counted, totals, strict=True)]
                    rounds.own = [0] * len(rounds.own)
                    self.tokens_seen, *by_source = rounds.counted
                    self.tokens_by_source = self._named(by_source)
                    return True

    def _exchange(self, rounds: Rounds, changed: bool, healed: bool) -> list[int]:
        """Exchange with the other groups what they have read, and go on with this group's part of the steps; return
        the targets of all since the last synchronisation."""
        totals = self.train_data.exchange(rounds.own, self._gather)
        position = self.train_data.state_dict()
        if healed:
            position = {**self._position, "lanes": position["lanes"]}
        merged = position_of_all(position, self.layout)
        whole = self.train_data.catch_up(merged)
        if changed or whole != merged:
            self._go_to(whole)
        return totals
