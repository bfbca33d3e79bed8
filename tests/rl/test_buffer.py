"""What the trainer gets from the buffer, and when; `test_buffer_simulated` has both in virtual time."""

import itertools

import pytest
from simulated import group, rollout  # noqa
