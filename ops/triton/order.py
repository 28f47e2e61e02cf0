"""How kernels of one stream overlap on devices that can (`griddepcontrol`, NVIDIA from sm90 on): the next one starts before this one ends.

A kernel with an `EARLY` parameter (`launch.early`) lets the next one start, does what needs nothing of the last one (its weights' first
tile, arrays that were there before the step), and waits for the last one. Without EARLY both functions do nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

AFTER_WAIT = tl.constexpr(False)
"""When the next kernel is let go. False: at once, so that the one behind it may follow while both wait, and several hold places on the
processors. True: when the wait is over, so that one at most waits beside the one that works. `benchmarks/gpu_layer.py --after-wait`."""


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY and not AFTER_WAIT:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
        if AFTER_WAIT:
            gdc_launch_dependents()
