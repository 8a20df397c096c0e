"""Vision task heads (VaLoRA §4.2.2): the kinds, and the file format of docs/reference/bundle.md."""

from pathlib import Path

from torch import Tensor

from valora_data.contract.files import UnreadableError, expect, read_safetensors, write_safetensors
from valora_data.contract.head import Head
from valora_data.errors import BundleError
from valora_data.registry import Registry

FILE_BYTES = 1 << 30  # most of a head's file
# Largest value in a head's file, in absolute terms: trained ones lie below 1e3, and up to here
# every logit and confidence stays finite in float32.
LARGEST = 1e6
_AGAIN = "copy or export the bundle again"
_LABEL_HEAD = "valora_data.contract.label_head:LabelHead"
HEAD_KINDS: Registry[type[Head]] = Registry(
    "valora.head_kinds", "kind of head",
    {"detection": "valora_data.contract.boxes:BoxHead"}
    | dict.fromkeys(("classification", "counting", "yes_no", "action"), _LABEL_HEAD), BundleError,
)  # fmt: skip


def write_head(file: Path, head: Head) -> None:
    """Write a head as safetensors; its metadata says what a server must know."""
    write_safetensors(file, head.tensors(), {"kind": head.kind, **head.metadata()})


def read_head(file: Path, width: int) -> Head:
    """Read a head for hidden states of a `width`: float32 on the CPU; or a `BundleError`."""
    try:
        metadata, stored = read_safetensors(file, FILE_BYTES)
        tensors = {name: _numbers(name, tensor) for name, tensor in stored.items()}
        kind = metadata["kind"][:100]
        return HEAD_KINDS[kind].parse(kind, metadata, tensors, width)
    except UnreadableError as error:
        raise BundleError(f"head {file} is damaged, as it {error.reason}: {_AGAIN}") from error
    except KeyError as error:
        raise BundleError(f"head {file} lacks {error}: {_AGAIN}") from error
    except (BundleError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise BundleError(f"head {file} does not fit: {str(error)[:300]}; {_AGAIN}") from error


def _numbers(name: str, tensor: Tensor) -> Tensor:
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    expect(not tensor.is_complex(), f"tensor {name}", "real numbers", tensor.dtype)
    expect(largest <= LARGEST, f"tensor {name}", f"numbers up to {LARGEST:g}", largest)  # no NaN
    return tensor.float()
