"""XML files of users' data sets, parsed by defusedxml, which expands no entities."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree.ElementTree import ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import parse

from valora_data.faults import FaultError, FaultKind

if TYPE_CHECKING:
    from pathlib import Path
    from xml.etree.ElementTree import Element


def parse_xml(path: Path) -> Element:
    """Root of an XML file.

    Raises:
        FaultError: If the file cannot be read or is no XML.
    """
    try:
        root: Element | None = parse(str(path)).getroot()
    except (OSError, ParseError, DefusedXmlException, ValueError, LookupError) as error:
        raise FaultError(
            FaultKind.FILE_MALFORMED, f"{path.name} is not valid XML ({error})"
        ) from error
    if root is None:
        raise FaultError(FaultKind.FILE_MALFORMED, f"{path.name} is empty")
    return root


def child_text(element: Element, path: str) -> str:
    """Text of an element below another one; empty if there is none."""
    return (element.findtext(path) or "").strip()


def number(text: str | None, where: str) -> float:
    """A number from a text.

    Raises:
        FaultError: If it is none.
    """
    try:
        return float(text or "")
    except ValueError as error:
        raise FaultError(FaultKind.BOX_MALFORMED, f"{where} {text!r} is no number") from error
