"""Compiled programs: kept on disk from one process to the next, and timed."""

import jax

from jaxkv.hub import cache_folder


def keep_compiled_programs() -> None:
    """Switches on XLA's persistent compilation cache, in jaxkv's cache folder, unless the user has
    configured one.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        # The small programs around the loops add up to seconds too.
        name = "jax_persistent_cache_min_compile_time_secs"
        jax.config.update(name, min(0.1, getattr(jax.config, name)))


class CompileClock:
    """Seconds spent tracing and compiling since it was made, told by JAX itself."""

    _seconds = 0.0
    _listening = False

    def __init__(self) -> None:
        if not CompileClock._listening:
            CompileClock._listening = True
            jax.monitoring.register_event_duration_secs_listener(CompileClock._listen)
        self._start = CompileClock._seconds

    @property
    def seconds(self) -> float:
        return CompileClock._seconds - self._start

    @staticmethod
    def _listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            CompileClock._seconds += duration_secs
