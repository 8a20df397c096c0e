"""Ways to answer about documents, measured on the same questions.

Each way is a function of a `Reader` and a number of tokens; register another one in `METHODS`.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract.contexts import ADAPTER, MEMORY_TOKENS, PREFIX, around_memory
from valora_data.contract.recall import head_inputs, run_tails
from valora_data.errors import DataError
from valora_data.schema import Answer, Document, Split
from valora_data.wording import plural
from valora_train.fusion.samples import DomainData
from valora_train.fusion.trainer import Trainer
from valora_train.model import memory
from valora_train.stages.encoder_training import ContextEncoder, train_encoder
from valora_train.tasks.context import ContextTask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from valora_data.schema import Sample
    from valora_train.fusion.samples import LabelledSplit
    from valora_train.model.lmm import Lmm
    from valora_train.model.memory import AnyMemory
    from valora_train.settings import Settings

    OnStep = Callable[..., None]

NAME = "context"
"""Name of the adapters that are trained here."""


@dataclass(frozen=True)
class Answered:
    """What a way answers to the test questions of each document."""

    said: dict[str, list[tuple[str, bool]]]  # each answer with whether it is right, by document
    bytes: float  # that are kept for a document, its share of an adapter included
    tokens: float  # that stand before a question, on average
    seconds: float  # of learning for a document


class Reader:
    """The base model with the documents and their questions."""

    def __init__(
        self, settings: Settings, lmm: Lmm, data: Mapping[str, DomainData], on_step: OnStep
    ) -> None:
        self.settings, self.lmm, self.on_step = settings, lmm, on_step
        self._data = data
        self.names = tuple(data)

    def data(self, name: str, form: str = PREFIX, tokens: int = 1) -> DomainData:
        """A document's samples, with a task that remembers it in a form."""
        changed = copy.copy(self._data[name])
        known = changed.task
        assert isinstance(known, ContextTask)
        options = known.settings.options.get("context", {}) | {"form": form, "tokens": tokens}
        settings = replace(known.settings, options={"context": options})
        changed.task = made = ContextTask(known.domain, settings, known.lmm)
        made.studied = known.studied
        made.prepare(self.test(name).samples)
        return changed

    def document(self, name: str) -> Document:
        """A document."""
        found = self._data[name].splits[Split.TEST].samples[0].document
        assert found is not None, "sources of task context have one"
        return found

    def check(self, tokens: int) -> None:
        """Check that every document has at least as many tokens as a memory is asked to have."""
        for name in self.names:
            length = memory.document_tokens(self.lmm, self.document(name))
            if tokens > length:
                raise DataError(
                    f"the document of domain {name} has {plural(length, 'token')}, fewer than the "
                    f"{tokens} of a memory: lower --tokens"
                )

    def test(self, name: str) -> LabelledSplit:
        """The test questions about a document, encoded, with their answers."""
        return self._data[name].splits[Split.TEST]

    def answers(self, name: str, memories: Sequence[AnyMemory | None]) -> list[tuple[str, bool]]:
        """The active model's answers to the test questions, and whether they are right."""
        part = self.test(name)
        most = self.settings.heads.max_tokens
        texts = memory.write(self.lmm, part.inputs, memories, most)
        truth = [sample.answer for sample in part.samples]
        scores = ContextTask.measure([Answer(answers=(text,)) for text in texts], truth)
        return list(zip(texts, map(bool, scores.each), strict=True))

    def without_training(
        self, remember: Callable[[str, Sample], tuple[AnyMemory | None, int]]
    ) -> Answered:
        """Answer from memories that take no training."""
        self.lmm.adapters.activate(None)
        said, size, count, questions = {}, 0.0, 0.0, 0
        for name in self.names:
            found = [remember(name, sample) for sample in self.test(name).samples]
            said[name] = self.answers(name, [one for one, _ in found])
            count += sum(tokens for _, tokens in found)
            questions += len(found)
            size += memory_bytes(found[0][0], self.lmm)
        return Answered(said, size / len(self.names), count / max(questions, 1), 0.0)

    def adapter_bytes(self, name: str) -> int:
        """Bytes of an adapter."""
        return sum(w.nelement() for w in self.lmm.adapters.parameters(name).values()) * 4


def memory_bytes(found: AnyMemory | None, lmm: Lmm) -> float:
    """Bytes of a memory in the model's type."""
    if found is None:
        return 0.0
    each = torch.empty((), dtype=lmm.dtype).element_size()
    return float(sum(part.nelement() for part in found.parameters()) * each)


# ------------------------------------------------------------------ without training


def question_alone(reader: Reader, tokens: int) -> Answered:
    """Nothing stands before the question: what can be guessed."""
    return reader.without_training(lambda name, sample: (None, 0))


def in_prompt(reader: Reader, tokens: int) -> Answered:
    """The whole document stands in the prompt."""
    read = {name: memory.read_document(reader.lmm, reader.document(name)) for name in reader.names}
    return reader.without_training(lambda name, sample: (read[name], read[name].tokens))


def truncated(reader: Reader, tokens: int) -> Answered:
    """The beginning of the document stands in the prompt, cut to the memory's size."""
    found = {
        name: read_beginning(reader.lmm, reader.document(name), tokens) for name in reader.names
    }
    return reader.without_training(lambda name, sample: (found[name], found[name].tokens))


def read_beginning(lmm: Lmm, document: Document, tokens: int) -> memory.Prefix:
    """What the active model keeps of a document's beginning; of an album, as many whole images."""
    for kept in range(len(document.images), 0, -1):
        found = replace(document, images=document.images[:kept])
        if memory.document_tokens(lmm, found) <= tokens:
            return memory.read_document(lmm, found)
    before, after = around_memory(lmm)
    room = tokens - len(before) - len(after)
    if room < 1:
        raise DataError(f"{plural(tokens, 'token')} have no room for a document: raise --tokens")
    ids = lmm.tokenizer(document.text, add_special_tokens=False)["input_ids"]
    rows = torch.tensor([[*before, *ids[:room], *after]], device=lmm.device)
    with lmm.precision(), torch.no_grad():
        read = run_tails(lmm, lmm.model.get_input_embeddings()(rows), 0, cached=True)[1].layers
    keys, values = (torch.cat([getattr(one, part) for one in read]) for part in ("keys", "values"))
    return memory.Prefix(keys.float(), values.float(), rows.shape[1])


def bm25(reader: Reader, tokens: int) -> Answered:
    """The lines that BM25 ranks highest for the question, as many as fit into the tokens."""
    import bm25s

    retrievers: dict[str, tuple[Any, list[str]]] = {}
    for name in reader.names:
        chunks = chunks_of(reader.document(name).text, tokens)
        retriever = bm25s.BM25()
        retriever.index(
            bm25s.tokenize(chunks, stopwords=None, show_progress=False), show_progress=False
        )
        retrievers[name] = retriever, chunks

    def remember(name: str, sample: Sample) -> tuple[AnyMemory | None, int]:
        retriever, chunks = retrievers[name]
        query = bm25s.tokenize([sample.prompt or ""], stopwords=None, show_progress=False)
        ranked = retriever.retrieve(query, k=len(chunks), show_progress=False)[0][0].tolist()
        found = _fitting(reader.lmm, [chunks[int(place)] for place in ranked], tokens)
        return (None, 0) if found is None else (found, found.tokens)

    found = reader.without_training(remember)
    size = sum(len(reader.document(name).text.encode()) for name in reader.names)
    return replace(found, bytes=size / len(reader.names))


def chunks_of(text: str, tokens: int) -> list[str]:
    """Lines of a text, or pieces of them of at most half as many words as there are tokens."""
    words = max(tokens // 4, 4)
    found = []
    for line in text.splitlines():
        parts = line.split()
        found += [" ".join(parts[at : at + words]) for at in range(0, len(parts), words)]
    return found


def _fitting(lmm: Lmm, chunks: Sequence[str], tokens: int) -> memory.Prefix | None:
    """A prompt with the first chunks whose head has at most as many tokens."""
    kept: list[str] = []
    for chunk in chunks:
        text = "\n".join([*kept, chunk])
        if head_inputs(lmm, text)["input_ids"].shape[1] > tokens:
            break
        kept.append(chunk)
    return memory.read_document(lmm, Document("\n".join(kept))) if kept else None


# ------------------------------------------------------------------ with training


def trained_memory(form: str) -> Callable[[Reader, int], Answered]:
    """A memory of a form, trained on the frozen base model."""

    def method(reader: Reader, tokens: int) -> Answered:
        said, size, start = {}, 0.0, time.monotonic()
        for name in reader.names:
            trainer = _trainer(reader, [name], form, tokens)
            seed = reader.settings.train.seed
            head: Any = trainer.train_head_only(name, seed, reader.on_step)
            reader.lmm.adapters.activate(None)
            said[name] = reader.answers(name, [head] * len(reader.test(name).samples))
            size += memory_bytes(head, reader.lmm)
        count = len(reader.names)
        return Answered(said, size / count, tokens, (time.monotonic() - start) / count)

    return method


def shared_adapter(form: str) -> Callable[[Reader, int], Answered]:
    """An adapter that all documents share, with a memory of each, or alone (closed book)."""

    def method(reader: Reader, tokens: int) -> Answered:
        start = time.monotonic()
        trainer = _trainer(reader, reader.names, form, tokens)
        settings = reader.settings.train
        trainer.open(NAME, settings.seed)
        try:
            trainer.train(
                NAME, reader.names, held=(), rehearse=False, seed=settings.seed,
                on_step=reader.on_step,
            )  # fmt: skip
            seconds = time.monotonic() - start
            reader.lmm.adapters.activate(NAME)
            said, size = {}, float(reader.adapter_bytes(NAME))
            for name in reader.names:
                head: Any = trainer.heads(NAME).get(name)
                said[name] = reader.answers(name, [head] * len(reader.test(name).samples))
                size += memory_bytes(head, reader.lmm)
        finally:
            trainer.close(NAME)
        count = len(reader.names)
        before = 0 if form == ADAPTER else tokens
        return Answered(said, size / count, before, seconds / count)

    return method


def _trainer(reader: Reader, names: Sequence[str], form: str, tokens: int) -> Trainer:
    data = {name: reader.data(name, form, max(tokens, 1)) for name in names}
    return Trainer(reader.lmm, data, reader.settings.train)


def next_token(reader: Reader, tokens: int) -> Answered:
    """LoRA trained to predict the documents' next tokens; closed book (the paper's baseline 3)."""
    lmm, settings = reader.lmm, reader.settings.train
    lmm.adapters.add(NAME, settings.seed, decode_only=False)
    start = time.monotonic()
    try:
        weights = list(lmm.adapters.parameters(NAME).values())
        optimizer = torch.optim.AdamW(weights, lr=settings.lr, weight_decay=settings.weight_decay)
        ids = [
            head_inputs(lmm, reader.document(name).text, reader.document(name).images)["input_ids"]
            for name in reader.names
        ]
        steps = settings.steps_for(len(reader.names), 0)
        for step in range(steps):
            row = ids[step % len(ids)].to(lmm.device)
            optimizer.zero_grad(set_to_none=True)
            loss = _next_token_loss(lmm, row)
            loss.backward()
            nn.utils.clip_grad_norm_(weights, settings.clip)
            optimizer.step()
            reader.on_step(step + 1, steps, float(loss.detach()))
        seconds = time.monotonic() - start
        said = {
            name: reader.answers(name, [None] * len(reader.test(name).samples))
            for name in reader.names
        }
        size = reader.adapter_bytes(NAME)
    finally:
        lmm.adapters.remove(NAME)
    count = len(reader.names)
    return Answered(said, size / count, 0, seconds / count)


def _next_token_loss(lmm: Lmm, ids: Tensor) -> Tensor:
    with lmm.precision():
        embedded = lmm.model.get_input_embeddings()(ids)
        hidden = lmm.language_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    return F.cross_entropy(lmm.logits(hidden[0, :-1]), ids[0, 1:])


class EncoderAndDecoder(ContextEncoder):
    """The paper's: the decoder has an adapter of its own, which is trained together with it."""

    adapters = ("encoder", "decoder")
    decoder = "decoder"


def papers(
    reconstruct: bool, tune: bool, *, apart: bool = False
) -> Callable[[Reader, int], Answered]:
    """The paper's method: an encoder makes memory tokens, a decoder adapter answers from them.

    Documents are reconstructed first (§3.2), then asked about (§3.3); `apart` measures each half of
    them with an encoder of the other half, which has never read it.
    """

    def method(reader: Reader, tokens: int) -> Answered:
        start, size = time.monotonic(), 0.0
        said: dict[str, list[tuple[str, bool]]] = {}
        names = reader.names
        folds = (
            [(names[::2], names[1::2]), (names[1::2], names[::2])] if apart else [(names, names)]
        )
        for learnt, measured in folds:
            found, size = _encoded(reader, learnt, measured, tokens, reconstruct, tune)
            said |= found
        count = len(names)
        return Answered(said, size, tokens, (time.monotonic() - start) / count)

    return method


def _encoded(
    reader: Reader,
    learnt: Sequence[str],
    measured: Sequence[str],
    tokens: int,
    reconstruct: bool,
    tune: bool,
) -> tuple[dict[str, list[tuple[str, bool]]], float]:
    """Train an encoder on some documents, and answer about others from what it makes of them."""
    lmm, settings = reader.lmm, reader.settings.train
    module = EncoderAndDecoder(lmm, tokens, settings.seed)
    steps = settings.steps_for(len(learnt), 0)
    try:
        asked = {name: (reader.document(name), reader.data(name).inputs) for name in learnt}
        train_encoder(
            module, asked, reconstruct=steps if reconstruct else 0,
            steps=steps if tune else 0, lr=settings.lr, seed=settings.seed, on_step=reader.on_step,
        )  # fmt: skip
        said, each = {}, 0.0
        for name in measured:
            with torch.no_grad():
                made: Any = memory.MemoryTokens(module.encode(reader.document(name)))
            lmm.adapters.activate(module.decoder)
            said[name] = reader.answers(name, [made] * len(reader.test(name).samples))
            each = memory_bytes(made, lmm)
        size = sum(map(reader.adapter_bytes, module.adapters[1:])) / len(learnt) + each
    finally:
        for adapter in module.adapters:
            lmm.adapters.remove(adapter)
    return said, size


@dataclass(frozen=True)
class Method:
    """A way to answer about documents.

    Attributes:
        title: What the table calls it.
        run: Answers the test questions of all documents.
        sized: Whether it depends on the number of tokens.
        documents: Fewest documents that it can be measured with.
    """

    title: str
    run: Callable[[Reader, int], Answered]
    sized: bool = True
    documents: int = 1


METHODS: dict[str, Method] = {
    "question_alone": Method("question alone", question_alone, sized=False),
    "in_prompt": Method("document in the prompt", in_prompt, sized=False),
    "truncated": Method("document cut to as many tokens", truncated),
    "bm25": Method("BM25, as many tokens", bm25),
    "next_token": Method("LoRA, next tokens, closed book", next_token, sized=False),
    "adapter": Method("LoRA, self-study, closed book", shared_adapter(ADAPTER), sized=False),
    "paper": Method("encoder and decoder LoRA (paper)", papers(True, True)),
    "paper_no_reconstruction": Method("the same without reconstruction", papers(False, True)),
    "paper_no_tuning": Method("the same without fine-tuning", papers(True, False)),
    "paper_apart": Method(
        "paper, documents it never read", papers(True, True, apart=True), documents=2
    ),
    "memory_tokens": Method("memory tokens", trained_memory(MEMORY_TOKENS)),
    "memory_tokens_adapter": Method("memory tokens and shared LoRA", shared_adapter(MEMORY_TOKENS)),
    "prefix": Method("prefix", trained_memory(PREFIX)),
    "prefix_adapter": Method("prefix and shared LoRA", shared_adapter(PREFIX)),
}
"""The ways by name, in the order of the table."""
REFERENCE = "in_prompt"
"""The way that the others are compared with."""
