"""Replica groups that meet after several steps instead of in each, by torchft's LocalSGD and DiLoCo.

Note [Rounds]
A round is the steps between two synchronisations: sync_steps / num_fragments of them. In it each group trains alone, on
its own part of each step's rows, with the denominator of its own targets. At its end:

1. The quorum says who lives. A group that has just started, or that others have left behind, heals from one that is at
   a round's end too: parameters, the optimizer's state, and what DiLoCo keeps alongside them.
2. The groups exchange how far each has read and how many targets it has trained on; each then knows the position in the
   data, reads over the rows of groups that were lost, and takes the part of the next steps that the quorum gives it.
3. torchft averages over the groups that live: the parameters (LocalSGD), or how far those of a fragment have come since
   its last synchronisation (DiLoCo), which its outer optimizer takes for a gradient.
4. Each group's ranks vote. After a no the group does all this again, from the parameters that it had trained. If others
   had a yes, they are in the next round, and this group waits for its end and heals.

With a delay, 3 begins so many steps before the round's end, after 1 and 2, and ends with it, after another 2. The new
parts of the steps hold from 2 on.

A group that starts joins in the same way; if all start, there is nothing to average. The manager's number of steps
tells them apart: 2 k for groups that start after round k, 2 k + 1 for those at the end of round k + 1. So a group that
starts, however far its checkpoint is, is never taken for one that has trained.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.local_sgd import _StreamingDiLoCoFragment as Fragment

from torchtitan_graph.capture.state import local_part
from torchtitan_graph.config import job
from torchtitan_graph.replicas import TrainingState
from torchtitan_graph.replicas.outer import Outer
from torchtitan_graph.replicas.replicas import Replicas

STOP_IN_ROUND_AFTER_S = 60.0  # of waiting for the others at a round's end a signal to stop ends it


class _DiLoCo(DiLoCo):
    """torchft's, whose state is among the tensors that `Replicas` sends."""

    def _register_state_dict_fn(self) -> None:
        pass


class Rounds(Replicas):
    """This replica group among others that meet at the end of rounds. See Note [Rounds]. All ranks of the group call
    each method together.

    is_training       whether this group is in a round that it has begun together with the others
    is_starting       after `meet`: whether all groups start, so that there is nothing to average
    is_sent           whether the average is under way
    is_synchronised   whether a round has ended after the last step
    counted, own      targets of all groups up to the last synchronisation, and of this one since; then, of a mixture,
                      those of each source
    """

    def __init__(
        self,
        table: job.FaultTolerance,
        folder: Path,
        device: torch.device,
        state: TrainingState,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        outer: Outer | None,
        counted: list[int],
    ) -> None:
        """Meet the lighthouse, as `Replicas`. `outer` is the state of DiLoCo; without it, the method is LocalSGD."""
        self._local_sgd: LocalSGD | None = None
        self._fragments: list[Fragment] = []
        self._is_behind = False  # whether this group has synchronised apart from the others, and heals
        self.is_training = False
        super().__init__(table, folder, device, state, step=0)
        trained = nn.ParameterList(p for p in model.parameters() if p.requires_grad)
        self._local_sgd = LocalSGD(self._manager, trained, optimizer, table.sync_steps)
        self._fragments = [] if outer is None else self._new_fragments(optimizer, outer)
        self._every = table.sync_steps // max(1, len(self._fragments))
        self._delay = table.fragment_sync_delay if self._fragments else 0
        self.is_starting = self.is_sent = self.is_synchronised = False
        self.counted, self.own = counted, [0] * len(counted)

    def _new_fragments(self, optimizer: torch.optim.Optimizer, outer: Outer) -> list[Fragment]:
        """Return torchft's fragments, on the state of `outer`."""
        table = self._table
        diloco = _DiLoCo(
            self._manager,
            list(outer.modules),
            optimizer,
            list(outer.optimizers),
            table.sync_steps,
            should_quantize=table.should_quantize,
            fragment_sync_delay=table.fragment_sync_delay,
            fragment_update_alpha=table.fragment_update_alpha,
        )
        for fragment, originals in zip(diloco._fragments, outer.originals, strict=True):
            fragment.original_parameters = {str(i): original for i, original in enumerate(originals)}
        return diloco._fragments

    def _fragment(self, step: int) -> Fragment | None:
        """Return the fragment of the round that this step is in, or ends: they take turns. None with LocalSGD."""
        round_number = -(-step // self._every)
        return self._fragments[(round_number - 1) % len(self._fragments)] if self._fragments else None

    def _make_manager(self, host: str, port: int) -> None:
        super()._make_manager(host, port)
        for each in (self._local_sgd, *self._fragments):  # of the manager before
            if each is not None:
                each._manager = self._manager

    def _stop_after_s(self) -> float:
        """A signal lets a group that has trained a round wait for the others, which may be slower."""
        return STOP_IN_ROUND_AFTER_S if self.is_training else super()._stop_after_s()

    def _current(self) -> int:
        assert self._manager is not None, "of this quorum"
        return int(self._manager.current_step())

    def is_due(self, step: int) -> bool:
        """Return whether the groups meet after this step."""
        return self.ends_round(step) or step % self._every == self._every - self._delay

    def ends_round(self, step: int) -> bool:
        return step % self._every == 0

    def meet(self, step: int) -> bool:
        """Wait for the quorum, as `join`; return whether this group's part of the steps is now another, or its
        state."""
        round_number = -(-step // self._every)  # of the round that this step is in, or ends
        number = 0 if self._is_behind else 2 * round_number - self.is_training
        self._state = {"step": number, "batches_committed": 0}
        if self._manager is not None:
            self._manager.load_state_dict(self._state)
        changed = self.join()
        if self.stop_signal:
            return changed
        self._is_behind = False
        self.is_starting = self._current() % 2 == 0
        return changed

    def begin(self) -> None:
        """Begin to train together with the others that start, if the vote says so."""
        self.is_training = self.commit()

    def send(self, step: int) -> None:
        """Begin to average over the groups that live; only DiLoCo does so ahead of `end`."""
        self.is_training = self.is_sent = True
        self._transport.disallow_checkpoint()  # those that heal have come to the exchange, or are lost
        if (fragment := self._fragment(step)) is not None:
            fragment.prepare_sync()

    def end(self, step: int) -> bool:
        """End the round with the average; return the vote. After a no the parameters are as they were."""
        if (fragment := self._fragment(step)) is not None:
            trained = [(p, local_part(p).detach().clone()) for p in fragment._model_fragment.parameters()]
            committed = fragment.perform_sync()
            if not committed:  # torchft has set them back
                for p, before in trained:
                    local_part(p).detach().copy_(before)
        else:
            number = self._current()
            assert self._local_sgd is not None, "without fragments"
            self._local_sgd._perform_sync()
            committed = self._current() > number
        if committed:
            self._extend_lineage()
        else:
            self.note_loss("synchronisation")
            self._is_behind, self._is_another = bool(self._max_in_group(self._is_another)), False
        self.is_sent, self.is_synchronised = False, committed
        return committed

    @property
    def healed(self) -> bool:
        """Whether this group has healed in the last `meet`."""
        return self._healed

    @property
    def saves(self) -> bool:
        """Whether this group saves a checkpoint: each saves its own, after a synchronisation."""
        return self.is_synchronised
