"""Any causal language model of the library transformers, unmodified, as a family.

The model is what `AutoModelForCausalLM.from_config` builds. transformers' registries take our attention, masks and
experts (layers/of_transformers.py), so packed documents stay apart; its plan of tensor parallelism becomes ours, and
parameters keep its names. What can't be a traced step is refused by name when the model is built.

A flavour is the default configuration of a `model_type`, such as mistral; `debugmodel` a small llama.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import traceback
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_graph.capture.step import Real, SideOutputs
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.decoder import LOAD, Decoder, check_attn
from torchtitan_graph.models.layers.init import STD, Constant, Drawn, Initial, allocate, said_initial
from torchtitan_graph.models.layers.lora import is_adapter, packed_weights
from torchtitan_graph.models.layers.masks import Rule, all_of, begins_of, causal, chunked, same_document, sliding
from torchtitan_graph.models.layers.moe import move_correction_bias
from torchtitan_graph.models.layers.of_transformers import (
    CORRECTION_BIASES,
    InDouble,
    Rows,
    Running,
    adapt_attention,
    adapt_block,
    correction_bias,
    is_router_trained,
    run_with,
)
from torchtitan_graph.ops.packed import wide_shape
from torchtitan_graph.transformers_private import (
    CORNER,
    Conversion,
    build,
    class_name,
    class_of_folder,
    config_class,
    drawn,
    fix_rotations,
    keys_of,
    model_types,
    router_of,
    tensor_parallel_plan,
    text_config,
    untested_version,
)
from torchtitan_graph.transient import is_lost_peer

c10d = torch.ops._c10d_functional

# The sizes that a smaller model has less of, and their names in transformers' configurations.
SIZES = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "moe_ffn_dim": "moe_intermediate_size",
    "num_experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "vocab_size": "vocab_size",
    "tied": "tie_word_embeddings",
    "window": "sliding_window",
}
MOST_LAYERS = 10_000
_REFUSED = {"xglm": "its table of positions is in fp32 among parameters in bf16, which its norms can't take"}
_GENERATES = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel")  # ends of names of models that have an output
# Keys of a config.json that are not the architecture: of the file, or of generation.
_OTHER = (
    *("transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "auto_map", "use_cache"),
    *("output_router_logits", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration of transformers: `rest` is its config.json, in which the other fields replace the sizes that
    differ."""

    rest: str
    dim: int
    num_layers: int
    vocab_size: int
    num_heads: int = 1
    num_kv_heads: int = 0
    head_dim: int = 0
    ffn_dim: int = 0
    moe_ffn_dim: int = 0
    num_experts: int = 0
    top_k: int = 0
    window: int = 0
    tied: bool = False
    rest_layers: int = 0  # the number of layers that lists in `rest` are for
    code: str = ""  # the folder whose own Python code defines the model
    norm_eps: float = 0.0  # its own modules have it

    def as_dict(self) -> dict[str, Any]:
        """Return the keys of a config.json, with transformers' names."""
        raw = json.loads(self.rest)
        attributes = config_class(raw, self.code).attribute_map
        held = {ours: _size(raw, attributes.get(theirs, theirs)) for ours, theirs in SIZES.items()}
        changed = {ours: getattr(self, ours) for ours in SIZES if getattr(self, ours) != held[ours]}
        raw |= {attributes.get(SIZES[ours], SIZES[ours]): x for ours, x in changed.items()}
        if "qk_rope_head_dim" in raw and changed.keys() & {"head_dim", "num_heads"}:
            # Latent attention: the width of heads is the sum of others.
            raw |= {"head_dim": raw["qk_rope_head_dim"], "num_key_value_heads": self.num_heads}
        for name, x in raw.items():
            if isinstance(x, list) and len(x) == self.rest_layers != self.num_layers:  # by layer: repeated or cut
                raw[name] = (x * self.num_layers)[: self.num_layers]
        return raw

    def of_transformers(self) -> Any:
        """Return transformers' object of it."""
        fixed = {"pad_token_id": None, "output_router_logits": False, "use_cache": False}
        return text_config(self.as_dict() | fixed, self.code)


def from_hf_config(raw: dict[str, Any], code: str = "") -> Config:
    """Return the configuration in a config.json: of the language model, where that is one part of several.

    Args:
        code: the folder whose own Python code defines the model: it is run.

    Raises:
        UserError: transformers has no such causal language model, or it draws random numbers in training.
    """
    config = text_config(raw, code)
    keys = {name: x for name, x in keys_of(config).items() if name not in _OTHER}
    keys |= {"auto_map": raw["auto_map"]} if code else {}
    sizes = {ours: _size(keys, config.attribute_map.get(theirs, theirs)) for ours, theirs in SIZES.items()}
    needed = ("dim", "num_layers", "num_heads")  # properties in some
    sizes |= {name: getattr(config, SIZES[name], 0) for name in needed if not sizes[name]}
    _check_values(config, sizes, keys)
    if dropout := [f"{k} = {x}" for k, x in keys.items() if _is_dropout(k) and isinstance(x, (int, float)) and x != 0]:
        raise UserError(
            f"{', '.join(dropout)}: dropout draws random numbers, which a graph can't; set it to 0 in config.json"
        )
    written = raw.get("architectures")
    if isinstance(written, list) and written and not code:
        named = [str(name) for name in written]
        if class_name(config) not in named and not any(name.endswith(_GENERATES) for name in named):
            raise UserError(
                f"architectures = {written!r:.100}: the causal language model of {config.model_type!r} is "
                f"{class_name(config)}; write that name if the weights are of it"
            )
    if raw.get("output_router_logits"):
        raise UserError(
            "output_router_logits = true: the routers' loss of transformers is not computed; set it to false"
        )
    found: dict[str, Any] = {name: x for name, x in sizes.items() if isinstance(x, int)}
    return Config(json.dumps(keys, sort_keys=True), rest_layers=found["num_layers"], code=code, **found)


def _size(keys: dict[str, Any], name: str) -> Any:
    """Return a size in a config.json; 0 where it has none, or one for each layer."""
    return keys[name] if isinstance(keys.get(name), int) else 0


def _check_values(config: Any, sizes: Mapping[str, Any], keys: Mapping[str, Any]) -> None:
    """Check what transformers takes without a word, and what would fail late or never.

    Raises:
        UserError: it names the key.
    """
    if why := _REFUSED.get(config.model_type):
        raise UserError(f"model_type = {config.model_type!r}: {why}")
    for name, most in (("dim", None), ("num_layers", MOST_LAYERS), ("vocab_size", None)):
        key = config.attribute_map.get(SIZES[name], SIZES[name])
        if key not in keys and not sizes[name]:
            raise UserError(f"model_type = {config.model_type!r}: its configuration has no {SIZES[name]}")
        if not isinstance(sizes[name], int) or sizes[name] < 1 or (most and sizes[name] > most):
            legal = f"from 1 to {most:,}" if most else "of at least 1"
            raise UserError(f"{key} = {keys.get(key)!r:.100}: must be a whole number {legal}")
    for name in SIZES.keys() - {"tied"}:
        if isinstance(sizes[name], int) and sizes[name] < 0:
            raise UserError(f"{config.attribute_map.get(SIZES[name], SIZES[name])} = {sizes[name]}: is below 0")
    if 0 < sizes["num_experts"] < sizes["top_k"]:
        raise UserError(f"{SIZES['top_k']} = {sizes['top_k']}: there are {sizes['num_experts']} experts")
    nested = [keys.get("rope_parameters") or {}, keys]
    for key, x in ((key, x) for each in nested for key, x in each.items() if isinstance(x, (int, float))):
        if (key.endswith(("_eps", "_epsilon")) and x < 0) or (key == "rope_theta" and x <= 0):
            raise UserError(f"{key} = {x}: must be above 0")


def _is_dropout(name: str) -> bool:
    if name.startswith(("classifier_", "summary_")):  # of heads that a causal language model has not
        return False
    return any(word in name for word in ("dropout", "pdrop", "drop_rate", "layerdrop", "jitter_noise"))


def to_hf_config(config: Config) -> dict[str, Any]:
    """Return a config.json."""
    theirs = config.of_transformers()
    keys = {name: x for name, x in keys_of(theirs).items() if name not in _OTHER}
    if config.code:
        keys["auto_map"] = json.loads(config.rest)["auto_map"]
    kind = keys["auto_map"]["AutoModelForCausalLM"].rpartition(".")[2] if config.code else class_name(theirs)
    return {"architectures": [kind], **keys, "pad_token_id": None}


class Flavors(Mapping[str, Config]):
    """The default configurations by model type. Iteration yields those that tests train."""

    def __getitem__(self, name: str) -> Config:
        if name == "debugmodel":
            sizes = dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=16, intermediate_size=768)
            return from_hf_config({"model_type": "llama", "vocab_size": 2048, "num_key_value_heads": 16, **sizes})
        if name not in model_types():
            raise KeyError(name)
        raw = keys_of(text_config({"model_type": name}))
        return from_hf_config({key: 0.0 if _is_dropout(key) and x else x for key, x in raw.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(["debugmodel"])

    def __len__(self) -> int:
        return 1

    def __contains__(self, name: object) -> bool:
        return name == "debugmodel" or name in model_types()


FLAVORS = Flavors()
FLAVOR_NAMES = ["debugmodel", *model_types()]
HF_ARCHITECTURES = ("*",)

# A model has its own: they follow from its modules.
PLAN: dict[str, dict[str, str]] = {}
HF_KEYS: dict[str, str] = {}


class _Unread:
    """A layer's number, in its place while the model is looked at: only caches want it, and layers that are alike would
    differ by it. A layer that does read it keeps it."""

    def _fail(self, *_: Any) -> Any:
        raise _Read

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = __hash__ = __mod__ = _fail  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = _fail
    __float__ = __pow__ = __rpow__ = __neg__ = __str__ = __format__ = _fail  # type: ignore[assignment]


class _Read(UserError):
    def __init__(self) -> None:
        super().__init__("it reads a layer's number where its first forward pass did not")


class _Elsewhere(nn.Module):
    """In the place of a module that another pipeline stage has: without its parameters and modules, but with what the
    code around it may read, as a layer's kind."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.__dict__ |= {name: x for name, x in vars(module).items() if not name.startswith("_") and name != "forward"}

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


class _Given(nn.Module):
    """In the place of a module, whose attributes it has: a call of it runs a function."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]):
        super().__init__()
        self.of, self.call = (module,), call

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["of"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _note_flow(flow: list[tuple[str, Any, Any]], name: str, module: nn.Module, args: Any, kwargs: Any, y: Any) -> None:
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    flow.append((name, given[0] if given else None, y))


@functools.cache  # one for all layers, which stay alike
def _first_by_position(name: str) -> Callable[[nn.Module, Any, dict[str, Any]], Any]:
    """Return a hook before forward that gives the argument of that name by its position, which is the first."""
    return functools.partial(_by_position, name)


def _by_position(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return (args, kwargs) if args else ((kwargs.pop(name),), kwargs)


class Model(Decoder):
    """A causal language model of transformers.

    Raises:
        UserError: it can't be a traced step, named with the line that can't, or has no list of layers.
    """

    def __init__(self, config: Config, attn: str = "sdpa"):
        nn.Module.__init__(self)
        check_attn(attn)
        theirs: Any
        raw = json.loads(config.rest)
        own = class_of_folder(raw, config.code, "AutoModelForCausalLM") if config.code else None
        theirs, values = build(config.of_transformers(), own)
        # In a tuple: it is not a module inside of this one, but shares its modules, which so keep their names.
        self._theirs, self._values, self.config, self.attn = (theirs,), (values,), config, attn
        self.__dict__ |= {key: vars(theirs)[key] for key in ("_modules", "_parameters", "_buffers")}
        self.ahead_weight = 0.0
        _make_biases_buffers(theirs, values)
        self.conversion = Conversion(theirs)
        self.source = Path(config.code or inspect.getfile(type(theirs)))
        number = theirs.config.num_hidden_layers
        lists = [n for n, m in theirs.named_modules() if isinstance(m, nn.ModuleList) and len(m) == number]
        if not lists:
            raise UserError(f"{type(theirs).__name__} has no list of its num_hidden_layers = {number} layers")
        self._list = min(lists, key=lambda name: name.count("."))
        names = {module: name for name, module in self.named_modules()}
        if theirs.get_output_embeddings() is None:
            raise UserError(f"{type(theirs).__name__} has no output layer (get_output_embeddings)")
        self._ends = names[theirs.get_input_embeddings()], names[theirs.get_output_embeddings()]
        self._names = {block: name for name, block in self.blocks.items()}
        for block in self.blocks.values():
            adapt_block(block, router_of(theirs))
        short = fix_rotations(theirs)
        self._look()
        self._make_plan()
        self._note_lengths(short)
        self.notes = self._notes()
        if torch.get_default_device().type != "meta":
            allocate(self, torch.float32)

    # --- what a model is made of ---

    def _note_lengths(self, short: int | None) -> None:
        """Set `longest_row` and `trained_length`.

        Args:
            short: up to what length of documents the rotation does not depend on it, if it does beyond.
        """
        trained = getattr(self._theirs[0].config, "max_position_embeddings", None)
        self.trained_length = trained if isinstance(trained, int) and trained > 0 else None
        if short is not None:
            why = "beyond, the frequencies of its rotation depend on the longest document of a batch (rope_type)"
            self.longest_row = short, why
            return
        if self.trained_length is None:
            return
        for name, module in self.named_modules():
            table = module.weight if isinstance(module, nn.Embedding) and name != self._ends[0] else None
            for x in (table, *module._buffers.values()):
                if x is not None and x.dim() == 2 and len(x) - getattr(module, "offset", 0) == self.trained_length:
                    self.longest_row = self.trained_length, f"{name} has a row for each position"

    def _notes(self) -> list[str]:
        """Return lines for the log: an untested release of transformers, and which experts have losses and biases."""
        notes = []
        if why := untested_version():
            notes.append(why)
        mixtures = [m for block in self.blocks.values() for m in block.modules() if hasattr(m, "all_experts")]
        if mixtures:
            losses = sum(hasattr(m, "auxiliary_loss") for m in mixtures)
            biases = sum(correction_bias(m) is not None for m in mixtures)
            notes.append(
                f"mixtures of experts: {len(mixtures)}; [moe] losses can be added to {losses}, and "
                f"moe.bias_update_speed moves the correction biases of {biases}"
            )
        return notes

    def _look(self) -> None:
        """Run the model once on meta: see which masks there are, which block's attention takes which, whether layers
        read their numbers, and whether the logits are what the output layer returns."""
        theirs: Any = self._theirs[0]
        numbered = [(m, m.layer_idx) for m in self.get_submodule(self._list).modules() if hasattr(m, "layer_idx")]
        row, out = torch.arange(8, device="meta").unsqueeze(0), self.get_submodule(self._ends[1])
        running, projected = Running(self._names, found={}), list[Tensor]()
        flow = list[tuple[str, Any, Any]]()  # what the stages of a pipeline are made of: name, first argument, result
        handles = [out.register_forward_hook(lambda module, args, y: projected.append(y))]
        for name, module in self._stage_modules():
            hook = functools.partial(_note_flow, flow, name)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        try:
            for is_read in (False, True):
                for module, number in numbered:
                    module.layer_idx = number if is_read else _Unread()  # type: ignore[assignment]
                running, projected = Running(self._names, found={}), []
                flow.clear()
                try:
                    with run_with(running), torch.no_grad(), torch.device("meta"):
                        logits = theirs(input_ids=row, position_ids=row, use_cache=False).logits
                    break
                except _Read:
                    pass
        except UserError as error:
            raise UserError(f"{type(theirs).__name__}: {error}") from error
        except Exception as error:
            raise UserError(f"{type(theirs).__name__} can't be traced: {error} ({_line_of(error)})") from error
        finally:
            for handle in handles:
                handle.remove()
        self.no_pipeline = self._why_no_pipeline(flow)
        self.projects_last = len(projected) == 1 and projected[0] is logits
        self.changes_scores = running.capped
        names = {module: name for name, module in self.named_modules()}
        self._rules, self._attentions = (
            list(running.found or {}),
            list(dict.fromkeys(names[m] for m, _ in running.calls)),
        )
        rules: dict[str, str] = {}
        for module, rule in running.calls:
            block = next((b for b in self.blocks if names[module].startswith(f"{b}.")), None)
            if block is None:
                raise UserError(f"{type(theirs).__name__}: {names[module]} attends outside of {self._list}")
            if rule in ("window 0", "chunk 0"):
                raise UserError(f"{type(theirs).__name__}: the mask of {block} is {rule}: a token would see nothing")
            rules[block] = rule
        for name, each in self.blocks.items():
            each.mask = rules.get(name, "causal")  # type: ignore[assignment]
        mixing = [name for name in self.blocks if name not in rules]
        self.mixes_documents = ", ".join(mixing[:3]) if mixing else "the state" if theirs._is_stateful else None
        adapt_attention([self.get_submodule(name) for name in self._attentions])

    def _stage_modules(self) -> list[tuple[str, nn.Module]]:
        """Return the blocks and the modules alongside their list, with and without parameters."""
        base = self._list.rpartition(".")[0]
        beside = [
            (f"{base}.{n}", m) for n, m in self.get_submodule(base).named_children() if f"{base}.{n}" != self._list
        ]
        return [*self.blocks.items(), *beside]

    def _why_no_pipeline(self, flow: list[tuple[str, Any, Any]]) -> str | None:
        """Return why the list of layers can't be cut: in a stage the modules of others return what they are given."""
        base, blocks = self._theirs[0].base_model, list(self.blocks)
        if base is self._theirs[0]:
            return f"{type(base).__name__} has no model without its output layer"
        names = [name for name, _, y in flow if isinstance(y, Tensor) or name in blocks]
        if [name for name in names if name in blocks] != blocks:
            return f"it does not run {self._list} once, in order"
        if not all(isinstance(y, Tensor) for name, _, y in flow if name in blocks):
            return "its layers return more than one tensor"
        before, after = names[: names.index(blocks[0])], names[names.index(blocks[-1]) + 1 :]
        weighted = [name for name in before if next(self.get_submodule(name).parameters(), None) is not None]
        if weighted != [self._ends[0]]:
            return f"{', '.join(weighted)} run before its layers, and a later stage has no tokens for them"
        if [*weighted, *blocks, *after, self._ends[1]] != self.modules_in_order:
            return f"{', '.join(after)} run after its layers, in another order than it has them or without parameters"
        chain = [(x, y) for name, x, y in flow if name in (*blocks, *after)]
        if any(x is not y for (_, y), (x, _) in zip(chain, chain[1:], strict=False)):
            return "what one of its layers returns is changed before the next"
        return None

    def _make_plan(self) -> None:
        """Translate transformers' plan of tensor parallelism. A parameter whose style has no role here gets none, so
        that tensor parallelism is refused by its name."""
        theirs = self._theirs[0]
        plan: dict[str, dict[str, str]] = {}
        holders = dict[str, str]()  # the child that returns a rank's term of a sum, by the pattern of its module
        refused = {_starred(name) for name in self._attentions}
        parameters = {_starred(name) for name, _ in self.named_parameters(remove_duplicate=False)}
        for pattern, style in tensor_parallel_plan(theirs).items():
            if pattern in self._ends:
                continue
            if style in ("colwise", "colwise_gather_output"):
                plan[f"{pattern}.weight"] = plan[f"{pattern}.bias"] = {"tp": "shard 0"}
                if style == "colwise_gather_output":
                    plan[pattern] = {"tp": "gather"}
                elif pattern in parameters:  # a parameter of attention itself, such as its sinks
                    plan[pattern] = {"tp": "shard 0"}
            elif style in ("rowwise", "rowwise_split_input") and not pattern.endswith(".experts.down_proj"):
                plan[f"{pattern}.weight"], plan[f"{pattern}.bias"] = {"tp": "shard 1"}, {"tp": "share"}
                holders[pattern.rpartition(".")[0]] = pattern.rpartition(".")[2]
                if style == "rowwise_split_input":
                    plan[pattern] = {"tp": "own part"}
            elif style not in ("replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj", "local_params"):
                refused.add(pattern)  # each rank has all of the others' results
        refused -= holders.keys()
        partial, modules = set[str](), dict(self.named_modules())
        for holder, last in holders.items():  # a mixture of experts may have the name of others' feed-forwards
            found = [name for name in modules if _starred(name) == holder]
            having = [name for name in found if hasattr(modules[name], last)]
            plan |= dict.fromkeys([holder] if having == found else having, {"tp": "partial"})
            partial |= {*having}
        plan |= {self._ends[0]: {"tp": "embedding"}, self._ends[1]: {"tp": "vocabulary"}}
        for name, module in modules.items():
            if name in partial:  # sums are taken of a module's first argument, by position
                first = next(iter(inspect.signature(module.forward).parameters))
                module._forward_pre_hooks[-1] = _first_by_position(first)  # type: ignore[assignment]
                module._forward_pre_hooks_with_kwargs[-1] = True
            if isinstance(module, Rows):
                plan[_starred(name)] = {"ep": "dispatch"}
        for name, _ in self.named_parameters(remove_duplicate=False):
            owner, starred = name.rpartition(".")[0], _starred(name)
            if hasattr(self.get_submodule(owner), "rows"):
                plan[starred] = {"tp": "replicate", "ep": "expert"}
            elif owner not in self._ends and not any(starred.startswith(f"{pattern}.") for pattern in refused):
                plan.setdefault(starred, {"tp": "replicate"})
        plan |= {f"{_starred(name)}.seen": {"cp": "context"} for name in self._attentions}
        self.PLAN = plan

    @property
    def blocks(self) -> dict[str, nn.Module]:
        every = self.get_submodule(self._list).named_children()
        return {f"{self._list}.{n}": m for n, m in every if not isinstance(m, _Elsewhere)}

    @property
    def tok_embeddings(self) -> Any:  # type: ignore[override]
        found = self.get_submodule(self._ends[0])
        return None if isinstance(found, _Elsewhere) else found

    @property
    def output(self) -> Any:  # type: ignore[override]
        return self.get_submodule(self._ends[1])

    @property
    def modules_in_order(self) -> list[str]:
        base = self._list.rpartition(".")[0]
        children = {f"{base}.{n}": m for n, m in self.get_submodule(base).named_children()}
        # A stage may have no layers.
        inside = [n for n, m in children.items() if n == self._list or next(m.parameters(), None) is not None]
        at = inside.index(self._list)
        return [*inside[:at], *self.blocks, *inside[at + 1 :], self._ends[1]]

    def keep(self, names: Container[str]) -> None:
        for name in self.modules_in_order:
            if name not in names and not (name == self._ends[0] and self.config.tied and self._ends[1] in names):
                self._replace(name, _Elsewhere(self.get_submodule(name)))
                self.PLAN.pop(name, None)

    def _replace(self, name: str, module: nn.Module) -> nn.Module:
        """Replace a module by another, and return the replaced one."""
        owner, _, leaf = name.rpartition(".")
        held = self.get_submodule(owner)._modules
        old, held[leaf] = held[leaf], module
        assert old is not None
        return old

    # --- how it trains ---

    def train(self, mode: bool = True) -> Model:
        self._theirs[0].training = mode  # the root, which is no module of this one
        return super().train(mode)  # type: ignore[return-value]

    def mask_rules(self, documents_BL: Tensor, positions_BL: Tensor) -> dict[str, Rule]:
        rules, base = dict[str, Rule](), all_of(causal, same_document(documents_BL))
        for name in self._rules:
            kind, _, size = name.partition(" ")
            more = {"window": sliding, "chunk": lambda size: chunked(positions_BL, size)}
            rules[name] = base if kind == "causal" else all_of(base, more[kind](int(size)))
        return rules

    def segments(self, documents_BL: Tensor, positions_BL: Tensor) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name in self._rules:
            kind, _, size = name.partition(" ")
            numbers = [documents_BL, positions_BL // int(size)] if kind == "chunk" else [documents_BL]
            found[name] = begins_of(*numbers)
        return found

    def windows(self) -> dict[str, int]:
        return {name: int(name.split()[1]) for name in self._rules if name.startswith("window ")}

    def num_visible(self, positions_BL: Tensor) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name in self._rules:
            kind, _, size = name.partition(" ")
            if kind == "chunk":
                found[name] = positions_BL % int(size) + 1
            else:
                found[name] = positions_BL + 1 if kind == "causal" else (positions_BL + 1).clamp(max=int(size))
        return found

    def after_step(self, state: Mapping[str, Tensor]) -> None:
        for name, load_E in state.items():
            experts: Any = self.get_submodule(name.removesuffix(LOAD))
            if (bias_E := correction_bias(experts)) is not None and is_router_trained(experts):
                move_correction_bias(bias_E, experts.bias_update_speed, load_E)

    def init_buffers(self) -> None:
        """Fill in the tables that __init__ computed."""
        buffers = dict(self.named_buffers())
        for name in buffers.keys() & self._values[0].keys():  # others are a converter's
            buffers[name].copy_(self._values[0][name])

    def initial_std(self, name: str) -> Initial:
        """Return how transformers draws a parameter: a normal one is drawn as those of other families, with its
        deviation; a small one that is neither constant nor normal, as a decay by channel, by transformers itself."""
        if is_adapter(self, name):
            return said_initial(self, name)[1]
        around = next((block for block in self.blocks if name.startswith(f"{block}.")), name.rpartition(".")[0])

        def draw(sizes: torch.Size | None, seed: int = 0) -> Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return drawn(self._theirs[0], name, around, sizes).float()

        corner = draw(None)
        if corner.isnan().any():  # it starts as __init__ makes it, which a model on meta has not
            return STD if corner.dim() > 1 else 0.0
        if corner.numel() == 1 or corner.min() == corner.max():
            value = float(corner.flatten()[0])
            return None if value == 1 else 0.0 if value == 0 else Constant(value)
        if corner.dim() > 1 and corner.mean().abs() < corner.std() / 4:
            smaller = draw(torch.Size(min(size, CORNER // 2) for size in corner.shape))
            if not 0.8 < smaller.std() / corner.std() < 1.25:  # it depends on the sizes, as Kaiming's
                shape, packing = self.get_parameter(name).shape, packed_weights(self).get(name)
                corner = draw(wide_shape(shape, packing) if packing else shape)
            return float(corner.std())
        return Drawn(draw)

    def forward(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor | None = None,
        masks: Mapping[str, Any] | None = None,
        *,
        side_outputs: bool = False,
        only: Container[str] | None = None,
        loss: Callable[[nn.Module, Tensor, int], Tensor] | None = None,
        real: Real | None = None,
    ) -> Any:
        """Return as `Decoder.forward`. With `loss`, the output layer's call returns the loss where its result is the
        logits; where a model changes them after it, the loss is computed of the logits."""
        if positions_BL is None:
            positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device).expand_as(tokens_BL)
        if masks is None:
            masks = self.masks(torch.zeros_like(tokens_BL), positions_BL)
        first, last = (only is None or end in only for end in self._ends)
        put: dict[str, nn.Module] = {}
        if only is not None:
            elsewhere = [name for name in self.modules_in_order if name not in only]
            put = {name: _Elsewhere(self.get_submodule(name)) for name in elsewhere}
        output, begin = self.output, next(name for name in self.modules_in_order if only is None or name in only)
        if loss is not None and last:
            put[self._ends[1]] = _Given(output, lambda x: loss(output, x, 0))
        # A model may change what it takes for its embeddings, and what its base returns: a stage begins right after.
        if begin == self._ends[1]:
            base = self._theirs[0].base_model

            def run_base(*args: Any, **kwargs: Any) -> Any:
                found = base(*args, **kwargs)
                found["last_hidden_state"] = tokens_BL
                return found

            put[self._theirs[0].base_model_prefix] = _Given(base, run_base)
        elif not first:
            run = self.get_submodule(begin)
            put[begin] = _Given(run, lambda _, *args, **kwargs: run(tokens_BL, *args, **kwargs))
        if real is not None and self.routing_group is not None:  # routers see this rank's part of each row
            parts = real.is_token_BL.chunk(self.routing_group.size(), dim=1)
            real = real._replace(is_token_BL=parts[self.routing_group.rank()])
        running, is_double = Running(self._names, masks, real), next(self.parameters()).dtype == torch.float64
        held = {name: self._replace(name, module) for name, module in put.items()}
        try:
            with run_with(running), InDouble() if is_double else nullcontext():
                theirs: Any = self._theirs[0] if last else self._theirs[0].base_model
                # What it is given for embeddings it may write to.
                given = {"input_ids": tokens_BL} if first else {"inputs_embeds": torch.zeros_like(tokens_BL)}
                result = theirs(**given, position_ids=positions_BL, use_cache=False)[
                    "logits" if last else "last_hidden_state"
                ]
        except Exception as error:
            if type(error) not in (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
                raise  # the tracer's own
            if is_lost_peer(error):
                raise  # the model's layers wait for other ranks
            raise UserError(f"{type(self._theirs[0]).__name__}: {error} ({_line_of(error)})") from error
        finally:
            for name, module in reversed(held.items()):  # a module's before those inside of it
                self._replace(name, module)
        if not side_outputs:
            return result
        loads, losses, group = running.loads, running.losses, self.routing_group
        if group is not None:  # a loss is of this rank's part, and what is reported is the ranks' mean
            losses = [x + (group.size() - 1) * x.detach() for x in losses]
        if group is not None and self.sums_loads:
            loads = {n: c10d.wait_tensor(c10d.all_reduce(x, "sum", group.group_name)) for n, x in loads.items()}
        return result, SideOutputs({}, {f"{name}{LOAD}": load_E for name, load_E in loads.items()}, experts=losses)


def _make_biases_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Make buffers of the correction biases that are parameters without gradients: a step moves them."""
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        if leaf in CORRECTION_BIASES and not parameter.requires_grad:
            module = model.get_submodule(owner)
            del module._parameters[leaf]
            module.register_buffer(leaf, parameter.detach())
            values[name] = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")


def _line_of(error: BaseException) -> str:
    """Return the last line of transformers' models that an error came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "transformers" in frame.filename]
    models = [frame for frame in frames if "/models/" in frame.filename and "torchtitan_graph" not in frame.filename]
    frame = (models or frames or traceback.extract_tb(error.__traceback__))[-1]
    return f"{frame.filename.rpartition('/')[2]}, line {frame.lineno}: {frame.line}"


def _starred(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
