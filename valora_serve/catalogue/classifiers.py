"""Heads of classifiers that PEFT has saved: `AutoModelForSequenceClassification` with LoRA.

Their output layer acts on the hidden state of the last token, as a label head with the pooling
``last`` does. Its labels are those of the model's configuration, if that lies beside the adapter.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from valora_data.contract.files import UnreadableError, read_json, shown
from valora_data.contract.heads import make_head
from valora_serve.catalogue.adapters import CONFIG_BYTES, MODEL_CONFIG
from valora_serve.errors import AdapterError

if TYPE_CHECKING:
    from valora_data.contract.head import Head
    from valora_serve.catalogue.adapters import Adapter

MOST_LABELS = 4096
"""Most labels of a classifier: the list of models names all of them."""


def read_classifier(adapter: Adapter, width: int) -> Head:
    """Make the head of an adapter that has an output layer.

    Args:
        adapter: The adapter.
        width: Size of the base model's hidden states.

    Raises:
        AdapterError: The configuration cannot be read, or says that answers are no single labels.
        BundleError: The output layer does not fit the model or the labels.
    """
    weight = adapter.score["weight"]
    outputs = len(weight) if weight.ndim else 0
    if outputs > MOST_LABELS:
        raise AdapterError(
            f"adapter {adapter.folder}: its output layer has {outputs} labels, more than "
            f"{MOST_LABELS}: train it with fewer"
        )
    metadata = {"kind": "classification", "pooling": "last"}
    metadata["labels"] = json.dumps(_labels(adapter, outputs))
    bias = adapter.score.get("bias", weight.new_zeros(outputs))
    remedy = f"serve it with transformers, or correct id2label in {MODEL_CONFIG}"
    what = f"the output layer of adapter {adapter.folder}"
    return make_head(what, metadata, {"weight": weight, "bias": bias}, width, remedy)


def _labels(adapter: Adapter, outputs: int) -> list[str]:
    """Names of the outputs; transformers' own where no configuration has others."""
    file = adapter.folder / MODEL_CONFIG
    try:
        config: Any = read_json(file, CONFIG_BYTES)
    except UnreadableError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise AdapterError(f"{file} {error.reason}: correct it, or remove it") from error
        config = {}
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
