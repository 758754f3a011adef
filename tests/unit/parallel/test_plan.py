"""What a plan says beside the degrees, and what it is refused for before any process group exists."""

import pytest
import torch

from torchtitan_graph.errors import UserError
from torchtitan_graph.models.spec import load_family, plan_of, tiny_config
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.parallelize import check_plan
from torchtitan_graph.parallel.plan import Plan, expert_roles, table_style, tensor_roles

MOE: Plan = {
    "moe": {"tp": "partial", "ep": "apart"},
    "moe.router": {"tp": "replicate"},
    "moe.experts": {"ep": "dispatch"},
    "moe.experts.w": {"tp": "shard 1", "ep": "expert"},
    "moe.shared": {"ep": "partial"},
}


def test_where_ep_spans_tp_a_role_on_ep_takes_the_place_of_that_on_tp() -> None:
    assert tensor_roles(MOE, ParallelDims(tp=2, ep=2)) == {
        "moe": "apart",
        "moe.router": "replicate",
        "moe.shared": "partial",
    }


@pytest.mark.parametrize("dims", [ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2, ep=2, etp=2)])
def test_where_each_expert_is_cut_over_tp_roles_on_tp_stay(dims: ParallelDims) -> None:
    assert tensor_roles(MOE, dims) == {"moe": "partial", "moe.router": "replicate", "moe.experts.w": "shard 1"}
    assert expert_roles(MOE) == {"moe.experts": "dispatch", "moe.experts.w": "expert"}


def check(name: str, dims: ParallelDims, plan: Plan | None = None, **changes: object) -> None:
    family = load_family(name)
    with torch.device("meta"):
        model = family.Model(tiny_config(family.FLAVORS["debugmodel"], **changes))
    check_plan(model, family.PLAN if plan is None else plan, dims)


@pytest.mark.parametrize(
    ("name", "dims", "changes", "message"),
    [
        ("llama3", ParallelDims(dp_shard=2, ep=2), {}, "expert_parallel_degree = 2: this model has no experts; leave"),
        ("gpt_oss", ParallelDims(dp_shard=4, ep=4), {}, "expert_parallel_degree = 4: does not divide the 6 experts of"),
        (
            "deepseek_v3",
            ParallelDims(tp=2, ep=2),
            {"moe_ffn_dim": 5, "num_shared_experts": 1},
            "the size 5 of layers.1.moe.shared",
        ),
    ],
)
def test_degrees_that_do_not_fit_the_model_are_refused(
    name: str, dims: ParallelDims, changes: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check(name, dims, **changes)


def test_heads_of_another_librarys_attention_are_not_cut() -> None:
    family = load_family("transformers")
    with torch.device("meta"):
        model = family.Model(tiny_config(family.FLAVORS["mixtral"]))
    check_plan(model, plan_of(family, model), ParallelDims(tp=2))
    with pytest.raises(
        UserError, match=r"tensor_parallel_degree = 4: does not divide the 2 heads of .*\.k_proj; choose"
    ):
        check_plan(model, plan_of(family, model), ParallelDims(tp=4))


def test_experts_that_are_not_cut_need_not_divide_over_tp() -> None:
    check("gpt_oss", ParallelDims(tp=2, ep=2), ffn_dim=15)
    with pytest.raises(UserError, match="tensor_parallel_degree = 2: does not divide the size 15"):
        check("gpt_oss", ParallelDims(dp_shard=2, tp=2, ep=2, etp=2), ffn_dim=15)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"pp": "shard 0"}, "on the axes tp, cp, ep"),
        ({"tp": "expert"}, "the role 'expert': legal are embedding"),
        ({"ep": "shard 0"}, "the role 'shard 0': legal are route, dispatch, expert, apart, partial"),
    ],
)
def test_an_axis_or_role_that_there_is_not_is_refused(roles: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check("llama3", ParallelDims(), plan={"norm.weight": roles})


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"cp": 2}, "context_parallel_degree = 2: the plan gives no module a role on cp"),
        ({"tp": 2}, "tensor_parallel_degree = 2: the plan gives no role to tok_embeddings.weight, layers"),
    ],
)
def test_a_plan_that_lacks_roles_is_refused(degrees: dict[str, int], message: str) -> None:
    plan: Plan = {"norm.weight": {"tp": "replicate"}}
    check("llama3", ParallelDims(), plan)
    with pytest.raises(UserError, match=message):
        check("llama3", ParallelDims(**degrees), plan)


def test_a_table_has_one_of_two_roles() -> None:
    with pytest.raises(ValueError, match="the role 'shard 0' of a module on tp: must be partial, apart, embedding or"):
        table_style("shard 0", loss_parallel=True)
