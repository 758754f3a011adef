"""Stages and schedules: what a rank does in a step, and what is refused."""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.parallel.schedule import SCHEDULES, Schedule, plan_pipeline
from torchtitan_graph.steps.held import in_flight


def modules(num_layers: int) -> list[str]:
    return ["tok_embeddings", *(f"layers.{i}" for i in range(num_layers)), "norm", "output"]


def plan(
    num_ranks: int = 2,
    num_microbatches: int = 4,
    num_layers: int = 8,
    most_deferred: int | None = None,
    **options: Any,
) -> Schedule:
    whole = ("module_fqns_per_model_part", "overlap_microbatches")
    named = {key if key in whole else f"pipeline_parallel_{key}": x for key, x in options.items()}
    parallelism = dataclasses.replace(job.Parallelism(pipeline_parallel_degree=num_ranks), **named)
    return plan_pipeline(parallelism, modules(num_layers), num_microbatches, most_deferred)


def test_ranks_that_keep_equally_many_microbatches_count_the_same_for_each_stage() -> None:
    """DualPipeV's two stages of a rank keep more and fewer, the more unequal the earlier the rank; 1F1B's one stage."""
    v, one = plan(4, 16, 16, schedule="DualPipeV"), plan(4, 16, 16, schedule="1F1B")
    assert len({in_flight(v, stage) for stage in range(8)}) == 1
    assert [in_flight(one, stage) for stage in range(4)] == [4, 3, 2, 1]


def sizes(schedule: Schedule) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in schedule.stages]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in SCHEDULES),
        ("DualPipeV", {"overlap_microbatches": True}),
        ("DualPipeV", {"overlap_microbatches": True, "most_deferred": 1}),
        ("ZBVZeroBubble", {"most_deferred": 2}),
    ],
)
def test_no_rank_waits_for_ever_though_each_message_waits_for_its_receiver(
    name: str, options: dict[str, Any], num_ranks: int
) -> None:
    """gloo buffers what is sent; NCCL does two ranks' messages one by one, in the order of both."""
    schedule = plan(num_ranks, 4 * num_ranks, 16, schedule=name, **options)
    assert [module for stage in schedule.stages for module in stage] == modules(16)
    place, done, last = [0] * num_ranks, set(), len(schedule.stages) - 1

    def next_of(rank: int) -> tuple[str, int, int] | None:
        actions = schedule.actions[rank]
        return actions[place[rank]] if place[rank] < len(actions) else None

    def may_run(rank: int, kind: str, stage: int, i: int) -> bool:
        if kind.startswith("RECV"):
            return False  # the sender takes both on
        if kind.startswith("SEND"):
            other = stage + (1 if kind == "SEND_F" else -1)
            assert {(kind[-1], stage, i), ("I" if kind == "SEND_B" else "F", stage, i)} & done
            if next_of(schedule.rank_of[other]) != (f"RECV_{kind[-1]}", other, i):
                return False
            done.add((f"got {kind[-1]}", other, i))
            place[schedule.rank_of[other]] += 1
            return True
        before = {"F": ("F", stage - 1), "B": ("B", stage + 1), "I": ("B", stage + 1)}.get(kind)
        if before and 0 <= before[1] <= last:  # from another rank, or made on this one
            wanted = {(f"got {before[0]}", stage, i)}
            if schedule.rank_of[before[1]] == rank:
                wanted = {(kind, before[1], i) for kind in ("F" if kind == "F" else "BI")}
            assert wanted & done
        assert kind == "F" or ("I" if kind == "W" else "F", stage, i) in done
        assert (kind, stage, i) not in done
        done.add((kind, stage, i))
        return True

    progress = True
    while progress:  # every rank in turn, as far as it comes
        progress = False
        for rank in range(num_ranks):
            while (action := next_of(rank)) and may_run(rank, *action):
                place[rank] += 1
                progress = True
    assert place == list(map(len, schedule.actions))
    for stage in range(last + 1):
        for i in range(4 * num_ranks):
            assert ("F", stage, i) in done and (("B", stage, i) in done) != (("W", stage, i) in done)


def test_a_pair_is_a_forward_and_the_backward_of_the_ranks_other_stage_right_behind_it() -> None:
    schedule = plan(4, 16, 16, schedule="DualPipeV", overlap_microbatches=True)
    found = 0
    for rank, actions in enumerate(schedule.actions):
        for action, following in itertools.pairwise(actions):
            if action in schedule.pairs:
                assert schedule.pairs[action] == following and (action.kind, following.kind) == ("F", "B")
                assert {action.stage, following.stage} == set(schedule.stages_of(rank))
                found += 1
    assert found == len(schedule.pairs) > 4 * 16
    alone = plan(4, 16, 16, schedule="DualPipeV")
    assert not alone.pairs
    computing = [[[a for a in order if a.kind in "FBIW"] for order in each.actions] for each in (alone, schedule)]
    assert computing[0] == computing[1], "the same, but for messages"


def test_a_pair_takes_its_time_once_both_inputs_are_there() -> None:
    """Two ranks whose pairs take as long as the longer half end earlier, by what they save on the critical path."""
    pairs = plan(2, 8, 8, schedule="DualPipeV", overlap_microbatches=True)
    alone = plan(2, 8, 8, schedule="DualPipeV")
    second = {*pairs.pairs.values()}
    time = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

    def of_pair(action: Any) -> float:
        return 2.0 if action in pairs.pairs else 0.0 if action in second else time[action.kind]

    whole, shorter = max(alone.ends(lambda a: time[a.kind])), max(pairs.ends(of_pair))
    assert shorter < whole - 8
    assert max(pairs.ends(lambda a: 3.0 if a in pairs.pairs else of_pair(a))) >= whole


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_no_more_weights_gradients_are_put_off_than_allowed(name: str) -> None:
    def most(schedule: Schedule) -> int:
        orders = ([a.kind for a in order if a.kind in "IW"] for order in schedule.actions)
        return max(max(itertools.accumulate((1 if kind == "I" else -1 for kind in o), initial=0)) for o in orders)

    free = plan(4, 16, 16, schedule=name)
    assert most(free) >= 4
    for allowed in (1, 2):
        bound = plan(4, 16, 16, schedule=name, most_deferred=allowed)
        assert most(bound) == allowed
        assert [sorted(a for a in order if a.kind in "FBIW") for order in bound.actions] == [
            sorted(a for a in order if a.kind in "FBIW") for order in free.actions
        ]
        assert free.waiting() < bound.waiting() < free.waiting() + 0.1


def test_ranks_wait_as_the_closed_forms_say() -> None:
    """A step of m microbatches on p ranks with v stages each: (p - 1) / (v m + p - 1) of it."""
    for p, m in ((2, 4), (2, 8), (4, 8), (4, 16)):
        assert plan(p, m, 16, schedule="GPipe").waiting() == pytest.approx((p - 1) / (m + p - 1))
        assert plan(p, m, 16, schedule="1F1B").waiting() == pytest.approx((p - 1) / (m + p - 1))
        assert plan(p, m, 16, schedule="Interleaved1F1B").waiting() == pytest.approx((p - 1) / (2 * m + p - 1))
        assert plan(p, m, 16, schedule="ZBVZeroBubble").waiting() < (p - 1) / (2 * m + p - 1)
    # A stage that takes twice as long as the other lets that one wait for half of the time, and both at the ends.
    uneven = plan(2, 64, 16, schedule="1F1B").waiting(lambda action: 1.0 + action.stage)
    assert 0.25 < uneven < 0.27


def test_1f1b_holds_no_more_microbatches_than_there_are_stages_from_a_rank_on() -> None:
    for rank, actions in enumerate(plan(4, 16, 16, schedule="1F1B").actions):
        held = list(itertools.accumulate({"F": 1, "B": -1}.get(action.kind, 0) for action in actions))
        assert max(held) == 4 - rank and held[-1] == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_layers": 8}, [4, 4]),
        ({"num_layers": 7}, [4, 3]),
        ({"num_layers": 8, "num_ranks": 4}, [2, 3, 2, 1]),
        ({"num_layers": 8, "first_stage_less_layers": 0, "last_stage_less_layers": 2}, [5, 3]),
        ({"num_layers": 10, "schedule": "Interleaved1F1B"}, [2, 3, 3, 2]),
        ({"num_layers": 6, "schedule": "ZBVZeroBubble"}, [1, 2, 2, 1]),
    ],
)
def test_layers_of_each_stage(options: dict[str, Any], expected: list[int]) -> None:
    assert sizes(plan(**options)) == expected


def test_stages_as_named() -> None:
    parts = [["tok_embeddings", "layers.0"], ["layers.1"], ["layers.2", "norm"], ["output"]]
    named = plan(num_layers=3, schedule="ZBVZeroBubble", module_fqns_per_model_part=parts)
    assert [list(stage) for stage in named.stages] == parts and named.rank_of == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_layers": 2, "num_ranks": 8}, ["degree = 8: 2 layers can't fill 8 stages", "use fewer stages"]),
        (
            {"num_layers": 2, "num_ranks": 4, "first_stage_less_layers": 0, "last_stage_less_layers": 0},
            ["2 layers can't fill 4 stages"],
        ),
        ({"schedule": "DualPipeV", "num_microbatches": 3}, ["4, not 3", "global_batch_size", "ZBVZeroBubble"]),
        ({"overlap_microbatches": True}, ["overlap_microbatches = true: 1F1B runs no forward alongside", "DualPipeV"]),
        ({"most_deferred": 2}, ["pipeline_parallel_deferred_weights = 2: 1F1B puts no weights"]),
        ({"schedule": "Interleaved1F1B", "num_microbatches": 5}, ["5 microbatches", "multiple of", "2"]),
        ({"module_fqns_per_model_part": [["norm"]] * 5}, ["5 parts on", "degree 2: 1F1B needs one on each rank"]),
        (
            {"schedule": "ZBVZeroBubble", "module_fqns_per_model_part": [["norm"]] * 6},
            ["ZBVZeroBubble needs two on each"],
        ),
        (
            {"schedule": "Interleaved1F1B", "module_fqns_per_model_part": [["norm"]] * 2},
            ["2 parts", "Interleaved1F1B needs several"],
        ),
        ({"first_stage_less_layers": 12}, ["first_stage_less_layers 12", "use fewer stages, or lower these"]),
        ({"module_fqns_per_model_part": [["tok_embeddings"], ["layer.0"]]}, ["did you mean layers.0?"]),
        ({"module_fqns_per_model_part": [["tok_embeddings", "layers.0"], ["output"]]}, ["norm is in no part"]),
        ({"module_fqns_per_model_part": [modules(1), ["output"]]}, ["output is there more than once"]),
        ({"module_fqns_per_model_part": [[], modules(1)]}, ["part 1 of 2 is empty"]),
        ({"module_fqns_per_model_part": [["layers.0", "tok_embeddings"], ["norm", "output"]]}, ["layers.0 comes too"]),
        ({"module_fqns_per_model_part": [["lm_head"]] * 2, "num_layers": 9}, ["layers.0 to layers.8, norm, output"]),
    ],
)
def test_what_can_not_be_is_refused(options: dict[str, Any], words: list[str]) -> None:
    if "module_fqns_per_model_part" in options:
        options = {"num_layers": 1, **options}
    with pytest.raises(UserError) as caught:
        plan(**options)
    assert all(word in str(caught.value) for word in words), caught.value


GOOD = "0F0,0F1,,0B0,0I1,0W1\n,1F0,1B0,1F1,1B1\n"


def test_a_schedule_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("\ufeff" + GOOD, encoding="utf-8")  # as spreadsheets write it
    schedule = plan(num_microbatches=2, schedule_csv=str(file))
    first = [action for action in schedule.actions[0] if action.kind in "FBIW"]
    assert [f"{a.stage}{a.kind}{a.microbatch}" for a in first] == ["0F0", "0F1", "0B0", "0I1", "0W1"]
    assert schedule.rank_of == (0, 1) and schedule.splits_backward


def test_pairs_of_ones_own_run_side_by_side_only_where_that_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,3F0,(0F1;3B0)OVERLAP_F_B,0B0,3F1,3B1,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1\n")
    both = {"num_microbatches": 2, "schedule_csv": str(file), "num_layers": 4}
    (pair,) = plan(**both, overlap_microbatches=True).pairs.items()
    assert pair == (("F", 0, 1), ("B", 3, 0)) and not plan(**both).pairs
    file.write_text("0F0,3F0,3B0,(0F1;0B0)OVERLAP_F_B,3F1,3B1,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1\n")
    with pytest.raises(UserError, match="side by side run a forward and the backward of another stage"):
        plan(**both)
    file.write_text(GOOD)
    with pytest.raises(UserError, match="the schedule of .*_csv runs no forward alongside a backward"):
        plan(num_microbatches=2, schedule_csv=str(file), overlap_microbatches=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0,0I0,0W0,0F1\n,1F0,1B0,1F1,1B1\n", ["of stage 0 and microbatch 0 there is F, B, I, W"]),
        ("0F0,0F1,0B0,0B1\n1B0,1F0\n", ["line 2: 1B0 has no 1F0 before it"]),
        ("0F0,0F1,0B0,0B1,1F1\n1F0,1B0,1B1\n", ["stage 1 is in line 1 and in line 2"]),
        (GOOD.replace("1F", "999999999F"), ["line 2: 1B0 has no 1F0 before it"]),
        ("0F0,0B0\n", ["has 1 lines of actions, but there are 2 ranks"]),
        (GOOD.replace("1B0", "1C0"), ["line 2: '1C0' is not an action", "from 0 to 1"]),
        (GOOD.replace("1B1", "1B2"), ["line 2: '1B2' is not an action"]),
        (GOOD.replace("0F1", "0F0"), ["line 1: 0F0 is there more than once"]),
        (GOOD.replace("0F1", "00F0"), ["line 1: 0F0 is there more than once"]),
        (GOOD.replace("1B1", "1B" + "9" * 5000), ["line 2: '1B999"]),
        (GOOD.replace("0W1", ""), ["of stage 0 and microbatch 1 there is F, I; every stage needs F, and B or I and W"]),
        (GOOD.replace("0W1", "0W1,0B1"), ["of stage 0 and microbatch 1 there is F, B, I, W; every"]),
        (GOOD.replace("1B0", "99B0"), ["line 2: 99B0 has no 99F0 before it"]),
        (GOOD.replace("1F", "2F").replace("1B", "2B"), ["of stage 1 and microbatch 0 there is nothing"]),
        ("0F0,0B0,1F1,0F1,0B1\n,1B1,1F0,1B0\n", ["all on one rank"]),
        ("0F0,0B0,0F1,0B1\n,1F1,1B1,1F0,1B0\n", ["each after what it waits for"]),
        ("0F0,0B0,0F1,0B1\n0F0\n", ["mine.csv"]),
    ],
)
def test_a_schedule_of_ones_own_that_is_none(text: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        plan(num_microbatches=2, schedule_csv=str(file))
    assert all(word in str(caught.value) for word in words), caught.value


def test_stages_as_named_are_those_of_a_schedule_of_ones_own(tmp_path: Path) -> None:
    file, parts = tmp_path / "mine.csv", [["tok_embeddings"], ["layers.0"], ["norm", "output"]]
    file.write_text(GOOD)
    with pytest.raises(UserError, match="has 3 parts, but the schedule has 2 stages"):
        plan(num_layers=1, num_microbatches=2, schedule_csv=str(file), module_fqns_per_model_part=parts)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"schedule_csv = 'nowhere\.csv': can't be read"):
        plan(schedule_csv="nowhere.csv")


def test_microbatches_without_end_are_refused() -> None:
    options = job.Parallelism(pipeline_parallel_degree=2)
    with pytest.raises(UserError, match="microbatch_size = 1: makes 1,099,511,627,776 microbatches .* raise it, or"):
        plan_pipeline(options, modules(8), 2**40)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"0F0,\xff0B0", "is not UTF-8 .* in line 1"),
        (b"0F0," * 200_000 + b"\n1F0", "line 1: 0F0 is there more than once"),
        (b"999999999F0\n1F0", "of stage 0 and microbatch 0 there is nothing"),
        # The limit is the process's: longer where it has read a table.
        (b'"' + b"0" * 200_000, "(field larger than field limit|has 1 lines of actions)"),
        (None, "is not a regular file, but a FIFO"),
    ],
    ids=["not-utf8", "long-line", "far-stage", "long-field", "fifo"],
)
def test_a_file_of_anybody_is_refused_in_a_moment(content: bytes | None, why: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    os.mkfifo(file) if content is None else file.write_bytes(content)
    options = job.Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule_csv=str(file))
    with pytest.raises(UserError, match=f"parallelism.pipeline_parallel_schedule_csv.*{why}"):
        plan_pipeline(options, modules(8), 1)
