"""A made-up device in the CPU's memory, on which tensors that are left on the CPU are found.

On a GPU, an operation on tensors of two devices fails; where all is on the CPU, none can. Tensors
of the device `far` hold their values in an ordinary tensor and refuse to be mixed with those of the
CPU, as CUDA's do: numbers and tensors without dimensions may be mixed, and indices may lie on the
CPU. Registering a device changes torch for good, so this runs in a process of its own:

    python -m tests.support.far_device task=classification model.device=far

runs `valora-train` there, its export gate in the same process.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "far"
CPU = torch.device("cpu")
ATEN = torch.ops.aten
BETWEEN_DEVICES = {ATEN.copy_.default, ATEN._to_copy.default}
BY_INDICES = {ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default}


class FarTensor(torch.Tensor):
    """A tensor on the device.

    Args:
        inner: Its values, on the CPU.
    """

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self, *, tensor_contents=None):
        return f"FarTensor({self.inner!r})"

    def __deepcopy__(self, memo):
        copied = FarTensor(self.inner.detach().clone()).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        memo[id(self)] = copied
        return copied

    def tolist(self):
        return self.inner.tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError(f"cannot convert a tensor on {NAME} to numpy")
        return self.inner.detach().numpy()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _is_far(device):
    return device is not None and torch.device(device).type == NAME


def _run(func, args, kwargs):
    """Run an operation on the values, and bring its result to the device.

    Raises:
        RuntimeError: If its tensors are on two devices.
    """
    given, spec = pytree.tree_flatten((args, kwargs))
    far = [one for one in given if isinstance(one, FarTensor)]
    near = [
        one
        for one in given
        if isinstance(one, torch.Tensor) and not isinstance(one, FarTensor) and one.ndim
    ]
    mixed = far and near and func not in BETWEEN_DEVICES
    if mixed and not (func in BY_INDICES and isinstance(args[0], FarTensor)):
        raise RuntimeError(
            f"{func}: expected all tensors on the same device, got {[tuple(x.shape) for x in near]}"
            f" on cpu beside {[tuple(x.shape) for x in far]} on {NAME}"
        )
    target = kwargs.get("device")
    goes_far = bool(far) if target is None else _is_far(target)
    if func is ATEN.copy_.default:
        goes_far = isinstance(args[0], FarTensor)
    known = {id(one.inner): one for one in far}
    inner_args, inner_kwargs = pytree.tree_unflatten([_inner(one) for one in given], spec)
    result = func(*inner_args, **inner_kwargs)
    if func is ATEN._to_copy.default and result is inner_args[0]:
        result = result.clone()

    def outer(one):
        if not isinstance(one, torch.Tensor):
            return one
        if id(one) in known:  # changed in place
            return known[id(one)]
        return FarTensor(one) if goes_far else one

    return pytree.tree_map(outer, result)


def _inner(one):
    if isinstance(one, FarTensor):
        return one.inner
    return CPU if isinstance(one, torch.device) and one.type == NAME else one


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        if _is_far(kwargs.get("device")) or any(isinstance(one, FarTensor) for one in leaves):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


class _Constructors(TorchFunctionMode):
    """`torch.tensor` and its like copy where no dispatch mode sees it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and _is_far(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.new_tensor and isinstance(args[0], FarTensor):
            kwargs.setdefault("dtype", args[0].dtype)
            return torch.tensor(args[1], **kwargs).to(args[0].device)
        return func(*args, **kwargs)


class _Module(_DummyBackendModule):
    """What torch asks of `torch.far`: random numbers are the CPU's."""

    def get_rng_state(self, device=None):
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state, device=None):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


@contextmanager
def far_device():
    """Make the device known, and tensors on it work."""
    _setup_privateuseone_for_python_backend(NAME, _Module())
    with _Constructors(), _Operations():
        yield


def main():
    """Run `valora-train` with the arguments of the command line."""
    from tests.support.forked import gate_here
    from valora_train import cli
    from valora_train.stages import export

    export.subprocess = SimpleNamespace(run=gate_here)
    sys.argv[0] = "valora-train"
    with far_device():
        cli.main()


if __name__ == "__main__":
    main()
