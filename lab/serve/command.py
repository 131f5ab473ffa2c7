"""`eagle3lab serve`: an engine, a socket, and signals that end both in order."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.errors import EXIT_PASSED, RunFailed
from lab.options.serve import LOOKUP_NAMES, ServeOptions

if TYPE_CHECKING:
    from eagle3core import EngineConfig, Pipeline, SpeculativeConfig
    from lab.serve.service import Service

NEEDS = ("starlette", "uvicorn")
CLOSING_S = 10  # for clients to read what they are told when the server ends


def run(options: ServeOptions) -> int:
    """Serves until a signal ends it; the exit code.

    Raises:
        RunFailed: what serving needs is not installed, or the address cannot be had.
        ConfigError, CheckpointError, BackendUnavailable: as `eagle3core.pipeline`.
    """
    check_installed()
    # The address first: whether it can be had is known at once, and a model takes a while.
    with bound(options.host, options.port) as listening:
        from lab.serve.service import Service

        pipe, name = opened(options)
        service = Service(pipe, options.name or name, most_waiting=options.max_waiting)
        set_aside()
        with suppress(KeyboardInterrupt):  # the signal that ended it, raised again once all has been closed
            asyncio.run(serve(service, listening, options.max_body_mib << 20))
    return EXIT_PASSED


def set_aside() -> None:
    """Leave all there is out of garbage collections from now on, since it stays as long as the process.

    One that goes through models, programs and imported modules takes 0.3 s, in which nobody gets a token, and with 64
    slots running one would be due about every ten seconds.
    """
    gc.collect()
    gc.freeze()


def check_installed() -> None:
    """That the extra `serve` is there.

    Raises:
        RunFailed: names what is not.
    """
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if absent:
        raise RunFailed(
            f"{' and '.join(absent)} {'are' if len(absent) > 1 else 'is'} not installed",
            "the extra serve: " + " and ".join(NEEDS),
            "pip install 'eagle3lab[serve]', or make install in a checkout",
        )


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which listens later.

    Raises:
        RunFailed: no such address here, or it is taken.
    """
    taken = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except (OSError, UnicodeError) as error:
        if taken is not None:
            taken.close()
        raise RunFailed(
            f"{host} port {port} cannot be listened at: {getattr(error, 'strerror', None) or error}",
            "an address of this machine, and a port that is free",
            "choose another with --host and --port; --port 0 takes any that is free",
        ) from error
    return taken


def opened(options: ServeOptions) -> tuple[Pipeline, str]:
    """The pipeline that the options name, and its target's name."""
    from eagle3core import pipeline
    from eagle3core.chat import ChatAnswers
    from lab.pairs import pair_on_disk, shipped_pair

    if options.target and not options.draft:
        target, draft = Path(options.target), None
    else:
        pair = pair_on_disk(options.target, options.draft) if options.target else shipped_pair()
        target, draft = pair.target, pair.draft
    speculative = speculative_config(options, draft)
    pipe = pipeline(target, engine_config=engine_config(options, speculative))
    pipe.answers = ChatAnswers(pipe.tokenizer, parses=options.channels)
    return pipe, target.resolve().name


def engine_config(options: ServeOptions, speculative: SpeculativeConfig | None) -> EngineConfig:
    """The engine's settings, which have the names of the options."""
    from eagle3core import EngineConfig

    names = ("session_len", "max_batch_size", "block_size", "prefill_chunk", "prefill_share",
             "cache_max_entry_count", "cache_blocks", "prefix_cache", "dtype", "cache_dtype", "target_weights",
             "device")  # fmt: skip
    return EngineConfig(speculative_config=speculative, **{name: getattr(options, name) for name in names})


def speculative_config(options: ServeOptions, draft: Path | None) -> SpeculativeConfig | None:
    """How it drafts: a chain, one of the trees, or a look-up; None for plain decoding."""
    from eagle3core import SpeculativeConfig

    if options.spec_k == 0 and not options.choices and options.dynamic is None:
        return None
    if options.method in LOOKUP_NAMES:
        return SpeculativeConfig(method=options.method, num_speculative_tokens=options.spec_k)
    if draft is None:
        return None
    how: dict[str, Any] = {"num_speculative_tokens": options.spec_k}
    if options.choices:
        how = {"choices": options.choices}
    elif options.dynamic is not None:
        size = options.dynamic
        how = {"use_dynamic_tree": True, "num_speculative_tokens": size.levels, "dynamic_tree_max_top_k": size.top_k,
               "max_decoding_tokens": size.nodes}  # fmt: skip
    how |= {"draft_weights": options.draft_weights, "draft_cache_dtype": options.draft_cache_dtype}
    return SpeculativeConfig(method=options.method, model=str(draft), **how)


async def serve(service: Service, listening: socket.socket, most_bytes: int) -> None:
    """Answer until a signal comes. The engine is closed first, so that whoever waits for it is told."""
    import uvicorn

    from lab.serve.endpoints import application

    settings = uvicorn.Config(
        application(service, most_bytes), http="h11", ws="none", loop="asyncio", log_config=None, access_log=False,
        timeout_graceful_shutdown=CLOSING_S,
    )  # fmt: skip
    server = uvicorn.Server(settings)
    watching = asyncio.create_task(_watch(server, service, listening))
    try:
        await server.serve(sockets=[listening])
    finally:
        watching.cancel()


async def _watch(server: Any, service: Service, listening: socket.socket) -> None:
    """Say where the server is once it listens, and close the engine when it is to end: streams would go on else."""
    while not server.started:
        await asyncio.sleep(0.01)
    host, port = listening.getsockname()[:2]
    spec = service.pipe.engine.speculation.reason
    print(f"{service.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1 ({spec})", flush=True)
    while not server.should_exit:
        await asyncio.sleep(0.05)
    await service.close()
