"""Ctrl-C at a chosen line of whatever runs: a real signal, handled as Python handles it between two lines."""

import signal
import sys
from collections import Counter


def lines_of(work, where):
    """All lines that a call runs in files that `where` accepts: (file, number), in order."""
    found = []

    def trace(frame, event, argument):
        if not where(frame.f_code.co_filename):
            return None
        if event == "line":
            found.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return found


def first_and_last(lines):
    """For every line, the first and the last time that it ran: places in the list, in order."""
    first, last = {}, {}
    for place, line in enumerate(lines):
        first.setdefault(line, place)
        last[line] = place
    return sorted({*first.values(), *last.values()})


def interrupted(work, line, time, interrupt, where):
    """Run the work and interrupt it before a line runs for a time.

    Args:
        work: The call.
        line: (file, number).
        time: Which time the line runs, from 1.
        interrupt: Called then.
        where: As in `lines_of`.

    Returns:
        Whether it came to that, as what is remembered between calls takes fewer lines; and what was raised.
    """
    seen = Counter()

    def trace(frame, event, argument):
        if not where(frame.f_code.co_filename):
            return None
        if event == "line" and (frame.f_code.co_filename, frame.f_lineno) == line:
            seen[line] += 1
            if seen[line] == time:
                sys.settrace(None)
                interrupt()
        return trace

    sys.settrace(trace)
    try:
        work()
    except BaseException as error:
        return seen[line] >= time, error
    finally:
        sys.settrace(None)
    return seen[line] >= time, None


def by_signal():
    """What Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def by_signals():
    """What someone impatient does."""
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def by_exception():
    """An interrupt that no handler of signals can put off."""
    raise KeyboardInterrupt
