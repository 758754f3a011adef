"""Checks of several options against each other and against the number of processes."""

import re

import pytest
import torch
from fsspec.registry import known_implementations

from torchtitan_graph.config import (
    JobConfig,
    check,
    check_length,
    load,
    ranks_asked_for,
    ranks_started,
    shard_degree,
    smallest_world,
)
from torchtitan_graph.errors import UserError
from torchtitan_graph.optim import build_lr_scheduler

BUDGET = "--activation_checkpoint.mode memory_budget --activation_checkpoint.memory_budget"


def problems(arguments: str, world_size: int) -> list[str]:
    with pytest.raises(UserError) as caught:
        check(load(arguments.split()), world_size)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("arguments", "world_size", "shards"),
    [
        ("", 1, 1),
        ("", 4, 4),
        ("--parallelism.tensor_parallel_degree 2", 8, 4),
        ("--parallelism.data_parallel_replicate_degree 2 --parallelism.tensor_parallel_degree 2", 8, 2),
        ("--parallelism.data_parallel_shard_degree 2 --parallelism.tensor_parallel_degree 4", 8, 2),
        ("--parallelism.data_parallel_replicate_degree 8 --parallelism.data_parallel_shard_degree 1", 8, 1),
        ("--training.local_batch_size 2 --training.global_batch_size 16", 4, 4),
        ("--training.local_batch_size 2 --training.global_batch_size 4 --parallelism.tensor_parallel_degree 2", 4, 2),
    ],
)
def test_legal_layouts(arguments: str, world_size: int, shards: int) -> None:
    config = load(arguments.split())
    assert check(config, world_size) == []
    assert shard_degree(config, world_size) == shards


def test_degrees_must_multiply_to_the_world_size() -> None:
    assert problems("--parallelism.tensor_parallel_degree 3 --training.seq_len 6", 8) == [
        "command line: parallelism.tensor_parallel_degree = 3: the degrees must multiply to the number of processes:"
        " data_parallel_replicate_degree 1 * data_parallel_shard_degree 2 (inferred) * tensor_parallel_degree 3 = 6,"
        " not 8; set it to 1, 2, 4 or 8, or start a multiple of 3 processes"
    ]
    assert "= 4, not 2" in problems("--parallelism.data_parallel_shard_degree 4", 2)[0]
    assert "= 16, not 8" in problems("--parallelism.tensor_parallel_degree 16", 8)[0]


@pytest.mark.parametrize(
    ("arguments", "world_size", "said"),
    [
        (
            "tensor_parallel_degree 3",
            64,
            "tensor_parallel_degree = 3: .* set it to 1, 2, 4, 8, 16, 32 or 64, or start a",
        ),
        (
            "pipeline_parallel_degree 2 --parallelism.tensor_parallel_degree 3",
            64,
            "tensor_parallel_degree = 3: .* set it to 1, 2, 4, 8, 16 or 32, or start a multiple of 6 processes",
        ),
        (
            "data_parallel_shard_degree 3 --parallelism.tensor_parallel_degree 2",
            64,
            "data_parallel_shard_degree = 3: .* set it to 32, or set data_parallel_shard_degree to -1, which is",
        ),
        ("data_parallel_shard_degree 4", 2, "data_parallel_shard_degree = 4: .* set it to 2, or .* or start 4 proc"),
        ("tensor_parallel_degree 7", 5040 * 11 + 1, "set it to 1 or 55441, or start a multiple of 7"),
        (
            "tensor_parallel_degree 11",
            5040,
            r"set it to 1, 2, 3, 4, 5, 6, 7, 8, \.\.\., 630, .*, 2520 or 5040, or start",
        ),
    ],
)
def test_a_wrong_degree_is_answered_by_those_that_work(arguments: str, world_size: int, said: str) -> None:
    (found,) = problems(f"--parallelism.{arguments} --training.seq_len 4620", world_size)
    assert re.search(said, found), found


def test_experts_reuse_ranks_of_the_other_axes() -> None:
    arguments = "--parallelism.expert_parallel_degree 3 --parallelism.tensor_parallel_degree 2"
    assert any("context_parallel_degree 1 * tensor_parallel_degree 2 = 4; expert_" in x for x in problems(arguments, 4))
    arguments = "--parallelism.expert_parallel_degree 4 --parallelism.tensor_parallel_degree 2"
    assert check(load(arguments.split()), 4) == []
    (said,) = problems(f"{arguments} --parallelism.expert_tensor_parallel_degree 2", 4)
    assert "= 4; expert_parallel_degree * expert_tensor_parallel_degree 2 must divide that: set this to 1 or 2" in said
    arguments = "--parallelism.expert_tensor_parallel_degree 4 --parallelism.tensor_parallel_degree 2"
    assert problems(arguments, 2) == [
        "command line: parallelism.expert_tensor_parallel_degree = 4: legal are 1, each expert whole, and"
        " parallelism.tensor_parallel_degree 2"
    ]


def test_ranks_of_an_expert_have_no_effect_where_experts_are_split_as_all_else() -> None:
    arguments = "--parallelism.tensor_parallel_degree 2 --parallelism.expert_tensor_parallel_degree 2"
    (notice,) = check(load(arguments.split()), 2)
    assert "expert_tensor_parallel_degree = 2: experts are split as all else while" in notice


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ("", 1),
        ("--parallelism.data_parallel_shard_degree 4 --parallelism.pipeline_parallel_degree 2", 8),
        ("--parallelism.expert_parallel_degree 8 --parallelism.tensor_parallel_degree 2", 8),
        ("--parallelism.expert_parallel_degree 2 --parallelism.tensor_parallel_degree 4", 4),
        (
            "--parallelism.expert_parallel_degree 4 --parallelism.tensor_parallel_degree 2"
            " --parallelism.expert_tensor_parallel_degree 2",
            8,
        ),
    ],
)
def test_the_smallest_number_of_processes(arguments: str, ranks: int) -> None:
    assert smallest_world(load(arguments.split())) == ranks


def test_batch_must_divide() -> None:
    assert problems("--training.global_batch_size 24", 2) == [
        "command line: training.global_batch_size = 24: must be a multiple of training.local_batch_size 8"
        " * data-parallel degree 2 = 16, such as 16 or 32, or -1"
    ]
    assert "4 = 32, such as 32, or -1" in problems("--training.global_batch_size 24", 4)[0]
    wrong = "--training.global_batch_size 20 --parallelism.data_parallel_shard_degree 3"
    assert len(problems(wrong, 2)) == 1, "the degrees alone: they may become others"


def test_sequence_parallel_must_divide() -> None:
    arguments = "--training.seq_len 15 --validation.seq_len 15 --parallelism.tensor_parallel_degree 2"
    assert len(problems(arguments, 2)) == 1
    assert len(problems(arguments + " --validation.enable", 2)) == 2
    assert check(load(["--training.seq_len", "15"]), 2) == []


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ("--training.seq_len 30", "2 * parallelism.context_parallel_degree 2 = 4"),
        ("--training.seq_len 20 --validation.enable --validation.seq_len 16", "_degree 2 * parallelism.tensor_"),
        ("--training.seq_len 24 --validation.enable --validation.seq_len 18", "= 4"),
    ],
)
def test_a_row_is_cut_over_context_and_tensor_parallel(arguments: str, needed: str) -> None:
    degrees = " --parallelism.context_parallel_degree 2 --parallelism.tensor_parallel_degree 4"
    (problem,) = problems(arguments + degrees, 8)
    assert "seq_len" in problem and needed in problem
    assert check(load(f"--training.seq_len 16 {degrees}".split()), 8) == []


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "--loss.label_smoothing 0.1",
            "loss.label_smoothing = 0.1: only cross entropy has it, and loss.name",
        ),
        ("--loss.z_loss 1e-4", "loss.z_loss = 0.0001: only cross entropy has it"),
        ("--training.loss_chunks 2", "training.loss_chunks = 2: not with loss.name = my.loss, which sees all logits"),
    ],
)
def test_what_a_loss_of_the_users_own_does_not_go_with_is_named(option: str, words: str) -> None:
    (line,) = problems(f"--loss.name my.loss {option}", 1)
    assert words in line


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("fsdp_once_a_step all --parallelism.pipeline_parallel_degree 2", "in any case; set it to none"),
        ("fsdp_once_a_step experts", "expert_parallel_degree is 1; use all, or a higher degree"),
        ("fsdp_once_a_step auto --compile.mode eager", "only a graph has a forecast of its memory to choose by"),
        ("overlap_microbatches --compile.mode eager", "only a graph runs two microbatches side by side"),
        ("overlap_microbatches --compile.cuda_graphs", "cuda_graphs = true: not with parallelism.overlap_microbatches"),
        ("fsdp_once_a_step all --training.dynamic_seq_len", "not with parallelism.fsdp_once_a_step = all: the parts"),
        ("fsdp_once_a_step all --training.enable_cpu_offload", "what is on the host would be copied in each part"),
        ("fsdp_once_a_step auto --compile.precompiled x", "not with parallelism.fsdp_once_a_step = auto: the memory"),
        ("fsdp_once_a_step sum", "must be one of none, experts, all, auto"),
        ("overlap_microbatches=auto --compile.precompiled x", "not with parallelism.overlap_microbatches = auto: "),
        ("overlap_microbatches=auto --optimizer.name my.Own", "'my.Own': not with parallelism.overlap_microbatches"),
        ("overlap_microbatches=atuo", "must be true, false or auto; did you mean auto?"),
    ],
)
def test_what_microbatches_can_not_share_is_named(option: str, words: str) -> None:
    assert any(words in problem for problem in problems(f"--parallelism.{option}", 2))


def test_a_dry_run_has_no_numbers_to_verify_passes_on() -> None:
    assert "nothing" in problems("--debug.verify_passes --comm.mode fake_backend", 4)[0]
    assert check(load(["--debug.verify_passes"]), 4) == []


@pytest.mark.parametrize("other", ["debug.verify_passes", "debug.dump_graphs", "debug.stack_traces"])
def test_what_looks_at_tracing_is_refused_where_graphs_are_read(other: str) -> None:
    (problem,) = problems(f"--compile.precompiled graphs --{other}", 1)
    assert other in problem and "leave one of them out" in problem
    assert check(load(["--compile.precompiled", "graphs"]), 1) == []


@pytest.mark.parametrize("other", ["compile.precompiled graphs", "compile.record_call_hierarchy"])
def test_dynamo_is_refused_where_its_guards_are_not_checked(other: str) -> None:
    found = problems(f"--compile.capture dynamo --{other}", 2)
    assert any(f"{other.split()[0]} = " in each and "not with compile.capture = dynamo" in each for each in found)
    assert check(load(["--compile.capture", "dynamo"]), 2) == []


@pytest.mark.parametrize("name", ["tag_budget", "rematerialize"])
def test_a_budget_is_not_met_without_what_meets_it(name: str) -> None:
    (problem,) = problems(f"--activation_checkpoint.mode memory_budget --compile.disable_passes {name}", 1)
    assert "compile.disable_passes" in problem and f"{name} is what meets" in problem
    assert check(load(["--compile.disable_passes", name, "--activation_checkpoint.mode", "none"]), 1) == []


def test_a_dry_run_builds_a_rank_of_its_world() -> None:
    assert (
        "must be from 0 to 3, as NGPU, the number of ranks, is 4"
        in problems("--comm.mode fake_backend --comm.fake_rank 4", 4)[0]
    )
    assert check(load(["--comm.mode", "fake_backend", "--comm.fake_rank", "3"]), 4) == []


def test_all_problems_are_reported_together() -> None:
    arguments = "--training.global_batch_size 12 --training.seq_len 9 --parallelism.tensor_parallel_degree 2"
    assert len(problems(arguments, 4)) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--optimizer.name Muon --compile.cuda_graphs", "Muon reads numbers on the host"),
        ("--optimizer.name torch.optim.RAdam", "optimizer.name = 'torch.optim.RAdam': not with compile.optimizer_in"),
        ("--optimizer.implementation foreach --compile.cuda_graphs", "cuda_graphs = true: not with compile.optimizer"),
        ("--metrics.histogram_freq 2 --metrics.enable_tensorboard", "metrics.histogram_freq = 2"),
        ("--training.enable_cpu_offload", "enable_cpu_offload = true: not with compile.optimizer_in_graph: the update"),
    ],
)
def test_what_an_optimizer_in_the_graph_does_not_go_with_is_named(arguments: str, words: str) -> None:
    check(load(arguments.split()), 1)
    assert words in problems(f"--compile.optimizer_in_graph {arguments}", 1)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--training.seq_len 40", "training.seq_len = 40: with training.dynamic_seq_len rows have a multiple of 16"),
        ("--training.seq_len 16", "have a multiple of 16 tokens, and up to 32 or more"),
        ("--parallelism.pipeline_parallel_degree 2", "pipeline_parallel_degree = 2: not with training.dynamic_seq_len"),
        ("--compile.precompiled graphs", "compile.precompiled = 'graphs': not with training.dynamic_seq_len"),
        ("--compile.cuda_graphs", "compile.cuda_graphs = true: not with training.dynamic_seq_len: a recording"),
        ("--compile.codegen blocks", "compile.codegen = 'blocks': not with training.dynamic_seq_len"),
        ("--compile.dedupe_layers", "compile.dedupe_layers = true: not with training.dynamic_seq_len"),
        (
            "--compile.mode eager --parallelism.tensor_parallel_degree 32",
            "tensor_parallel_degree = 32: with training.dynamic_seq_len rows have a multiple of 16 tokens",
        ),
        (
            "--parallelism.tensor_parallel_degree 2 --parallelism.enable_async_tensor_parallel",
            "enable_async_tensor_parallel = true: not with training.dynamic_seq_len: products are cut",
        ),
        ("--parallelism.context_parallel_degree 2", "context_parallel_degree = 2: not with training.dynamic_seq_len"),
    ],
)
def test_what_rows_of_several_lengths_do_not_go_with_is_named(arguments: str, words: str) -> None:
    assert any(words in problem for problem in problems(f"--training.dynamic_seq_len {arguments}", 2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--parallelism.tensor_parallel_degree 1", "tensor_parallel_degree = 1: not with parallelism.enable_async"),
        ("--compile.disable_passes overlap_products", "disable_passes = ['overlap_products']: not with parallelism"),
    ],
)
def test_what_async_tensor_parallelism_does_not_go_with_is_named(arguments: str, words: str) -> None:
    given = f"--parallelism.tensor_parallel_degree 2 --parallelism.enable_async_tensor_parallel {arguments}"
    assert any(words in problem for problem in problems(given, 2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--parallelism.pipeline_parallel_degree 2", "pipeline_parallel_degree = 2: not with compile.cuda_graphs"),
        ("--activation_checkpoint.offload layers.*", "offload = ['layers.*']: not with compile.cuda_graphs"),
        ("--training.enable_cpu_offload", "training.enable_cpu_offload = true: not with compile.cuda_graphs"),
    ],
)
def test_what_cuda_graphs_do_not_go_with_is_named(arguments: str, words: str) -> None:
    assert any(words in problem for problem in problems(f"--compile.cuda_graphs {arguments}", 2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--activation_checkpoint.memory_budget_gib 0", "memory_budget_gib = 0.0: a rank holds more than nothing"),
        (
            "--activation_checkpoint.memory_budget_gib 4 --activation_checkpoint.memory_budget 0.25",
            "memory_budget_gib = 4.0: takes the place of memory_budget = 0.25; leave one of them out",
        ),
        (
            "--activation_checkpoint.memory_budget_gib 4 --optimizer.name torch.optim.SGD",
            "memory_budget_gib = 4.0: what optimizer.name = 'torch.optim.SGD' keeps is not known before",
        ),
    ],
)
def test_a_budget_that_can_not_be_met_is_named(arguments: str, words: str) -> None:
    mode = "--activation_checkpoint.mode memory_budget"
    assert check(load(mode.split()), 1) == []
    assert words in problems(f"{mode} {arguments}", 1)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--optimizer.name my.Own --optimizer.state_dtype bfloat16", "optimizer.state_dtype = 'bfloat16': a class of"),
        ("--optimizer.name my.Own --optimizer.ema_decay 0.9", "optimizer.ema_decay = 0.9: a class of your own, my.Own"),
        (
            "--optimizer.name Muon --optimizer.implementation foreach",
            "implementation = 'foreach': Muon's AdamW is fused",
        ),
        ("--optimizer.param_groups [{pattern='*',name='AdamW'}]", "'AdamW'}]: name: is for optimizer.name = Muon"),
    ],
)
def test_what_is_of_another_optimizer_is_named(arguments: str, words: str) -> None:
    (problem,) = problems(arguments, 1)
    assert words in problem


@pytest.mark.parametrize("fraction", ["-0.1", "1.1", "nan"])
def test_a_budget_is_a_part(fraction: str) -> None:
    with pytest.raises(UserError, match="activation_checkpoint.memory_budget = .*at least 0 and at most 1"):
        load(["--activation_checkpoint.memory_budget", fraction])


def test_what_is_compiled_is_said_once() -> None:
    for part in ("--compile.regions output", "--compile.fusions rope"):
        assert "codegen = whole compiles all" in problems(f"--compile.codegen whole {part}", 1)[0]
    for other in ("--compile.codegen blocks", "--compile.fusions rope"):
        (problem,) = problems(f"--compile.dedupe_layers {other}", 1)
        assert "compile.dedupe_layers = true: blocks are calls already" in problem
    fused = "--model.elementwise fused --compile.fusions"  # a run's config.toml says the first where auto took it
    assert check(load(f"{fused} rope".split()), 1) == check(load(f"{fused} swiglu".split()), 1) == []
    assert "so none is left" in problems(f"{fused} rope,swiglu", 1)[0]


@pytest.mark.parametrize(
    "words",
    [
        "activation_checkpoint.mode memory_budget",
        "activation_checkpoint.offload layers.*",
        "activation_checkpoint.save layers.*",
        "activation_checkpoint.recompute layers.*",
        "compile.capture dynamo",
        "compile.cuda_graphs",
        "compile.dedupe_layers",
        "compile.fusions rope",
        "compile.optimizer_in_graph",
        "compile.precompiled graphs",
        "parallelism.enable_async_tensor_parallel --parallelism.tensor_parallel_degree 2",
        "parallelism.pipeline_parallel_degree 2",
    ],
)
def test_what_needs_a_graph_is_refused_in_eager_mode(words: str) -> None:
    check(load(f"--{words}".split()), 2)
    (problem,) = problems(f"--compile.mode eager --{words}", 2)
    assert f"{words.split()[0]} = " in problem and "only a graph" in problem and "use compile.mode = graph" in problem


@pytest.mark.parametrize(
    ("arguments", "notice"),
    [
        ("--lr_scheduler.total_steps 10", "from step 11 on the learning rate stays at 0.0008"),
        ("--checkpoint.remote_folder memory://run", "nothing is copied while checkpoint.enable is false"),
        ("--debug.verify_passes --compile.mode eager", "compile.mode = eager has no graph, and runs no passes"),
        ("--debug.dump_graphs --compile.mode eager", "compile.mode = eager has no graph, and runs no passes"),
        ("--compile.disable_passes fill_waits --compile.mode eager", "compile.mode = eager has no graph"),
        ("--compile.regions layers.*.attention", "has no effect while compile.codegen is off"),
        ("--activation_checkpoint.memory_budget 0.3", "nothing is budgeted while activation_checkpoint.mode is not"),
        ("--compile.disable_passes rematerialize", "without rematerialize activation_checkpoint.mode = selective has"),
        ("--activation_checkpoint.offload layers.* --compile.disable_passes tag_offload", "offload has no effect"),
        ("--compile.codegen whole --compile.mode eager", "compile.codegen = 'whole': compile.mode = eager compiles"),
        ("--comm.fake_rank 1", "only a dry run"),
        (
            "--activation_checkpoint.visualize_memory_budget_pareto",
            "true: nothing is budgeted while activation",
        ),
        ("--activation_checkpoint.memory_budget_gib 4", "memory_budget_gib = 4.0: nothing is budgeted while"),
        ("--comm.fake_device A100", "only a dry run"),
        ("--metrics.histogram_freq 5", "no histograms while metrics.enable_tensorboard is false"),
        ("--parallelism.pipeline_parallel_schedule GPipe", "'GPipe': there are no stages while parallelism.pipeline_"),
        ("--parallelism.module_fqns_per_model_part a;b", "there are no stages while"),
        ("--parallelism.expert_exchange by_machine", "'by_machine': no tokens are exchanged while parallelism.expert_"),
        ("--parallelism.exchange_dtype float8", "'float8': no tokens are exchanged while parallelism.expert_parallel_"),
        ("--parallelism.ranks_per_machine 4", "no tokens are exchanged while parallelism.expert_parallel_degree is 1"),
    ],
)
def test_what_has_no_effect_is_said(arguments: str, notice: str) -> None:
    notices = check(load(arguments.split()), 1)
    assert len(notices) == 1 and notice in notices[0]


@pytest.mark.parametrize(
    ("arguments", "notice"),
    [
        (
            "--profiling.enable_profiling --profiling.profile_freq 11",
            "profile_freq = 11: nothing is profiled, for the run",
        ),
        ("--profiling.enable_memory_snapshot --profiling.profile_freq 11", "nothing is profiled, for the run has"),
        ("--metrics.enable_tensorboard --metrics.histogram_freq 11", "no histogram is written, for the run has"),
        (
            "--checkpoint.enable --checkpoint.keep_every 11",
            "no checkpoint is kept for good, for the run has training.st",
        ),
    ],
)
def test_what_a_run_is_too_short_for_is_said(arguments: str, notice: str) -> None:
    (said,) = check(load([*arguments.split(), "--training.steps", "10"]), 1)
    assert notice in said
    assert check(load([*arguments.split(), "--training.steps", "11"]), 1) == []


def test_a_run_of_epochs_is_as_long_as_its_rows() -> None:
    words = "--training.epochs 1 --training.steps 1000 --lr_scheduler.total_steps 20 --metrics.enable_tensorboard"
    config = load([*words.split(), "--metrics.histogram_freq", "11"])
    assert check(config, 1) == [] and check_length(config, 11) == []
    (said,) = check_length(config, 10)
    assert "histogram_freq = 11: no histogram is written, for the run has 10 steps: set" in said
    (said,) = check_length(config, 30)
    assert "the schedule ends before 30 steps; from step 21 on" in said


def test_what_spaces_nothing_may_be_longer_than_the_run() -> None:
    words = "--training.steps 10 --profiling.profile_freq 11 --checkpoint.interval 11 --validation.freq 11"
    assert check(load(words.split()), 1) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--lr_scheduler.warmup_steps 2", "from step 11 on the learning rate is 0, and nothing is learned"),
        ("--lr_scheduler.warmup_steps 2 --lr_scheduler.min_lr_factor 0.1", "the learning rate stays at 8e-05"),
        ("--lr_scheduler.warmup_steps 2 --lr_scheduler.decay_ratio 0.04", "the learning rate stays at 0.0008"),
        ("--lr_scheduler.warmup_steps 2 --lr_scheduler.decay_ratio 0.9", "the learning rate is 0"),
        ("--lr_scheduler.warmup_steps 10 --lr_scheduler.min_lr_factor 0.1", "the learning rate stays at 0.0008"),
    ],
)
def test_the_rate_after_a_schedule_is_said(arguments: str, said: str) -> None:
    config = load([*arguments.split(), "--lr_scheduler.total_steps", "10"])
    (notice,) = check(config, 1)
    assert said in notice
    assert not check(load([*arguments.split(), "--lr_scheduler.total_steps", "10", "--training.steps", "10"]), 1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.optimizer.lr)
    last = build_lr_scheduler(optimizer, config.lr_scheduler, 1000).factor(10)  # of step 11
    assert f"{config.optimizer.lr * last:g}" in (notice if last else "0")


def test_auto_in_a_pipeline_without_pairs_is_said_to_do_nothing() -> None:
    words = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.overlap_microbatches=auto"]
    (notice,) = check(load([*words, "--training.local_batch_size", "8"]), 2)
    assert "overlap_microbatches = 'auto': pipeline_parallel_schedule 1F1B runs no forward alongside" in notice
    assert check(load([*words, "--parallelism.pipeline_parallel_schedule", "DualPipeV"]), 2) == []


def test_sums_of_a_direct_exchange_are_said_to_be_none() -> None:
    words = ["--parallelism.expert_parallel_degree", "2", "--parallelism.exchange_sums", "by_machine"]
    (notice,) = check(load(words), 2)
    assert "exchange_sums = 'by_machine': has no effect while parallelism.expert_exchange is direct; set that" in notice
    assert check(load([*words, "--parallelism.expert_exchange", "by_machine"]), 2) == []


def test_what_divides_no_stages_is_said() -> None:
    words = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.module_fqns_per_model_part", "a;b"]
    assert check(load(words), 2) == []
    (notice,) = check(load([*words, "--parallelism.pipeline_parallel_first_stage_less_layers", "3"]), 2)
    assert "pipeline_parallel_first_stage_less_layers = 3: parallelism.module_fqns_per_model_part says" in notice


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--checkpoint.remote_folder s4://bucket/run", "remote_folder = 's4://bucket/run': unknown protocol 's4'; kno"),
        ("--checkpoint.remote_folder absent://bucket/run", "is not installed; pip install it (Install nothing_there)"),
        ("--validation.sets [{name='a',dataset_path='s4://b'}]", "entry 1: unknown protocol 's4'"),
        ("--checkpoint.remote_folder /data/run", "a plain folder is file:///path/of/the/folder"),
        ("--checkpoint.remote_folder file:///", "must be an address such as s3://bucket/run"),
        ("--checkpoint.remote_folder memory://a/run[1]", "must not hold any of * ? [ ]"),
        ("--checkpoint.initial_load_path s4://bucket/run/step-5", "unknown protocol 's4'"),
        ("--checkpoint.initial_load_path memory://run", "must be that of one checkpoint, and end in step-N"),
        (
            "--checkpoint.initial_load_path memory://run/step-5 --checkpoint.initial_load_in_hf",
            "with initial_load_in_hf it is a folder of the file system",
        ),
        ("--validation.enable --training.sources [{dataset='stdlib'}]", "the sources of a mixture don't end together"),
        ("--training.roll_back_after 3 --checkpoint.enable", "no step is skipped: set training.skip_leaps too"),
        ("--training.roll_back_after 3 --training.skip_leaps 10", "checkpoint.enable = false saves none: change that"),
        (
            "--training.roll_back_after 3 --training.skip_leaps 10 --checkpoint.enable --checkpoint.load_only",
            "checkpoint.load_only = true saves none",
        ),
        ("--checkpoint.load_step 3", "needs checkpoint.enable = true; with checkpoint.load_only"),
        (
            "--checkpoint.enable --checkpoint.exclude_from_loading model --checkpoint.load_step 3",
            "model can't be left out",
        ),
        ("--checkpoint.exclude_from_loading optimizer", "is about checkpoint.load_step, or checkpoint.initial_load"),
        ("--checkpoint.exclude_from_loading optimizer --checkpoint.initial_load_path a", "initial_load_model_only ="),
    ],
)
def test_checkpoints(arguments: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"class": "nothing_there.FileSystem", "err": "Install nothing_there"}
    monkeypatch.setitem(known_implementations, "absent", absent)
    (problem,) = problems(arguments, 2)
    assert message in problem


def test_legal_checkpoints() -> None:
    for arguments in (
        "--checkpoint.exclude_from_loading optimizer,dataloader --checkpoint.load_step 3 --checkpoint.enable",
        "--checkpoint.enable --checkpoint.export_dtype bfloat16",  # of the last model
        "--checkpoint.initial_load_path ckpt",  # nothing has to be saved for that
        "--checkpoint.enable --checkpoint.exclude_from_loading train_state --checkpoint.initial_load_path /data/step-1"
        " --checkpoint.no-initial_load_model_only",
        "--checkpoint.enable --checkpoint.remote_folder memory://a --checkpoint.initial_load_path file:///a/step-1/",
    ):
        assert check(load(arguments.split()), 1) == []


STAGES = "--parallelism.pipeline_parallel_degree 2 "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            f"{STAGES} --training.local_batch_size 3 --parallelism.pipeline_parallel_microbatch_size 2",
            "pipeline_parallel_microbatch_size = 2: must divide training.local_batch_size 3",
        ),
        (f"{STAGES} --checkpoint.enable --checkpoint.last_save_in_hf", "no rank of a pipeline can gather the whole"),
        (f"{STAGES} --model.num_mtp_layers 1", "num_mtp_layers = 1: not with pipeline or context parallel"),
        (
            "--parallelism.context_parallel_degree 2 --model.num_mtp_layers 1",
            "num_mtp_layers = 1: not with pipeline or context parallel",
        ),
    ],
)
def test_what_stages_and_parts_of_rows_can_not_do(arguments: str, message: str) -> None:
    (problem,) = problems(arguments, 2)
    assert message in problem


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("training.stepz", 3, "training.stepz is not an option; did you mean training.steps?"),
        ("training.steps", "3", "training.steps = '3': must be a whole number of at least 1"),
        ("training.steps", -1, "training.steps = -1: must be a whole number of at least 1"),
        ("training.steps", 3.5, "training.steps = 3.5: must be a whole number of at least 1"),
        ("compile.mode", "egaer", "compile.mode = 'egaer': must be one of .*; did you mean eager?"),
        ("compile.extra_passes", ["my.pass"], r"compile.extra_passes = \['my.pass'\]: must be a list of ExtraPass"),
        ("training", {"steps": 3}, "training is of class dict: set its options one by one, as attributes"),
        ("trainin", 3, "trainin is not an option"),
    ],
)
def test_a_configuration_that_is_written_in_python_is_checked_as_a_file_is(key: str, value: object, words: str) -> None:
    config = JobConfig()
    table, _, name = key.rpartition(".")
    setattr(getattr(config, table) if table else config, name, value)
    with pytest.raises(UserError, match=f"1 problem in the configuration:\n  {words}"):
        check(config, 1)


def test_a_right_one_that_is_written_in_python_passes() -> None:
    """Negative control."""
    config = JobConfig()
    config.optimizer.lr = 1  # a whole number, as TOML takes it
    config.training.steps = 3
    check(config, 1)


@pytest.mark.parametrize("world_size", ["2", 0, None, 2.0])
def test_a_number_of_processes_that_is_none_is_refused(world_size: object) -> None:
    with pytest.raises(UserError, match="world_size = .*: must be the number of processes, a whole number"):
        check(JobConfig(), world_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("argv", ["llama3_debug.toml", None, {"training.steps": 3}, ["--training.steps", 3]])
def test_load_takes_the_words_of_a_command_line(argv: object) -> None:
    with pytest.raises(UserError, match=r"must be the words of a command line, as in load\(\['--job.config_file', "):
        load(argv)  # type: ignore[arg-type]


def test_check_takes_a_configuration() -> None:
    with pytest.raises(UserError, match="config is of class list: must be a JobConfig"):
        check([], 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--training.seq_len 2147483648", "times training.local_batch_size = 8 these are 17,179,869,184 tokens at a"),
        ("--training.local_batch_size 8589934592", "training.local_batch_size = 8589934592 these are"),
        ("--validation.enable --validation.seq_len 67108864", "times validation.local_batch_size = 8 these are"),
        ("--training.seq_len 4611686018427387904", "67,108,864 are the most; use shorter rows or fewer of them"),
        ("--model.num_mtp_layers 100000", "must be a whole number of at least 0 and at most 16"),
        ("--activation_checkpoint.memory_budget_gib 1e308", "at least 0 and at most 1000000"),
        ("--training.dataloader.num_workers 100000", "at most 1024"),
    ],
)
def test_sizes_have_bounds(arguments: str, why: str) -> None:
    assert why in problems(arguments, 1)[0]


@pytest.mark.parametrize("given", ["9" * 5000, str(2**31), "0", "-1", "two", "1.5", "", "\u00b2"])
def test_a_number_of_ranks_has_bounds(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NGPU", given)
    with pytest.raises(UserError, match="NGPU = '.*: must be the number of ranks") as error:
        ranks_asked_for()
    assert len(str(error.value)) < 500


def test_a_message_tells_the_first_of_very_many_problems() -> None:
    rows = ",".join(["{}"] * 1000)
    told = problems(f"--training.sources [{rows}]", 1)
    assert len(told) == 31 and told[-1] == "and 971 more"


def test_a_notice_shows_a_long_value_in_part() -> None:
    (notice,) = check(load(["--compile.regions", ",".join(["layers.*"] * 1000)]), 1)
    assert len(notice) < 500 and "has no effect while compile.codegen is off" in notice


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("given", ["", "two", "-1", "9" * 5000, "1.5"])
def test_what_launchers_say_is_checked(name: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, given)
    with pytest.raises(UserError, match=f"{name} = '.*: must be a whole number from"):
        check(load([]), 1)


def test_a_rank_is_below_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert ranks_started() == 2
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UserError, match="RANK = '2': must be below WORLD_SIZE = 2"):
        ranks_started()
