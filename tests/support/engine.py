# SPDX-License-Identifier: Apache-2.0
"""Real engines, started as a user starts them: PYTHONPATH, and nothing else of ours.

The model is tiny but has weights, so that what is generated depends on the whole context, and
computes in float32, so that it does not depend on what else is in a batch.
"""

from __future__ import annotations

import csv
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from analysis.tables.metadata import wall_clock
from demo.server import Server, serve
from demo.tiny_model import write_model as write_demo_model

ROOT = Path(__file__).resolve().parent.parent.parent
APP = ROOT / "tests" / "engine" / "apps" / "offline.py"
VLLM = Path(sys.executable).with_name("vllm")

BLOCK_SIZE = 32
"""Tokens; vLLM's attention on CPUs wants a multiple of 32."""
BLOCKS = 128
TOTAL_BLOCKS = BLOCKS - 1
"""Without the null block."""
SERVED_NAME = "tiny"
ENGINE_OPTIONS = (
    "--dtype=float32",
    "--max-model-len=2048",
    f"--block-size={BLOCK_SIZE}",
    f"--num-gpu-blocks-override={BLOCKS}",
    "--max-num-seqs=16",
    "--enforce-eager",  # compiling would need a C++ compiler
)
SLOW = "--logits-processors=tests.engine.apps.slow:Slow"

START_SECONDS = 600
"""Far more than vLLM needs: an idle machine takes half a minute."""
END_SECONDS = 300
SETTLED_SECONDS = 300
"""By then the collector, which gives way to whatever else runs here, has written what there is, and
ended if vLLM has. An idle machine takes a second."""


def wait_for(what: str, condition: Callable[[], Any], seconds: float) -> Any:
    """Wait until ``condition`` returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what}"
        time.sleep(0.05)
    return found


def wait_until_settled(base: Path) -> None:
    """Once vLLM has ended: all sessions under ``base`` become complete, no process is left."""
    deadline = time.monotonic() + SETTLED_SECONDS
    while unsettled := [
        *(session for session in sessions(base) if not metadata(session).get("complete")),
        *processes_about(base).values(),
    ]:
        assert time.monotonic() < deadline, f"still not complete, or still there: {unsettled}"
        time.sleep(0.05)


def write_model(folder: Path) -> Path:
    """A Llama of two layers with random weights, and a tokenizer of bytes."""
    import numpy as np
    from safetensors.numpy import save_file

    write_demo_model(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"torch_dtype": "float32", "max_position_embeddings": 2048}
    path.write_text(json.dumps(config))

    hidden, inner, vocabulary = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    queries, keys = (
        config["head_dim"] * config[name] for name in ("num_attention_heads", "num_key_value_heads")
    )
    random = np.random.default_rng(0)
    weights = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.standard_normal((rows, columns)) / np.sqrt(columns)
        weights[f"{name}.weight"] = values.astype(np.float32)

    matrix("model.embed_tokens", vocabulary, hidden)
    matrix("lm_head", vocabulary, hidden)
    norms = ["model.norm"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        matrix(f"{prefix}.self_attn.q_proj", queries, hidden)
        matrix(f"{prefix}.self_attn.k_proj", keys, hidden)
        matrix(f"{prefix}.self_attn.v_proj", keys, hidden)
        matrix(f"{prefix}.self_attn.o_proj", hidden, queries)
        matrix(f"{prefix}.mlp.gate_proj", inner, hidden)
        matrix(f"{prefix}.mlp.up_proj", inner, hidden)
        matrix(f"{prefix}.mlp.down_proj", hidden, inner)
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
    weights |= {f"{name}.weight": np.ones(hidden, np.float32) for name in norms}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


EXPERTS, CHOSEN, MOE_LAYERS = 12, 3, 3
"""Of the model with experts: how many, how many a token gets, and in how many layers."""


def write_moe_model(
    folder: Path, layers: int = MOE_LAYERS, experts: int = EXPERTS, chosen: int = CHOSEN
) -> Path:
    """A Mixtral with random weights, and a tokenizer of bytes."""
    import numpy as np
    from safetensors.numpy import save_file

    write_demo_model(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "torch_dtype": "float32",
        "max_position_embeddings": 2048,
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
    }
    path.write_text(json.dumps(config))
    hidden, inner, vocabulary = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    queries, keys = (
        config["head_dim"] * config[name] for name in ("num_attention_heads", "num_key_value_heads")
    )
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    norms = ["model.norm"]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, shape in (
            ("q_proj", (queries, hidden)),
            ("k_proj", (keys, hidden)),
            ("v_proj", (keys, hidden)),
            ("o_proj", (hidden, queries)),
        ):
            shapes[f"{prefix}.self_attn.{name}"] = shape
        shapes[f"{prefix}.block_sparse_moe.gate"] = (experts, hidden)
        for expert in range(experts):
            of_expert = f"{prefix}.block_sparse_moe.experts.{expert}"
            shapes |= {f"{of_expert}.w{number}": (inner, hidden) for number in (1, 3)}
            shapes[f"{of_expert}.w2"] = (hidden, inner)
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
    weights = {
        f"{name}.weight": (random.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        for name, shape in shapes.items()
    }
    weights |= {f"{name}.weight": np.ones(hidden, np.float32) for name in norms}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Lab:
    """A folder with the model, in which engines run; sessions of each go to a folder of its own.

    ``environment`` is a user's shell without a network. ``caches`` is where vLLM keeps what it
    finds out about a model's class, which takes it 12 s of processor time.
    """

    def __init__(self, folder: Path, caches: Path | None = None) -> None:
        self.folder = folder
        self.caches = caches or folder / "caches"
        self.model = write_model(folder / "model")

    def sessions(self, name: str) -> Path:
        """Where the run of this name puts its sessions."""
        return self.folder / name / "sessions"

    def environment(self, name: str, *, profiled: bool = True, **variables: str) -> dict[str, str]:
        """The variables for the run of this name; with ``profiled``, PYTHONPATH has us."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("VLLM_") and name != "PYTHONPATH"
        }
        if profiled:
            inherited |= {
                "PYTHONPATH": str(ROOT),
                "VLLM_PROFILING_DIR": str(self.sessions(name)),
            }
        return {
            **inherited,
            "PATH": os.pathsep.join([str(VLLM.parent), os.environ.get("PATH", os.defpath)]),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.caches / "huggingface"),
            "VLLM_CACHE_ROOT": str(self.caches / "vllm"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # One thread computes such a model fastest, and always in the same order.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            **variables,
        }

    @contextmanager
    def application(
        self, name: str, *options: str, app: Path = APP, model: Path | None = None, **variables: Any
    ) -> Iterator[Application]:
        """Start tests/engine/apps/offline.py, or another ``app`` there, with another ``model``; all
        its processes are gone after the block."""
        folder = self.folder / name
        folder.mkdir()
        result = str(folder / "result.json")
        command = [sys.executable, str(app), str(model or self.model), result, *options]
        with (folder / "log").open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=self.environment(name, **variables),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            yield Application(process, folder / "log", folder / "result.json", self.sessions(name))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @contextmanager
    def slow_answers(self) -> Iterator[dict[str, Any]]:
        """Fields of requests that take seconds for a few tokens in the block, and go on after it
        as others do.
        """
        file = self.folder / "slow"
        file.touch()
        try:
            yield {"vllm_xargs": {"slow_while": str(file)}}
        finally:
            file.unlink()

    @contextmanager
    def server(self, name: str, *options: str, **variables: Any) -> Iterator[Server]:
        """Start ``vllm serve``; all its processes are gone after the block."""
        (self.folder / name).mkdir()
        engine = [str(self.model), f"--served-model-name={SERVED_NAME}", *ENGINE_OPTIONS, SLOW]
        environ = self.environment(name, **variables)
        with serve(VLLM, [*engine, *options], environ, self.folder / name / "log") as server:
            yield server

    def vllm(self, name: str, *arguments: str) -> str:
        """Run a ``vllm`` command that ends by itself; returns what it said."""
        done = subprocess.run(
            [str(VLLM), *arguments],
            env=self.environment(name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=START_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout


@dataclass(frozen=True)
class Application:
    """A run of an application of tests/engine/apps."""

    process: subprocess.Popen[bytes]
    log_file: Path
    result_file: Path
    sessions: Path

    def wait(self) -> int:
        """Wait for its end and that of what it leaves behind; returns the exit status."""
        try:
            status = self.process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {START_SECONDS} s:\n{self.log[-3000:]}") from None
        wait_until_settled(self.sessions)
        return status

    def wait_for_result(self) -> None:
        """Wait until it has written its result."""
        wait_for(
            "the application's result",
            lambda: self.result_file.exists() or self.process.poll() is not None,
            START_SECONDS,
        )

    @property
    def result(self) -> dict[str, Any]:
        """What was generated, and what was counted."""
        assert self.result_file.exists(), self.log[-3000:]
        result: dict[str, Any] = json.loads(self.result_file.read_text())
        return result

    @property
    def log(self) -> str:
        """What it wrote to stdout and stderr."""
        return self.log_file.read_text(errors="replace")

    @property
    def session(self) -> Path:
        """Its one session."""
        return only_session(self.sessions)


def bench_options(model: Path, port: int, prompts: int, output: int) -> list[str]:
    """Load for a server: prompts in four families that share about 128 tokens."""
    return [
        "bench", "serve", "--backend=openai", f"--model={SERVED_NAME}", f"--tokenizer={model}",
        "--host=127.0.0.1", f"--port={port}", "--disable-tqdm", "--seed=0", "--temperature=0",
        "--dataset-name=prefix_repetition", f"--num-prompts={prompts}", "--ignore-eos",
        "--prefix-repetition-num-prefixes=4", "--prefix-repetition-prefix-len=128",
        "--prefix-repetition-suffix-len=200", f"--prefix-repetition-output-len={output}",
        "--max-concurrency=12",
    ]  # fmt: skip


def get(port: int, path: str) -> str:
    """The body of a page of the server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=END_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def metric(page: str, name: str, **labels: str) -> float:
    """The sum of the samples of a Prometheus metric that have these labels."""
    from prometheus_client.parser import text_string_to_metric_families

    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


class Answer:
    """An answer that a server streams, token by token."""

    def __init__(self, port: int, prompt: Sequence[int], max_tokens: int, **fields: Any) -> None:
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=END_SECONDS)
        body = {
            "model": SERVED_NAME,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": True,
            **fields,
        }
        self._connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()

    def read(self, tokens: int | None = None) -> Answer:
        """Read until this many tokens have come, or to the end; stops where the server dies."""
        with suppress(http.client.IncompleteRead, ConnectionError):
            while tokens is None or len(self.tokens) < tokens:
                line = self._response.readline()
                if not line or line.strip() == b"data: [DONE]":
                    break
                self._take(line)
        return self

    def close(self) -> None:
        """Leave, whether or not the answer has ended."""
        self._response.close()
        self._connection.close()

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[len(b"data: ") :])["choices"]:
                self.tokens += choice["token_ids"] or []
                self.finish_reason = choice["finish_reason"] or self.finish_reason


def answer(port: int, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Answer:
    """A whole answer."""
    asked = Answer(port, prompt, max_tokens, **fields).read()
    asked.close()
    return asked


def sessions(base: Path) -> list[Path]:
    """The sessions under this folder."""
    return sorted(base.glob("session_*"))


def only_session(base: Path) -> Path:
    found = sessions(base)
    assert len(found) == 1, found
    return found[0]


def session_of(server: Server, base: Path) -> Path:
    """The server's session under this folder."""
    (found,) = (session for session in sessions(base) if f"_{server.process.pid}_" in session.name)
    return found


def metadata(session: Path) -> dict[str, Any]:
    """metadata.json; empty where it is not there yet."""
    try:
        known: dict[str, Any] = json.loads((session / "metadata.json").read_text())
        return known
    except FileNotFoundError:
        return {}


def rows(session: Path, table: str) -> list[dict[str, str]]:
    """The rows of a CSV table, by column."""
    with (session / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def requests(session: Path) -> list[dict[str, Any]]:
    """The finished lines of requests.jsonl; none where it is not there yet."""
    try:
        text = (session / "requests.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def moved(session: Path, event: str) -> int:
    """Blocks in all rows of kv_cache_allocations.csv with this event."""
    return sum(
        int(row["num_blocks"])
        for row in rows(session, "kv_cache_allocations")
        if row["event"] == event
    )


def total(table: list[dict[str, str]], column: str) -> int:
    return sum(int(row[column]) for row in table)


def engine_pids(session: Path) -> dict[int, int]:
    """Process ids of the session's engines, by rank."""
    return {process["rank"]: process["pid"] for process in metadata(session)["processes"]}


def wait_for_engines(session: Path, count: int) -> dict[int, int]:
    """As ``engine_pids``, once there are this many."""
    wait_for(
        f"{count} engines in the metadata, which the collector writes when it has a processor",
        lambda: len(metadata(session).get("processes", ())) >= count,
        END_SECONDS,
    )
    return engine_pids(session)


def processes_about(folder: Path) -> dict[int, str]:
    """Processes whose command line or environment names this folder: pid and command line."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                command = (process / "cmdline").read_bytes()
                if os.fsencode(folder) in command + (process / "environ").read_bytes():
                    found[int(process.name)] = os.fsdecode(command).replace("\0", " ")
    return found


def collector_pid(session: Path) -> int:
    """The process that writes the session's tables."""
    found = collector_pids(session)
    assert len(found) == 1, processes_about(session)
    return found[0]


def collector_pids(session: Path) -> list[int]:
    """The same, also where there is none, or another one is about to begin."""
    return [pid for pid, command in processes_about(session).items() if " -I -c " in command]


def copy_journal(session: Path, folder: Path) -> Path:
    """A session in ``folder`` that has what the journal of this one holds now, and no tables."""
    copy = folder / session.name
    shutil.copytree(session / "journal", copy / "journal")
    return copy


def elapsed_sec(session: Path) -> float:
    """Seconds since the session began, as its tables count them."""
    began = wall_clock(metadata(session)["started_at"])
    assert began is not None
    return time.time() - began


def journal_size(session: Path) -> int:
    """Bytes of all journals."""
    return sum(path.stat().st_size for path in session.glob("journal/*.journal"))


def tables(session: Path) -> dict[str, bytes]:
    """The bytes of each table that is there."""
    return {
        path.name: path.read_bytes()
        for path in session.iterdir()
        if path.suffix in (".csv", ".jsonl")
    }


def assert_begin_the_same(begun: dict[str, bytes], whole: dict[str, bytes]) -> None:
    """Each table of the first session is, byte for byte, how that of the second one begins."""
    assert begun
    for name, content in begun.items():
        assert content.count(b"\n") > 1, f"{name} is empty, which would prove nothing"
        assert whole[name][: len(content)] == content, name


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def kill(*pids: int) -> None:
    """Kill processes as the kernel would, and wait until they are gone."""
    for pid in pids:
        # One may have ended by itself.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for("killed processes to go", lambda: not any(map(is_alive, pids)), END_SECONDS)


def stop(*pids: int) -> None:
    """Halt processes where they are, so that they take no processor time until they are killed."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def children(pid: int) -> dict[int, str]:
    """Processes that this one started: pid and title."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == pid:
                    found[int(process.name)] = os.fsdecode((process / "cmdline").read_bytes())
    return found


def assert_sound(session: Path, ranks: Sequence[int] = (0,)) -> None:
    """A session that ended well has everything, and its numbers agree with each other."""
    known = metadata(session)
    assert known["complete"]
    assert known["dropped_events"] == 0
    assert [process["rank"] for process in known["processes"]] == list(ranks)
    for process in known["processes"]:
        assert process["hooks_missing"] == process["hooks_failed"] == {}
        assert process["problem"] is None
        # The free blocks that the pool counted, against those that the events lead to.
        assert process["mismatches"] == 0
    assert not (session / "journal").exists()
    usage = rows(session, "kv_cache_usage")
    for row in usage:
        held, cached, free = (int(row[f"{state}_blocks"]) for state in ("num", "cached", "free"))
        assert held + cached + free == int(row["total_blocks"]) == TOTAL_BLOCKS
        assert float(row["usage_pct"]) == pytest.approx(100 * held / TOTAL_BLOCKS, abs=0.006)
    for rank in ranks:
        last = [row for row in usage if row["engine"] == str(rank)][-1]
        assert (last["usage_pct"], last["num_blocks"], last["running_reqs"]) == ("0.00", "0", "0")


def assert_answered(session: Path, result: dict[str, Any]) -> None:
    """requests.jsonl has every answer of the application: its length and how it ended."""
    answers = [*result["identical"], *result["mixed"]]
    recorded = {int(row["request_id"].partition("-")[0]): row for row in requests(session)}
    assert sorted(recorded) == list(range(len(answers)))
    for number, (generated, reason) in enumerate(answers):
        row = recorded[number]
        assert (row["output_length"], row["finish_reason"]) == (len(generated), reason)
        assert 0 < row["timestamp"] / 1000 < row["first_token_sec"] <= row["finish_sec"]
