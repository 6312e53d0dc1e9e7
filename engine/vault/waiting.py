"""Leases in files whose adapters are not loaded: they can be continued when these are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bequest.engine.types.estate import Manifest


class WaitingLeases:
    """By tenant, and by id or name."""

    def __init__(self, find_adapter: Callable[[str], Any]) -> None:
        """`find_adapter`: by name and content; None where it is not loaded."""
        self._find_adapter = find_adapter
        self._manifests: dict[tuple[str, str], Manifest] = {}

    def add(self, manifest: Manifest) -> None:
        deed = manifest.deed
        for reference in filter(None, (deed.id, deed.name)):
            self._manifests[deed.identity.tenant, reference] = manifest

    def get(self, tenant: str, reference: str) -> Manifest | None:
        return self._manifests.get((tenant, reference))

    def take(self, manifest: Manifest) -> bool:
        """Whether it waited still."""
        references = [reference for reference, own in self._manifests.items() if own is manifest]
        for reference in references:
            del self._manifests[reference]
        return bool(references)

    def adapter_of(self, tenant: str, reference: str) -> str | None:
        """The name of the adapter that a lease waits for; None: there is no such lease, or it waits no more."""
        manifest = self.get(tenant, reference)
        if manifest is None or self._find_adapter(manifest.deed.identity.adapter) is not None:
            return None
        return manifest.deed.identity.adapter.partition("=")[0]
