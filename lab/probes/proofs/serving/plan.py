"""How many clients ask for how long, and of what server: the words of its command, and the engines it stands for."""

from __future__ import annotations

from dataclasses import dataclass

from lab.pairs.prompts import UNEVEN_LENGTHS
from lab.probes.proofs.subject import Setting


@dataclass(frozen=True)
class ServingPlan:
    """A server and its clients.

    Attributes:
        clients: that stream at once. seconds: they go on asking for.
        k, slots, session_len, cache_blocks: of the server's engine, which keeps full blocks for others to find. The
            blocks are fewer than its slots can fill, so that requests wait for them and may be put back.
        n_prompts: texts that are asked about. prompt_tokens: of those that are sent as token ids, in turn.
        n_tokens: of the answers; each text is asked about with each.
        odd_every: of so many requests of a client one is left half-way, and another is one to be refused.
        dtype, device: of server and offline engine.
        start_s: the server may take, compiling its kernels included. patience_s: a request may take.
    """

    clients: int = 200
    seconds: float = 60.0
    k: int = 3
    slots: int = 16
    session_len: int = 1024
    cache_blocks: int = 64
    n_prompts: int = 32
    prompt_tokens: tuple[int, ...] = UNEVEN_LENGTHS
    n_tokens: tuple[int, ...] = (17, 48, 130)
    odd_every: int = 30
    dtype: str = "bfloat16"
    device: str = "cuda"
    start_s: float = 400.0
    patience_s: float = 120.0

    @property
    def path(self) -> str:
        """What has to compute."""
        return "kernels" if self.device == "cuda" else "torch"

    def settings(self) -> list[Setting]:
        """Every engine that is made: the offline one, plain and one request at a time, and the server's."""
        return [Setting(0, 1, self.session_len), Setting(self.k, self.slots, self.session_len)]

    def words(self) -> list[str]:
        """Of the server's command; who left may still have a place when its client asks again."""
        values = {
            "spec-k": self.k, "max-batch-size": self.slots, "session-len": self.session_len,
            "cache-blocks": self.cache_blocks, "max-waiting": 2 * self.clients, "dtype": self.dtype,
            "device": self.device, "host": "127.0.0.1", "port": 0,
        }  # fmt: skip
        return ["--prefix-cache", *(word for name, value in values.items() for word in (f"--{name}", str(value)))]
