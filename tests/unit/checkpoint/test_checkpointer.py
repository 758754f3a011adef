"""What is saved when, what is loaded, and what is refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_graph.checkpoint import (
    Checkpointer,
    check_choice,
    check_loadable,
    checkpointer,
    find_likely,
    load_model,
)
from torchtitan_graph.checkpoint import folder as folder_module
from torchtitan_graph.checkpoint.folder import excess_steps, name_for_model, newest_below
from torchtitan_graph.checkpoint.metadata import read_metadata
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer
from torchtitan_graph.parallel.chunk import chunk_of
from torchtitan_graph.quantize.layers import Linear
from torchtitan_graph.quantize.products import DELAYED, Recipe


@pytest.fixture(autouse=True)
def log_to_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "propagate", True)


class Run:
    """A tiny run whose data are drawn from the step's number: the real optimizer, schedule and checkpoints."""

    def __init__(
        self, folder: Path, seed: int = 0, width: int = 3, lr: float = 0.1, num_inputs: int = 3, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(num_inputs, width), nn.Linear(width, 1))
        self.optimizer = build_optimizer(self.model, job.Optimizer(lr=lr))
        self.lr_scheduler = build_lr_scheduler(self.optimizer, job.LRScheduler(warmup_steps=2), total_steps=20)
        config = job.Checkpoint(**({"enable": True, "interval": 2} | options))
        self.checkpointer = Checkpointer(folder, config, self.model, self.optimizer, self.lr_scheduler)
        self.step = 0

    def train(self, until: int) -> "Run":
        while self.step < until:
            self.step += 1
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(self.step))
            self.optimizer.zero_grad()
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.lr_scheduler.step()
            self.checkpointer.maybe_save(self.step, lambda: {"step": self.step}, last=self.step == until)
        return self

    def load(self, num_steps: int | None = None) -> dict[str, Any] | None:
        state = self.checkpointer.load(num_steps)
        self.step = state["step"] if state else 0
        return state

    def bits(self) -> list[list[float]]:
        tensors = [*self.model.parameters(), *(v for s in self.optimizer.state.values() for v in s.values())]
        return [tensor.detach().flatten().tolist() for tensor in tensors]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full(**options: Any) -> dict[str, Any]:
    return {"last_save_model_only": False} | options


# Going on


def test_a_run_stopped_and_resumed_is_bitwise_the_run_that_never_stopped(tmp_path: Path) -> None:
    whole = Run(tmp_path / "a").train(7)
    Run(tmp_path / "b", **full()).train(3)
    resumed = Run(tmp_path / "b", seed=1)
    assert resumed.load() == {"step": 3}
    assert resumed.train(7).bits() == whole.bits()
    assert resumed.lr_scheduler.get_last_lr() == whole.lr_scheduler.get_last_lr()


def test_a_resumed_run_that_lost_its_schedule_would_differ(tmp_path: Path) -> None:
    whole = Run(tmp_path / "a").train(7)
    Run(tmp_path / "b", **full()).train(3)
    resumed = Run(tmp_path / "b", seed=1)
    resumed.load()
    resumed.lr_scheduler.load_state_dict({"num_steps_done": 2})
    assert resumed.train(7).bits() != whole.bits()


def test_loading_keeps_the_live_tensors(tmp_path: Path) -> None:
    Run(tmp_path, **full()).train(2)
    run = Run(tmp_path, seed=1)
    before = [id(param) for param in run.model.parameters()]
    run.load()
    assert [id(param) for param in run.model.parameters()] == before
    assert list(run.optimizer.state) == list(run.model.parameters())


def test_an_empty_folder_starts_from_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    before = run.bits()
    assert run.load() is None
    assert run.bits() == before


# When to save


def test_saved_at_the_interval_and_at_the_end(tmp_path: Path) -> None:
    Run(tmp_path, interval=2).train(5)
    assert saved(tmp_path) == ["step-2", "step-4", "step-5"]


@pytest.mark.parametrize("options", [{"enable": False}, {"load_only": True}])
def test_nothing_is_written_when_checkpoints_are_off_or_only_loaded(tmp_path: Path, options: dict[str, bool]) -> None:
    Run(tmp_path, **options).train(4)
    assert saved(tmp_path) == []


def test_load_only_loads(tmp_path: Path) -> None:
    Run(tmp_path, **full()).train(2)
    assert Run(tmp_path, load_only=True).load() == {"step": 2}


def test_the_state_is_asked_for_only_when_it_is_saved(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise AssertionError

    Run(tmp_path, interval=2).checkpointer.maybe_save(3, fail)


@pytest.mark.parametrize(("keep", "kept"), [(2, ["step-4", "step-6"]), (0, ["step-2", "step-4", "step-6"])])
def test_the_latest_k_are_kept(tmp_path: Path, keep: int, kept: list[str]) -> None:
    Run(tmp_path, keep_latest_k=keep).train(6)
    assert saved(tmp_path) == kept


def test_the_newest_written_is_kept_even_if_older_branches_went_further(tmp_path: Path) -> None:
    Run(tmp_path, **full()).train(8)
    branch = Run(tmp_path, load_step=2, keep_latest_k=2, interval=1, **full())
    branch.load()
    branch.train(3)
    assert saved(tmp_path) == ["step-3", "step-8"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    Run(tmp_path, **full()).train(4)
    branch = Run(tmp_path, load_step=2, lr=0.2, **full())
    branch.load()
    branch.train(4)
    resumed = Run(tmp_path, seed=1)
    resumed.load()
    assert resumed.bits() == branch.bits()
    assert saved(tmp_path) == ["step-2", "step-4"]


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    Run(tmp_path).train(2)
    assert saved(tmp_path / "step-2") == [".metadata", "__0_0.distcp", "manifest.json", "train_state.json"]
    state = json.loads((tmp_path / "step-2" / "train_state.json").read_text())
    assert state["train_state"] == {"step": 2}
    assert state["lr_scheduler"] == {"num_steps_done": 2}
    assert str(tmp_path).encode() not in (tmp_path / "step-2" / ".metadata").read_bytes()  # it can be moved


# Which one is loaded


def test_torn_checkpoints_are_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(tmp_path, **full()).train(8)
    (tmp_path / "step-4" / "manifest.json").unlink()
    (tmp_path / "step-6" / "__0_0.distcp").unlink()
    data = tmp_path / "step-8" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    assert Run(tmp_path).load() == {"step": 2}
    for step, problem in ((4, "no manifest.json"), (6, "is missing"), (8, "bytes, not")):
        assert any(f"step-{step}" in line and problem in line for line in caplog.messages)


@pytest.mark.parametrize("newer", [True, False])
def test_a_checkpoint_removed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
    """Another replica group saves, and removes old ones: the newer one is loaded instead."""
    folder, aside = tmp_path / "run", tmp_path / "step-4"
    Run(folder, **full(interval=2)).train(4)
    shutil.move(folder / "step-4", aside)

    def read_as_it_vanishes(path: Path) -> Any:
        if path.name == "step-2":
            if newer:
                shutil.move(aside, folder / "step-4")
            shutil.rmtree(path)
        return read_metadata(path)

    monkeypatch.setattr(checkpointer, "read_metadata", read_as_it_vanishes)
    run = Run(folder, seed=1)
    if newer:
        assert run.load() == {"step": 4}
        assert run.bits() == Run(tmp_path / "whole").train(4).bits()
    else:
        with pytest.raises(UserError, match="step-2 can't be read"):
            run.load()


def test_load_step_picks_one_and_warns_of_later_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(tmp_path, **full()).train(6)
    assert Run(tmp_path, load_step=2).load() == {"step": 2}
    assert "checkpoint.load_step = 2: checkpoints of later steps (4, 6)" in caplog.text


def test_a_load_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    Run(tmp_path, **full()).train(4)
    with pytest.raises(UserError, match=r"checkpoint.load_step = 3: no such .* there are: 2, 4"):
        Run(tmp_path, load_step=3).load()


def test_a_model_only_end_is_loaded_when_the_run_is_over(tmp_path: Path) -> None:
    finished = Run(tmp_path).train(5)
    again = Run(tmp_path, seed=1)
    assert again.load(num_steps=5) == {"step": 5}
    assert again.bits()[:4] == finished.bits()[:4]


def test_a_longer_run_goes_on_from_the_last_full_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = Run(tmp_path / "a").train(7)
    Run(tmp_path / "b").train(5)
    longer = Run(tmp_path / "b", seed=1)
    assert longer.load(num_steps=7) == {"step": 4}
    assert "step-5 holds only the model" in caplog.text
    assert longer.train(7).bits() == whole.bits()


@pytest.mark.parametrize("interval", [2, 5], ids=["between saves", "saved again"])
def test_a_longer_run_keeps_the_model_that_the_run_ended_with(interval: int, tmp_path: Path) -> None:
    ended = Run(tmp_path).train(5)
    longer = Run(tmp_path, seed=1, interval=interval, keep_latest_k=1, lr=0.2)
    longer.load(num_steps=10)
    longer.train(10)
    kept = "step-5" if interval == 2 else "step-5-model"
    assert saved(tmp_path) == ["step-10", kept]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    load_model(tmp_path / kept, model)
    assert [p.flatten().tolist() for p in model.parameters()] == ended.bits()[:4]


def test_what_is_deleted_is_the_oldest_beyond_the_number_that_is_kept() -> None:
    assert excess_steps([1, 2, 3, 4], 4, 2, 0) == [1, 2]
    assert excess_steps([1, 2, 3, 4], 4, 2, 0, best=1) == [2] == excess_steps([1, 2, 3, 4], 4, 1, 3, best=1)
    for kept in (0, 4, 5, 6):  # all of them
        assert excess_steps([1, 2, 3, 4], 4, kept, 0) == []


def test_a_whole_save_of_a_step_that_is_there_goes_and_what_is_there_stays(tmp_path: Path) -> None:
    Run(tmp_path).train(2)
    there = (tmp_path / "step-2").stat().st_ino
    shutil.copytree(tmp_path / "step-2", tmp_path / "step-2.tmp")
    folder_module.clean_up(tmp_path)
    assert saved(tmp_path) == ["step-2"] and (tmp_path / "step-2").stat().st_ino == there


def test_each_model_that_makes_place_has_a_name_of_its_own() -> None:
    assert name_for_model("step-5", {"step-5"}) == "step-5-model"
    assert name_for_model("step-5", {"step-5", "step-5-model", "step-5-model-2"}) == "step-5-model-3"


def test_a_run_that_saved_only_its_model_can_not_be_continued(tmp_path: Path) -> None:
    Run(tmp_path, interval=100).train(3)
    with pytest.raises(UserError, match=r"step-3 holds only the model .*initial_load_path"):
        Run(tmp_path).load(num_steps=5)
    with pytest.raises(UserError, match="checkpoint.load_step = 3: that checkpoint holds only the model"):
        Run(tmp_path, load_step=3).load(num_steps=5)


# Starting from another run's


def test_initial_load_takes_only_the_parameters(tmp_path: Path) -> None:
    source = Run(tmp_path / "a", **full()).train(2)
    run = Run(tmp_path / "b", seed=1, initial_load_path=str(tmp_path / "a" / "step-2"))
    assert run.load() is None
    assert run.bits()[:4] == source.bits()[:4]
    assert all(state["step"] == 0 for state in run.optimizer.state.values())
    assert run.lr_scheduler.state_dict() == {"num_steps_done": 0}


def test_a_run_that_saves_nothing_starts_from_what_is_named(tmp_path: Path) -> None:
    source = Run(tmp_path, **full()).train(2)
    before = saved(tmp_path)
    run = Run(tmp_path, seed=1, enable=False, initial_load_path=str(tmp_path / "step-2"))
    assert run.load() is None  # its own folder or not: only the parameters are taken
    assert run.bits()[:4] == source.bits()[:4]
    run.train(3)
    assert saved(tmp_path) == before


def test_initial_load_takes_everything_on_request(tmp_path: Path) -> None:
    source = Run(tmp_path / "a", **full()).train(2)
    options = {"initial_load_path": str(tmp_path / "a" / "step-2"), "initial_load_model_only": False}
    run = Run(tmp_path / "b", seed=1, **options)
    assert run.load() == {"step": 2}
    assert run.bits() == source.bits()


def test_the_own_folder_comes_before_initial_load(tmp_path: Path) -> None:
    Run(tmp_path / "a", **full()).train(4)
    Run(tmp_path / "b", **full()).train(2)
    assert Run(tmp_path / "b", initial_load_path=str(tmp_path / "a" / "step-4")).load() == {"step": 2}


def test_an_initial_load_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    Run(tmp_path / "a", **full()).train(2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    for path, message in (
        (tmp_path / "nowhere", "there is no such folder"),
        (tmp_path / "empty", "it has no manifest.json"),
        (tmp_path / "theirs", "set checkpoint.initial_load_in_hf = true"),
        (tmp_path / "a", f"did you mean one of {tmp_path / 'a' / 'step-2'}?"),
        (tmp_path, f"did you mean one of {tmp_path / 'a' / 'step-2'}?"),
    ):
        with pytest.raises(UserError) as error:
            Run(tmp_path / "b", initial_load_path=str(path)).load()
        assert f"checkpoint.initial_load_path = {str(path)!r}" in str(error.value)
        assert message in str(error.value)
        with pytest.raises(UserError) as before:
            check_choice(tmp_path / "b", job.Checkpoint(enable=True, initial_load_path=str(path)), num_steps=5)
        assert str(before.value) == str(error.value)


def test_what_can_be_loaded_is_not_refused_before_it_is(tmp_path: Path) -> None:
    """A save that was killed when it was all but done is finished later; what is not looked at may be wrong."""
    Run(tmp_path, **full()).train(2)
    nowhere = job.Checkpoint(enable=True, initial_load_path="nowhere")
    step_2 = job.Checkpoint(enable=True, load_step=2)
    for config in (nowhere, step_2):
        check_choice(tmp_path, config, num_steps=5)
    (tmp_path / "step-2").rename(tmp_path / "step-2.tmp")
    for config in (nowhere, step_2):
        check_choice(tmp_path, config, num_steps=5)
    assert saved(tmp_path) == ["step-2.tmp"]


def test_everything_of_a_model_only_checkpoint_is_refused(tmp_path: Path) -> None:
    Run(tmp_path / "a", interval=100).train(2)
    options = {"initial_load_path": str(tmp_path / "a" / "step-2"), "initial_load_model_only": False}
    with pytest.raises(UserError, match="initial_load_model_only = true"):
        Run(tmp_path / "b", **options).load()


@pytest.mark.parametrize("part", ["optimizer", "lr_scheduler", "dataloader", "train_state"])
def test_excluded_parts_stay_as_they_are(part: str, tmp_path: Path) -> None:
    source = Run(tmp_path / "a")
    source.train(2)
    train_state = {"step": 2, "tokens_seen": 8, "rng": "00", "data": {"rows": 4, "lanes": [[4, 0, 0, 0]]}}
    source.checkpointer.save(2, train_state)
    path = str(tmp_path / "a" / "step-2")
    run = Run(
        tmp_path / "b", seed=1, initial_load_path=path, initial_load_model_only=False, exclude_from_loading=[part]
    )
    fresh = run.bits()[4:]
    state = run.checkpointer.load()
    assert run.bits()[:4] == source.bits()[:4]
    assert run.bits()[4:] == (fresh if part == "optimizer" else source.bits()[4:])
    assert run.lr_scheduler.state_dict() == {"num_steps_done": 0 if part == "lr_scheduler" else 2}
    left_out = {"dataloader": {"data"}, "train_state": {"step", "tokens_seen", "rng"}}.get(part, set())
    assert state == {key: value for key, value in train_state.items() if key not in left_out}


def test_a_name_that_is_too_long_is_none(tmp_path: Path) -> None:
    long = "x" * 300
    for options in ({"initial_load_path": long}, {"load_step": 10**299}):
        with pytest.raises(UserError, match="there is no such folder|no such complete checkpoint"):
            Run(tmp_path, **options).load()
        with pytest.raises(UserError, match="there is no such folder|no such complete checkpoint"):
            check_choice(tmp_path, job.Checkpoint(enable=True, **options), 3)
    with pytest.raises(UserError, match="there is no such folder"):
        load_model(newest_below(Path(long)), nn.Linear(2, 2))


@pytest.mark.parametrize("mode", ["disabled", "async_with_pinned_mem"])
def test_a_last_model_is_kept_in_the_dtype_of_the_export(mode: str, tmp_path: Path) -> None:
    run = Run(tmp_path, export_dtype="bfloat16", async_mode=mode).train(3)
    dtypes = {
        step: {x.properties.dtype for x in read_metadata(tmp_path / f"step-{step}").state_dict_metadata.values()}
        for step in (2, 3)
    }
    assert dtypes == {2: {torch.float32}, 3: {torch.bfloat16}}
    assert all(x.dtype == torch.float32 for x in run.model.parameters())
    rounded = [x.to(torch.bfloat16).float().tolist() for x in run.model.parameters()]
    again = Run(tmp_path, seed=1)
    again.load(num_steps=3)
    assert [x.tolist() for x in again.model.parameters()] == rounded
    assert Run(tmp_path, seed=1).load(num_steps=5) == {"step": 2}, "a longer run has all bits"
    both = Run(tmp_path / "both", export_dtype="bfloat16", last_save_in_hf=True).train(1)
    metadata = read_metadata(both.checkpointer.folder / "step-1")
    assert {x.properties.dtype for x in metadata.state_dict_metadata.values()} == {torch.float32}, "step-1-hf is it"


def test_a_run_that_goes_on_excludes_nothing(tmp_path: Path) -> None:
    source = Run(tmp_path, **full()).train(2)
    run = Run(tmp_path, seed=1, exclude_from_loading=["optimizer", "train_state"])
    assert run.load() == {"step": 2}
    assert run.bits() == source.bits()


def test_a_step_that_was_asked_for_excludes_what_is_told(tmp_path: Path) -> None:
    Run(tmp_path).checkpointer.save(0, {"step": 0})
    run = Run(tmp_path, load_step=0, exclude_from_loading=["optimizer"])
    assert run.load() == {"step": 0} and not run.checkpointer.loaded_optimizer


def test_a_run_goes_back_to_before_the_step_whose_weights_it_has(tmp_path: Path) -> None:
    run = Run(tmp_path, **full()).train(6)
    assert [run.checkpointer.roll_back(step) for step in (2, 5, 4)] == [None, 4, 2]
    assert run.bits() == Run(tmp_path / "other", **full()).train(2).bits()


# Another model


def test_all_differences_to_another_model_are_told_at_once(tmp_path: Path) -> None:
    Run(tmp_path, **full()).train(2)
    run = Run(tmp_path, width=5)
    run.model.append(nn.Linear(1, 1, bias=False))
    run.model[1].bias = None
    run.checkpointer.optimizer = build_optimizer(run.model, job.Optimizer())
    before = run.bits()
    with pytest.raises(UserError) as error:
        run.load()
    message = str(error.value)
    assert "step-2 is of another model" in message
    assert "missing: model.2.weight\n" in message
    assert "unexpected: optim.1.bias.exp_avg\n" in message
    assert "model.0.weight: shape [3, 3], but here [5, 3]" in message
    assert run.bits() == before


def refuse_early(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any) -> None:
    config = job.Checkpoint(enable=True, **options)
    path = find_likely(folder, config, num_steps=5)
    assert path is not None
    check_loadable(path, folder, config, model, optimizer)


def test_another_model_or_optimizer_is_refused_before_it_is_built(tmp_path: Path) -> None:
    """In whatever dtype its parameters will rest."""
    Run(tmp_path, **full()).train(2)
    with torch.device("meta"):
        same, other = Run(tmp_path / "b"), Run(tmp_path / "b", width=5)
    plain = torch.optim.SGD(same.model.parameters(), momentum=0.9)
    refuse_early(tmp_path, same.model, same.optimizer)
    refuse_early(tmp_path, same.model.bfloat16(), None)
    refuse_early(tmp_path, same.model, plain, load_step=2, exclude_from_loading=["optimizer"])
    with pytest.raises(UserError, match=r"step-2 is of another model:\n(.*\n)*.*shape \[3, 3\], but here \[5, 3\]"):
        refuse_early(tmp_path, other.model, other.optimizer)
    with pytest.raises(UserError, match="step-2 is of another optimizer:\n(.*\n)*.*go on with the run's own"):
        refuse_early(tmp_path, same.model, plain)
    assert find_likely(tmp_path / "b", job.Checkpoint(enable=True), num_steps=5) is None
    initial = job.Checkpoint(enable=True, initial_load_path=str(tmp_path / "step-2"))
    assert find_likely(tmp_path / "b", initial, num_steps=5) == tmp_path / "step-2"


def test_what_names_do_not_tell_is_not_looked_at_before_it_is_loaded(tmp_path: Path) -> None:
    Run(tmp_path / "a", **full()).train(4)

    def likely(folder: str, **options: Any) -> Path | None:
        return find_likely(tmp_path / folder, job.Checkpoint(enable=True, **options), num_steps=5)

    assert likely("a", load_step=2) == tmp_path / "a" / "step-2" and likely("a", load_step=3) is None
    assert likely("a", remote_folder="s3://bucket/run") is None
    assert likely("b", initial_load_path="s3://bucket/run/step-2") is None
    in_hf = {"initial_load_path": str(tmp_path), "initial_load_in_hf": True}
    assert likely("b", **in_hf) is None and likely("a", **in_hf) == tmp_path / "a" / "step-4"


def test_what_is_damaged_is_not_refused_before_it_is_loaded(tmp_path: Path) -> None:
    Run(tmp_path, **full()).train(4)
    index = tmp_path / "step-4" / ".metadata"
    index.write_bytes(index.read_bytes()[:-1] + b"x")
    with torch.device("meta"):
        other = Run(tmp_path / "b", width=5)
    refuse_early(tmp_path, other.model, other.optimizer)


def test_only_models_are_refused_before_a_step_is_built(tmp_path: Path) -> None:
    Run(tmp_path, interval=100).train(2)
    config = job.Checkpoint(enable=True)
    with pytest.raises(UserError, match="step-2 holds only the model"):
        find_likely(tmp_path, config, num_steps=5)
    assert find_likely(tmp_path, config, num_steps=2) == tmp_path / "step-2"  # nothing is left to train
    (tmp_path / "step-4.tmp").mkdir()
    assert find_likely(tmp_path, config, num_steps=5) is None


def test_what_delayed_scaling_saw_belongs_to_a_run_that_goes_on_alone(tmp_path: Path) -> None:
    def run(folder: str, is_delayed: bool, **options: Any) -> Run:
        run = Run(tmp_path / folder, **(full(width=16, num_inputs=16) | options))
        if is_delayed:
            run.model[0] = Linear(run.model[0], Recipe(DELAYED))
        return run

    source, plain = run("delayed", True), run("plain", False)
    source.model[0].amax_history.fill_(3.0)
    for saving in (source, plain):
        saving.checkpointer.save(2, {"step": 2})
    again = run("delayed", True)
    assert again.load() and torch.equal(again.model[0].amax_history, source.model[0].amax_history)
    for folder, is_delayed in (("delayed", False), ("plain", True)):
        begins = {"initial_load_path": str(tmp_path / folder / "step-2")}
        new = run(f"from {folder}", is_delayed, **begins)
        refuse_early(tmp_path / f"from {folder}", new.model, None, **begins)
        assert new.load() is None and new.bits()[:4] == source.bits()[:4]
        assert not is_delayed or not new.model[0].amax_history.any()
        with pytest.raises(UserError, match=r"0.amax_history\n  amax_history is .* checkpoint.initial_load_path"):
            run(folder, is_delayed).load()
    load_model(tmp_path / "delayed" / "step-2", plain.model)


def test_state_of_another_optimizer_is_never_dropped_silently(tmp_path: Path) -> None:
    source = Run(tmp_path, **full()).train(2)

    def with_sgd(**options: Any) -> Run:
        run = Run(tmp_path, seed=1, **options)
        run.checkpointer.optimizer = torch.optim.SGD(run.model.parameters())
        return run

    with pytest.raises(UserError, match=r"(?s)another optimizer:.*unexpected: optim.*exclude_from_loading"):
        with_sgd().load()
    run = with_sgd(load_step=2, exclude_from_loading=["optimizer"])
    assert run.load() == {"step": 2} and run.bits()[:4] == source.bits()[:4]


def test_another_dtype_is_refused_when_going_on_and_converted_when_starting(tmp_path: Path) -> None:
    Run(tmp_path / "a", **full()).train(2)

    def in_bf16(folder: Path, **options: Any) -> Run:
        run = Run(folder, **options)
        run.model.bfloat16()
        run.checkpointer.optimizer = build_optimizer(run.model, job.Optimizer())
        return run

    with pytest.raises(UserError, match="model.0.weight: torch.float32, but here torch.bfloat16"):
        in_bf16(tmp_path / "a").load()
    started = in_bf16(tmp_path / "b", initial_load_path=str(tmp_path / "a" / "step-2"))
    started.load()
    source = Run(tmp_path / "a")
    source.load()
    assert torch.equal(started.model[0].weight, source.model[0].weight.bfloat16())


def test_a_moved_checkpoint_loads(tmp_path: Path) -> None:
    Run(tmp_path / "a", **full()).train(2)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert Run(tmp_path / "b").load() == {"step": 2}


def test_a_checkpoint_that_is_a_link_goes_without_what_it_leads_to(tmp_path: Path) -> None:
    Run(tmp_path / "a", **full()).train(2)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "step-2").symlink_to(tmp_path / "a" / "step-2")
    run = Run(tmp_path / "b", keep_latest_k=1)
    assert run.load() == {"step": 2}
    run.train(4)
    assert saved(tmp_path / "b") == ["step-4"]
    assert saved(tmp_path / "a" / "step-2")


def test_the_state_of_diloco_is_saved_with_the_rest_and_missed_where_it_is_not(tmp_path: Path) -> None:
    def with_outer(seed: int, fill: float) -> Run:
        run = Run(tmp_path, seed=seed, last_save_model_only=False)
        outer = {"outer.original": chunk_of(torch.full((4,), fill)), "outer.x.momentum_buffer": chunk_of(torch.ones(2))}
        run.checkpointer.outer = outer
        return run

    first = with_outer(seed=0, fill=3.0).train(2)
    second = with_outer(seed=1, fill=0.0)
    second.load()
    assert second.checkpointer.outer["outer.original"].local.tolist() == [3.0] * 4
    assert second.bits() == first.bits()
    without = Run(tmp_path, last_save_model_only=False)
    without.load()  # it is no part of the model
    without.train(4)
    with pytest.raises(UserError, match="is of another method:\n  missing: outer.original\n(.|\n)*semi_sync_method"):
        with_outer(seed=0, fill=0.0).load()


def test_two_replica_groups_may_save_and_delete_the_same_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path, **full(interval=2)).train(6)
    for number in range(2):  # both have written step 8, and neither sees what the other renames meanwhile
        shutil.copytree(tmp_path / "step-6", tmp_path / f"step-8.tmp-{number}")
    lexists, answers = os.path.lexists, iter([False])
    folder_module.commit(tmp_path / "step-8.tmp-0")
    monkeypatch.setattr(folder_module.os.path, "lexists", lambda path: next(answers, None) or lexists(path))
    folder_module.commit(tmp_path / "step-8.tmp-1")
    monkeypatch.undo()
    rename = folder_module._rename

    def after_the_other(old: Path, new: Path) -> None:
        shutil.rmtree(old)
        rename(old, new)

    monkeypatch.setattr(folder_module, "_rename", after_the_other)
    folder_module.prune(tmp_path / "step-8", keep_latest_k=2, keep_every=0)
    assert saved(tmp_path) == ["step-6", "step-8"]
