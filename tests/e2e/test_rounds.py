"""Replica groups that meet after several steps: DiLoCo and LocalSGD by their definitions, losses, and resumed runs."""

import copy
import hashlib
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("torchft", reason="replica groups need torchft")

from groups import groups
from runs import TINY, Forks, numbers, saved, saved_steps
from torch import Tensor, nn

from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.checkpoint import load_model
from torchtitan_graph.config import JobConfig, load, run_folder
from torchtitan_graph.config.job import FaultTolerance
from torchtitan_graph.data.batch import IGNORE_INDEX, Batch
from torchtitan_graph.data.batches import Deal
from torchtitan_graph.data.loader import build_dataloader
from torchtitan_graph.data.tokenizer import load_tokenizer
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer
from torchtitan_graph.run.status import NAME as STATUS

COMMON = ["--compile.mode", "eager", "--validation.no-enable", "--training.mixed_precision_param", "float32"]
COMMON += ["--training.global_batch_size", "8", "--training.steps", "8", "--fault_tolerance.sync_steps", "4"]
COMMON += ["--checkpoint.interval", "4", "--activation_checkpoint.mode", "none"]
DILOCO = ["--fault_tolerance.semi_sync_method", "diloco"]
STREAMING = [*DILOCO, "--fault_tolerance.num_fragments", "2"]
DELAYED = [*STREAMING, "--fault_tolerance.fragment_sync_delay", "1", "--fault_tolerance.fragment_update_alpha", "0.25"]
TOGETHER = ["--fault_tolerance.min_replicas", "2"]  # else the first to start would train alone for a while
LOCAL_SGD = ["--fault_tolerance.semi_sync_method", "local_sgd"]


# --- by definition --------------------------------------------------------------------------------------------------


class Alone:
    """A group between two synchronisations: a plain module that takes steps of its own on its part of the rows."""

    def __init__(self, config: JobConfig, number: int, of: int) -> None:
        model = copy.deepcopy(Blueprint(config, 1).model)
        model.to_empty(device="cpu")
        initialize(model, 0, torch.device("cpu"))
        training, total = config.training, config.training.global_batch_size // config.training.local_batch_size
        self.model, self.max_norm = model, training.max_norm
        self.optimizer = build_optimizer(model, config.optimizer)
        self.schedule = build_lr_scheduler(self.optimizer, config.lr_scheduler, training.steps)
        self.rows = build_dataloader(
            dataset=training.dataset,
            dataset_path=None,
            split="train",
            tokenizer=load_tokenizer(None),
            seed=0,
            seq_len=training.seq_len,
            local_batch_size=training.local_batch_size,
            dp_rank=0,
            dp_degree=1,
            num_microbatches=total,
        )
        self.rows.deal = Deal(number, of, total)

    def step(self) -> None:
        batches = [next(self.rows) for _ in range(self.rows.deal.own)]
        num_targets = sum(int((batch.labels_BL != IGNORE_INDEX).sum()) for batch in batches)
        for batch in batches:
            (self._loss(batch) / num_targets).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def _loss(self, batch: Batch) -> Tensor:
        masks = self.model.masks(batch.documents_BL, batch.positions_BL)
        logits_BLV = self.model(batch.tokens_BL, batch.positions_BL, masks)
        return F.cross_entropy(logits_BLV.flatten(0, 1), batch.labels_BL.flatten(), reduction="sum")


def by_definition(options: list[str], lost_at: int = 10**9) -> list[dict[str, Tensor]]:
    """Return each group's parameters after the last step, by the papers' algorithms. The second group's part of the
    synchronisation after step `lost_at`, and of later ones, is lost."""
    config = load(["--job.config_file", TINY, *COMMON, *options])
    table, local = config.fault_tolerance, config.fault_tolerance.semi_sync_method == "local_sgd"
    fragments = 1 if local else table.num_fragments
    every, delay = table.sync_steps // fragments, 0 if local else table.fragment_sync_delay
    alone = [Alone(config, number, 2) for number in range(2)]
    parameters = [dict(group.model.named_parameters()) for group in alone]
    old = {name: p.detach().clone() for name, p in parameters[0].items()}
    momentum = {name: torch.zeros_like(p) for name, p in old.items()}
    blocks = config_layers(parameters[0])
    mean: dict[str, Tensor] = {}
    for step in range(1, config.training.steps + 1):
        for group in alone:
            group.step()
        turn = -(-step // every) - 1
        mine = [name for name in old if blocks[name] * fragments // (max(blocks.values()) + 1) == turn % fragments]
        with torch.no_grad():
            if step % every == (every - delay) % every:
                living = parameters[: 2 if step < lost_at else 1]
                mean = {name: sum(each[name] for each in living) / len(living) for name in mine}  # type: ignore[misc]
            if step % every:
                continue
            for name in mine:
                if local:
                    new = mean[name]
                else:
                    outer_gradient = old[name] - mean[name]
                    momentum[name] = table.outer_momentum * momentum[name] + outer_gradient
                    ahead = outer_gradient + table.outer_momentum * momentum[name]
                    new = old[name] - table.outer_lr * (ahead if table.outer_nesterov else momentum[name])
                old[name] = new
                for each in parameters:
                    each[name].copy_(new + table.fragment_update_alpha * (each[name] - new))
    return [{name: p.detach() for name, p in each.items()} for each in parameters]


def config_layers(parameters: dict[str, Tensor]) -> dict[str, int]:
    """Return each parameter's block by number: the embedding goes with the first, norm and output with the last."""
    numbered = {name: int(name.split(".")[1]) for name in parameters if name.startswith("layers.")}
    last = max(numbered.values())
    return {name: numbered.get(name, 0 if name.startswith("tok_embeddings") else last) for name in parameters}


def loaded(folder: Path, step: int) -> dict[str, Tensor]:
    """Return the parameters in a group's checkpoint."""
    model = copy.deepcopy(Blueprint(load(["--job.config_file", TINY, *COMMON]), 1).model)
    model.to_empty(device="cpu")
    load_model(folder / "checkpoint" / f"step-{step}", model)
    return {name: p.detach() for name, p in model.named_parameters()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize(
    "options",
    [
        DILOCO,
        pytest.param(LOCAL_SGD, marks=pytest.mark.slow),
        pytest.param(STREAMING, marks=pytest.mark.slow),
        pytest.param(DELAYED, marks=pytest.mark.slow),
        pytest.param([*DILOCO, "--compile.mode", "graph", "--compile.optimizer_in_graph"], marks=pytest.mark.slow),
    ],
)
def test_two_groups_train_as_the_algorithm_is_defined(options: list[str], tmp_path: Path) -> None:
    with groups(tmp_path, *COMMON, *TOGETHER, *options) as run:
        run.start(0, 1)
        run.finish()
    expected = by_definition(options)
    for number in range(2):
        assert distance(loaded(tmp_path / f"replica_{number}", 8), expected[number]) < 2e-6
    wrong = by_definition([*options, "--fault_tolerance.sync_steps", "8"])
    assert distance(loaded(tmp_path / "replica_0", 8), wrong[0]) > 1e-3


def _sgd(words: list[str]) -> int:
    """In a process: train a small model by SGD, in rounds of one step, and write its weights."""
    folder, lighthouse, number, method = words
    from torchtitan_graph.replicas import TrainingState
    from torchtitan_graph.replicas.outer import Outer
    from torchtitan_graph.replicas.rounds import Rounds

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    table = FaultTolerance(replica=int(number), lighthouse=lighthouse, semi_sync_method=method, sync_steps=1)
    table.outer_lr, table.outer_momentum = 1.0, 0.0
    model, random = small_model(), torch.Generator().manual_seed(int(number))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    outer = Outer(model, ["0", "1"], table) if method == "diloco" else None
    if outer is not None:
        outer.begin()
    given = table, Path(folder), torch.device("cpu"), TrainingState(lambda: {}, lambda: {}, lambda *_: None)
    rounds = Rounds(*given, model=model, optimizer=optimizer, outer=outer, counted=[0])
    while not rounds.is_training or len(rounds.living) < 2:  # the other may be late
        rounds.is_training = False
        rounds.meet(0)
        rounds.begin()
    for step in range(1, 6):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=random)
        optimizer.step()
        rounds.meet(step)
        rounds.send(step)
        assert rounds.end(step)
    torch.save([p.detach() for p in model.parameters()], Path(folder, f"{number}.pt"))
    return 0


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


@pytest.mark.parametrize("method", ["diloco", "local_sgd"])
def test_in_rounds_of_one_step_sgd_is_synchronous(method: str, tmp_path: Path) -> None:
    """SGD's update, and its momentum, are linear in the gradients; so their mean is that of the mean gradients."""
    with groups(tmp_path) as run:
        for number in ("0", "1"):
            run.running[int(number)] = Forks(str(tmp_path), run.lighthouse, number, method)
            run.running[int(number)].fork(_sgd, None, {})
        run.finish()
    model, randoms = small_model(), [torch.Generator().manual_seed(number) for number in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _ in range(5):
        for p in model.parameters():
            p.grad = sum((torch.randn(p.shape, generator=random) for random in randoms), torch.zeros(())) / 2
        optimizer.step()
    for number in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{number}.pt"), [*model.parameters()], rtol=0, atol=1e-6)


# --- losses and returns ---------------------------------------------------------------------------------------------


def patch(pace: float = 0.0, moment: str = "", nth: int = 0, number: int = signal.SIGKILL) -> None:
    """In a rank: wait for the other group to start, and in each step; write what a synchronisation left; and send this
    process a signal before the `nth` call of a function."""
    from torchtitan_graph.replica_trainer import RoundsTrainer
    from torchtitan_graph.replicas.manager import _Manager
    from torchtitan_graph.replicas.rounds import Fragment, Rounds
    from torchtitan_graph.steps import Steps

    train, train_step, join = Steps.train, RoundsTrainer.train_step, RoundsTrainer._join

    def join_together(self: RoundsTrainer) -> Any:
        folder = Path(self.config.job.dump_folder)
        while not all((folder / f"replica_{number}" / STATUS).exists() for number in range(2)):
            time.sleep(0.05)
        return join(self)

    def train_slowly(*given: Any) -> Any:
        time.sleep(pace)
        return train(*given)

    def step_and_tell(self: RoundsTrainer, metrics: Any) -> bool:
        trained = train_step(self, metrics)
        if self.rounds is not None and self.rounds.is_synchronised:
            sums = hashlib.sha256()
            for name, x in sorted(self._own_tensors().items()):
                if not name.startswith("optim."):  # of each group alone
                    sums.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            told = {"step": self.step, "digest": sums.hexdigest(), "rows": self.train_data.state_dict()["rows"]}
            told |= {"tokens": self.tokens_seen, "living": len(self.rounds.living)}
            with (run_folder(self.config) / f"synchronised.{self.rank}").open("a") as file:
                file.write(json.dumps(told) + "\n")
        return trained

    Steps.train, RoundsTrainer.train_step = train_slowly, step_and_tell  # type: ignore[method-assign,assignment]
    RoundsTrainer._join = join_together  # type: ignore[method-assign]
    if moment:
        holder = next(each for each in (Steps, Rounds, Fragment, _Manager) if hasattr(each, moment))
        function, calls = getattr(holder, moment), iter(range(nth))

        def die_or_go_on(*given: Any, **named: Any) -> Any:
            if next(calls, None) is None:
                os.kill(os.getpid(), number)
            return function(*given, **named)

        setattr(holder, moment, die_or_go_on)


def synchronised(folder: Path, number: int, rank: int = 0) -> dict[int, dict[str, Any]]:
    """Return what a group's rank wrote after each synchronisation, by step."""
    lines = (folder / f"replica_{number}" / f"synchronised.{rank}").read_text().splitlines()
    return {told["step"]: told for told in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "nth", "options", "ranks"),
    [
        ("train", 13, DILOCO, 1),  # between two synchronisations
        ("gather", 2, DILOCO, 1),
        ("prepare_sync", 1, DILOCO, 1),
        ("perform_sync", 1, DILOCO, 1),
        ("should_commit", 2, DILOCO, 1),
        ("gather", 2, LOCAL_SGD, 1),
        ("should_commit", 2, LOCAL_SGD, 1),
        ("train", 14, DELAYED, 1),
        ("perform_sync", 2, DELAYED, 1),
        ("perform_sync", 1, DILOCO, 2),
    ],
)
def test_a_group_that_dies_comes_back_and_all_are_equal(
    moment: str, nth: int, options: list[str], ranks: int, tmp_path: Path
) -> None:
    """Each group takes a step in a tenth of a second, so that the survivor trains still when the other is back."""
    steps = 60
    words = [*COMMON, *options, "--training.steps", str(steps), "--training.global_batch_size", str(8 * ranks)]
    with groups(tmp_path, *words, ranks=ranks) as run:
        run.start(0, patch=partial(patch, 0.1))
        run.start(1, patch=partial(patch, 0.1, moment, nth))
        wait_for_death(run.running[1])
        run.start(1, patch=partial(patch, 0.1))
        results = run.finish()
    for rank in range(ranks):
        survivor, returned = (synchronised(tmp_path, number, rank) for number in (0, 1))
        every = 2 if options is DELAYED else 4
        assert sorted(survivor) == list(range(every, steps + 1, every))
        assert all(told["rows"] == 8 * ranks * step for step, told in survivor.items()), "rows are dealt as ever"
        both = [step for step in returned if survivor[step]["living"] == 2 and step > 8]
        assert len(both) >= 3, (both, results[0].output)
        if options is not DELAYED:  # whose groups keep a part of their own
            assert all(returned[step] == survivor[step] for step in both)
        tokens = {step: (returned[step]["tokens"], survivor[step]["tokens"]) for step in both}
        assert all(a == b for a, b in tokens.values()), tokens
    assert "this one, 1, healed" in results[1].output
    if moment in ("gather", "prepare_sync"):  # later the survivor has all of the other's numbers
        assert "a replica was lost in this synchronisation, which is repeated" in results[0].output


def wait_for_death(group: Forks) -> None:
    deadline = time.monotonic() + 120
    while not any(process.exitcode for process in group.processes):
        assert time.monotonic() < deadline, group.output()
        time.sleep(0.05)
    group.kill()  # as a launcher does


@pytest.mark.slow
@pytest.mark.parametrize(("options", "moment"), [(DILOCO, "prepare_sync"), (DILOCO, "gather"), (LOCAL_SGD, "gather")])
def test_what_the_survivor_has_trained_is_in_a_synchronisation_done_anew(
    options: list[str], moment: str, tmp_path: Path
) -> None:
    with groups(tmp_path, *COMMON, *options) as run:
        run.start(0, patch=patch)
        run.start(1, patch=partial(patch, 0.0, moment, 2 if moment == "gather" else 1))
        result = run.running[0].finish()
    assert result.code == 0 and "this synchronisation, which is repeated" in result.output, result.output
    found = loaded(tmp_path / "replica_0", 8)
    assert distance(found, by_definition(options, lost_at=8)[0]) < 2e-6
    assert distance(found, by_definition(options)[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("options", [DILOCO, LOCAL_SGD, DELAYED])
def test_groups_that_are_stopped_go_on_with_every_bit(options: list[str], tmp_path: Path) -> None:
    """A signal in the fifth step is obeyed at the next synchronisation, after which each group saves its own state."""
    words = [
        *COMMON,
        *TOGETHER,
        *options,
        "--training.steps",
        "12",
        "--checkpoint.interval",
        "12",
        "--fault_tolerance.sync_steps",
    ]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    with groups(whole, *words, "4") as run:
        run.start(0, 1)
        run.finish()
    with groups(stopped, *words, "4") as run:
        run.start(0, 1, patch=partial(patch, 0.0, "train", 4, signal.SIGTERM))
        first = {number: group.finish() for number, group in run.running.items()}
    step = 6 if options is DELAYED else 8
    for number in range(2):
        assert saved_steps(stopped / f"replica_{number}") == [step], first[number].output
        assert "SIGTERM: the run stops after the next synchronisation" in first[number].output
    with groups(stopped, *words, "4") as run:
        run.start(0, 1)
        run.finish()
    for folder in ("replica_0", "replica_1"):
        assert saved(stopped / folder, 12) == saved(whole / folder, 12)
        assert numbers(stopped / folder) == numbers(whole / folder)
    assert saved(whole / "replica_0", 12) != saved(whole / "replica_1", 12), "the moments are each group's own"


def walk_slowly(pace: float) -> None:
    """In a rank: wait in each step, and ask the lighthouse again soon."""
    from torchtitan_graph.replicas import replicas
    from torchtitan_graph.steps import Steps

    replicas.ASK_AGAIN_S = 2.0
    train = Steps.train

    def train_slowly(*given: Any) -> Any:
        time.sleep(pace)
        return train(*given)

    Steps.train = train_slowly  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("options", [LOCAL_SGD, DILOCO], ids=["local_sgd", "diloco"])
def test_a_group_that_waits_long_has_a_new_manager_and_goes_on(options: list[str], tmp_path: Path) -> None:
    with groups(tmp_path, *COMMON, *options, *TOGETHER) as run:
        run.start(0, patch=partial(walk_slowly, 0.0))
        run.start(1, patch=partial(walk_slowly, 1.5))
        run.finish()
    told = [numbers(tmp_path / f"replica_{number}") for number in range(2)]
    assert sorted(told[0]) == sorted(told[1]) == [*range(1, 9)]
    ends = [saved(tmp_path / f"replica_{number}", 8) for number in range(2)]
    assert {k: v for k, v in ends[0].items() if k.startswith("model.")} == {
        k: v for k, v in ends[1].items() if k.startswith("model.")
    }
