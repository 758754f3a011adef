"""Numbers without a GPU: Triton's kernels in Triton's interpreter, torch's operators on the host. Import it first."""

import ctypes
import os

os.environ["TRITON_INTERPRET"] = "1"  # read as Triton and Inductor are imported

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
import torch.utils._pytree as pytree
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.language.extra import libdevice
from triton.runtime import interpreter

_multiply = interpreter.InterpreterBuilder.create_dot


def _wide(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)


def _multiply_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Multiply bf16 numbers: the interpreter holds them as integers of 16 bits, and would multiply those."""
    return _multiply(self, _wide(a), _wide(b), *rest)


interpreter.InterpreterBuilder.create_dot = _multiply_numbers


def _by_numpy(function: Callable[[Any], Any]) -> Callable[[tl.tensor], tl.tensor]:
    return lambda x: tl.tensor(
        interpreter.TensorHandle(function(x.handle.data).astype(x.handle.data.dtype), x.dtype), x.type
    )


# Functions of a library for GPUs, which the interpreter does not have.
for _name, _function in {"rsqrt": lambda x: 1 / numpy.sqrt(x), "exp": numpy.exp, "log": numpy.log}.items():
    setattr(libdevice, _name, _by_numpy(_function))


class OnHost(TorchDispatchMode):
    """Let torch's operators give numbers on the null GPU: each runs on the host, in the very memory of its arguments,
    for the null GPU's memory is the host's."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_cuda]
        to_device = torch.device(kwargs["device"]).type == "cuda" if kwargs.get("device") else bool(given)
        if not (given or to_device) or func.is_view or func.overloadpacket is torch.ops.aten.set_:
            return func(*args, **kwargs)
        hosted = {id(x): here(x) for x in given}
        own = {id(hosted[id(x)]): x for x in given}

        def move(x: Any) -> Any:
            return hosted.get(id(x), torch.device("cpu") if isinstance(x, torch.device) else x)

        def back(x: Any) -> Any:
            return own[id(x)] if id(x) in own else there(x) if to_device and isinstance(x, Tensor) else x

        return pytree.tree_map(back, func(*pytree.tree_map(move, args), **pytree.tree_map(move, kwargs)))


def here(x: Tensor) -> Tensor:
    """Give a tensor of the null GPU as one of the host, in the same memory."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    same = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(same, x.storage_offset(), x.shape, x.stride())


def there(x: Tensor) -> Tensor:
    """Copy a tensor of the host to the null GPU, as it lies."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    here(copy).copy_(x)
    return copy
