"""Property tests draw the same examples in every run, and no example has a time limit: both would make tests flaky."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pronghorn", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("pronghorn")
