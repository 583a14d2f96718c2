"""How glibc treats memory that was freed."""

import ctypes

# mallopt's numbers of its parameters, from malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks for the next update; call it before the first threads are started.

    By itself it hands large ones back to the system at every free, and the next update faults them in again, page by
    page. Blocks of 256 MB and more, replays mostly, still go back.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_ARENA_MAX, 1)  # other threads' arenas would be too small for XLA's work space
        if not libc.mallopt(M_MMAP_THRESHOLD, 2**28):
            libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that an older glibc allows
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)
        libc.mallopt(M_TOP_PAD, 2**26)
    except (OSError, AttributeError):
        pass  # another C library
