"""Vision task heads (VaLoRA §4.2.2): the kinds, and the file format.

Training writes heads with this module and the server reads and runs them with it. docs/bundle.md
describes the files. torch is imported where tensors are computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.contract.files import UnreadableError, read_safetensors
from valora_data.errors import BundleError
from valora_data.registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

    from valora_data.contract.head import Head

FILE_BYTES = 1 << 30
"""Most bytes of a head's file."""
LARGEST = 1e6
"""Largest value in a head's file, in absolute terms. Trained ones lie below 1e3; up to here every
logit and confidence stays finite in float32."""
HEAD_KINDS: Registry[type[Head]] = Registry(
    "valora.head_kinds",
    "kind of head",
    {
        "detection": "valora_data.contract.box_head:BoxHead",
        "classification": "valora_data.contract.label_head:LabelHead",
        "counting": "valora_data.contract.label_head:LabelHead",
        "yes_no": "valora_data.contract.label_head:LabelHead",
        "action": "valora_data.contract.label_head:LabelHead",
    },
    BundleError,
)


def write_head(file: Path, head: Head) -> None:
    """Write a head as safetensors; its metadata says what a server must know."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.tensors().items()}
    save_file(tensors, file, {"kind": head.kind, **head.metadata()})


def read_head(file: Path, width: int) -> Head:
    """Read a head.

    Args:
        file: A safetensors file that `write_head` wrote.
        width: Size of the base model's hidden states.

    Returns:
        The head, float32 on the CPU.

    Raises:
        BundleError: The file is damaged, its kind is unknown, or it is for another width.
    """
    import torch

    try:
        metadata, stored = read_safetensors(file, FILE_BYTES)
    except UnreadableError as error:
        raise BundleError(
            f"head {file} is damaged, as it {error.reason}: copy or export the bundle again"
        ) from error
    for name, tensor in stored.items():
        if tensor.is_complex():
            raise BundleError(f"head {file}: tensor {name} is complex; export the bundle again")
    tensors = {name: tensor.to(torch.float32) for name, tensor in stored.items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BundleError(f"head {file}: tensor {name} holds NaN or Inf; train it again")
        if tensor.numel() and (largest := float(tensor.abs().max())) > LARGEST:
            raise BundleError(
                f"head {file}: tensor {name} reaches {largest:.3g}, more than the {LARGEST:g} up "
                "to which answers stay finite; train it again"
            )
    try:
        kind = metadata["kind"][:100]
        return HEAD_KINDS[kind].parse(kind, metadata, tensors, width)
    except BundleError as error:
        raise BundleError(f"head {file} does not fit: {error}") from error
    except KeyError as error:
        raise BundleError(f"head {file} lacks {error}: export the bundle again") from error
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise BundleError(
            f"head {file} does not fit: {str(error)[:300]}; export the bundle again"
        ) from error
