"""The roofline against closed forms, and against the forecast that prices the same graph."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchtitan_graph.analysis.cost import ATTENTION, COMPUTE, LAUNCH, MEMORY, PRODUCT
from torchtitan_graph.plan.ranks import build, configuration
from torchtitan_graph.plan.roofline import (
    CLASSES,
    COMMUNICATION,
    COPIES,
    FUSED,
    LOSS,
    NORMS,
    OPTIMIZER,
    POINTWISE,
    REALISTIC,
    UNCOMPILED,
    UNFUSED,
    Roofline,
    as_data,
    lines,
    roofline,
)
from torchtitan_graph.plan.simulate import by_rates, simulate
from torchtitan_graph.rates import RATES
from torchtitan_graph.roofline import main
from torchtitan_graph.steps.budget import trained_bytes

H100 = RATES["H100"]
REPOSITORY = Path(__file__).parents[3]
# llama3's debug model: six layers, 16 heads of 16; two microbatches.
B, L, D, F, V, LAYERS, STEPS = 2, 128, 256, 768, 256, 6, 2
SIZES = ["--training.seq_len", str(L), "--training.local_batch_size", str(B), "--compile.codegen", "blocks"]
ONE = [
    *SIZES,
    "--model.attn",
    "flex",
    "--training.global_batch_size",
    str(B * STEPS),
    "--activation_checkpoint.mode",
    "none",
]
FOUR = [*SIZES, "--parallelism.tensor_parallel_degree", "2"]  # with what backward computes again


def found(words: Sequence[str], world_size: int = 1) -> Roofline:
    return roofline(configuration(words, world_size), world_size, H100)


@pytest.fixture(scope="module")
def one() -> Roofline:
    return found(ONE)


@pytest.fixture(scope="module")
def on_host() -> Roofline:
    return found([*ONE, "--training.enable_cpu_offload"])


@pytest.fixture(scope="module")
def of_four() -> Roofline:
    return found(FOUR, 4)


@pytest.mark.parametrize("name", ["one", "on_host", "of_four"])
def test_realistic_and_unfused_is_what_a_forecast_says(name: str, request: pytest.FixtureRequest) -> None:
    """Of the job that compiles nothing, to the last of its kernels, waits and launches."""
    given: Roofline = request.getfixturevalue(name)
    plan = simulate(given.job, by_rates(given.job, H100), H100)
    assert given.seconds(UNCOMPILED) == pytest.approx(plan.step.seconds)
    assert given.mfu(UNCOMPILED) == pytest.approx(plan.mfu)


@pytest.mark.parametrize("name", ["one", "of_four"])
def test_nothing_is_lost_between_modules_and_classes(name: str, request: pytest.FixtureRequest) -> None:
    given: Roofline = request.getfixturevalue(name)
    for how, costed in given.steps.items():
        sums = [given.by_class(how).values(), given.by_module(how).values(), costed.values()]
        for figure in ("flops", "moved", "received", "time"):
            each = [sum(getattr(cost, figure) for cost in costs) for costs in sums]
            assert each == pytest.approx([each[0]] * 3)
        assert sum(cost.flops for cost in costed.values()) == pytest.approx(given.flops)
        assert {kind for _, kind in costed} <= set(CLASSES)


def test_fused_moves_less_and_peaks_are_faster(one: Roofline) -> None:
    unfused, fused = one.by_class(UNFUSED), one.by_class(FUSED)
    for kind in (PRODUCT, ATTENTION, OPTIMIZER):
        assert fused[kind].moved == unfused[kind].moved
    for kind in (LOSS, NORMS, POINTWISE, COPIES):
        assert 0 < fused[kind].moved < unfused[kind].moved
    assert one.mfu(UNCOMPILED) < one.mfu(REALISTIC) < one.mfu(FUSED)
    assert one.mfu(UNCOMPILED) < one.mfu(UNFUSED) < one.mfu(FUSED) < 1


def test_the_optimizer_goes_through_what_is_trained(one: Roofline) -> None:
    """Ten times, and three for each microbatch but the first, whose gradients are added to nothing."""
    trained = trained_bytes(one.job.ranks[0].graphs.storages.values())
    assert one.by_class(UNFUSED)[OPTIMIZER].moved == (10 + 3 * (STEPS - 1)) * trained


def test_what_rests_on_the_host_comes_and_goes(on_host: Roofline) -> None:
    """A weight for forward, a block's again for backward; and its gradient."""
    storages = on_host.job.ranks[0].graphs.storages.items()
    copied = sum((3 if name.startswith("layers.") else 2) * trained_bytes([each]) for name, each in storages)
    assert on_host.by_class(UNFUSED)[COMMUNICATION].received == STEPS * copied


def test_a_linear_layer_is_three_products(one: Roofline) -> None:
    """Its result, and two gradients: each reads two of the three matrices, in bf16, and writes the third."""
    cost = one.steps[UNFUSED]["layers.*.feed_forward.w1", PRODUCT]
    times = 3 * LAYERS * STEPS
    assert cost.flops == times * 2 * B * L * D * F
    assert cost.moved == times * 2 * (B * L * D + D * F + B * L * F)
    assert cost.seconds == pytest.approx({MEMORY: cost.moved / H100.memory})
    # Of so few tokens no product is as long as a kernel takes at least.
    assert one.steps[UNCOMPILED]["layers.*.feed_forward.w1", PRODUCT].seconds.keys() == {LAUNCH}


def test_a_norm_is_two_kernels_as_on_a_gpu(one: Roofline) -> None:
    """Forward reads rows and the weight, writes rows and the inverse roots, in fp32. Backward reads the same and the
    result's gradient, writes two gradients. Beside them rows' gradients are added to those of what passes by, the
    weight and its gradient are cast, and the latter is summed over microbatches."""
    cost = one.steps[UNFUSED]["layers.*.ffn_norm", NORMS]
    forward, backward = 2 * (2 * B * L * D + D) + 4 * B * L, 2 * (3 * B * L * D + 2 * D) + 4 * B * L
    beside = 2 * 3 * B * L * D + 2 * (4 + 2) * D
    assert cost.moved == LAYERS * (STEPS * (forward + backward + beside) + (STEPS - 1) * 4 * 3 * D)


def test_attention_counts_what_a_causal_mask_leaves(one: Roofline) -> None:
    """Flex, on an H100: two products forward and four backward, which computes the scores again beside them."""
    cost = one.steps[UNFUSED]["layers.*.attention", ATTENTION]
    pairs = L * (L + 1) / 2
    assert cost.flops == pytest.approx(LAYERS * STEPS * (2 + 4) * 2 * B * D * pairs)
    slow = H100._replace(half=1e9)
    seconds = roofline(one.job.config, 1, slow).steps[UNFUSED]["layers.*.attention", ATTENTION].seconds
    assert seconds == pytest.approx({COMPUTE: LAYERS * STEPS * (2 + 5) * 2 * B * D * pairs / 1e9})


def loss_bytes(found: Roofline, how: str) -> float:
    """Give what the loss moves for each logit."""
    logits = STEPS * B * L * found.job.ranks[0].graphs.storages["output.weight"].shape[0]
    return found.by_class(how)[LOSS].moved / logits


def test_the_loss_reads_its_logits_twice_and_writes_them_once(one: Roofline) -> None:
    numbers_of_a_row = 100 / V  # bytes, in fp32, that are no logits
    assert 2 + 2 + 2 < loss_bytes(one, UNFUSED) < 2 + 2 + 2 + numbers_of_a_row


def test_an_elementwise_layer_moves_what_it_is_given_and_gives_once(one: Roofline) -> None:
    """SwiGLU in forward, again in backward, and its gradients; queries and keys rotated, and their gradients back, by
    angles in fp32."""
    modules, rows = one.by_module(UNFUSED), STEPS * B * L * LAYERS
    assert modules["layers.*.feed_forward.activation"].moved == rows * F * 2 * (3 + 3 + 5)
    assert modules["layers.*.attention.rotate"].moved == rows * 4 * (D * 2 * 2 + 2 * 8 * 4)


def test_ranks_wait_for_one_another(of_four: Roofline) -> None:
    received = sum(each.num_bytes for each in of_four.job.ranks[0].forecast.sent.values())
    cost = of_four.by_class(UNFUSED)[COMMUNICATION]
    assert cost.received == received * of_four.job.options.num_microbatches and cost.moved == 0
    assert cost.seconds.keys() == {COMMUNICATION}
    assert cost.seconds[COMMUNICATION] <= received * of_four.job.options.num_microbatches / H100.near, "hops are free"


def test_the_table_says_what_the_data_say(one: Roofline) -> None:
    text, data = "\n".join(lines(one)), json.loads(json.dumps(as_data(one)))
    assert data["steps"][REALISTIC]["mfu"] == pytest.approx(one.mfu(REALISTIC))
    assert f"{data['steps'][REALISTIC]['seconds'] * 1e3:10.2f}{one.mfu(REALISTIC):10.1%}" in text
    modules = data["steps"][UNFUSED]["modules"]
    assert f"{modules['output']['bytes'] / 1e9:9.2f}" in next(x for x in text.splitlines() if x.startswith("  output "))
    assert "layers.*.feed_forward.w1" in text and max(map(len, text.splitlines())) <= 160


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--device cpu", "--device cpu: a CPU has no peaks that a file could hold; legal are a100, b200, h100,"),
        ("--device h10", "'h10': no such device; legal are a100, b200, h100,"),
        ("--world 0", "--world 0: must be the number of ranks"),
        ("--json no/where.json", "--json no/where.json: there is no folder no"),
        ("--training.seqlen 3", "is not an option; did you mean training.seq_len?"),
        ("--seq_len 3", "is not an option; did you mean training.seq_len?"),
        ("--optimizer.name torch.optim.SGD", "optimizer.name = 'torch.optim.SGD': what it reads"),
        ("--optimizer.name Muon", "optimizer.name = 'Muon': what it reads"),
        ("--optimizer.ema_decay 0.9", "optimizer.ema_decay = 0.9: a roofline does not know"),
        (
            "--world 2 --parallelism.pipeline_parallel_degree 2",
            "parallelism.pipeline_parallel_degree = 2: a roofline is of a step that one rank computes alone; leave it",
        ),
    ],
)
def test_what_has_no_roofline_is_refused(words: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    config = str(REPOSITORY / "train_configs" / "llama3_debug.toml")
    assert main(["--job.config_file", config, *words.split()]) == 2
    out, err = capfd.readouterr()
    assert says in out + err and not out.startswith("a step")


def test_the_forecast_of_a_compiled_job_is_another(one: Roofline) -> None:
    """Negative control: with its regions the same job's graph is another, and takes less time."""
    compiled = build(one.job.config, 1, H100)
    assert simulate(compiled, by_rates(compiled, H100), H100).step.seconds < 0.99 * one.seconds(UNCOMPILED)
