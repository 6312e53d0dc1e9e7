"""Which images the device has rows of, and which the tower looks at in the step that is planned.

The rows of an image are needed while tokens of it are computed: for prompts, and again when a preempted sequence is
computed anew. They stay on the device until others need the room; then the tower looks at the image again. Whoever has
keys and values of an image needs neither.

Owned by the event-loop thread. A step drops and looks before it computes, so what is planned here is so on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bequest.engine.state.step import Stretch
from bequest.engine.types.image import Image, ImageSpan


class DeviceImages:
    def __init__(self, max_rows: int, max_patches: int, together: bool = False) -> None:
        """`max_patches`: that the tower works on in one step; a larger image is alone in its step. `together`: rows of
        an image see each other, so that one step computes all that are left of it."""
        self._max_rows = max_rows
        self._max_patches = max_patches
        self._held: dict[int, int] = {}  # first id → rows; the one that was not used for longest comes first
        self._num_rows = 0
        self._used: set[int] = set()  # by the step that is planned
        self._looked_at: list[Image] = []  # likewise
        self._dropped: list[int] = []
        self._ahead: set[int] = set()  # of those held: looked at before their requests came, and not used since
        self._together = together
        self._overdrew = False  # the step that is planned is longer than it was to be, for the end of an image
        self.num_runs = 0  # of the tower, so far

    @property
    def num_rows(self) -> int:
        """On the device."""
        return self._num_rows

    def begin_plan(self) -> None:
        self._used.clear()
        self._overdrew = False

    def lacks(self, spans: Sequence[ImageSpan], begin: int) -> bool:
        """Whether the tower has to look at an image before all tokens from `begin` on can be computed."""
        return any(span.end > begin and span.image.is_seen and span.image.first_id not in self._held for span in spans)

    def within(self, spans: Sequence[ImageSpan], stretch: Stretch) -> Stretch | None:
        """As much of the stretch as the step can compute: up to the first image whose rows it cannot have. None:
        nothing of it. An image that is computed at once may make it longer, once in a step."""
        if not spans:
            return stretch  # nearly always
        if self._together and not stretch.read_only:
            whole = self._whole(spans, stretch)
            if whole is None:
                return None
            stretch = whole
        end = stretch.begin + stretch.count
        for span in spans:
            if span.begin >= end or span.end <= stretch.begin:
                continue
            if not self._bring(span.image):
                count = span.begin - stretch.begin
                return msgspec.structs.replace(stretch, count=count) if count > 0 else None
        return stretch

    def _whole(self, spans: Sequence[ImageSpan], stretch: Stretch) -> Stretch | None:
        """Ends within no image: behind it, or before it if another one has made the step longer already."""
        end = stretch.begin + stretch.count
        cut = next((span for span in spans if span.begin < end < span.end and span.image.is_seen), None)
        if cut is None:
            return stretch
        if not self._overdrew:
            self._overdrew = True
            return msgspec.structs.replace(stretch, count=cut.end - stretch.begin)
        count = cut.begin - stretch.begin
        return msgspec.structs.replace(stretch, count=count) if count > 0 else None

    @property
    def planned(self) -> bool:
        """Whether the tower has something to look at."""
        return bool(self._looked_at)

    def look_ahead(self, image: Image) -> bool:
        """Has the step that is planned next look at an image that no token needs yet. False: it was, or cannot be."""
        if image.first_id in self._held or not self._bring(image):
            return False
        self._ahead.add(image.first_id)
        return True

    def take_ahead(self, used: set[int]) -> int:
        """How many of the images that the planned step uses were looked at for it before."""
        ahead = self._ahead & used
        self._ahead -= ahead
        return len(ahead)

    def take(self) -> tuple[tuple[int, ...], tuple[Image, ...]]:
        """What the step drops, and what its tower looks at."""
        taken = tuple(self._dropped), tuple(self._looked_at)
        self.num_runs += sum(image.is_seen for image in self._looked_at)
        self._dropped, self._looked_at = [], []
        return taken

    def _bring(self, image: Image) -> bool:
        if image.first_id in self._held:
            self._held[image.first_id] = self._held.pop(image.first_id)
        elif not self._fits_step(image) or not self._make_room(image.num_rows):
            return False
        else:
            self._held[image.first_id] = image.num_rows
            self._num_rows += image.num_rows
            self._looked_at.append(image)
        self._used.add(image.first_id)
        return True

    def _fits_step(self, image: Image) -> bool:
        patches = sum(other.num_patches for other in self._looked_at)
        return not self._looked_at or patches + image.num_patches <= self._max_patches

    def _make_room(self, num_rows: int) -> bool:
        """An image that is larger than all room there is has it alone."""
        while self._num_rows + num_rows > self._max_rows:
            oldest = next((first_id for first_id in self._held if first_id not in self._used), None)
            if oldest is None:
                return not self._held
            self._num_rows -= self._held.pop(oldest)
            self._ahead.discard(oldest)
            self._dropped.append(oldest)
        return True
