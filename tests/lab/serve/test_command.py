"""The command: its options become an engine, what it lacks is said, and the page's example runs against it."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from places import ROOT
from serving import MISSING, WHY_NOT
from tiny_engines import Pair

from eagle3core import GenerationConfig, SpeculativeConfig, pipeline
from lab.cli import parsed
from lab.errors import ExperimentError, RunFailed
from lab.options.serve import ServeOptions
from lab.serve import command, service
from lab.serve.command import bound, engine_config, speculative_config

pytestmark = pytest.mark.reference

PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
WITHOUT = "import sys; sys.modules['uvicorn'] = None; from lab.cli import main; sys.exit(main(['serve']))"


def options(*words: str) -> ServeOptions:
    """What was typed after `serve`."""
    command, found = parsed(["serve", *words])
    assert command.name == "serve"
    assert isinstance(found, ServeOptions)
    return found


def test_options_have_the_names_and_defaults_of_the_engine() -> None:
    from eagle3core import EngineConfig

    assert engine_config(options(), None) == EngineConfig()
    typed = options("--session-len", "512", "--max-batch-size", "3", "--dtype", "float64", "--prefill-chunk", "128")
    assert engine_config(typed, None) == EngineConfig(
        session_len=512, max_batch_size=3, dtype="float64", prefill_chunk=128
    )


def test_the_formats_of_maps_are_the_engines_settings() -> None:
    assert speculative_config(options("--draft-weights", "fp8"), Path("head")) == SpeculativeConfig(
        model="head", draft_weights="fp8"
    )
    plain = speculative_config(options(), Path("head"))
    assert plain is not None
    assert plain.draft_weights == "as_stored"
    for weights in ("as_stored", "fp8", "dequantised"):
        assert engine_config(options("--target-weights", weights), None).target_weights == weights


def test_what_caches_are_stored_in_are_the_engines_settings() -> None:
    typed = options("--cache-dtype", "fp8", "--draft-cache-dtype", "fp8")
    assert engine_config(typed, None).cache_dtype == "fp8"
    speculative = speculative_config(typed, Path("head"))
    assert speculative is not None
    assert speculative.draft_cache_dtype == "fp8"


def test_garbage_collections_leave_out_what_the_server_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, n_left_out = [["a part of the engine"]], list[int]()

    async def serve(*asked: object) -> None:
        n_left_out.append(gc.get_freeze_count())
        assert not any(each is parts for each in gc.get_objects())

    monkeypatch.setattr(command, "check_installed", lambda: None)
    monkeypatch.setattr(command, "opened", lambda asked: (parts, "nano"))
    monkeypatch.setattr(service, "Service", lambda *asked, **named: parts)
    monkeypatch.setattr(command, "serve", serve)
    try:
        assert command.run(options("--port", "0")) == 0
    finally:
        gc.unfreeze()
    assert n_left_out[0] > 0


@pytest.mark.parametrize(
    ("words", "kind", "n_nodes"),
    [
        ([], "chain", 4),
        (["--spec-k", "5"], "chain", 6),
        (["--choices", "mc_sim_7b_63"], "static", 64),
        (["--dynamic", "60/7/10"], "dynamic", 60),
        (["--method", "ngram"], "chain", 4),
        (["--method", "suffix", "--spec-k", "6"], "chain", 7),
        (["--method", "draft_target", "--target", "big", "--draft", "draft"], "chain", 4),
        (["--method", "eagle", "--target", "big", "--draft", "draft", "--dynamic", "60/7/10"], "dynamic", 60),
    ],
)
def test_each_way_of_drafting_can_be_typed(words: list[str], kind: str, n_nodes: int) -> None:
    spec = speculative_config(options(*words), Path("draft"))
    assert spec is not None
    assert (spec.tree_kind, spec.n_nodes) == (kind, n_nodes)
    assert spec.method == options(*words).method
    assert speculative_config(options("--spec-k", "0"), Path("draft")) is None
    assert speculative_config(options(), None) is None, "a target alone"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--port", "65536"], "--port is 65536"),
        (["--draft", "x"], "--draft without --target"),
        (["--target", "x", "--dynamic", "60/7/10"], "a tree without --draft"),
        (["--choices", "mc_sim_7b_63", "--dynamic", "60/7/10"], "both --choices and --dynamic"),
        (["--method", "ngram", "--dynamic", "60/7/10"], "--method ngram with a tree"),
        (["--method", "suffix", "--target", "x", "--draft", "y"], "--method suffix with --draft"),
        (["--method", "draft_target"], "--method draft_target without --draft"),
        (["--method", "eagle"], "--method eagle without --draft"),
        (["--prefill-share", "0"], "--prefill-share is 0"),
    ],
)
def test_options_that_make_no_server_are_refused(words: list[str], what: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        options(*words)
    assert what in refused.value.what


def test_an_address_that_is_taken_or_nowhere_is_refused_before_a_model_is_read() -> None:
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "no.such.host.invalid", "a" * 70 + ".invalid"):
            with pytest.raises(RunFailed) as refused:
                bound(host, port)
            assert f"{host} port {port} cannot be listened at" in refused.value.what


@pytest.mark.slow
def test_without_the_extra_the_command_says_what_it_lacks() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    assert "uvicorn" in ended.stderr
    assert "\n  allowed: the extra serve" in ended.stderr
    assert "\n  do: pip install 'eagle3lab[serve]'" in ended.stderr


@contextlib.contextmanager
def started(words: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process, and what it says where it is."""
    command = [sys.executable, "-m", "lab", "serve", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def post(port: int, body: dict[str, Any]) -> Any:
    """The open answer to a completion."""
    headers = {"Content-Type": "application/json"}
    return urlopen(Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers), timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=WHY_NOT)
def test_the_pages_example_runs_and_a_signal_ends_the_server_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    [line, *_] = re.findall(r"^    eagle3lab serve(.*)$", PAGE, flags=re.MULTILINE)
    [example] = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    with started([*shlex.split(line), "--port", "0", "--session-len", "2000"]) as (process, where):
        found = re.fullmatch(r"target at http://127\.0\.0\.1:(\d+)/v1 \(eagle3 with 3 drafted tokens a step\)\n", where)
        assert found is not None, where
        port = int(found[1])
        exec(compile(example.replace("8000", str(port)), "docs/serve.md", "exec"), {"__name__": "example"})
        shown = capsys.readouterr().out
        pair = ROOT / "lab" / "pairs" / "shipped"
        with pipeline(pair / "target", speculative_config=SpeculativeConfig(model=str(pair / "draft"))) as pipe:
            assert shown == pipe("def main():", GenerationConfig(max_new_tokens=24)).text + "\n"
        long = {"prompt": "import", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with post(port, long) as stream:
            assert [stream.readline()[:6], stream.readline()] == [b"data: ", b"\n"]
            process.send_signal(signal.SIGTERM)
            *_, last, done = [event for event in stream.read().split(b"\n\n") if event]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "closing"
        assert done == b"data: [DONE]"
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=WHY_NOT)
def test_a_pair_of_ones_own_is_served_by_its_name_with_texts_or_ids(letters: Pair, tmp_path: Path) -> None:
    from serving import LETTERS, letter_pipe
    from tiny_engines import letter_tokenizer, new_tokens

    letter_tokenizer(None, LETTERS).save_pretrained(letters[0])
    settings = ["--dtype", "float64", "--session-len", "64", "--block-size", "4", "--prefill-chunk", "8"]
    words = ["--target", str(letters[0]), "--draft", str(letters[1]), "--name", "mine", "--port", "0", *settings]
    with letter_pipe(letters, None) as pipe:
        expected = pipe("abc", new_tokens(9)).text
    with started(words) as (process, where):
        assert where.startswith("mine at ")
        port = int(where.split(":")[2].split("/")[0])
        asked = {"model": "mine", "prompt": [0, 1, 2], "max_tokens": 9, "temperature": 0}
        for prompt in ("abc", [0, 1, 2]):
            with post(port, {**asked, "prompt": prompt}) as answer:
                assert json.load(answer)["choices"][0]["text"] == expected
        with pytest.raises(HTTPError, match="404"):
            post(port, {**asked, "model": "theirs"})
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_socket_waits_for_the_model_without_taking_connections() -> None:
    with bound("127.0.0.1", 0) as taken, socket.socket() as client:
        client.settimeout(5)
        begun = time.monotonic()
        with pytest.raises(OSError):
            client.connect(taken.getsockname())
        assert time.monotonic() - begun < 5, "refused at once, and not left waiting"
