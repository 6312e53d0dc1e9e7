"""The masks of a step on their way to the device: made after the step was staged, so they have a copy of their own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.masks import StepMasks, mask_words
from engine.runner.staging import Field, Staging, StagingLayout


class DeviceMasks:
    """Takes its memory when the first grammar comes: most servers see none."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_rows, mask_words(vocab_size))
        self._device = device
        self._staging: Staging | None = None

    def send(self, masks: StepMasks) -> Tensor:
        """Waits for the masks and queues their copy; int32 [rows, words] on the device."""
        filled = masks.wait()
        if self._staging is None:
            self._staging = Staging(StagingLayout([Field("masks", self._shape, torch.int32)]), self._device)
        np.copyto(self._staging.arrays()["masks"][: masks.num_rows], filled)
        self._staging.send(filled.nbytes)
        return self._staging.on_device("masks")[: masks.num_rows]
