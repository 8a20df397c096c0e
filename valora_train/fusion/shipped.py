"""Finished oracle tables, which are replayed: those that are shipped, one for a task, and files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.contract.files import expanded
from valora_train.errors import SettingsError
from valora_train.fusion.facts import domain_facts, trial_facts
from valora_train.fusion.oracle import OF_DOMAIN, OracleTable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from valora_train.settings import Settings

SHIPPED = "shipped"
FOLDER = Path(__file__).parent.parent / "oracles"


def shipped_tasks() -> list[str]:
    """Names of the tasks whose oracle tables are shipped."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def finished_table(settings: Settings) -> OracleTable:
    """The complete table of the chosen domains that `oracle.table` names.

    Args:
        settings: All settings.

    Raises:
        SettingsError: If there is no such table, or it is damaged, incomplete or of other domains;
            if a shipped one is of other settings or of another base model.
    """
    asked, task = str(settings.oracle.table), settings.task.name
    setting = f"oracle.table={asked}"
    if asked == SHIPPED and task not in shipped_tasks():
        raise SettingsError(
            f"no oracle table of task {task} is shipped, only of {', '.join(shipped_tasks())}: "
            "choose one of them, or train yours (oracle.table=null)"
        )
    file = FOLDER / f"{task}.json" if asked == SHIPPED else expanded(asked)
    table = OracleTable.read(file)
    domains = [domain.name for domain in settings.chosen()]
    table.require_domains(domains, setting)
    if missing := [domain for domain in table.domains if domain not in domains]:
        raise SettingsError(
            f"{setting} also holds {', '.join(missing)}, and is replayed with all of its domains: "
            "choose them, too (task.only)"
        )
    table.require_complete(setting)
    if asked == SHIPPED:
        _require_settings(table, settings)
    return table


def _require_settings(table: OracleTable, settings: Settings) -> None:
    """Refuse a shipped table of other settings; what the data are is known by their settings."""
    ours = trial_facts(settings)
    ours |= {f"{OF_DOMAIN}{domain.name}": domain_facts(domain) for domain in settings.chosen()}
    if changed := list(_changed(table.made_of, ours)):
        raise SettingsError(
            f"oracle.table={SHIPPED} was made with other settings ({', '.join(changed[:3])}): "
            "leave them as they are, or train a table of yours (oracle.table=null)"
        )


def _changed(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Names of our settings that differ, e.g. ``train.steps``; hashes of data are only theirs."""
    found = []
    for key, value in ours.items():
        other = theirs.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            found += _changed(other, value, f"{prefix}{key}.")
        elif value != other:
            found.append(f"{prefix}{key}")
    return found
