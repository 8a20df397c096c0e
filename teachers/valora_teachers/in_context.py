"""A base model that has the document in its prompt."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.schema import Answer, Domain
from valora_teachers.base import TeacherError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from valora_data.schema import Sample, Task
    from valora_teachers.base import OnBatch


@dataclass(frozen=True)
class InContextOptions:
    """Numbers among the options.

    Attributes:
        max_tokens: Most tokens of an answer.
        batch: Questions that are answered at once; fewer about long documents.
    """

    max_tokens: int = 32
    batch: int = 64


TOKENS_AT_ONCE = 131_072
"""Tokens that are kept at once: those of a document for each question of a batch."""


class InContextTeacher:
    """Reads each document once, and answers its questions from keys and values.

    Args:
        base: The model: `tiny`, a folder, or a name on the hub.
        task: Task of the domain.
        prompt: Prompt of the domain.
        options: `max_tokens`, `batch`, `dtype` and `device`.
    """

    labels: tuple[str, ...] = ()

    def __init__(self, base: str, task: Task, prompt: str, options: Mapping[str, Any]) -> None:
        import torch

        from valora_data.contract.base_model import BaseModel, load_model

        self.task = task
        self._domain = Domain("document", task, (), prompt, 1.0)
        self._most = int(options.get("max_tokens", InContextOptions.max_tokens))
        self._batch = int(options.get("batch", InContextOptions.batch))
        dtype = getattr(torch, str(options.get("dtype", "float32")))
        self.model = BaseModel(base, *load_model(base, dtype))
        self.model.to(str(options.get("device", "cpu")))

    def answer(self, samples: Sequence[Sample], on_batch: OnBatch | None = None) -> list[Answer]:
        """Answer questions about their documents, one answer per sample in order.

        Args:
            samples: The samples.
            on_batch: Called after each batch.

        Raises:
            TeacherError: A sample asks about no document, or the model cannot read what it says.
        """
        from valora_data.contract.recall import read_head

        answers = [Answer()] * len(samples)
        done = 0
        by_document: dict[int, list[int]] = defaultdict(list)
        for row, sample in enumerate(samples):
            by_document[id(sample.document)].append(row)
        for rows in by_document.values():
            document = samples[rows[0]].document
            if document is None:
                raise TeacherError(
                    f"sample {samples[rows[0]].id} asks about no document: a teacher of kind "
                    "in_context needs a source of documents"
                )
            try:
                read = read_head(self.model, document.text, document.images)
                for part, texts in self._about(read, [samples[row] for row in rows]):
                    for place, text in zip(part, texts, strict=True):
                        answers[rows[place]] = Answer(answers=(text,))
                    done += len(part)
                    if on_batch is not None:
                        on_batch(done, len(samples))
            except DataError as error:
                name = samples[rows[0]].id.partition("/")[0]
                raise TeacherError(f"domain {name}: {error}") from error
        return answers

    def _about(
        self, read: tuple[Tensor, Tensor, int], samples: Sequence[Sample]
    ) -> Iterator[tuple[list[int], list[str]]]:
        """Yield places of some samples about one document, with the answers to them."""
        import torch

        from valora_data.contract.contexts import tail_tokens
        from valora_data.contract.recall import run_tails, write_on

        model = self.model
        keys, values, position = read
        by_length: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for place, sample in enumerate(samples):
            text = [{"type": "text", "text": self._domain.question(sample)}]
            ids = tail_tokens(model, [{"role": "user", "content": text}])
            by_length[len(ids)].append((place, ids))
        step = max(1, min(self._batch, TOKENS_AT_ONCE // keys.shape[2]))
        for length, alike in by_length.items():
            for start in range(0, len(alike), step):
                some = alike[start : start + step]
                rows = torch.tensor([ids for _, ids in some], device=model.device)
                with torch.no_grad():
                    hidden, cache = run_tails(
                        model,
                        model.model.get_input_embeddings()(rows),
                        position,
                        keys[:, None].expand(-1, len(some), -1, -1, -1),
                        values[:, None].expand(-1, len(some), -1, -1, -1),
                        cached=True,
                    )
                    texts = write_on(model, hidden, cache, position + length, self._most)
                yield [place for place, _ in some], texts
