"""The built-in domains as a format; what draws them is imported when they are drawn."""

from __future__ import annotations

from functools import partial

from valora_data.schema import Split, Task
from valora_data.sources.base import Source, SourceFormat, Splits


class ScenesFormat(SourceFormat):
    """The built-in domains: `Source.name` names one, `Source.counts` says how many samples."""

    drawn = True

    def supports(self, task: Task) -> bool:
        """Tasks with built-in domains."""
        from valora_data.sources.scenes.builtin import SCENES

        return task is Task.DETECTION or task in SCENES

    def open(self, source: Source) -> Splits:
        """The splits that `Source.counts` asks for."""
        from valora_data.sources.scenes.builtin import builtin_samples

        return {
            split: partial(
                builtin_samples, source.task, source.name, split, source.counts[split], source.seed
            )
            for split in Split
            if source.counts.get(split)
        }
