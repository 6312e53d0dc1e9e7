"""Audio in: a file's bytes → mono samples at 16 kHz → log-mel features. numpy alone; belongs on a worker thread."""

from bequest.engine.audio.decode import SAMPLE_RATE, decode, decoded_bytes
from bequest.engine.audio.mel import HOP, LogMel
from bequest.engine.audio.resample import Samples

__all__ = ["HOP", "SAMPLE_RATE", "LogMel", "Samples", "decode", "decoded_bytes"]
