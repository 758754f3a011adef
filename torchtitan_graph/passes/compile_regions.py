"""Let parts of the graph be calls: compiled by Inductor, or equal ones of one subgraph."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

import torchtitan_graph.ops  # noqa: F401 (registers the exchange)
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import loss_of
from torchtitan_graph.graph.cost import Work, fused_kernels, works_of
from torchtitan_graph.graph.edit import call, erase_dead, is_view, value
from torchtitan_graph.graph.flex_kernels import flex_kernel_options
from torchtitan_graph.graph.flops import attention_flops, matmul_flops
from torchtitan_graph.graph.liveness import Memories, most_within, readers_of_memory, size_of
from torchtitan_graph.graph.torch_private.inductor import compile_by_inductor
from torchtitan_graph.graph.torch_private.tracing import boxed
from torchtitan_graph.graph.traffic import is_permutation
from torchtitan_graph.log import logger

# Regions that are no modules: a flex attention operator; what follows the last module; all that can be compiled.
FLEX, LOSS, WHOLE = "flex", "loss", "whole"

_FORWARD, _BACKWARD = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
_EXCHANGE, _ROW_SPLITS = torch.ops.torchtitan_graph.exchange.default, torch.ops.torchtitan_graph.row_splits.default
_ATEN = torch.ops.aten
# Sums by index. In Inductor's code threads add to a number atomically, in an order that differs from run to run.
# torch's own kernels give the same bits in each run (on a GPU those of scatters do with debug.deterministic).
_ADDS_BY_INDEX = {
    _ATEN.embedding_dense_backward,
    _ATEN.index_put,
    _ATEN.index_put_,
    _ATEN._unsafe_index_put,
    _ATEN._unsafe_masked_index_put_accumulate,
    _ATEN._index_put_impl_,
    _ATEN.put,
    _ATEN.index_add,
    _ATEN.index_reduce,
    _ATEN.scatter_add,
    _ATEN.scatter_reduce,
}
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_OPS = torch.ops.torchtitan_graph
_HOST_COPIES = (_OPS.offload.default, _OPS.reload.default, _OPS.arrived.default, _OPS.landed.default)
# torch's own call of a subgraph, with gradients: Inductor's code of it is wrong on a CPU (2.13).
_SUBGRAPH = torch.ops.higher_order.invoke_subgraph

# FLEX, LOSS, WHOLE or a pattern of module names -> Inductor's options there; None: not compiled, only one subgraph
Regions = Mapping[str, Mapping[str, Any] | None]
Compiled = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]  # of its inputs as a list, which it empties


def compile_regions(gm: GraphModule, regions: Regions, compiles: bool = True) -> GraphModule:
    """Hand each region to Inductor, which is not bitwise, or call it as it is; all other nodes stay, in their order.

        a = f(x); b = g(a); y = h(b)                              f and g in one region
        region = compiled(inputs(x)); b = region[0]; y = h(b)

    Regions that are alike (a block's, in every layer) are compiled once, or are one subgraph. Flex attention on CUDA
    runs the kernels of `torch.compile(flex_attention)`. In a dry run nothing is compiled; a region is a call all the
    same.

    Raises:
        RuntimeError: Inductor can't compile a region, which is named.
    """
    if not regions:
        return gm
    tag_regions(gm, list(regions))
    if any(map(meta.region, gm.graph.nodes)):
        _settle_strides(gm)
    memories, readers = Memories(gm), readers_of_memory(gm)
    parts = [_cut_out(gm, nodes, _options(regions, nodes[0]), memories, readers) for nodes in _segments(gm)]
    kinds: dict[str, list[_Part]] = {}
    for part in parts:
        kinds.setdefault(part.kind, []).append(part)
    begin = time.perf_counter()
    calls: dict[str, Compiled] = {}
    for i, (kind, alike) in enumerate(kinds.items(), 1):
        is_code = compiles and alike[0].options is not None
        calls[kind] = _compile(alike, f"{i} of {len(kinds)}") if is_code else _as_it_is(alike[0])
    results: dict[Node, Node] = {}
    for part in parts:
        _replace(gm, part, calls[part.kind], results)
    if parts:
        compiled = compiles and any(part.options is not None for part in parts)
        done = f"compiled in {time.perf_counter() - begin:.0f} s" if compiled else "not compiled"
        logger.info(f"compile_regions: {len(parts)} regions, {len(kinds)} of them different, {done}")
        erase_dead(gm.graph, gm.graph.find_nodes(op="get_attr"))
        gm.delete_all_unused_submodules()
        gm.recompile()
    return gm


# --- policy: which node is in which region --------------------------------------------------------------------------


def tag_regions(gm: GraphModule, patterns: Sequence[str]) -> None:
    """Write on each node of a region its name: what it is ("flex", "loss", a module), then which.

    A flex attention operator takes its score and mask subgraphs along and nothing else, and is in no other region. A
    module's forward and backward are two regions. Collectives, what layout passes put around them, views of what a
    region is given, what writes into its arguments, sums by index (an embedding's gradient), and rows on the ranks
    that hold their experts, of which there is any number, are in none.
    """
    modules = [pattern for pattern in patterns if pattern not in (FLEX, LOSS, WHOLE)]
    loss = _whole_loss(gm) if LOSS in patterns else set()
    away = _away(gm).union(gm.graph.find_nodes(op="call_function", target=_SUBGRAPH))
    num_left = 0
    for node in gm.graph.nodes:
        name = region_of(meta.module(node), modules)
        if node.target in (_FORWARD, _BACKWARD):
            if FLEX in patterns and _compiles(node):
                for part in [n for n in node.all_input_nodes if _is_subgraph(gm, n)] + [node]:
                    meta.write(part, region=f"{FLEX} {node.name}")
            else:
                num_left += FLEX in patterns
        elif node.op != "call_function" or _is_layout(node) or _writes(node) or _adds_by_index(node) or node in away:
            continue
        elif node.target is operator.getitem:
            meta.write(node, region=meta.region(node.args[0]))  # type: ignore[arg-type]
        elif node in loss:
            meta.write(node, region=LOSS)
        elif WHOLE in patterns or name:
            region = WHOLE if WHOLE in patterns else f"{name} {meta.phase(node)}"
            if not is_view(node) or meta.region(node.all_input_nodes[0]) == region:
                meta.write(node, region=region)
    if num_left:
        logger.info(
            f"compile_regions: {num_left} flex attention operators stay uncompiled and exact: on a CPU torch compiles "
            "only those without backward, over whole blocks of the mask"
        )


def region_of(module: str, patterns: Iterable[str]) -> str | None:
    """Give the name that the first matching pattern matches: the module's own, or that of a module around it."""
    parts = module.split(".")
    for pattern in patterns:
        wanted = pattern.split(".")
        if len(wanted) <= len(parts) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=False)):
            return ".".join(parts[: len(wanted)])
    return None


def _options(regions: Regions, node: Node) -> Mapping[str, Any] | None:
    name = (meta.region(node) or "").split()[0]
    return next(options for pattern, options in regions.items() if name in (pattern, region_of(name, [pattern])))


def _whole_loss(gm: GraphModule) -> set[Node]:
    """Give the loss. One that goes through the logits by rows holds less than Inductor's would, and stays: then no
    node."""
    loss = loss_of(gm)
    return set() if any(getattr(n.target, "namespace", "") == "torchtitan_graph" for n in loss) else loss


def _away(gm: GraphModule) -> set[Node]:
    """Give what handles rows on the ranks that hold their experts: Inductor would take the number of rows that the
    trace shows for theirs."""
    found: set[Node] = set()
    ends: set[Node] = set()  # what brings rows home, or tells the host their number
    for node in gm.graph.nodes:
        if node.target is _EXCHANGE and node.args[2] or node.target is _ROW_SPLITS:
            ends.add(node)
        elif node.target is _EXCHANGE or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found | ends


def _compiles(node: Node) -> bool:
    """Tell whether torch compiles a flex attention operator on its device, and right.

    On a CPU torch 2.13 has no backward and no log-sum-exp; and where a sequence ends inside a block of the mask, its
    kernel gives wrong numbers, or none (seen for 24, 40, 104 and 120 positions in blocks of 128).
    """
    if not _on_cpu(node):
        return True
    if node.target is _BACKWARD or any(part.args[1] != 0 and part.users for part in node.users):
        return False
    q, k, _, _, mask, *_ = node.args
    return all(value(x).shape[2] % block == 0 for x, block in zip((q, k), mask[-3:-1], strict=True))  # type: ignore


def _on_cpu(node: Node) -> bool:
    return value(node.args[0]).device.type == "cpu"  # type: ignore[arg-type]


def _is_subgraph(gm: GraphModule, node: Node) -> bool:
    return node.op == "get_attr" and isinstance(getattr(gm, str(node.target), None), GraphModule)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _adds_by_index(node: Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _ADDS_BY_INDEX


def _is_layout(node: Node) -> bool:
    """Tell a collective, a copy to or from the host, or a node that a layout pass put before or after a collective: not
    a cast that stands alone."""
    if node.target in _HOST_COPIES:
        return True
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("_c10d_functional", "_dtensor"):
        return True
    return meta.role(node) is not None and any(meta.role(n) for n in (*node.all_input_nodes, *node.users))


# --- mechanism: compile what is tagged ------------------------------------------------------------------------------


def _settle_strides(gm: GraphModule) -> None:
    """Let all read tokens, positions and masks in one piece: compiled code asserts the strides of what it is given, and
    a caller may give others than were traced, as those of a part of longer rows."""
    for node in gm.graph.find_nodes(op="placeholder"):
        readers = list(node.users)
        if readers and value(node).dim() > 1 and not value(node).is_floating_point():
            with gm.graph.inserting_before(min(readers)):
                whole = call(gm.graph, node, torch.ops.aten.contiguous.default, node)
            for reader in readers:
                reader.replace_input_with(node, whole)


def _segments(gm: GraphModule) -> list[list[Node]]:
    """Give the calls of each region, cut wherever another node reads what it has made so far.

    A segment can then run where its last operator stands: what it needs is there, and nothing has asked for it yet.
    WHOLE is cut at each wait too: one segment would need the weights of all blocks at once. All are cut where one part
    of activations is waited for, beside whose journey another is multiplied.
    """
    done: list[list[Node]] = []
    running: dict[str, dict[Node, None]] = {}  # a region's name -> its calls since it was last cut, in order
    for node in gm.graph.nodes:
        region = meta.region(node)
        if node.target is _WAIT:
            ends = list(running) if is_permutation(node.all_input_nodes[0]) else [WHOLE]
            done += [list(running.pop(name)) for name in ends if name in running]
        for source in node.all_input_nodes:
            other = meta.region(source)
            if other is not None and other != region and source in running.get(other, ()):
                done.append(list(running.pop(other)))
        if region is not None and node.op == "call_function" and node.target is not operator.getitem:
            # Only the parts of a tuple can leave a region, so they stay with the operator that makes it.
            parts = [user for user in node.users if user.target is operator.getitem]
            running.setdefault(region, {}).update(dict.fromkeys([node, *parts]))
    return done + [list(nodes) for nodes in running.values()]


class _Part(NamedTuple):
    """A segment, copied into a graph of its own under its operators' names, which do not tell which layer's it is.

    nodes    its calls, in order
    inputs   the nodes that it reads, and `outputs` those that are read of it
    same_as  of each output, the first that lies in the same memory
    scratch  bytes that it holds at its peak beside its outputs, in this order of its nodes: an estimate, for Inductor
             fuses some of them, and gives dead inputs' memory to results
    works    what its kernels ask of a device: an estimate too
    kind     its code and layouts: parts of a kind compile to the same
    """

    nodes: list[Node]
    graph: GraphModule
    inputs: list[Node]
    outputs: list[Node]
    same_as: list[int]
    scratch: int
    works: tuple[Work, ...]
    options: Mapping[str, Any] | None
    kind: str

    @property
    def last(self) -> Node:
        return next(node for node in reversed(self.nodes) if node.target is not operator.getitem)


def _cut_out(
    gm: GraphModule,
    nodes: list[Node],
    options: Mapping[str, Any] | None,
    memories: Memories,
    readers: Mapping[Node, set[Node]],
) -> _Part:
    inside, graph, held = set(nodes), Graph(), torch.nn.Module()
    copies: dict[Node, Node] = {}
    inputs: list[Node] = []
    for source in dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in inside):
        if _is_subgraph(gm, source):
            held.add_module(f"subgraph_{len(copies)}", getattr(gm, str(source.target)))
            copies[source] = graph.get_attr(f"subgraph_{len(copies)}")
        else:
            copies[source] = graph.placeholder(f"input_{len(inputs)}")
            inputs.append(source)
    for node in nodes:
        args, kwargs = map_arg(node.args, copies.__getitem__), map_arg(node.kwargs, copies.__getitem__)
        if node.target in (_FORWARD, _BACKWARD):
            args = _with_kernel_options(args, _kernel_options(node, options or {}))
        copies[node] = graph.create_node(node.op, node.target, args, kwargs)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(copies[node] for node in outputs))
    owners = [memories.owner[node] for node in outputs]
    scratch = most_within(nodes, memories) - sum(map(size_of, set(owners)))
    part = GraphModule(held, graph)
    works = (
        tuple(kernel.work for kernel in fused_kernels(nodes, memories.owner, readers))
        if options is not None
        else tuple(work for node in nodes for work in works_of(node))
    )
    kind = "\n".join([repr(options), *map(_layout, inputs), *_code(part)])
    return _Part(nodes, part, inputs, outputs, [*map(owners.index, owners)], max(scratch, 0), works, options, kind)


def _compile(alike: Sequence[_Part], number: str) -> Compiled:
    """Compile the first of parts of a kind, which takes seconds to minutes."""
    part, others = alike[0], f" and {len(alike) - 1} like it" if len(alike) > 1 else ""
    name = meta.region(part.last)
    logger.info(f"compiling region {number}: {name}{others}, {len(part.nodes)} operators")
    try:
        return compile_by_inductor(part.graph, [value(x) for x in part.inputs], part.options or {})
    except Exception as error:
        raise RuntimeError(
            f"Inductor can't compile the region {name}: {error}\n"
            'compile.codegen = "off" trains without it; flex attention on a GPU also needs '
            'compile.disable_passes = ["compile_regions"]'
        ) from error


def _as_it_is(part: _Part) -> Compiled:
    """Give a part's own operators as one call: a function, for that is what a node can call."""
    run = boxed(part.graph)

    def subgraph(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return run(inputs)

    return subgraph


def _inputs(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Put a region's inputs into a list. The graph then lets go of those that it does not need after it."""
    return list(tensors)


def _replace(gm: GraphModule, part: _Part, compiled: Compiled, results: dict[Node, Node]) -> None:
    """Put one call in place of a part. `results` has what stands for the outputs of the parts replaced so far."""
    inputs, region = [results.get(node, node) for node in part.inputs], meta.region(part.last)
    with gm.graph.inserting_after(part.last):
        held = gm.graph.create_node("call_function", _inputs, tuple(inputs), name=f"{region} inputs")
    with gm.graph.inserting_after(held):
        done = gm.graph.create_node("call_function", compiled, (held,), name=region)
    for node, values in ((held, inputs), (done, part.outputs)):
        node.meta["val"] = tuple(map(value, values))
        meta.inherit(node, part.last)
        meta.stand_for(node, part.nodes)
        meta.write(node, region=region)
    operations = sum(matmul_flops(node) + attention_flops(node) / 2 for node in part.nodes)
    meta.write(done, operations=operations, works=part.works, scratch=part.scratch)
    with gm.graph.inserting_after(done):
        for i, output in reversed(list(enumerate(part.outputs))):
            results[output] = gm.graph.call_function(operator.getitem, (done, i))
            results[output].meta = output.meta
            meta.write(results[output], same_as=part.same_as[i])
            output.replace_all_uses_with(results[output])
    for node in reversed(part.nodes):
        gm.graph.erase_node(node)


def _with_kernel_options(args: tuple[Any, ...], more: Mapping[str, Any]) -> tuple[Any, ...]:
    """Add to the kernel options of a flex attention operator: the one argument that is a dictionary."""
    return tuple({**x, **more} if isinstance(x, Mapping) else x for x in args)


def _kernel_options(node: Node, options: Mapping[str, Any]) -> dict[str, Any]:
    """Give what a flex attention operator is told only when it is compiled, for where it is."""
    if _on_cpu(node):  # its kernel can't give the log-sum-exp, and nothing reads it
        return {"OUTPUT_LOGSUMEXP": False} if node.target is _FORWARD else {}
    searches = bool(options.get("max_autotune"))  # Inductor then looks for blocks itself, and would find ours alone
    return flex_kernel_options(value(node.args[0]), own_blocks=not searches)  # type: ignore[arg-type]


def _code(gm: GraphModule) -> list[str]:
    return [each.code for each in gm.modules() if isinstance(each, GraphModule)]


def _layout(node: Node) -> str:
    x = value(node)
    return f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device}"
