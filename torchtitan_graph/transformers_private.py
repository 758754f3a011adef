"""All that is used of transformers beyond its documented interface, each with why, and what would replace it.

Its registries of attention, masks and experts, its plans of tensor parallelism, its initialization of a module and its
conversion of files' tensors are how it works inside; they change between its releases. Supported are 5.23 and 5.24.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, cast

import jinja2
import torch
import transformers
from filelock import FileLock
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    dynamic_module_utils,
    masking_utils,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_converters,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ExpertsInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from torchtitan_graph.errors import UserError
from torchtitan_graph.nearest import did_you_mean

OURS = "torchtitan_graph"  # the name of our functions in its registries
CORNER = 64  # of a parameter that is drawn to see how it starts, in each dim
TESTED = ("5.23", "5.24")
_LARGE = 2**24  # elements: a tensor of more is a parameter, and no table


def register(attention: Callable[..., Any], mask: Callable[..., Any], experts: Callable[..., Any]) -> None:
    """Register our functions with transformers, for the models that `build` returns. The registry of experts is not
    documented: the public name would be one alongside AttentionInterface."""
    AttentionInterface.register(OURS, attention)
    AttentionMaskInterface.register(OURS, mask)
    ExpertsInterface.register(OURS, experts)


def untested_version() -> str | None:
    """Return a warning if the installed release is not one of those that are tested."""
    version = transformers.__version__
    if version.startswith(tuple(f"{tested}." for tested in TESTED)):
        return None
    which = f"{' and '.join(TESTED)} {'are' if len(TESTED) > 1 else 'is'}"
    return f"transformers {version} is not tested with this package: {which}"


# --- configurations -------------------------------------------------------------------------------------------------


def model_types() -> list[str]:
    """Return the types of causal language models that this release knows, by `model_type` in config.json."""
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)


def text_config(raw: Mapping[str, Any], code: str = "") -> Any:
    """Return transformers' configuration of the language model in a config.json, alone.

    Args:
        code: the folder whose own Python code defines it.

    Raises:
        UserError: this release or the folder has no such model, or can't read its configuration.
    """
    kind, version, made = raw.get("model_type"), transformers.__version__, config_class(raw, code)
    try:
        config = made.from_dict(_decoded({**raw})).get_text_config(decoder=True)
    except Exception as error:  # of any kind: classes check their values in their own ways
        raise UserError(f"transformers {version} can't read this configuration of {kind}: {error}") from error
    if not code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model_type = {kind!r}: transformers {version} has no causal language model of it")
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model_type = {kind!r}: a decoder that reads an encoder's result can't be trained alone")
    return config


def config_class(raw: Mapping[str, Any], code: str = "") -> Any:
    """Return the class of the configuration in a config.json, as `text_config`."""
    kind = raw.get("model_type")
    if code:
        return class_of_folder(raw, code, "AutoConfig")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        own = did_you_mean(str(kind), model_types())
        if raw.get("auto_map"):
            own = "; model.trust_remote_code = true runs the Python code in its folder"
        raise UserError(f"model_type = {kind!r:.100} is none that transformers {transformers.__version__} knows{own}")
    return CONFIG_MAPPING[kind]


def class_of_folder(raw: Mapping[str, Any], code: str, kind: str) -> Any:
    """Return the class that a folder's own Python code has for one of transformers' automatic ones. It runs that code.

    Raises:
        UserError: the folder has none, names another repository, or its code can't be run.
    """
    named = raw.get("auto_map")
    reference = named.get(kind) if isinstance(named, dict) else None
    if not isinstance(reference, str) or not reference:
        raise UserError(f"model.trust_remote_code = true: its auto_map has no {kind}, so no code to run; leave it out")
    if "--" in reference:
        raise UserError(f"auto_map.{kind} = {reference!r} is code of another repository: copy its files to this folder")
    try:
        return _class_of_folder(reference, code)
    except Exception as error:  # the code may do anything
        raise UserError(f"the code of {reference} in {code} can't be run: {type(error).__name__}: {error}") from error


@functools.cache
def _class_of_folder(reference: str, code: str) -> Any:
    """Return a class of a folder's code, which transformers copies first: one process at a time."""
    copies = Path(dynamic_module_utils.HF_MODULES_CACHE)
    copies.mkdir(parents=True, exist_ok=True)
    with FileLock(copies / "torchtitan_graph.lock"):
        return dynamic_module_utils.get_class_from_dynamic_module(reference, code)


def keys_of(config: Any) -> dict[str, Any]:
    """Return the keys of a configuration as in a config.json: infinity, which JSON has not, is an object there."""
    return config._encode_special_floats(config.to_dict())  # type: ignore[no-any-return]


def _decoded(raw: dict[str, Any]) -> dict[str, Any]:
    return transformers.PreTrainedConfig._decode_special_floats(raw)  # type: ignore[no-any-return]


def class_name(config: Any) -> str:
    """Return the name of the class of a configuration's causal language model."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return kind.__name__  # type: ignore[no-any-return]


# --- models ---------------------------------------------------------------------------------------------------------


def build(config: Any, kind: Any = None) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the causal language model of a configuration on meta, and its buffers' values; `kind` is its class where
    transformers does not know it.

    Its buffers are tables that __init__ computes, and no method fills in every model: so they are built on the CPU,
    and only parameters are moved to meta, one by one, before they are written. torch.device("meta") would lose them.
    Large ones are made there: a stack of experts may be larger than the memory.
    """
    register_parameter, values = nn.Module.register_parameter, {}
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it warns of attention that it does not know, which is ours
    name = class_name(config) if kind is None else kind.__name__

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # what is tied is there already
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register_parameter(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        with torch.device("cpu"), _LargeOnMeta():
            with no_init_weights():
                make = AutoModelForCausalLM.from_config if kind is None else kind._from_config
                model = make(config, dtype=torch.float32, attn_implementation=OURS, experts_implementation=OURS).train()
            model.tie_weights()  # a part of the initialization
    except ImportError as error:
        raise UserError(f"transformers' {name} needs another package: {error}") from error
    except Exception as error:
        if error.args == (OURS,):  # it has a table of attentions of its own
            raise UserError(f"transformers' {name} has attention of its own, without a registry") from None
        missing = error.args if isinstance(error, KeyError) else ()
        keys = [key for key, x in config.to_dict().items() if isinstance(x, str) and (x,) == missing]
        of = f"{keys[0]} = {error} is none that it knows" if keys else f"{type(error).__name__}: {error}"
        raise UserError(f"transformers can't build {name} of this configuration: {of}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UserError(f"{name} is a table of {buffer.numel():,} numbers, more than {_LARGE:,}")
        owner, _, leaf = name.rpartition(".")
        values[name] = buffer
        model.get_submodule(owner)._buffers[leaf] = buffer.to("meta")
    return model, values


class _LargeOnMeta(TorchFunctionMode):
    """Makes tensors of more than _LARGE elements on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.empty, torch.zeros, torch.ones, torch.randn, torch.rand):
            on_meta = func(*args, **{**(kwargs or {}), "device": "meta"})
            if on_meta.numel() > _LARGE:
                return on_meta
        return func(*args, **(kwargs or {}))


_is_ours = ContextVar("_is_ours", default=False)  # the model that runs
_search = masking_utils.find_packed_sequence_indices


def _search_of_others(position_ids: Tensor) -> Any:
    return None if _is_ours.get() else _search(position_ids)


masking_utils.find_packed_sequence_indices = _search_of_others


@contextlib.contextmanager
def documents_by_masks() -> Iterator[None]:
    """Run a model without its own search for documents, by jumps in positions: our masks have them, and the search
    waits for the device."""
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)


def fix_rotations(model: nn.Module) -> int | None:
    """Make rotary embeddings whose frequencies depend on the longest document of a batch use those of short documents,
    and return the length up to which these are right; None if there are no such embeddings. No argument of theirs does
    this: they read their attribute `rope_type` in each forward pass."""
    lengths = list[int]()
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if not (isinstance(kinds, (str, dict)) and hasattr(module, "original_max_seq_len")):
            continue
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            rope: Any = module.config.rope_parameters  # type: ignore[union-attr]
            rope = rope if layer is None else rope[layer]
            if kind in ("longrope", "dynamic"):
                whole: Any = module.original_max_seq_len
                lengths.append(rope["original_max_position_embeddings"] if kind == "longrope" else whole)
                if layer is None:
                    module.rope_type = "default"  # type: ignore[assignment]
                else:
                    module.rope_type = {**module.rope_type, layer: "default"}  # type: ignore[dict-item, assignment]
    return min(lengths, default=None)


def rule_of(mask_function: Callable[..., Any], local_size: int | None) -> str:
    """Return the name of the mask that transformers describes by a function of functions: "causal", "window 512" or
    "chunk 8192". They have no other description.

    Raises:
        UserError: it is made of others.
    """
    names, todo = set(), [mask_function]
    while todo:
        function = todo.pop()
        names.add(function.__qualname__.partition(".")[0])
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        inside = [y for x in held for y in (x if isinstance(x, tuple) else (x,))]
        todo += [y for y in inside if isinstance(y, types.FunctionType)]
    kinds = {"sliding_window_overlay": "window", "chunked_overlay": "chunk"}
    other = names - {"and_masks", "causal_mask_function", *kinds}
    if other or "causal_mask_function" not in names:
        made = ", ".join(sorted(other)) or "no causal_mask_function"
        raise UserError(f"its masks are made of {made}, which are no rules of this framework")
    return next((f"{kinds[name]} {local_size}" for name in sorted(names) if name in kinds), "causal")


def tensor_parallel_plan(model: nn.Module) -> dict[str, str]:
    """Return the model's own plan: a pattern of names -> its style there, such as "colwise"."""
    return dict(model.tp_plan or {})  # type: ignore[arg-type]


def router_of(model: Any) -> tuple[type[nn.Module], int] | None:
    """Return the class of a model's routers, and which of their results are the logits, if transformers has a
    load-balancing loss for it: its records of outputs have no public name."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    kind, at = getattr(recorded, "target_class", recorded), getattr(recorded, "index", 0)
    has_loss = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    return (kind, at) if has_loss and isinstance(kind, type) and issubclass(kind, nn.Module) else None


def drawn(model: nn.Module, name: str, around: str, sizes: Sequence[int] | None) -> Tensor:
    """Return a parameter as the model draws it: of these sizes, or a corner of it.

    Its `_init_weights` takes a module and writes parameters of it and of modules inside, from the innermost module to
    the model itself. The real ones are on meta or shards: so it gets stand-ins, complete in the module `around`, its
    block, and above that of the modules on the way.
    """
    for most in (CORNER, None):
        chain = _stand_ins(model, name, around, sizes, most)
        try:
            for path, stand_in in reversed(chain.items()):
                with torch.device("cpu"), contextlib.suppress(*() if path.startswith(around) else (AttributeError,)):
                    model._init_weights(stand_in)  # type: ignore[operator]
            break
        except RuntimeError:  # it copies values of the whole size
            if most is None:
                raise
    owner, _, leaf = name.rpartition(".")
    return chain[owner]._parameters[leaf].detach()  # type: ignore[union-attr]


def _stand_ins(
    model: nn.Module, name: str, around: str, sizes: Sequence[int] | None, most: int | None
) -> dict[str, nn.Module]:
    """Return stand-ins of the modules around a parameter, the model's first, by name, with parameters of nan: of at
    most `most` in each dim, the one of that name of these sizes."""
    chain: dict[str, nn.Module] = {}

    def parameter(path: str, x: Tensor | None) -> nn.Parameter | None:
        if x is None:
            return None
        shape = sizes if sizes is not None and path == name else [min(size, most or size) for size in x.shape]
        return nn.Parameter(torch.full(tuple(shape), torch.nan, device="cpu"), requires_grad=False)

    def stand_in(module: nn.Module, path: str) -> nn.Module:
        new: Any = object.__new__(next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule)))
        held, begin, is_whole = vars(module), f"{path}." if path else "", f"{path}.".startswith(f"{around}.")
        new.__dict__ |= held | ({"padding_idx": None} if "padding_idx" in held else {})
        new.__dict__["_parameters"] = {n: parameter(begin + n, x) for n, x in module._parameters.items()}
        buffers = {n: None if x is None else torch.zeros(x.shape, device="cpu") for n, x in module._buffers.items()}
        new.__dict__["_buffers"] = buffers
        if not path or name.startswith(begin):
            chain[path] = new
        new.__dict__["_modules"] = {
            n: stand_in(child, begin + n)
            for n, child in module._modules.items()
            if child is not None and (is_whole or name.startswith(f"{begin}{n}."))
        }
        return new

    stand_in(model, "")
    return chain


# --- files ----------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Tensors of files that together become some of a model's.

    files    names in the files by the pattern of the conversion that they match, in order; one for a tensor that is
             only renamed
    outputs  the shapes of the model's tensors that they become, by name
    by_row   the i-th of each pattern's files is all that row i on dim 0, an expert, is made of
    """

    files: dict[str, list[str]]
    outputs: dict[str, tuple[int, ...]]
    by_row: bool
    convert: Callable[[dict[str, list[Tensor]]], dict[str, Tensor]] | None

    @property
    def names(self) -> list[str]:
        return [name for names in self.files.values() for name in names]


class Conversion:
    """How the tensors of a model's files become its parameters and buffers, and back: by transformers' own rules, which
    know the names and forms of each release."""

    def __init__(self, model: Any):
        self._model, self.model_name = model, type(model).__name__
        self.names = set(model.state_dict())  # of all tensors, whichever of them a pipeline's stage has
        self._there: dict[str, Any] = dict.fromkeys(self.names, True)  # as it looks names up
        transforms = get_model_conversion_mapping(model)
        self._renamings = [x for x in transforms if isinstance(x, WeightRenaming)]
        self._converters = [x for x in transforms if isinstance(x, WeightConverter)]
        self._reversed: list[Any] = [
            x.reverse_transform()
            for x in get_model_conversion_mapping(model, add_legacy=False)[::-1]
            if isinstance(x, WeightConverter)
        ]

    def skips(self, name: str) -> bool:
        """Return whether a tensor of the files is known to be no part of the model."""
        patterns = [
            *(self._model._keys_to_ignore_on_load_unexpected or ()),
            r"rotary_emb\.inv_freq$",
            r"attn\.masked_bias$",
        ]  # type: ignore[misc]
        return any(re.search(pattern, name) for pattern in patterns)

    def groups(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Group]:
        """Return the groups of files' tensors, given the shapes of all: what they become is computed on meta."""
        found: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        for name in sorted(shapes, key=dot_natural_key):
            target, pattern = rename_source_key(
                name, self._renamings, self._converters, self._model.base_model_prefix, self._there
            )
            converter = next((x for x in self._converters if pattern in x.source_patterns), None)
            _, files = found.setdefault(target, (converter if pattern else None, defaultdict(list)))
            files[pattern or name].append(name)
        return [self._group(target, converter, files, shapes) for target, (converter, files) in found.items()]

    def _group(
        self, target: str, converter: Any, files: dict[str, list[str]], shapes: Mapping[str, tuple[int, ...]]
    ) -> Group:
        if converter is None:
            (name, *others) = [x for names in files.values() for x in names]
            if others:
                raise UserError(f"the files hold {target} twice, as {name} and {others[0]}: remove one")
            return Group(files, {target: tuple(shapes[name])}, False, None)

        def convert(tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
            own = copy.deepcopy(converter)
            for pattern, xs in tensors.items():
                for x, name in zip(xs, files[pattern], strict=False):
                    own.add_tensor(target, name, pattern, x)
            made = own.convert(target, model=self._model, config=self._model.config)
            return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}

        def on_meta(count: int | None) -> dict[str, tuple[int, ...]]:
            xs = {p: [torch.empty(shapes[n], device="meta") for n in names[:count]] for p, names in files.items()}
            return {name: tuple(x.shape) for name, x in convert(xs).items()}

        try:
            outputs = on_meta(None)
        except Exception as error:
            raise UserError(
                f"{target} can't be made of {', '.join(map(str, files.values()))!s:.200}: {error}"
            ) from error
        by_row = len(outputs) == 1 and {len(names) for names in files.values()} == {outputs[target][0]}
        if by_row:
            try:
                by_row = on_meta(1) == {target: (1, *outputs[target][1:])}
            except Exception:
                by_row = False
        return Group(dict(files), outputs, by_row, convert)

    def written_together(self, names: Iterable[str]) -> list[list[str]]:
        """Return the model's tensors in the groups that become tensors of files together."""
        groups: dict[str, list[str]] = {}
        for name in names:
            key, pattern = apply_converters(name, self._reversed)
            groups.setdefault(key if pattern else name, []).append(name)
        return list(groups.values())

    def to_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the files' tensors that a group of the model's becomes."""
        return revert_weight_conversion(self._model, tensors)  # type: ignore[no-any-return]


# Arguments of `render_jinja_template` itself, which would be given twice, and what a conversation consists of.
_NOT_ARGUMENTS = {
    "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask",
}  # fmt: skip


# What Jinja raises as it renders a conversation, and Python for the code in a template; others are not the rows' fault.
TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError,
)  # fmt: skip


def syntax_error(template: str) -> str:
    """Return what is wrong with the syntax of a Jinja template of conversations, with the line; "" if nothing is."""
    try:
        _compile_jinja_template(template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return ""


def chat_arguments(template: str) -> set[str]:
    """Return the names that a Jinja template of conversations reads and that its caller may give.

    A name that the template itself sets counts only where it looks first whether the caller has given it.
    """
    from jinja2 import meta, nodes

    tree = _compile_jinja_template(template).environment.parse(template)
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    tests = [test for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined", "none")]
    defaults = [each for each in tree.find_all(nodes.Filter) if each.name in ("default", "d")]
    looked_for = {each.node.name for each in [*tests, *defaults] if isinstance(each.node, nodes.Name)}
    return meta.find_undeclared_variables(tree) - (assigned - looked_for) - _NOT_ARGUMENTS


def keys_read(template: str) -> set[str]:
    """Return the keys of objects that a Jinja template reads: as attributes, by subscripts, by `get`, by `in`, and as
    attributes that filters are given."""
    from jinja2 import nodes

    tree = _compile_jinja_template(template).environment.parse(template)
    found: list[Any] = [item.arg for item in tree.find_all(nodes.Getitem)]
    for each in (*tree.find_all(nodes.Call), *tree.find_all(nodes.Filter)):
        found += [*each.args, *(keyword.value for keyword in each.kwargs)]
    found += [each.expr for each in tree.find_all(nodes.Compare) if each.ops[0].op in ("in", "notin")]
    keys = {each.value for each in found if isinstance(each, nodes.Const) and isinstance(each.value, str)}
    return keys | {each.attr for each in tree.find_all(nodes.Getattr)}


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    prompt: bool,
    arguments: Mapping[str, Any],
    strftime: Callable[[str], str],
) -> tuple[str, list[tuple[int, int]]]:
    """Return a conversation's text by a Jinja template, in transformers' sandbox, and the characters that the template
    marks by {% generation %}. `PreTrainedTokenizerBase.apply_chat_template`, which is public, wants a tokenizer of its
    own and gives neither the marks' characters nor another day.

    arguments: further names that the template may read, those of special tokens among them.
    """
    _compile_jinja_template(template).globals["strftime_now"] = strftime  # kept: the rendering compiles it once
    has_marks = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
    rendered: Any = render_jinja_template(  # its annotations are of another result
        [messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=has_marks,
        add_generation_prompt=prompt,
        **cast(Any, arguments),
    )
    (text,), marks = rendered
    return text, marks[0] if has_marks else []
