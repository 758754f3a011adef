"""The estimate of a graph's time, against sums by hand: of its nodes, and of streams that run beside one another."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torchtitan_graph import rates
from torchtitan_graph.analysis import cost
from torchtitan_graph.analysis.cost import Costs, Estimate, Link, estimate, fused_kernels
from torchtitan_graph.analysis.liveness import Memories, readers_of_memory
from torchtitan_graph.torch_private.fake import FakeTensorMode

c10d = torch.ops._c10d_functional
N = 1024  # rows and columns: 4 MiB
# Round numbers, no latency of the host.
RATES = rates.RATES["CPU"]._replace(half=4e12, full=1e12, memory=1e11, near=1e10, far=1e9)
LINKS = {"a": Link("fsdp", 8, 8), "b": Link("tp", 4, 1)}
COSTS = Costs(RATES, LINKS)

PRODUCT = 2 * N**3 / (1e12 * RATES.product_share)
ADD = 3 * 4 * N**2 / (1e11 * RATES.memory_share)  # two read, one written
GATHER = 3 * RATES.near_hop + 7 * 4 * N**2 / (1e10 * RATES.network_share)  # seven others' parts, within a machine
SUM = 2 * RATES.far_hop + 2 * 3 / 4 * 4 * N**2 / (1e9 * RATES.network_share)  # to and fro between four machines


def graph_of(fn: Callable[..., object]) -> GraphModule:
    with FakeTensorMode():
        return make_fx(fn)(torch.empty(N, N), torch.empty(N, N))


def gather(x: Tensor) -> Tensor:
    return c10d.all_gather_into_tensor(x, 8, "a")


def total(x: Tensor) -> Tensor:
    return c10d.all_reduce(x, "sum", "b")


def wait(x: Tensor) -> Tensor:
    return c10d.wait_tensor(x)


def close(found: Estimate, seconds: float, **exposed: float) -> bool:
    return found.seconds == pytest.approx(seconds) and found.exposed == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("fn", "seconds"),
    [
        (lambda x, y: x @ y, PRODUCT),
        (lambda x, y: x.t(), 0.0),
        (lambda x, y: torch.ops.aten._unsafe_view(x, [-1]), 0.0),
        (lambda x, y: x + y, ADD),
        (lambda x, y: x[0] + y[0], RATES.kernel),
    ],
    ids=["products", "views", "a view that says it is none", "bytes", "a launch at least"],
)
def test_a_node_takes_the_longer_of_its_products_and_its_bytes(fn: Callable, seconds: float) -> None:
    assert close(estimate(graph_of(fn), COSTS), seconds)


def test_narrow_products_run_at_their_own_rate() -> None:
    with FakeTensorMode():
        gm = make_fx(torch.mm)(*torch.empty(2, N, N, dtype=torch.bfloat16))
    assert close(estimate(gm, COSTS), PRODUCT / 4)


def test_products_in_float8_reach_their_own_share() -> None:
    work = cost.Work(cost.PRODUCT, 1e12, 0.0, 0.0, width=1)
    costs = Costs(RATES._replace(fp8=8e12, fp8_share=0.25, product_share=0.5))
    assert costs.terms(work)[cost.COMPUTE] == 1e12 / (8e12 * 0.25)
    assert costs.terms(work._replace(width=2))[cost.COMPUTE] == 1e12 / (4e12 * 0.5)


def test_what_takes_rows_of_a_table_reads_no_others() -> None:
    with FakeTensorMode():
        gm = make_fx(torch.embedding)(torch.empty(1000 * N, N), torch.empty(2, dtype=torch.int64))
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    assert cost.touched(node) == 2 * (2 * 4 * N)


@pytest.mark.parametrize(
    ("fn", "moved"),
    [
        (lambda x, y: x[:1].expand(N, N) + y, 2 * N**2 + N),
        (lambda x, y: x[0, 0].expand(N, N) + y, 2 * N**2 + 1),
        (lambda x, y: x + y, 3 * N**2),
        (lambda x, y: x.copy_(y), 2 * N**2),
        (lambda x, y: torch.zeros_like(x), N**2),
        (lambda x, y: x.new_ones(N), N),
        (lambda x, y: x.mul_(y), 3 * N**2),
    ],
    ids=["a row for each", "a number for all", "all", "overwritten", "a shape", "a dtype", "read and overwritten"],
)
def test_what_is_read_counts_once_and_what_is_overwritten_does_not(fn: Callable, moved: int) -> None:
    *_, node = (n for n in graph_of(fn).graph.nodes if n.op == "call_function")
    assert cost.touched(node) == 4 * moved


def test_what_is_waited_for_at_once_is_exposed() -> None:
    assert close(estimate(graph_of(lambda x, y: (wait(gather(x)), x @ y)), COSTS), GATHER + PRODUCT, fsdp=GATHER)


def test_products_hide_what_runs_beside_them() -> None:
    def late(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        sent = gather(x)
        z = x @ y
        return wait(sent), z

    left = GATHER - PRODUCT
    assert left > 0
    assert close(estimate(graph_of(late), COSTS), GATHER, fsdp=left)


def test_a_collective_takes_its_share_of_the_products_beside_it_but_of_no_bytes() -> None:
    costs = Costs(RATES._replace(message_share=0.5), LINKS)

    def products(number: int) -> Callable[..., object]:
        def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            sent = gather(x)
            found = [x @ y for _ in range(number)]
            return *found, wait(sent)

        return run

    enough = math.ceil(GATHER / PRODUCT)
    assert estimate(graph_of(products(enough)), costs).seconds == pytest.approx(enough * PRODUCT + GATHER / 2)
    assert estimate(graph_of(lambda x, y: (x @ y, wait(gather(x)))), costs).seconds == pytest.approx(PRODUCT + GATHER)
    added = estimate(graph_of(lambda x, y: (gather(x), x + y)), costs)
    assert added.computed == pytest.approx({cost.OTHER: ADD})


def test_what_a_part_has_more_is_not_exposed_beyond_what_it_sends() -> None:
    first, other = Estimate(5.0, {"ep": 2.0}, {"ep": 1.5}), Estimate(4.0, {"ep": 2.0}, {"ep": 0.5})
    assert first.beyond(other) == Estimate(1.0, {"ep": 0.0}, {"ep": 0.0})
    assert first.beyond(Estimate(1.0, {}, {})) == Estimate(4.0, {"ep": 2.0}, {"ep": 1.5})


def test_one_groups_collectives_queue_and_two_groups_do_not() -> None:
    def both(first: Callable, second: Callable) -> Callable:
        def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            a, b = first(x), second(y)
            return wait(a), wait(b)

        return run

    assert close(estimate(graph_of(both(gather, gather)), COSTS), 2 * GATHER, fsdp=2 * GATHER)
    assert SUM > GATHER
    assert close(estimate(graph_of(both(gather, total)), COSTS), SUM, fsdp=GATHER, tp=SUM - GATHER)
    found = estimate(graph_of(both(gather, total)), COSTS)
    assert found.sent == pytest.approx({"fsdp": GATHER, "tp": SUM})


@pytest.mark.parametrize(("near", "seconds"), [(8, 7 / 8 / 1e10), (4, 7 / 8 / 4 / 1e9), (1, 7 / 8 / 1e9)])
def test_each_rank_in_a_machine_brings_a_port(near: int, seconds: float) -> None:
    """Of a ring's bytes; and no hop is counted here."""
    (node,) = graph_of(lambda x, y: gather(x)).graph.find_nodes(
        op="call_function", target=c10d.all_gather_into_tensor.default
    )
    hops = 3 * (RATES.near_hop if near == 8 else RATES.far_hop)
    found = Costs(RATES, {"a": Link("fsdp", 8, near)}).seconds(node)
    assert found - hops == pytest.approx(8 * 4 * N**2 * seconds / RATES.network_share)


def test_an_exchange_sends_what_leaves_the_machine_over_its_own_port() -> None:
    even = [N // 8] * 8
    gm = graph_of(lambda x, y: c10d.all_to_all_single(x, even, even, "a"))
    (node,) = gm.graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default)
    found = Costs(RATES, {"a": Link("ep", 8, 4)}).seconds(node)
    assert found == pytest.approx(3 * RATES.far_hop + 4 * N**2 * 4 / 8 / (1e9 * RATES.network_share))


def test_a_group_that_is_no_axis_is_not_counted() -> None:
    assert estimate(graph_of(lambda x, y: wait(gather(x))), Costs(RATES, {})).sent == {}


def test_kernels_begin_when_the_host_has_started_them() -> None:
    """Two short sums: the host's starts are what takes time; a product that is long enough hides them."""
    slow = Costs(RATES._replace(launch=1e-3), LINKS)
    found = estimate(graph_of(lambda x, y: (x[0] + y[0], x[1] + y[1])), slow)
    assert close(found, 2e-3 + RATES.kernel)
    assert found.seconds - sum(found.computed.values()) == pytest.approx(2e-3 - RATES.kernel)
    hidden = estimate(graph_of(lambda x, y: (x @ y, x[1] + y[1])), slow)
    assert close(hidden, 1e-3 + PRODUCT + RATES.kernel)


def test_what_a_late_host_starts_exposes_its_own_time_alone() -> None:
    late, free = ({"launch": 1e-3}, {"near": 1e30, "near_hop": 0.0})
    gm = graph_of(lambda x, y: wait(gather(x)))
    assert close(estimate(gm, Costs(RATES._replace(**late), LINKS)), 1e-3 + GATHER, fsdp=GATHER)
    assert close(estimate(gm, Costs(RATES._replace(**late, **free), LINKS)), 1e-3, fsdp=0.0)


def test_what_a_kernel_is_for_adds_up() -> None:
    found = estimate(graph_of(lambda x, y: (wait(gather(x)), x @ y, x + y)), COSTS)
    assert found.computed == pytest.approx({cost.PRODUCT: PRODUCT, cost.OTHER: ADD})
    assert sum(found.computed.values()) + sum(found.exposed.values()) == pytest.approx(found.seconds)
    assert (found + found).seconds == (found * 2).seconds == pytest.approx(2 * found.seconds)
    assert (found + found).exposed == (found * 2).exposed and (found + found).computed == (found * 2).computed


def test_copies_to_the_host_run_beside_products() -> None:
    own = torch.ops.torchtitan_graph

    def away(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        copy = own.offload(x)
        z = x @ y
        return own.arrived(copy, x), z

    rates_ = RATES._replace(host=1e8)
    found = estimate(graph_of(away), Costs(rates_, LINKS))
    assert found.seconds == pytest.approx(4 * N**2 / 1e8)
    assert found.exposed == pytest.approx({"to the host": 4 * N**2 / 1e8 - PRODUCT})


LATE = Costs(RATES._replace(launch=1e-3, near=1e30, near_hop=0.0, host=1e8), LINKS)


def test_the_host_goes_on_when_a_copy_has_landed() -> None:
    own = torch.ops.torchtitan_graph

    def away(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        there = own.arrived(own.offload(x), x)
        return own.landed(there), x + y

    assert close(estimate(graph_of(away), LATE), 1e-3 + 4 * N**2 / 1e8 + 1e-3 + ADD, **{"to the host": 4 * N**2 / 1e8})


def test_the_host_knows_how_many_rows_it_sends_when_they_are_counted() -> None:
    """The device is busy till then; the exchange, and what comes behind it, is not started before."""
    own = torch.ops.torchtitan_graph

    def counted(x: Tensor, y: Tensor) -> Tensor:
        counts = torch.empty(8, 8, dtype=torch.int64)
        return own.row_splits(counts, counts)

    def sent(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x @ y
        rows = own.exchange(x, counted(x, y), False, N, True, "a")
        return z, wait(rows), x + y

    until_counted = estimate(graph_of(lambda x, y: (x @ y, counted(x, y))), LATE).seconds
    assert estimate(graph_of(sent), LATE).seconds == pytest.approx(until_counted + 2e-3 + ADD)
    links = {"a": Link("ep", 8, 8)}
    exposed = estimate(graph_of(sent), Costs(LATE.rates._replace(near_hop=1.0), links))
    assert exposed.seconds == pytest.approx(until_counted + 1e-3 + 3.0 + ADD), "three hops, none of them before"


def test_what_rests_on_the_host_is_updated_and_summed_there() -> None:
    costs = Costs(RATES._replace(host_memory=1e9))
    assert (costs.optimizer(10**9, True), costs.accumulating(10**9, True)) == pytest.approx((10.0, 3.0))
    on_device = 1e9 / (1e11 * RATES.memory_share)
    assert (costs.optimizer(10**9), costs.accumulating(10**9)) == pytest.approx((10 * on_device, 3 * on_device))


@pytest.mark.parametrize(("is_causal", "part"), [(True, 0.5), (False, 1.0)])
def test_attention_computes_what_its_kernel_looks_at(is_causal: bool, part: float) -> None:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    with FakeTensorMode():
        gm = make_fx(lambda q: attend(q, q, q, 0.0, is_causal)[0])(torch.empty(1, 8, N, 128))
    seconds = part * 4 * 8 * N**2 * 128 / (1e12 * RATES.attention_share)
    assert estimate(gm, COSTS).computed == pytest.approx({cost.ATTENTION: seconds})


@pytest.mark.parametrize(("share", "moved"), [(0.0, 5 * 4 * N**2), (1.0, 3 * 4 * N**2), (0.5, 4 * 4 * N**2)])
def test_of_fused_neighbours_a_share_of_what_stays_inside_is_not_moved(share: float, moved: int) -> None:
    """x + y, and its root: what lies between is written and read, unless they are one kernel."""
    gm = graph_of(lambda x, y: ((x + y).sqrt(), x @ y))
    memories, nodes = Memories(gm), [n for n in gm.graph.nodes if n.op == "call_function"]
    first, product = (kernel.work for kernel in fused_kernels(nodes, memories.owner, readers_of_memory(gm)))
    assert (first.kind, product.kind) == (cost.OTHER, cost.PRODUCT)
    assert Costs(RATES._replace(fusion_share=share)).kernel(first) == pytest.approx(moved / (1e11 * RATES.memory_share))
