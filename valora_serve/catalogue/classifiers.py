"""Heads of classifiers that PEFT has saved: `AutoModelForSequenceClassification` with LoRA.

Their output layer acts on the hidden state of the last token, as a label head with the pooling
``last`` does. Its labels are those of the model's configuration, if that lies beside the adapter.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from valora_data.contract.files import UnreadableError, read_json, shown
from valora_data.contract.head import Head
from valora_data.contract.heads import LARGEST
from valora_data.contract.label_head import LabelHead
from valora_serve.catalogue.adapters import CONFIG_BYTES, MODEL_CONFIG, Adapter
from valora_serve.errors import AdapterError

MAX_LABELS = 4096  # most labels of a classifier: the list of models names all of them


def make_classifier(adapter: Adapter, score: Tensor, width: int) -> Head:
    """Make the head of an output layer `score` [labels, width]; AdapterError if it cannot be."""
    shape, score = tuple(score.shape), score.float()
    if len(shape) != 2 or not 2 <= shape[0] <= MAX_LABELS or not (score.abs() <= LARGEST).all():
        raise AdapterError(
            f"adapter {adapter.folder}: its output layer of shape {shape} has not 2 to "
            f"{MAX_LABELS} labels, or holds NaN or values above {LARGEST:g}: serve it with "
            "transformers, or train it again"
        )
    metadata = {"labels": json.dumps(_labels(adapter, shape[0])), "pooling": "last"}
    tensors = {"weight": score, "bias": score.new_zeros(shape[0])}
    try:
        return LabelHead.parse("classification", metadata, tensors, width)
    except ValueError as error:
        raise AdapterError(
            f"adapter {adapter.folder}: its output layer does not fit ({error}): use the base "
            f"model that it was trained on, or correct id2label in {MODEL_CONFIG}"
        ) from error


def _labels(adapter: Adapter, outputs: int) -> list[str]:
    """Names of the outputs; transformers' own where no configuration has others."""
    file = adapter.folder / MODEL_CONFIG
    try:
        config: Any = read_json(file, CONFIG_BYTES) if file.exists() else {}
    except UnreadableError as error:
        raise AdapterError(f"{file} {error.reason}: correct it, or remove it") from error
    config = config if isinstance(config, dict) else {}
    kind = config.get("problem_type")
    if kind not in (None, "single_label_classification"):
        raise AdapterError(
            f"adapter {adapter.folder}: its problem_type is {shown(kind)}, and only classifiers "
            "with one label for each prompt can be served: serve it with transformers"
        )
    names = config.get("id2label") or {str(n): f"LABEL_{n}" for n in range(outputs)}
    if not isinstance(names, dict) or set(names) != {str(n) for n in range(outputs)}:
        raise AdapterError(
            f"adapter {adapter.folder}: {MODEL_CONFIG} has id2label = {shown(names)}, its output "
            f"layer {outputs} outputs: correct id2label, or remove it"
        )
    return [str(names[str(n)]) for n in range(outputs)]
