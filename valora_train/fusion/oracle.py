"""A table of what every domain reaches in every group of domains: packing with proof.

An oracle table holds, for each seed and each non-empty group of a task's domains, the accuracy of
every domain of the group in an adapter that is trained on all of them. From it the fewest adapters
follow exactly for any requirements (`valora_train.fusion.exact`), and strategies are replayed
without training (`valora_train.fusion.replay`). Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from valora_train.errors import SettingsError
from valora_train.stage import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SCHEMA_VERSION = 1
OF_DOMAIN = "domain "  # begins the keys of `made_of` that hold for one domain
MOST_DOMAINS = 10  # 1,023 groups; each further domain doubles the trainings
_REMEDY = "delete it and run command=oracle again, or name another table"


class Measured(NamedTuple):
    """Accuracy of a domain on the validation and on the test split; NaN if training diverged."""

    val: float
    test: float


class OracleTable:
    """Accuracies of the domains of a task in every group of them.

    Args:
        task: Name of the task.
        domains: The domains, 1 to 10.
        seeds: Seeds that the table is made for.
        made_of: What the accuracies depend on besides group and seed, as JSON: hashes of the data
            and of the base model, and the settings of training.
        largest: Largest value of each domain's metric; 1 where it is not given.

    Raises:
        SettingsError: If there are no domains, no seeds, or too many domains.

    Attributes:
        task: Name of the task.
        domains: The domains.
        seeds: Seeds that the table is made for.
        made_of: What the accuracies depend on.
        largest: Largest value of each domain's metric.
        teacher: Accuracy of each domain's teacher; domains without one are missing.
        measured: Hardware, date and command of the trainings, for people; may be empty.
    """

    def __init__(
        self,
        task: str,
        domains: Sequence[str],
        seeds: Sequence[int],
        made_of: Mapping[str, Any],
        largest: Mapping[str, float] | None = None,
    ) -> None:
        if not 1 <= len(domains) <= MOST_DOMAINS:
            count = len(domains)
            raise SettingsError(
                f"an oracle table of {count} domains takes {2**count - 1} trainings a seed: choose "
                f"1 to {MOST_DOMAINS} domains (task.only)"
            )
        if not seeds:
            raise SettingsError("an oracle table needs at least one seed")
        self.task = task
        self.domains = tuple(domains)
        self.seeds = tuple(seeds)
        self.made_of: dict[str, Any] = json.loads(json.dumps(made_of))
        self.largest = {name: (largest or {}).get(name, 1.0) for name in domains}
        self.teacher: dict[str, Measured] = {}
        self.measured = ""
        self._head_only: dict[int, dict[str, Measured]] = {seed: {} for seed in seeds}
        self._groups: dict[int, dict[frozenset[str], dict[str, Measured]]] = {
            seed: {} for seed in seeds
        }

    # --- content ------------------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """Hash of the domains and of what the accuracies depend on; neither seeds nor progress."""
        facts = {"task": self.task, "domains": self.domains, "made_of": self.made_of}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def groups(self) -> Iterator[tuple[str, ...]]:
        """Every non-empty group of domains: the small ones first, in the order of the domains."""
        for size in range(1, len(self.domains) + 1):
            yield from combinations(self.domains, size)

    def missing(self) -> list[tuple[int, tuple[str, ...]]]:
        """Seeds and groups that were not trained yet: seed by seed, small groups first."""
        return [
            (seed, group)
            for seed in self.seeds
            for group in self.groups()
            if frozenset(group) not in self._groups[seed]
        ]

    def put(self, seed: int, reached: Mapping[str, Measured]) -> None:
        """Enter what the domains of a group reached together.

        Args:
            seed: One of `seeds`.
            reached: Accuracies by domain; their names are the group.

        Raises:
            KeyError: If the seed or a domain is not of this table.
        """
        if not reached or not set(reached) <= set(self.domains):
            raise KeyError(f"expected a group of {self.domains}, got {sorted(reached)}")
        self._groups[seed][frozenset(reached)] = {
            name: Measured(*reached[name]) for name in self.domains if name in reached
        }

    def put_head_only(self, seed: int, domain: str, reached: Measured) -> None:
        """Enter what a domain reaches without LoRA."""
        if domain not in self.domains:
            raise KeyError(f"expected one of {self.domains}, got {domain}")
        self._head_only[seed][domain] = Measured(*reached)

    def reached(self, seed: int, group: Sequence[str] | frozenset[str]) -> dict[str, Measured]:
        """What the domains of a group reach together.

        Raises:
            KeyError: If the group was not trained with this seed.
        """
        return self._groups[seed][frozenset(group)]

    def head_only(self, seed: int) -> dict[str, Measured]:
        """What domains reach without LoRA; domains that were not measured are missing."""
        return self._head_only[seed]

    # --- checks -------------------------------------------------------------------------------

    def require_complete(self, name: str = "the oracle table") -> None:
        """Refuse a table that lacks a training.

        Args:
            name: The table for the message, such as its path.

        Raises:
            SettingsError: If a group or an accuracy without LoRA is missing.
        """
        missing = self.missing()
        remedy = "run command=oracle with the same settings again, which continues where it ended"
        if missing:
            seed, group = missing[0]
            count = len(self.seeds) * (2 ** len(self.domains) - 1)
            raise SettingsError(
                f"{name} is incomplete: {len(missing)} of {count} trainings are missing (first: "
                f"{', '.join(group)} with seed {seed}): {remedy}"
            )
        for seed in self.seeds:
            for domain in self.domains:
                if domain not in self._head_only[seed]:
                    raise SettingsError(
                        f"{name} is incomplete: the accuracy of {domain} without LoRA is missing "
                        f"for seed {seed}: {remedy}"
                    )

    def require_domains(self, domains: Sequence[str], name: str = "the oracle table") -> None:
        """Refuse a table that lacks a domain.

        Args:
            domains: The domains of this run; the table may have more.
            name: The table for the message, such as its path.

        Raises:
            SettingsError: If a domain is unknown to the table.
        """
        if unknown := [domain for domain in domains if domain not in self.domains]:
            raise SettingsError(
                f"{name} knows no domain {', '.join(unknown)}, only {', '.join(self.domains)}: run "
                "command=oracle for these domains, or choose with task.only"
            )

    def write(self, file: Path) -> None:
        """Write the table as JSON, also an unfinished one; the file is replaced at once."""
        value = {
            "schema_version": SCHEMA_VERSION,
            "task": self.task,
            "measured": self.measured,
            "identity": self.identity,
            "made_of": self.made_of,
            "domains": list(self.domains),
            "largest": self.largest,
            "seeds": list(self.seeds),
            "teacher": _as_json(self.teacher),
            "head_only": {str(seed): _as_json(self._head_only[seed]) for seed in self.seeds},
            "groups": {
                str(seed): {
                    ",".join(group): _as_json(self._groups[seed][frozenset(group)])
                    for group in self.groups()
                    if frozenset(group) in self._groups[seed]
                }
                for seed in self.seeds
            },
        }
        write_json(file, value)

    @classmethod
    def read(cls, file: Path) -> OracleTable:
        """Read a table, complete or not.

        Raises:
            SettingsError: If there is no such file, or it holds no oracle table.
        """
        try:
            value = read_json(file)
        except OSError as error:
            raise SettingsError(
                f"cannot read the oracle table {file} ({error.strerror}): make it with "
                "command=oracle, or name another file"
            ) from error
        except ValueError as error:
            raise SettingsError(f"{file} is no JSON, or was cut short: {_REMEDY}") from error
        if not isinstance(value, dict) or "schema_version" not in value or "groups" not in value:
            raise SettingsError(f"{file} is no oracle table: name a file that command=oracle wrote")
        if value["schema_version"] != SCHEMA_VERSION:
            raise SettingsError(
                f"{file} has version {value['schema_version']} of the oracle table's format, but "
                f"this valora-train reads version {SCHEMA_VERSION}: run command=oracle again"
            )
        try:
            table = _from_json(cls, value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SettingsError(
                f"the oracle table {file} is damaged ({_why(error)}): {_REMEDY}"
            ) from error
        if table.identity != value.get("identity"):
            raise SettingsError(
                f"the oracle table {file} was changed: its identity is not the hash of its domains "
                f"and of what it was made of: {_REMEDY}"
            )
        return table


def _from_json(cls: type[OracleTable], value: dict[str, Any]) -> OracleTable:
    seeds = [_seed(seed) for seed in value["seeds"]]
    table = cls(value["task"], value["domains"], seeds, value["made_of"], value["largest"])
    table.measured = str(value.get("measured", ""))
    table.teacher = {name: _measured(table, name, pair) for name, pair in value["teacher"].items()}
    for seed in seeds:
        for name, pair in value["head_only"][str(seed)].items():
            table.put_head_only(seed, name, _measured(table, name, pair))
        for group, reached in value["groups"][str(seed)].items():
            if set(group.split(",")) != set(reached):
                raise ValueError(f"group {group} has accuracies of {', '.join(reached) or 'none'}")
            table.put(seed, {name: _measured(table, name, reached[name]) for name in reached})
    return table


def _seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no seed")
    return value


def _measured(table: OracleTable, domain: str, pair: Any) -> Measured:
    """An accuracy pair of the file; null is NaN."""
    largest = table.largest[domain]
    values = [math.nan if value is None else value for value in pair]
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (math.isnan(value) or 0.0 <= value <= largest):
            raise ValueError(f"{value!r} is no accuracy of {domain}")
    if len(values) != 2:
        raise ValueError(f"{pair!r} is no pair of accuracies of {domain}")
    return Measured(*map(float, values))


def _as_json(reached: Mapping[str, Measured]) -> dict[str, list[float | None]]:
    return {
        name: [None if math.isnan(value) else value for value in pair]
        for name, pair in reached.items()
    }


def _why(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
