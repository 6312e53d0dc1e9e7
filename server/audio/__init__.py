"""Transcriptions and translations: the form, windows of audio, formats."""
