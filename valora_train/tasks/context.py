"""Questions about a document that was learnt once: a memory as the domain's head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract.base_model import base_hash
from valora_data.contract.contexts import ADAPTER, PREFIX, read_memory, source_hash
from valora_data.contract.manifest import ContextEntry
from valora_data.errors import BundleError, DataError
from valora_data.schema import Answer, Document, Sample
from valora_data.tasks import CONTEXT
from valora_data.wording import plural
from valora_train.metrics.measures import Scores, known, normalized
from valora_train.model import memory
from valora_train.model.lmm import Lmm
from valora_train.model.memory import AnyMemory
from valora_train.model.prompts import Encoded, Example, HiddenStates, Size
from valora_train.settings import ContextSettings
from valora_train.tasks.language import LanguageTask


class SoftTargets:
    """What the base model computes for answers with the document in its prompt."""

    def __init__(self, hidden: Sequence[Tensor]) -> None:
        self._hidden = list(hidden)  # (answer tokens, width) of each sample

    def to(self, device: torch.device | str) -> SoftTargets:
        """Return the same on a device."""
        return SoftTargets([part.to(device) for part in self._hidden])

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Hidden states of the answers of some samples: (tokens, width)."""
        return torch.cat([self._hidden[row] for row in rows.tolist()])


class ContextTask(LanguageTask):
    """Answers questions about a document from its memory."""

    spec = CONTEXT
    remembers = True
    options_type = ContextSettings
    _document: Document | None = None
    studied: Sequence[Encoded] = ()  # the samples whose answers are learnt

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        pairs = zip(predicted, truth, strict=True)
        hits = [
            normalized(one.choice or "") in map(normalized, known(other.answers, "context"))
            for one, other in pairs
        ]
        return Scores(np.array(hits, np.float64))

    def prompt(self, sample: Sample) -> Example:
        return replace(super().prompt(sample), context=True)

    def prepare(self, samples: Sequence[Sample]) -> None:
        self._document = document = samples[0].document
        if document is None:
            text = f"the samples of domain {self.domain.name} ask about no document: give it a"
            raise DataError(f"{text} source of documents, such as documents, texts or album")
        length, form = memory.document_tokens(self.lmm, document), self.options.form
        if form != ADAPTER and self.options.tokens > length:
            raise DataError(
                f"the document of domain {self.domain.name} has {plural(length, 'token')}, fewer "
                f"than the {self.options.tokens} of its memory: lower context.tokens"
            )

    @property
    def document(self) -> Document:
        """The document; only where samples were read."""
        assert self._document is not None, "`prepare` sets it"
        return self._document

    @torch.no_grad()
    def targets(self, samples: Sequence[Sample], encoded: Sequence[Encoded]) -> SoftTargets:
        """Hidden states of the base model that has the document in its prompt."""
        self.studied = encoded
        self.lmm.adapters.activate(None)
        read = memory.read_document(self.lmm, self.document)
        found: list[Tensor] = []
        step = max(1, memory.READ_AT_ONCE // max(read.tokens, 1))
        for start in range(0, len(encoded), step):
            batch = encoded[start : start + step]
            hidden, _ = memory.states(self.lmm, batch, [read] * len(batch)).answer_pairs()
            found += hidden.float().split([item.length - item.prompt for item in batch])
        return SoftTargets(found)

    def new_head(self, lmm: Lmm, first: Encoded, seed: int) -> nn.Module | None:
        """A memory that begins as a part of the document; none in the form `adapter`."""
        if self.options.form == ADAPTER:
            return None
        lmm.adapters.activate(None)
        file = Path(self.options.start or "") / f"{self.domain.name}.safetensors"
        if self.options.start is not None and file.is_file():
            return self.read_head(file, lmm.width)
        if self.options.form == PREFIX:
            read = memory.read_document(lmm, self.document)
            return memory.most_attended(lmm, read, self.studied or [first], self.options.tokens)
        return memory.new_memory_tokens(lmm, self.document, self.options.tokens)

    def loss(self, head: Any, states: HiddenStates, targets: Tensor, lmm: Lmm) -> Tensor:
        """Distance from what the base model computes with the document in its prompt.

        The mean over answer tokens of the Kullback-Leibler divergence of its logits, of one minus
        the cosine of hidden states, and of the cross entropy of the answers, as they are weighted.
        """
        weights = self.options
        hidden, tokens = states.answer_pairs()
        logits = lmm.logits(hidden)
        total = hidden.new_zeros((), dtype=torch.float32)
        if weights.logits:
            with torch.no_grad():
                truth = F.log_softmax(lmm.logits(targets.to(hidden)), -1)
            gap = F.kl_div(F.log_softmax(logits, -1), truth, log_target=True, reduction="batchmean")
            total = total + weights.logits * gap
        if weights.hidden:
            apart = 1 - F.cosine_similarity(hidden.float(), targets, dim=-1)
            total = total + weights.hidden * apart.mean()
        if weights.answers:
            total = total + weights.answers * F.cross_entropy(logits, tokens)
        return total

    def outputs(self, head: Any, lmm: Lmm, batch: Sequence[Encoded]) -> list[tuple[str, Size]]:
        texts = memory.write(lmm, batch, [head] * len(batch), self.settings.max_tokens)
        return [(text, (0, 0)) for text in texts]

    def write_head(self, head: AnyMemory, file: Path) -> None:
        memory.stored(head, base_hash(self.lmm.base), self.lmm.dtype).write(file)

    def read_head(self, file: Path, width: int) -> AnyMemory:
        """Read the memory, which must be of this base model."""
        lmm = self.lmm
        found = read_memory(file, base_hash(lmm.base), lmm.config.get_text_config())
        if found.form != self.options.form and self._document is not None:
            raise BundleError(f"{file} holds a {found.form}, expected a {self.options.form}")
        return memory.module_of(found).to(lmm.device)

    def metadata(self, head: Any) -> dict[str, Any]:
        facts = super().metadata(head)
        if self._document is None:
            return facts
        parts = [] if head is None else head.parameters()
        entry = ContextEntry(
            form=ADAPTER if head is None else head.form,
            file=None if head is None else f"contexts/{self.domain.name}.safetensors",
            tokens=0 if head is None else head.tokens,
            position=0 if head is None else head.position,
            bytes=sum(part.nelement() for part in parts) * self.lmm.dtype.itemsize,
            source_tokens=memory.document_tokens(self.lmm, self._document),
            source_sha256=source_hash(self._document.text, self._document.images),
        )
        return facts | {"context": asdict(entry)}
