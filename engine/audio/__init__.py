"""Audio in: a file's bytes → mono samples at 16 kHz → log-mel features. numpy alone; belongs on a worker thread."""

from engine.audio.decode import SAMPLE_RATE, decode
from engine.audio.mel import HOP, LogMel
from engine.audio.resample import Samples

__all__ = ["HOP", "SAMPLE_RATE", "LogMel", "Samples", "decode"]
