"""This replica group among the others: the quorum, the sum over the replicas, the vote, and healing.

Note [Replicas]
Each replica group is a mesh of its own, with an all that a job without replicas has. Rank s of a group meets rank s of
the others, which holds the same shards. A step is:

1. The quorum says who lives. A group that is behind heals from one that is ahead: parameters, the optimizer's state,
   the schedule, the position in the data.
2. The step's microbatches, as many however many replicas live, are dealt to those. The ranks exchange the number of
   targets, so that the loss has one denominator, and how far they have read.
3. Each group computes its gradients, summed over its own ranks. They are then summed over the replicas, in place,
   message by message as they were made: where they come from one graph, while that still runs for the last of the
   group's microbatches.
4. Each group's ranks vote. If one of them lost another replica, the group does the step again, from its position
   before, with those that live then. A group that others have left behind heals in the next quorum.
5. Clipping and the optimizer run in each group alone: all have the same numbers.

A replica whose link to the lighthouse is cut after a quorum may do the step that the others do without it. The states
then differ by rounding, at the same step. So each state has a number that says who did its steps: replicas compare it
in each exchange, and one that differs from the first heals from it.

So a step has the same rows and the same denominator whoever lives. While all live, the sums are those of the axis
dp_replicate, in the same order where messages are the same; with fewer, they are taken in another order.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions
from torchft import Manager

from torchtitan_graph import stop
from torchtitan_graph.capture.state import local_part
from torchtitan_graph.capture.step import StepOutput
from torchtitan_graph.config import job
from torchtitan_graph.config.fault_tolerance import AUTO
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.agree import files_group, on_rank_0
from torchtitan_graph.parallel.join import host_store
from torchtitan_graph.replicas import TrainingState
from torchtitan_graph.replicas.manager import end, forget_quorum, group_over_replicas, new_manager
from torchtitan_graph.replicas.network import (
    CONNECT_WITHIN_S,
    LIGHTHOUSE,
    Connection,
    address_towards,
    job_token,
    lighthouse_address,
)
from torchtitan_graph.replicas.transport import State, Transport
from torchtitan_graph.runtime.gradients import memory_of

TELL_AFTER_S = 30.0  # of waiting for enough replicas, or for the lighthouse
STOP_AFTER_S = 2.0  # of waiting a signal to stop ends it
LOOK_EVERY_S = 1.0  # whether another rank has lost a replica, while a message is under way
ASK_AGAIN_S = 20.0  # the lighthouse, at first
_LOST = "lighthouse is lost"
# Whether a rank has the quorum, or why it has not; the highest of a group's ranks counts for all.
MET, NOT_HEALED, NO_QUORUM, NO_LIGHTHOUSE, LEAVES = range(5)


class _Trial(threading.Thread):
    """A quorum, and what is received to heal in it, in a thread: the main one looks for signals and for the lighthouse.

    before    the manager's state before it
    received  the state of another replica, if this one is to heal: it is loaded once all ranks have theirs
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(name="quorum", daemon=True)
        self.ended, self.outcome, self._manager = threading.Event(), NO_QUORUM, manager
        self.began, self.before = time.monotonic(), manager.state_dict()
        self.received: State | None = None
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.start()

    def run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        try:
            self._manager.start_quorum()
            self.outcome = NOT_HEALED if self._manager.errored() is not None else MET
        except (TimeoutError, RuntimeError):
            forget_quorum(self._manager)
        except Exception as error:  # of a state that is none, or of torchft
            self._manager.report_error(error)
            self.outcome = NOT_HEALED
        finally:
            self.ended.set()


class Replicas:
    """This replica group among the others. See Note [Replicas]. All ranks of the group call each method together.

    living   the numbers of the replicas that live, this one among them
    place    the index of this one among those
    redone   steps that were repeated so far, for a replica was lost
    stop_signal  the signal that ended the wait for a quorum, or 0
    """

    def __init__(
        self,
        table: job.FaultTolerance,
        folder: Path,
        device: torch.device,
        state: TrainingState,
        step: int,
    ) -> None:
        """Meet the lighthouse; from here on this replica counts as living.

        Args:
            folder: the job's, with its token.
            state: this rank's, of its training.
            step: steps done.
        """
        assert table.replica is not None and table.lighthouse is not None, "the configuration is checked"
        self._table, self._folder, self._device = table, folder, device
        self._timeout = timedelta(seconds=table.timeout_seconds)
        self._heal_timeout = timedelta(seconds=table.heal_timeout_seconds)
        self._training = state
        self.living: tuple[int, ...] = ()
        self.place = table.replica  # until the first quorum
        self.redone = self.stop_signal = 0
        self._healed = self._is_another = self._has_left = False
        self._num_quorums = 0  # that this group has had
        self._begun: dict[int, Any] = {}  # sums that have begun: the address of their memory -> their work
        self._ask_again_s = ASK_AGAIN_S
        self._lineage = 0  # of this state: which replicas did its steps
        self._ranks = dist.new_group(backend="gloo")  # of this group, for this thread alone
        self._lighthouse = on_rank_0(self._wait_for_address, files_group())
        self._host = address_towards(self._lighthouse)
        token = on_rank_0(lambda: job_token(folder), files_group())
        self._transport = Transport(self._host, token, self._own_state, self._heal_timeout)
        self._group = group_over_replicas(device, self._host, timedelta(seconds=CONNECT_WITHIN_S), self._timeout)
        self._connection: Connection | None = None  # rank 0's
        self._store: dist.TCPStore | None = None  # of the manager, hosted by rank 0
        self._manager: Manager | None = None
        self._state = {"step": step, "batches_committed": 0}
        self._reach_lighthouse(time.monotonic(), math.inf)

    def _wait_for_address(self) -> str:
        begin = warned = time.monotonic()
        while (address := self._find_address()) is None:
            if stop.received() or time.monotonic() > begin + self._table.join_timeout_seconds:
                raise UserError(
                    f"fault_tolerance.lighthouse = 'auto': no lighthouse says in {self._folder / LIGHTHOUSE} where it"
                    " is; start python -m torchtitan_graph.launch.lighthouse with the options of this run"
                )
            warned = self._maybe_warn(begin, warned, f"no lighthouse says in {self._folder / LIGHTHOUSE} where it is")
            time.sleep(0.5)
        return address

    def _find_address(self) -> str | None:
        return lighthouse_address(self._table.lighthouse or AUTO, self._folder)

    def join(self) -> bool:
        """Wait for the quorum of the next step, and heal if another replica is ahead; return whether this one now has
        other microbatches, or another state, than before. A signal to stop ends the wait: `stop_signal` is then set."""
        before, self._healed, began = (self.living, self.place), False, time.monotonic()
        while (met := self._meet(began)) != MET:
            if met == LEAVES:
                self.stop_signal, self._has_left = self._max_in_group(stop.received()), True
                return False
        assert self._manager is not None, "of this quorum"
        place = self._manager.participating_rank()
        assert place is not None, "all of a synchronous quorum take part"
        self.living, self.place, self._ask_again_s = self._group.members, place, ASK_AGAIN_S
        self._num_quorums += 1
        if self.living != before[0] or self._healed:
            self._tell(before[0])
        return self._healed or (self.living, self.place) != before

    def meet_at_end(self) -> None:
        """Meet the others once more after the last step: one that lost another in it heals from this one."""
        self._meet(time.monotonic(), self._timeout.total_seconds())
        self._transport.finish()  # what is saved now may be other weights, the average of these

    def _meet(self, began: float, most_s: float = math.inf) -> int:
        """Try once to get the quorum, and to heal; return MET, or why a rank has not.

        Args:
            began: when this group began to wait.
            most_s: seconds after which it waits no longer.
        """
        manager = self._manager or self._reach_lighthouse(began, most_s)
        if manager is None:
            return LEAVES
        trial, warned, mine = _Trial(manager), began, LEAVES
        late = f"fewer than {self._table.min_replicas} replicas live, or one is late"
        while not self._leaves(began, most_s):
            if trial.ended.wait(0.2):
                mine = trial.outcome
                break
            if self._has_lost_lighthouse(trial):
                mine = NO_LIGHTHOUSE
                break
            receives = self._transport.is_receiving
            warned = self._maybe_warn(began, warned, "it receives the state of another one" if receives else late)
        met = self._max_in_group(mine)
        if met == MET and trial.received is not None:
            self._lineage = trial.received.rest.pop("lineage")
            self._training.take(*trial.received)
            self._healed = True
        if met != MET:
            manager.load_state_dict(trial.before)  # also where this rank has received a state, and another has not
        if met == NO_LIGHTHOUSE:
            end(manager)
            self._group.abort()  # else others that have this quorum would wait for this one
            self._state, self._manager = trial.before, None
            if self._connection is not None and self._connection.is_open():
                # The lighthouse would count the old manager, and its request, among those that live.
                time.sleep(self._table.heartbeat_timeout_seconds + 1.0)
        if met == NOT_HEALED:
            logger.warning(
                f"replica {self._table.replica} tries again to join the others: {_first_line(manager.errored())}"
            )
            self._group.abort()  # else the others would wait for this one
            manager.should_commit(timeout=self._timeout)
        return met

    def _has_lost_lighthouse(self, trial: _Trial) -> bool:
        """Return whether rank 0's connection to the lighthouse is closed, or its request may be lost: after a cut of
        the network the lighthouse may never answer it. Rank 0 tells the others by the store."""
        assert self._store is not None, "of the manager"
        if self._connection is None:
            return bool(self._store.check([_LOST]))
        if self._transport.is_receiving:  # it has answered
            return False
        if self._connection.is_open() and time.monotonic() < trial.began + self._ask_again_s:
            return False
        self._ask_again_s *= 2  # or the lighthouse would not see how long this group has waited for another one
        self._store.set(_LOST, "")
        return True

    def _leaves(self, began: float, most_s: float) -> bool:
        waited = time.monotonic() - began
        return waited > most_s or (stop.received() != 0 and waited > self._stop_after_s())

    def _stop_after_s(self) -> float:
        return STOP_AFTER_S

    def _maybe_warn(self, began: float, warned: float, why: str) -> float:
        """Log a warning if the last one, or the beginning, is a while ago; return when it was logged."""
        now = time.monotonic()
        if now < warned + TELL_AFTER_S:
            return warned
        if dist.get_rank() == 0:
            logger.warning(f"replica {self._table.replica} has waited for {now - began:.0f} s: {why}")
        return now

    def _reach_lighthouse(self, began: float, most_s: float) -> Manager | None:
        """Connect to the lighthouse, as long as that takes, and make a manager; None if this group leaves."""
        warned = began
        while True:
            mine = self._make_manager_on_rank_0() if dist.get_rank() == 0 else MET
            reached = self._max_in_group(LEAVES if self._leaves(began, most_s) else mine)
            if reached == LEAVES:
                return None
            if reached == MET:
                break
            time.sleep(0.2)
            warned = self._maybe_warn(began, warned, f"the lighthouse, {self._lighthouse}, does not answer")
        host, port = on_rank_0(lambda: (self._host, self._store.port if self._store else 0), self._ranks)
        if dist.get_rank():
            self._store = dist.TCPStore(host, port, is_master=False, timeout=self._timeout)
            self._make_manager(host, port)
        return self._manager

    def _make_manager_on_rank_0(self) -> int:
        try:
            if self._connection is not None:
                self._connection.close()
            self._lighthouse = self._find_address() or self._lighthouse  # it may have moved
            self._connection = Connection(self._lighthouse)
            self._store = host_store(self._timeout, self._host)
            self._make_manager(self._host, self._store.port)
            return MET
        except (OSError, RuntimeError):
            return NO_LIGHTHOUSE

    def _make_manager(self, host: str, port: int) -> None:
        """Make the manager of this rank, with the store that rank 0 hosts."""
        self._manager = new_manager(
            self._group,
            self._transport,
            _receive,
            self._own_state,
            replica_id=self._table.replica or 0,
            min_replicas=self._table.min_replicas,
            lighthouse=self._lighthouse,
            host=self._host,
            store=(host, port),
            timeout=self._timeout,
            quorum_timeout=timedelta(seconds=self._table.join_timeout_seconds) + self._heal_timeout,
            connect_timeout=timedelta(seconds=CONNECT_WITHIN_S),
            vote_timeout=self._timeout + self._heal_timeout,
        )
        self._manager.load_state_dict(self._state)

    def _own_state(self) -> State:
        """Return all state of this rank."""
        return State(self._training.tensors(), self._training.give() | {"lineage": self._lineage})

    def _error(self) -> Any:
        return None if self._manager is None else self._manager.errored()

    def _report(self, error: RuntimeError) -> None:
        """Have this group vote no, and end what others wait for from this rank: they may not notice the loss."""
        assert self._manager is not None, "of this quorum"
        self._manager.report_error(error)
        self._group.abort()
        assert self._store is not None, "of the manager"
        self._store.set(self._loss(), "")

    def _loss(self) -> str:
        """Return the key by which a rank tells the others of this group that a replica is lost in this step."""
        return f"loss {self._num_quorums}"

    def _wait(self, work: Any) -> None:
        """Wait for a message between replicas. gloo does not always notice in the middle of sending one that a peer is
        lost; a rank that has noticed tells the others.

        Raises RuntimeError if a replica is lost, or the message takes longer than it may.
        """
        if self._device.type == "cuda":
            return work.wait()  # type: ignore[no-any-return]  # in the stream
        assert self._store is not None, "of the manager"
        while not work.is_completed():
            try:
                work.wait(timedelta(seconds=LOOK_EVERY_S))
            except RuntimeError:
                if not work.is_completed() and self._store.check([self._loss()]):
                    raise RuntimeError("another rank of this group has noticed it") from None
        work.wait()

    def _max_in_group(self, number: int) -> int:
        most = torch.tensor(number)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._ranks)
        return int(most)

    def _tell(self, before: tuple[int, ...]) -> None:
        if dist.get_rank():
            return
        gone, come = (sorted(set(x) - set(y)) for x, y in ((before, self.living), (self.living, before)))
        changes = [f"{_numbers(gone)} gone"] * bool(gone) + [f"{_numbers(come)} come"] * bool(come and before)
        seconds = self._transport.last_seconds
        healed = f"; this one, {self._table.replica}, healed in {seconds:.1f} s" if self._healed else ""
        logger.info(
            f"replicas: {len(self.living)} of {self._table.replicas} live: {_numbers(self.living)}"
            f"{' (' + ', '.join(changes) + ')' if changes else ''}{healed}"
        )

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Return the same list of every living replica's same rank; of this one alone if a replica is lost, or did
        another step than the others."""
        if len(self.living) == 1:
            return [numbers]
        mine = torch.tensor([self._lineage, *numbers], device=self._device)
        everyones = [torch.empty_like(mine) for _ in self.living]
        options = AllgatherOptions()
        options.timeout = self._heal_timeout if self._group.is_new else self._timeout  # one of a new one may heal
        self._group.is_new = False
        try:
            self._group.allow(options.timeout)
            self._wait(self._group.allgather([everyones], [mine], options))
            received = [each.tolist() for each in everyones]
            if (problem := self._group.errored()) is not None:  # an aborted message of NCCL raises nothing
                raise RuntimeError(str(problem))
        except RuntimeError as error:
            self._report(error)
            return [numbers]
        lineages = [lineage for lineage, *_ in received]
        if len({*lineages}) > 1:
            self._report(RuntimeError("replicas did the same step apart, and are not alike: some heal"))
            self._is_another = self._lineage != lineages[0]
            return [numbers]
        return [others for _, *others in received]

    def begin_sum(self, memory: Tensor) -> None:
        """Begin to add up, in place, a block of memory that has gradients, and that the step's other work leaves alone
        from here on. All replicas do so for the same gradients in the same order; `sum` ends it."""
        if len(self.living) > 1 and self._error() is None:
            self._begun[memory.data_ptr()] = self._launch(memory)

    def sum(self, model: nn.Module, output: StepOutput) -> StepOutput:
        """Add up gradients, in place, and a step's output over the replicas.

        Gradients that are parts of one block of memory, as a collective made it, are one message.
        """
        grads = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
        blocks = {grad.untyped_storage().data_ptr(): grad for grad in grads}
        begun, self._begun = self._begun, {}
        assert begun.keys() <= blocks.keys(), "what has begun are gradients"
        whole = [memory_of(grad) for at, grad in blocks.items() if at not in begun]
        loss = output.loss.double()  # sums of a few fp32 numbers are exact
        others = [*output.state.values(), *output.terms.values(), *output.metrics.values()]
        joined = {dtype: [x for x in others if x.dtype == dtype] for dtype in dict.fromkeys(x.dtype for x in others)}
        messages = [loss, *(torch.cat([x.flatten() for x in alike]) for alike in joined.values())]
        self._sum([*whole, *messages], [*begun.values()])
        for alike, message in zip(joined.values(), messages[1:], strict=True):
            for x, part in zip(alike, message.split([x.numel() for x in alike]), strict=True):
                x.copy_(part.view_as(x))
        return output._replace(loss=loss)

    def _sum(self, tensors: Iterable[Tensor], begun: Iterable[Any]) -> None:
        if len(self.living) == 1 or self._error() is not None:
            return
        works = [*begun, *map(self._launch, tensors)]
        try:
            for work in works:
                if work is not None:
                    self._wait(work)
        except RuntimeError as error:
            self._report(error)

    def _launch(self, tensor: Tensor) -> Any:
        """Begin the sum of a tensor over the replicas, in place, and return the work; None if a replica is lost."""
        options = AllreduceOptions()  # of a sum
        options.timeout = self._timeout
        self._group.allow(options.timeout)
        try:
            return None if self._error() is not None else self._group.allreduce([tensor], options)
        except RuntimeError as error:
            self._report(error)
            return None

    def commit(self) -> bool:
        """Return the vote of this group's ranks: whether the step counts, or is repeated."""
        assert self._manager is not None, "of this quorum"
        committed = bool(self._manager.should_commit())
        if committed:
            self._extend_lineage()
        else:
            self.note_loss("step")
            if self._max_in_group(self._is_another):
                self._manager.load_state_dict({"step": 0, "batches_committed": 0})  # so that it heals
                self._is_another = False
        return committed

    def _extend_lineage(self) -> None:
        self._lineage = zlib.crc32(repr((self._lineage, self.living)).encode())

    def note_loss(self, what: str) -> None:
        """Count what is repeated, for a replica was lost in it, and log it."""
        self.redone += 1
        if dist.get_rank() == 0:
            why = _first_line(self._error())
            logger.warning(f"a replica was lost in this {what}, which is repeated: {why}")

    @property
    def saves(self) -> bool:
        """Whether this replica saves the checkpoints: one does, and each that leaves while it waits for others, which
        may be lost."""
        return self.place == 0 or self._has_left

    def numbers(self) -> dict[str, float]:
        """Return the numbers to log: replicas that live, steps repeated, and seconds that healing took."""
        return {
            "replicas": len(self.living),
            "redone_steps": self.redone,
            "heal_s": round(self._transport.seconds, 3),
        }

    def state(self) -> dict[str, Any]:
        """Return the state of the replicas, for status.json."""
        return {"this": self._table.replica, "living": list(self.living), "of": self._table.replicas, **self.numbers()}

    def close(self) -> None:
        """Leave the others, which notice it as a loss; again it does nothing."""
        if self._manager is not None:
            end(self._manager)
            self._manager = None
        self._group.abort()
        self._transport.close()


def _receive(state: State) -> None:
    """Store the received state in the trial whose thread this is; `_meet` loads it."""
    trial = threading.current_thread()
    assert isinstance(trial, _Trial), "a manager heals in its quorum"
    trial.received = state


def _first_line(error: Any) -> str:
    return "another rank of this group noticed it" if error is None else f"{str(error).splitlines()[0]:.200}"


def _numbers(replicas: Iterable[int]) -> str:
    return ", ".join(map(str, replicas)) or "none"
