"""What tests/forked.py has imported before it forks: whatever a server, a program of the documentation or
another run of some tests does."""

import gc

import openai
import pytest
import torch

import bequest
import bequest.engine.build
import bequest.engine.runner.cpu
import bequest.engine.runner.prepare
import bequest.engine.runner.sleeping
import bequest.server.__main__
import bequest.server.app
import bequest.server.process.serve

__all__ = ["bequest", "openai", "pytest", "torch"]

gc.freeze()  # forks would copy the pages that a collection writes to
