"""What a lease in files need not write, because the files of its parent have it. Event-loop thread."""

from __future__ import annotations

from bequest.engine.inheritance.estates import Leaving
from bequest.engine.state.record import Record
from bequest.engine.types.estate import NO_BLOCK, StoredBlock


def blocks_of_parent(
    record: Record, parent: Record | None, leaving: Leaving, block_size: int, num_strips: int
) -> dict[int, StoredBlock]:
    """Whole blocks: KV of the same tokens. By entry of the record's tables. The parent may have been given more since
    it was written."""
    lineage = record.identity.lineage
    if lineage is None or parent is None or parent.stored is None or parent.lost or parent.salt != record.salt:
        return {}
    held = parent.kept.get(lineage.choice)
    choice = next((c for c in parent.stored.deed.choices if c.index == lineage.choice), None)
    found: dict[int, StoredBlock] = {}
    if held is None or choice is None:
        return found
    for index, table in leaving.tables.items():
        kept = record.kept[index]
        alike = min(held.tokens.common_prefix(kept.tokens), choice.computed, kept.computed)
        count = alike // block_size * num_strips
        alikes = zip(table.entries[:count], choice.rows[:count], strict=True)
        found |= {entry: parent.stored.blocks[row] for entry, row in alikes if entry and row != NO_BLOCK}
    return found
