"""Write a traced function to a file, and read it in another process: nothing of the file is run or imported.

save_traced(traced, "step.json")
traced = load_traced("step.json", x, y)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch

from torchtitan_graph.capture.calls import TRACE, expect
from torchtitan_graph.capture.traced import TracedResult, check_call
from torchtitan_graph.errors import UserError
from torchtitan_graph.formats.as_data import NotStored, traced_from_data, traced_to_data
from torchtitan_graph.patience import refuse_unwritable
from torchtitan_graph.small_files import BadFile, check_type, parse_json, read_small, write_text

_FORMAT = 2
_MOST_BYTES, _MOST_VALUES = 128 * 2**20, 10_000_000
_SAVE = "save_traced(traced, path)"
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class _File(TypedDict):
    """The content of a file; `arguments` is the structure of the call's arguments, as text, to be compared, and
    `digest` the SHA-256 of the content without it."""

    format: int
    digest: str
    device: str
    arguments: str
    constants: dict[str, bool | int | float | str | None]
    options: dict[str, Any]
    autocast: dict[str, str]
    classes: dict[str, str]
    step: dict[str, Any]


def save_traced(traced: TracedResult, path: Path | str) -> None:
    """Write a traced function, with its calling convention, as JSON.

    Its graph may have been edited by passes. Stored are operators of torch and of this package on plain tensors, and
    constants up to 64 numbers.

    Raises:
        UserError: names what can't be stored, or the file can't be written.
    """
    expect(_SAVE, "traced", traced, TracedResult, f"what {TRACE} returns")
    path = Path(path)
    try:
        if traced.guards is not None:
            raise NotStored("guards of Dynamo, which refer to objects of this process, can't be stored")
        if " at 0x" in str(traced.in_spec):
            raise NotStored("an argument with code in it, such as a mask's rule, can't be stored")
        device = _device_of(traced)
        content: _File = {
            "format": _FORMAT,
            "digest": "",
            "device": device.type,
            "arguments": str(traced.in_spec),
            "constants": {traced.names[i]: x for i, x in traced.constants.items()},
            "options": {name: _option_to_data(name, x) for name, x in traced.options.items()},
            "autocast": {kind: str(dtype).removeprefix("torch.") for kind, dtype in traced.autocast.items()},
            "classes": traced.classes,
            "step": traced_to_data(traced, {}, device, {}),
        }
    except NotStored as error:
        raise UserError(f"save_traced: {error}; trace again where the function is needed") from error
    with refuse_unwritable(f"save_traced: {path}", path.parent):
        write_text(path, _as_text({**content, "digest": _digest(content)}))


def load_traced(path: Path | str, *args: Any, **kwargs: Any) -> TracedResult:
    """Return a traced function that `save_traced` wrote.

    Args:
        args, kwargs: arguments as in a call: tensors of the shapes and dtypes that it was traced for, of any numbers;
            what is no tensor as it was traced.

    Raises:
        UserError: there is no such file, it was not written by `save_traced`, or its function takes other arguments.
    """
    path = Path(path)
    begin = f"load_traced: {path}"
    try:
        found = parse_json(read_small(path, _MOST_BYTES), dict[str, Any], path, _MOST_VALUES)
        if found.get("format") != _FORMAT:
            raise BadFile(f"its format is {found.get('format')!r:.20}, and this release reads {_FORMAT}")
        content = check_type(found, _File, path)
        if content["digest"] != _digest(found):
            raise BadFile("it is damaged: its digest is another")
        autocast = {kind: _AUTOCAST[dtype] for kind, dtype in content["autocast"].items()}
        options = {name: _option_from_data(x) for name, x in content["options"].items()}
    except OSError as error:
        raise UserError(f"{begin}: can't be read: {error}") from error
    except (BadFile, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{begin}: is no file of save_traced: {error!s:.300}") from error
    try:
        traced = traced_from_data(content["step"], args, kwargs, {}, torch.device(content["device"]), {})
    except UserError:
        raise
    except Exception as error:  # whatever a forged file makes the reader do
        why = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
        raise UserError(f"{begin}: not what was written, or for other arguments ({why})") from error
    if str(traced.in_spec) != content["arguments"]:
        raise UserError(f"{begin}: was traced for arguments {content['arguments']:.300}, not {traced.in_spec!s:.300}")
    constants = {traced.names[i]: x for i, x in traced.constants.items()}
    if repr(constants) != repr(content["constants"]):
        raise UserError(f"{begin}: was traced with {content['constants']}, not {constants}: constants of the graph")
    try:
        check_call(traced, args, kwargs)
    except UserError as error:
        raise UserError(f"{begin}: {error}") from error
    return dataclasses.replace(traced, options=options, autocast=autocast, classes=content["classes"])


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_as_text({**content, "digest": ""}).encode()).hexdigest()


def _as_text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))


def _device_of(traced: TracedResult) -> torch.device:
    nodes = [*traced.gm.graph.find_nodes(op="placeholder"), *traced.gm.graph.nodes]
    values = (node.meta.get("val") for node in nodes)
    return next((x.device for x in values if isinstance(x, torch.Tensor)), torch.device("cpu"))


def _option_to_data(name: str, x: Any) -> Any:
    if isinstance(x, tuple):
        return {"tuple": [_option_to_data(name, each) for each in x]}
    if isinstance(x, list):
        return [_option_to_data(name, each) for each in x]
    if not isinstance(x, (bool, int, float, str, type(None))):
        raise NotStored(f"the optimizer's {name}, a {type(x).__name__}, can't be stored")
    return x


def _option_from_data(x: Any) -> Any:
    if isinstance(x, dict):
        return tuple(_option_from_data(each) for each in x["tuple"])
    return [_option_from_data(each) for each in x] if isinstance(x, list) else x
