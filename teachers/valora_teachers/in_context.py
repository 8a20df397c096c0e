"""The base model with the document in its prompt: what a memory should answer like."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from valora_data.errors import BundleError, DataError
from valora_data.schema import Answer, Sample, question_of
from valora_data.wording import first_line
from valora_teachers.base import Count, Dtype, OnBatch, Teacher, TeacherError, TeacherOptions

if TYPE_CHECKING:
    from torch import Tensor

TOKENS_AT_ONCE = 131_072  # that are kept: those of a document for each question of a batch


class InContextOptions(TeacherOptions):
    """Options of a base model that reads."""

    max_tokens: Count = 32  # most tokens of an answer
    batch: Count = 64  # questions that are answered at once; fewer about long documents
    dtype: Dtype = "float32"  # data type of the weights, such as ``float32``
    device: str = "cpu"  # device in torch's terms, such as ``cpu`` or ``cuda``


class InContext(Teacher):
    """Reads each document once, and answers its questions from keys and values."""

    options_type = InContextOptions
    without_effect: ClassVar[frozenset[str]] = frozenset({"device", "batch"})

    @classmethod
    def inputs(
        cls, weights: str | None, options: Mapping[str, Any], cache: Path | None
    ) -> dict[str, str]:
        """Hashes of the model's weights and of what prompts are made with."""
        from valora_data.contract.base_model import base_hash, processor_hash

        base = str(weights)
        try:
            return {"base": base_hash(base), "processor": processor_hash(base)}
        except BundleError as error:
            raise TeacherError(str(error)) from error

    def load(self, weights: Path | str) -> None:
        import torch

        from valora_data.contract.base_model import BaseModel, load_model

        if self.names or self.labels:
            raise TeacherError(
                "a teacher of kind in_context writes its answers: leave labels and names out"
            )
        dtype = getattr(torch, self.options.dtype)
        self.model = BaseModel(str(weights), *load_model(str(weights), dtype))
        try:
            self.model.to(self.options.device)
        except (RuntimeError, AssertionError) as error:
            device, said = self.options.device, first_line(error)
            raise TeacherError(f"{weights} cannot be moved to device {device}: {said}") from error

    def answer(self, samples: Sequence[Sample], on_batch: OnBatch | None = None) -> list[Answer]:
        answers = [Answer()] * len(samples)
        done = 0
        by_document: dict[int, list[int]] = defaultdict(list)
        for row, sample in enumerate(samples):
            by_document[id(sample.document)].append(row)
        for rows in by_document.values():
            try:
                for part, texts in self._about([samples[row] for row in rows]):
                    for place, text in zip(part, texts, strict=True):
                        answers[rows[place]] = Answer(answers=(text,))
                    done += len(part)
                    if on_batch is not None:
                        on_batch(done, len(samples))
            except DataError as error:
                name = samples[rows[0]].id.partition("/")[0]
                raise TeacherError(f"domain {name}: {error}") from error
        return answers

    def answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        return self.answer(samples)

    def _about(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], list[str]]]:
        """Yield places of some samples about one document, with the answers to them."""
        import torch

        from valora_data.contract.contexts import tail_tokens
        from valora_data.contract.recall import read_head, run_tails, write_on

        model, document = self.model, samples[0].document
        if document is None:
            raise TeacherError(
                f"sample {samples[0].id} asks about no document: a teacher of kind in_context "
                "needs a source of documents"
            )
        keys, values, position = read_head(model, document.text, document.images)
        by_length: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for place, sample in enumerate(samples):
            text = [{"type": "text", "text": question_of(self.prompt, sample)}]
            ids = tail_tokens(model, [{"role": "user", "content": text}])
            by_length[len(ids)].append((place, ids))
        step = max(1, min(self.options.batch, TOKENS_AT_ONCE // keys.shape[2]))
        for length, alike in by_length.items():
            for start in range(0, len(alike), step):
                some = alike[start : start + step]
                rows = torch.tensor([ids for _, ids in some], device=model.device)
                copies = (-1, len(some), -1, -1, -1)
                with torch.no_grad():
                    embedded = model.model.get_input_embeddings()(rows)
                    past: list[Tensor] = [x[:, None].expand(copies) for x in (keys, values)]
                    hidden, cache = run_tails(model, embedded, position, *past, cached=True)
                    texts = write_on(
                        model, hidden, cache, position + length, self.options.max_tokens
                    )
                yield [place for place, _ in some], texts
