"""Options of replica groups that meet after several steps: what is refused, and what has no effect."""

import re

import pytest

from torchtitan_graph.config import check, load
from torchtitan_graph.config.fault_tolerance import check_member
from torchtitan_graph.errors import UserError

GROUPS = "--fault_tolerance.enable --training.steps 100"
DILOCO = f"{GROUPS} --fault_tolerance.semi_sync_method diloco"


def notices(words: str) -> list[str]:
    return check(load(words.split()), 1)


def problems(words: str) -> str:
    with pytest.raises(UserError) as caught:
        notices(words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--fault_tolerance.num_fragments 3", "num_fragments = 3: must divide sync_steps = 5: 1, 5"),
        ("--fault_tolerance.fragment_sync_delay 5", "fragment_sync_delay = 5: must be at most 4"),
        ("--fault_tolerance.fragment_update_alpha 1", "fragment_update_alpha = 1.0: 1 keeps each group's own"),
        ("--fault_tolerance.outer_lr 0", "outer_lr = 0.0: 0 would train nothing"),
        ("--training.steps 101", "training.steps = 101: must be a multiple of fault_tolerance.sync_steps = 5"),
        ("--checkpoint.enable --checkpoint.interval 12", "checkpoint.interval = 12: must be a multiple .* such as 10"),
        ("--checkpoint.enable --checkpoint.keep_every 7", "checkpoint.keep_every = 7: must be a multiple"),
        ("--checkpoint.enable --checkpoint.interval_minutes 5", "interval_minutes = 5.0: not with"),
        ("--training.epochs 2", "training.epochs = 2: not with fault_tolerance.semi_sync_method = diloco"),
        ("--optimizer.ema_decay 0.9", "optimizer.ema_decay = 0.9: not with"),
        ("--validation.enable --validation.patience 2", "validation.patience = 2: not with"),
        ("--checkpoint.enable --checkpoint.remote_folder file:///x", "remote_folder = .*: not with"),
    ],
)
def test_what_does_not_go_together_is_refused(words: str, problem: str) -> None:
    assert re.search(problem, problems(f"{DILOCO} {words}"))


def test_methods_have_names() -> None:
    with pytest.raises(UserError, match="semi_sync_method = 'dilocco'.*did you mean diloco"):
        load([*GROUPS.split(), "--fault_tolerance.semi_sync_method", "dilocco"])


@pytest.mark.parametrize(
    ("words", "noticed"),
    [
        (f"{GROUPS} --fault_tolerance.sync_steps 7", "sync_steps = 7: replicas meet in every step"),
        (
            f"{GROUPS} --fault_tolerance.semi_sync_method local_sgd --fault_tolerance.outer_lr 0.5",
            "outer_lr = 0.5: is about semi_sync_method = diloco alone",
        ),
        (f"{DILOCO} --fault_tolerance.outer_momentum 0", "outer_nesterov = true: without effect"),
        ("--fault_tolerance.sync_steps 7", "sync_steps = 7: there are no replica groups"),
    ],
)
def test_what_has_no_effect_is_noticed(words: str, noticed: str) -> None:
    assert any(noticed in notice for notice in notices(words)), notices(words)
    assert not any("fault_tolerance" in notice for notice in notices(DILOCO))


def test_a_cpu_does_not_quantize() -> None:
    words = f"{DILOCO} --fault_tolerance.should_quantize --fault_tolerance.replica 0"
    config = load([*words.split(), "--fault_tolerance.lighthouse", "http://127.0.0.1:29510"])
    with pytest.raises(UserError, match="should_quantize = true: needs a GPU; set it to false"):
        check_member(config)
