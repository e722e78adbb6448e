"""What becomes of a rank's things in a process that is forked from it: nothing.

`os.fork` copies the memory of a process, but none of its threads but one. Locks may be held for ever, queues are
served by nobody, and sockets and mapped files are the parent's own. A child that would end what it has inherited would
wait for threads that it does not have, or end the parent's connections. So in the child

* owners of such things (communicators, worlds) live on until the process has gone: nothing of theirs is destroyed,
* their `close` does nothing: they ask `is_inherited`,
* what was on its way never arrives: see `Flag`.
"""

from __future__ import annotations

import ctypes
import os
import weakref

__all__ = ["is_inherited", "keep_in_children", "this_process"]

_owners: weakref.WeakSet[object] = weakref.WeakSet()
_num_forks = 0  # between the first process that imported this and the present one


def this_process() -> int:
    """A number that no ancestor of this process has."""
    return _num_forks


def is_inherited(process: int) -> bool:
    """True for what was made when `this_process()` was another."""
    return process != _num_forks


def keep_in_children(owner: object) -> None:
    """In every child forked from now on, `owner` and all that it refers to is never destroyed."""
    _owners.add(owner)


def _after_in_child() -> None:
    global _num_forks
    _num_forks += 1
    for owner in list(_owners):  # not even at the end of the interpreter, which clears modules and their lists
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
    _owners.clear()


os.register_at_fork(after_in_child=_after_in_child)
