"""This replica group among the others: the quorum, the sum over the replicas, the vote, and healing.

Note [Replicas]
Each replica group is a mesh of its own, with an all that a job without replicas has. Rank s of a group meets rank s of
the others, which holds the same shards. A step is:

1. The quorum says who lives. A group that is behind heals from one that is ahead: parameters, the optimizer's state,
   the schedule, the position in the data.
2. The step's microbatches, as many however many replicas live, are dealt to those. The ranks exchange the number of
   targets, so that the loss has one denominator, and how far they have read.
3. Each group computes its gradients, summed over its own ranks. They are then summed over the replicas, in place,
   message by message as they were made.
4. Each group's ranks vote. If one of them lost another replica, the group does the step anew, from its position before,
   with those that live then. A group that others have left behind heals in the next quorum.
5. Clipping and the optimizer run in each group alone: all have the same numbers.

So a step has the same rows and the same denominator whoever lives. While all live, the sums are those of the axis
dp_replicate, in the same order; with fewer, they are taken in another order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceOp

from torchtitan_graph import stop
from torchtitan_graph.capture.state import local_part
from torchtitan_graph.capture.step import StepOutput
from torchtitan_graph.config import job
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.agree import files_group, on_rank_0
from torchtitan_graph.parallel.join import host_store
from torchtitan_graph.replicas.manager import forget_quorum, group_over_replicas, new_manager
from torchtitan_graph.replicas.network import address_towards, job_token
from torchtitan_graph.replicas.transport import State, Transport

TELL_AFTER_S = 30.0  # of waiting for enough replicas, or for the lighthouse
NOT_HEALED, NO_QUORUM = 1, 2  # why a rank has not joined


class Replicas:
    """This replica group among the others. See Note [Replicas]. All ranks of the group call each method together.

    living   the numbers of the replicas that live, this one among them
    place    the index of this one among those
    redone   steps that were done anew so far, for a replica was lost
    stop_signal  the signal that ended the wait for a quorum, or 0
    """

    def __init__(
        self,
        table: job.FaultTolerance,
        folder: Path,
        device: torch.device,
        tensors: Callable[[], dict[str, Tensor]],
        give: Callable[[], dict[str, Any]],
        take: Callable[[dict[str, Tensor], dict[str, Any]], None],
        step: int,
    ) -> None:
        """Meet the lighthouse; from here on this replica counts as living.

        Args:
            folder: the job's, with its token.
            tensors: returns this rank's parts of all state, by name; they are sent to a replica that heals.
            give: returns the rest of the state, which can be written as JSON.
            take: a function that loads the state of another replica.
            step: steps done.
        """
        assert table.replica is not None and table.lighthouse is not None, "the configuration is checked"
        self._table, self._device = table, device
        self._timeout = timedelta(seconds=table.timeout_seconds)
        self._heal_timeout = timedelta(seconds=table.heal_timeout_seconds)
        self._take, self._tensors, self._give = take, tensors, give
        self.living: tuple[int, ...] = ()
        self.place = 0
        self.redone = self.stop_signal = 0
        self._healed = False
        self._ranks = dist.new_group(backend="gloo")  # of this group, for this thread alone
        host = address_towards(table.lighthouse)
        token = on_rank_0(lambda: job_token(folder), files_group())
        self._transport = Transport(host, token, tensors, self._heal_timeout)
        self._store = host_store(self._timeout, host) if dist.get_rank() == 0 else None
        store = on_rank_0(lambda: (host, self._store.port if self._store else 0), files_group())
        self._group = group_over_replicas(device, host, self._timeout)
        self._manager = new_manager(
            self._group,
            self._transport,
            self._heal,
            lambda: State(self._tensors(), self._give()),
            replica_id=table.replica,
            min_replicas=table.min_replicas,
            lighthouse=table.lighthouse,
            host=host,
            store=store,
            timeout=self._timeout,
            connect_timeout=self._timeout,
        )
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def join(self) -> bool:
        """Wait for the quorum of the next step, and heal if another replica is ahead; return whether this one now has
        other microbatches, or another state, than before. A signal to stop ends the wait: `stop_signal` is then set."""
        before, self._healed = (self.living, self.place), False
        began = told = time.monotonic()
        while not self._meet():
            self.stop_signal = self._max_in_group(stop.received())
            if self.stop_signal:
                return False
            if time.monotonic() > told + TELL_AFTER_S:
                told = time.monotonic()
                logger.warning(
                    f"waiting for {told - began:.0f} s: fewer than {self._table.min_replicas} replicas live"
                    f" (fault_tolerance.min_replicas), or the lighthouse {self._table.lighthouse} does not answer"
                )
        place = self._manager.participating_rank()
        assert place is not None, "all of a synchronous quorum take part"
        self.living, self.place = self._group.members, place
        if self.living != before[0]:
            self._tell(before[0])
        return self._healed or (self.living, self.place) != before

    def meet_at_end(self) -> None:
        """Meet the others once more after the last step: one that lost another in it heals from this one."""
        self._meet()

    def _meet(self) -> bool:
        """Try to get the quorum, and to heal; return whether all ranks have."""
        try:
            self._manager.start_quorum()
        except (TimeoutError, RuntimeError):
            forget_quorum(self._manager)
            failed = NO_QUORUM
        else:
            failed = NOT_HEALED if self._manager.errored() is not None else 0
        failed = self._max_in_group(failed)
        if failed == NOT_HEALED:
            error = self._manager.errored()
            logger.warning(f"replica {self._table.replica} tries again to join the others: {_first_line(error)}")
            self._group.abort()  # else the others would wait for this one
            self._manager.should_commit(timeout=self._timeout)
        return failed == 0

    def _max_in_group(self, number: int) -> int:
        most = torch.tensor(number)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._ranks)
        return int(most)

    def _tell(self, before: tuple[int, ...]) -> None:
        if dist.get_rank():
            return
        gone, come = (sorted(set(x) - set(y)) for x, y in ((before, self.living), (self.living, before)))
        changes = [f"{_numbers(gone)} gone"] * bool(gone) + [f"{_numbers(come)} come"] * bool(come and before)
        healed = f"; this one, {self._table.replica}, healed" if self._healed else ""
        logger.info(
            f"replicas: {len(self.living)} of {self._table.replicas} live: {_numbers(self.living)}"
            f"{' (' + ', '.join(changes) + ')' if changes else ''}{healed}"
        )

    def _heal(self, state: State) -> None:
        self._take(*state)
        self._healed = True

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Return the same list of every living replica's same rank; of this one alone if a replica is lost."""
        if len(self.living) == 1:
            return [numbers]
        mine = torch.tensor(numbers, device=self._device)
        everyones = [torch.empty_like(mine) for _ in self.living]
        options = AllgatherOptions()
        options.timeout = self._heal_timeout  # one of them may heal
        try:
            self._group.allgather([everyones], [mine], options).wait()
            return [each.tolist() for each in everyones]
        except RuntimeError as error:
            self._manager.report_error(error)
            return [numbers]

    def sum(self, model: nn.Module, output: StepOutput) -> StepOutput:
        """Add up gradients, in place, and a step's output over the replicas.

        Gradients that are parts of one block of memory, as a collective made it, are one message.
        """
        grads = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
        blocks = {grad.untyped_storage().data_ptr(): grad for grad in grads}.values()
        whole = [grad.new_empty(0).set_(grad.untyped_storage()) for grad in blocks]
        loss = output.loss.double()  # sums of a few fp32 numbers are exact
        others = [*output.state.values(), *output.terms.values(), *output.metrics.values()]
        joined = {dtype: [x for x in others if x.dtype == dtype] for dtype in dict.fromkeys(x.dtype for x in others)}
        messages = [loss, *(torch.cat([x.flatten() for x in alike]) for alike in joined.values())]
        self._sum([*whole, *messages])
        for alike, message in zip(joined.values(), messages[1:], strict=True):
            for x, part in zip(alike, message.split([x.numel() for x in alike]), strict=True):
                x.copy_(part.view_as(x))
        return output._replace(loss=loss)

    def _sum(self, tensors: Iterable[Tensor]) -> None:
        if len(self.living) == 1:
            return
        works = [self._manager.allreduce(x, reduce_op=ReduceOp.SUM) for x in tensors]
        for work in works:
            work.wait()

    def commit(self) -> bool:
        """Return the vote of this group's ranks: whether the step counts, or is done anew."""
        committed = bool(self._manager.should_commit(timeout=self._timeout + self._heal_timeout))
        if not committed:
            self.redone += 1
            if dist.get_rank() == 0:
                why = _first_line(self._manager.errored())
                logger.warning(f"a replica was lost in this step, which is done anew: {why}")
        return committed

    @property
    def saves(self) -> bool:
        """Whether this replica saves the checkpoints: one does."""
        return self.place == 0

    def numbers(self) -> dict[str, float]:
        """Return the numbers to log: replicas that live, steps done anew, and seconds that healing took."""
        return {"replicas": len(self.living), "redone_steps": self.redone, "heal_s": self._transport.seconds}

    def close(self) -> None:
        """Leave the others, which notice it as a loss."""
        self._manager.shutdown(wait=False)


def _first_line(error: Any) -> str:
    return "another rank of this group noticed it" if error is None else f"{str(error).splitlines()[0]:.200}"


def _numbers(replicas: Iterable[int]) -> str:
    return ", ".join(map(str, replicas)) or "none"
