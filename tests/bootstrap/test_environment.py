# SPDX-License-Identifier: Apache-2.0
"""vLLM's check for unknown variables knows ours; no other part of vLLM does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.bootstrap.conftest import ROOT, User, new_user

OURS = {
    "VLLM_PROFILING": "0",
    "VLLM_ENABLE_PROFILING": "1",
    "VLLM_PROFILING_DIR": "/tmp/profiles",
    "VLLM_PROFILING_VERBOSE": "0",
    "VLLM_PROFILING_SESSION": "session_20260101_000000_1_abcdef",
    "VLLM_PROFILING_FAILED": "engine",
    "VLLM_PROFILING_GPU_TIMING": "0",
    "VLLM_PROFILING_GPU_INTERVAL": "1",
    "VLLM_PROFILING_PHASES": "0",
    "VLLM_PROFILING_EXPERTS": "0",
    "VLLM_PROFILING_EXPERT_PAIRS": "64",
}
STRANGERS = {"VLLM_PROFILING_PORT": "tcp://10.0.0.1:80", "VLLM_NO_SUCH_NAME": "1"}

# The two places in which vLLM's releases have the check; 0.32's is also tested for real below.
ENVS = """
    import os
    environment_variables = {"VLLM_PORT": lambda: os.environ.get("VLLM_PORT")}
    unknown = []
    meanwhile = lambda: None

    def check(hard_fail):
        meanwhile()
        for name in os.environ:
            if name.startswith("VLLM_") and name not in environment_variables:
                if hard_fail:
                    raise ValueError(f"Unknown vLLM environment variable detected: {name}")
                unknown.append(name)

    def compile_factors():
        return {name: getter() for name, getter in environment_variables.items()}
    """
FORMS = {
    "0.17.1 to 0.31": (ENVS + "\n    validate_environ = check\n", "class Platform: pass"),
    "from 0.32": (
        ENVS,
        """
        class Platform:
            @classmethod
            def validate_environ(cls, hard_fail):
                from vllm import envs
                return envs.check(hard_fail)
        class UnspecifiedPlatform(Platform): pass
        """,
    ),
    "before 0.17.1": (ENVS, "class Platform: pass"),
}
CHECK = """
from vllm import envs
from vllm.platforms import interface
current = getattr(interface, "UnspecifiedPlatform", envs)
validate_environ = getattr(current, "validate_environ", None)
"""


@pytest.fixture(params=list(FORMS)[:2])
def checking_user(user: User, request: pytest.FixtureRequest) -> User:
    user.write_vllm()
    envs, interface = FORMS[request.param]
    user.write("vllm/envs", envs)
    user.write("vllm/platforms/interface", interface)
    return user


def test_only_strangers_are_reported(checking_user: User) -> None:
    code = CHECK + "validate_environ(hard_fail=False)\nprint(*sorted(envs.unknown))\n"
    assert checking_user.output(code, **OURS, **STRANGERS) == [
        "VLLM_NO_SUCH_NAME VLLM_PROFILING_PORT"
    ]


def test_refusing_to_start_is_over_strangers_only(checking_user: User) -> None:
    code = f"{CHECK}validate_environ(True)\nprint(type(envs.environment_variables).__name__)\n"
    assert checking_user.output(code, **OURS) == ["dict"]
    code = f"""
{CHECK}
try:
    validate_environ(True)
except ValueError as error:
    print(error)
print(type(envs.environment_variables).__name__)
"""
    assert checking_user.output(code, **OURS, VLLM_NO_SUCH_NAME="1") == [
        "Unknown vLLM environment variable detected: VLLM_NO_SUCH_NAME",
        "dict",
    ]


def test_names_are_in_no_key_even_while_the_check_runs(checking_user: User) -> None:
    code = f"""
{CHECK}
table = envs.environment_variables
def meanwhile():
    print(envs.environment_variables is not table, envs.compile_factors())
    print("VLLM_PROFILING_DIR" in envs.environment_variables, "VLLM_PORT" in table)
    print(list(envs.environment_variables), len(envs.environment_variables))
    envs.environment_variables["VLLM_NEW"] = lambda: "kept"
envs.meanwhile = meanwhile
validate_environ(False)
print(envs.environment_variables is table, envs.compile_factors())
"""
    assert checking_user.output(code, **OURS) == [
        "True {'VLLM_PORT': None}",
        "True True",
        "['VLLM_PORT'] 1",
        "True {'VLLM_PORT': None, 'VLLM_NEW': 'kept'}",
    ]


def test_checks_in_several_threads(checking_user: User) -> None:
    """One that ends does not take the names away from one that still runs."""
    code = f"""
{CHECK}
import threading
table = envs.environment_variables
both = threading.Barrier(2)
first_ended = threading.Event()
def meanwhile():
    both.wait(20)
    if threading.current_thread().name == "second":
        first_ended.wait(20)
envs.meanwhile = meanwhile
def first():
    validate_environ(True)
    first_ended.set()
threads = [
    threading.Thread(target=first, name="first"),
    threading.Thread(target=validate_environ, args=(True,), name="second"),
]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(first_ended.is_set(), envs.environment_variables is table)
"""
    assert checking_user.output(code, **OURS) == ["True True"]


def test_fork_while_a_check_runs(checking_user: User) -> None:
    code = f"""
{CHECK}
import os, threading
inside, forked = threading.Event(), threading.Event()
def meanwhile():
    inside.set()
    forked.wait(20)
envs.meanwhile = meanwhile
thread = threading.Thread(target=validate_environ, args=(True,))
thread.start()
inside.wait(20)
from profilemate.hooks import environment
environment._lock.acquire()
pid = os.fork()
if pid == 0:
    forked.set()
    before = type(envs.environment_variables)
    validate_environ(True)
    os._exit(before is dict and type(envs.environment_variables) is dict)
environment._lock.release()
forked.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), type(envs.environment_variables).__name__)
"""
    ended = checking_user.run(code, **OURS)  # newer Pythons warn of forking with threads
    assert ended.stdout == "1 dict\n"


def test_release_without_a_check(user: User) -> None:
    user.write_vllm()
    envs, interface = FORMS["before 0.17.1"]
    user.write("vllm/envs", envs)
    user.write("vllm/platforms/interface", interface)
    code = f"{CHECK}print(validate_environ, hasattr(interface.Platform, 'validate_environ'))"
    assert user.output(code, **OURS) == ["None False"]


def test_check_looks_as_before(checking_user: User) -> None:
    code = f"""
{CHECK}
import inspect
print(inspect.signature(validate_environ), validate_environ.__name__, validate_environ.__module__)
print(inspect.ismethod(validate_environ) == (current is not envs))
"""
    signature, bound = checking_user.output(code)
    assert signature.startswith("(hard_fail) ")
    assert "profilemate" not in signature
    assert bound == "True"


REAL = f"""
import json, logging, os
from vllm import envs
from vllm.platforms import current_platform

class Records(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

lines = []
logging.getLogger("vllm").addHandler(Records())

def check():
    lines.clear()
    current_platform.validate_environ(False)
    warned = [line for line in lines if "Unknown vLLM environment" in line]
    try:
        current_platform.validate_environ(True)
    except ValueError as error:
        return warned, str(error)
    return warned, None

found = {{"alone": check()}}
os.environ.update({STRANGERS!r})
found["with strangers"] = check()
found["factors"] = {{name: repr(value) for name, value in envs.compile_factors().items()}}
found["known"] = sorted(dir(envs))
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def real_vllm(tmp_path_factory: pytest.TempPathFactory, bytecode: Path) -> list[dict[str, Any]]:
    """The real vLLM's check and cache key, without us and with us, side by side."""
    user = new_user(tmp_path_factory.mktemp("real"), bytecode)
    running = [
        subprocess.Popen(
            user.command(REAL),
            # With the bytecode that torch and vLLM were installed with.
            env=user.environment(OURS | {"PYTHONPATH": path, "PYTHONPYCACHEPREFIX": ""}),
            cwd=user.work,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for path in (str(user.site), str(ROOT))
    ]
    outputs = [process.communicate()[0] for process in running]
    return [json.loads(output.partition("FOUND ")[2].splitlines()[0]) for output in outputs]


def test_real_vllm_reports_our_names_without_us(real_vllm: list[dict[str, Any]]) -> None:
    """This is why the hook exists. When this fails, the hook is no longer needed."""
    warned, refused = real_vllm[0]["alone"]
    assert {line.rpartition(" ")[2] for line in warned} == set(OURS)
    assert refused.rpartition(" ")[2] in OURS


def test_real_vllm_does_not_report_our_names(real_vllm: list[dict[str, Any]]) -> None:
    assert real_vllm[1]["alone"] == [[], None]


def test_real_vllm_still_reports_strangers(real_vllm: list[dict[str, Any]]) -> None:
    warned, refused = real_vllm[1]["with strangers"]
    assert {line.rpartition(" ")[2] for line in warned} == set(STRANGERS)
    assert refused.rpartition(" ")[2] in STRANGERS


def test_real_vllm_keeps_its_cache_key(real_vllm: list[dict[str, Any]]) -> None:
    without, with_us = real_vllm
    assert len(without["factors"]) > 100
    assert with_us["factors"] == without["factors"]
    assert with_us["known"] == without["known"]
