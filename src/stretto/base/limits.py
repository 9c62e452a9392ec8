"""What the operating system lets this process do."""

from __future__ import annotations


def raise_file_limit() -> int | None:
    """Let this process open as many files and sockets as the system allows; the new limit, None on Windows.

    A request under way is a socket on both ends, and the usual soft limit of 1024 is less than a batch of
    rollouts.
    """
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS names a hard limit that it then refuses
        return soft
    return hard
