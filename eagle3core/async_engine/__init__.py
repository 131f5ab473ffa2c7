"""One engine for coroutines: a thread makes the rounds, and tokens or text arrive where they are awaited.

Imports the engine. `rounds` is the thread and what callers ask it for, `streams` what each of them holds.
"""

from eagle3core.async_engine.rounds import THREAD_NAME, AsyncEngine
from eagle3core.async_engine.streams import AsyncTextStream, AsyncTokenStream

__all__ = ["THREAD_NAME", "AsyncEngine", "AsyncTextStream", "AsyncTokenStream"]
