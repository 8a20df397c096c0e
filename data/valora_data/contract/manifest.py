"""What ``bundle.json`` holds, as pydantic checks it; apart, as the engine does without pydantic."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from valora_data.contract.contexts import ADAPTER, PREFIX
from valora_data.contract.files import expect, shown

# Versions of the format. Since 2, the adapter of a domain may be null, and a bundle may have no
# adapter at all; 3 is that of bundles with contexts, which earlier servers would ignore.
READABLE = FIRST, SCHEMA_VERSION, WITH_CONTEXTS = (1, 2, 3)
MAX_FILES = 10_000
MAX_TOKENS = 1 << 20  # most of a memory
PROMPT_LENGTH = 32_768  # most characters of a domain's prompt
Count = Annotated[int, Field(strict=True, ge=0)]
Figure = Annotated[float, Field(allow_inf_nan=False)] | None


@checked_dataclass(frozen=True)
class ContextEntry:
    """A context in the manifest; the domain of the same name says how well it answers.

    `position`, with `PREFIX` that of the tail's first token, may be more or less than `tokens`.
    """

    form: Annotated[str, Field(pattern="^(adapter|prefix|memory_tokens)$")]
    tokens: Annotated[Count, Field(le=MAX_TOKENS)]  # of the memory; 0 without a file
    position: Count
    bytes: Count
    source_tokens: Count  # of the document's head
    source_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # see `source_hash`
    file: str | None = None  # None with `ADAPTER`
    encoder: str | None = None  # name of what made memory tokens, None if they were trained

    @model_validator(mode="after")
    def _fits(self) -> Self:
        has_file = self.form != ADAPTER
        expect((self.file is not None) == has_file, "file", "one but for an adapter", self.file)
        expect((self.tokens > 0) == has_file, "tokens", "others for this form", self.tokens)
        expect(self.position or self.form != PREFIX, "position", "1 or more", self.position)
        return self


context_entry = TypeAdapter(ContextEntry).validate_python
"""Read an entry of a manifest's `contexts`; pydantic's `ValidationError` says what is wrong."""


class _Part(BaseModel):
    """A part of a manifest that readers rely on; docs/reference/bundle.md says what it means."""

    model_config = ConfigDict(strict=True)


class _Base(_Part):
    id: str
    sha256: str
    quantize: Literal["nf4"] | None = None
    dtypes: list[str] = []


class _Adapter(_Part):
    path: str
    decode_only: bool | None = None


class _Accuracy(_Part):
    test: Figure = None
    teacher: Figure = None


class _Domain(_Part):
    adapter: str | None  # None where the base model answers
    head: str | None = None
    task: str | None = None
    metric: str | None = None
    prompt: Annotated[str, Field(max_length=PROMPT_LENGTH)] | None = None
    media: str | None = None
    labels: list[str] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    required: Figure = None
    threshold: Figure = None
    accuracy: _Accuracy | None = None


class _Encoder(_Part):
    path: str
    tokens: int


class Manifest(_Part):
    """A whole manifest."""

    schema_version: int
    files: Annotated[dict[str, str], Field(max_length=MAX_FILES)]
    name: Annotated[str, Field(pattern=r"^[^@/]*[^@/\s][^@/]*$")]
    version: Annotated[int, Field(ge=1)]
    base: _Base
    adapters: dict[str, _Adapter]
    domains: dict[str, _Domain]
    contexts: dict[str, ContextEntry] | None = None
    encoders: dict[str, _Encoder] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check that the entries fit together; a `ValueError` names one that does not."""
        for domain, facts in self.domains.items():
            if facts.adapter is not None or self.schema_version == FIRST:
                field = f"domains.{shown(domain)}.adapter"
                expect(facts.adapter in self.adapters, field, "an adapter", facts.adapter)
        contexts, version = self.contexts or {}, self.schema_version
        expect(not contexts or version >= WITH_CONTEXTS, "schema_version", "3", version)
        for context, entry in contexts.items():
            field = f"contexts.{shown(context)}"
            expect(context in self.domains, field, "a domain of the same name", None)
            if entry.file is None:
                by = self.domains[context].adapter
                expect(by, f"{field}.form", "an adapter of its domain", by)
            else:
                expect(entry.file in self.files, f"{field}.file", "one with a sha256", entry.file)
            known = entry.encoder is None or entry.encoder in (self.encoders or {})
            expect(known, f"{field}.encoder", "an encoder", entry.encoder)
        return self
