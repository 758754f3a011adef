"""Regions of the graph as calls: compiled by Inductor, or one subgraph shared by equal regions."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchtitan_graph.analysis.cost import Work, fused_kernels, works_of
from torchtitan_graph.analysis.flops import attention_flops, matmul_flops
from torchtitan_graph.analysis.liveness import Memories, most_within, readers_of_memory, size_of
from torchtitan_graph.analysis.traffic import is_permutation
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.collectives import with_dynamic_rows
from torchtitan_graph.graph.edit import call, erase_dead, is_view, value
from torchtitan_graph.log import logger
from torchtitan_graph.ops.flex_kernels import flex_kernel_options
from torchtitan_graph.ops.operator import operator_of
from torchtitan_graph.torch_private.inductor import compile_by_inductor
from torchtitan_graph.torch_private.tracing import boxed

# Regions other than modules: a flex attention operator; all that can be compiled.
FLEX, WHOLE = "flex", "whole"

_FORWARD, _BACKWARD = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
_WAIT = torch.ops._c10d_functional.wait_tensor.default

# FLEX, WHOLE or a pattern of module names -> Inductor's options there; None: one subgraph, not compiled
Regions = Mapping[str, Mapping[str, Any] | None]
Compiled = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]  # takes its inputs as a list, and empties it


def compile_regions(gm: GraphModule, regions: Regions, compiles: bool = True) -> GraphModule:
    """Compile each region with Inductor, which is not bitwise, or call it uncompiled; all other nodes stay in order.

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


# --- policy: the region of each node --------------------------------------------------------------------------------


def tag_regions(gm: GraphModule, patterns: Sequence[str]) -> None:
    """Write on each node of a region its name: its kind ("flex", a module), then its number or phase.

    A flex attention operator is a region with its score and mask subgraphs alone. A module's forward and backward are
    two regions. In no region are collectives, nodes that layout passes put around them, views of a region's inputs,
    in-place operators, scatter-adds (an embedding's gradient), and rows on the ranks that hold their experts, whose
    number is unbacked.
    """
    modules = [pattern for pattern in patterns if pattern not in (FLEX, WHOLE)]
    left_out = _never_compiled(gm)
    num_left = 0
    for node in gm.graph.nodes:
        name = region_of(meta.module(node), modules)
        if node.target in (_FORWARD, _BACKWARD):
            if FLEX in patterns and _compiles(node):
                for part in [n for n in node.all_input_nodes if _is_subgraph(gm, n)] + [node]:
                    meta.write(part, region=f"{FLEX} {node.name}")
            else:
                num_left += FLEX in patterns
        elif node.op != "call_function" or _is_layout(node) or node in left_out:
            continue
        elif node.target is operator.getitem:
            meta.write(node, region=meta.region(node.args[0]))  # type: ignore[arg-type]
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
    """Return the module name that the first matching pattern matches: `module` itself, or an enclosing module."""
    parts = module.split(".")
    for pattern in patterns:
        wanted = pattern.split(".")
        if len(wanted) <= len(parts) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=False)):
            return ".".join(parts[: len(wanted)])
    return None


def _options(regions: Regions, node: Node) -> Mapping[str, Any] | None:
    name = (meta.region(node) or "").split()[0]
    return next(options for pattern, options in regions.items() if name in (pattern, region_of(name, [pattern])))


def _never_compiled(gm: GraphModule) -> set[Node]:
    """Return the nodes of operators that no region may contain, and rows whose number depends on data, with all that is
    computed from them until they are sent back: Inductor would specialize on the traced number."""
    found = with_dynamic_rows(gm.graph.nodes)
    for node in gm.graph.nodes:
        if operator_of(node.target).collective is None and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found | {node for node in gm.graph.nodes if not operator_of(node.target).compiles}


def _compiles(node: Node) -> bool:
    """Return whether torch compiles a flex attention operator on its device, and correctly.

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


def _is_layout(node: Node) -> bool:
    """Return whether a layout pass put a node next to a collective: not a cast that stands alone."""
    return meta.role(node) is not None and any(meta.role(n) for n in (*node.all_input_nodes, *node.users))


# --- mechanism: compile tagged nodes --------------------------------------------------------------------------------


def _settle_strides(gm: GraphModule) -> None:
    """Make tokens, positions and masks contiguous: compiled code asserts its inputs' strides, and a caller's may differ
    from the traced ones, as those of a part of longer rows."""
    for node in gm.graph.find_nodes(op="placeholder"):
        readers = list(node.users)
        if readers and value(node).dim() > 1 and not value(node).is_floating_point():
            with gm.graph.inserting_before(min(readers)):
                whole = call(gm.graph, node, torch.ops.aten.contiguous.default, node)
            for reader in readers:
                reader.replace_input_with(node, whole)


def _segments(gm: GraphModule) -> list[list[Node]]:
    """Return the calls of each region, cut wherever a node outside it reads one of its results.

    A segment can then run at the place of its last operator: its inputs exist there, and no reader comes before. WHOLE
    is cut at each wait too: one segment would need the weights of all blocks at once. All are cut at the wait for a
    part of activations that is sent while another part is multiplied.
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
    """A segment, copied into a graph of its own; its nodes are named by operators, without the layer's number.

    nodes    its calls, in order
    inputs   the nodes that it reads, and `outputs` its nodes with readers outside
    same_as  for each output, the first output in the same memory
    scratch  its peak memory in bytes without its outputs, in this order of its nodes: an estimate, for Inductor
             fuses some of them, and gives dead inputs' memory to results
    works    its kernels' work, for the cost model: an estimate too
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
            more = _kernel_options(node, options or {})  # kernel options are the only argument that is a dictionary
            args = tuple({**x, **more} if isinstance(x, Mapping) else x for x in args)
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
    code = [each.code for each in part.modules() if isinstance(each, GraphModule)]
    kind = "\n".join([repr(options), *map(_layout, inputs), *code])
    return _Part(nodes, part, inputs, outputs, [*map(owners.index, owners)], max(scratch, 0), works, options, kind)


def _compile(alike: Sequence[_Part], number: str) -> Compiled:
    """Compile the first part of a kind, which takes seconds to minutes, and return the call."""
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
    """Return a function that runs a part's own operators, uncompiled: a node's target must be a function."""
    run = boxed(part.graph)

    def subgraph(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return run(inputs)

    return subgraph


def _inputs(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return a region's inputs as a list, so that the graph drops its references to those not needed later."""
    return list(tensors)


def _replace(gm: GraphModule, part: _Part, compiled: Compiled, results: dict[Node, Node]) -> None:
    """Replace a part by one call. `results` maps outputs of the parts replaced so far to their replacements."""
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


def _kernel_options(node: Node, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kernel options that a flex attention operator needs only when compiled, for its device."""
    if _on_cpu(node):  # its kernel can't compute the log-sum-exp, and nothing reads it
        return {"OUTPUT_LOGSUMEXP": False} if node.target is _FORWARD else {}
    searches = bool(options.get("max_autotune"))  # Inductor then searches block sizes itself, and would find only ours
    return flex_kernel_options(value(node.args[0]), own_blocks=not searches)  # type: ignore[arg-type]


def _layout(node: Node) -> str:
    x = value(node)
    return f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device}"
