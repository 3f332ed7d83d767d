# SPDX-License-Identifier: Apache-2.0
"""Real interpreters, started the way a user starts them, with a folder of the user's beside us.

Most tests import a small package called vllm. Importing the real one takes half a minute, and
here it is the import that is tested, not what is imported; the real one has its tests in
test_environment.py.
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

VLLM = {
    "__init__": "__version__ = '9.9.9'\n",
    "envs": """
        import os
        environment_variables = {"VLLM_PORT": lambda: os.environ.get("VLLM_PORT")}

        def __getattr__(name):
            if name in environment_variables:
                return environment_variables[name]()
            raise AttributeError(name)
        """,
    "platforms/__init__": "",
    "platforms/interface": "class Platform: pass\n",
    "v1/__init__": "",
    "v1/core/__init__": "",
    "v1/core/sched/__init__": "",
    "v1/core/sched/scheduler": "class Scheduler: pass\n",
    "v1/engine/__init__": "",
    "v1/engine/core": "from vllm.v1.core.sched.scheduler import Scheduler\n",
    "v1/worker/__init__": "",
    "v1/worker/worker_base": "class WorkerWrapperBase: pass\n",
}

# The user's sitecustomize runs after ours, in children too: it puts probes in the place of the
# hooks that need more of vLLM than the small package has.
PROBES = """
    from dataclasses import replace
    from profilemate import hooks
    hooks.HOOKS = tuple(
        hook if hook.always else replace(hook, attach="probe:attach") for hook in hooks.HOOKS
    )
    """

PROBE = """
    import os
    def attach(module):
        if module.__name__ in os.environ.get("PROBE_RAISES", ""):
            raise AttributeError("no such class\\nin this release")
        module.attached = getattr(module, "attached", 0) + 1
    """


def unindent(source: str) -> str:
    lines = source.strip("\n").splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[margin:] for line in lines) + "\n"


@dataclass(frozen=True)
class User:
    """A user's folder of modules, an empty working folder and an empty temporary one."""

    site: Path
    work: Path
    temporary: Path
    bytecode: Path

    def write(self, name: str, source: str) -> Path:
        path = self.site / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unindent(source))
        return path

    def write_vllm(self, *, probes: bool = True) -> None:
        for name, source in VLLM.items():
            self.write(f"vllm/{name}", source)
        if probes:
            self.write("sitecustomize", PROBES)
            self.write("probe", PROBE)

    def environment(self, changes: Mapping[str, str]) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VLLM_", "PROBE_"))
        }
        ours = {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{self.site}",
            "PYTHONPYCACHEPREFIX": str(self.bytecode),
            "TMPDIR": str(self.temporary),
        }
        return {**kept, **ours, **changes}

    def command(self, code: str, *flags: str, python: str = sys.executable) -> list[str]:
        return [python, *flags, "-c", unindent(code)]

    def run(
        self,
        code: str,
        *flags: str,
        python: str = sys.executable,
        cwd: Path | None = None,
        **changes: str,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(code, *flags, python=python),
            env=self.environment(changes),
            cwd=cwd or self.work,
            capture_output=True,
            check=False,
            text=True,
            timeout=120,
        )

    def output(self, code: str, *flags: str, **changes: str) -> list[str]:
        """Lines of stdout of a run that has to succeed without a word on stderr."""
        ended = self.run(code, *flags, **changes)
        assert (ended.returncode, ended.stderr) == (0, "")
        return ended.stdout.splitlines()


def new_user(folder: Path, bytecode: Path) -> User:
    site, work, temporary = (folder / name for name in ("site", "work", "temporary"))
    for made in (site, work, temporary):
        made.mkdir()
    return User(site, work, temporary, bytecode)


@pytest.fixture(scope="session")
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bytecode")


@pytest.fixture
def user(tmp_path: Path, bytecode: Path) -> User:
    return new_user(tmp_path, bytecode)


@pytest.fixture
def vllm_user(user: User) -> User:
    user.write_vllm()
    return user


@functools.cache
def interpreters() -> tuple[str, ...]:
    """This Python, and each of 3.10 to 3.14 that is installed."""
    found = {sys.version_info[:2]: sys.executable}
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    for minor in range(10, 15):
        name = f"python3.{minor}"
        candidates = [shutil.which(name), *glob.glob(f"{pyenv}/versions/3.{minor}.*/bin/{name}")]
        for candidate in filter(None, candidates):
            probe = [candidate, "-c", "import sys; print(sys.version_info[1])"]
            ended = subprocess.run(probe, capture_output=True, check=False, text=True)
            if ended.stdout.strip() == str(minor):
                found.setdefault((3, minor), candidate)
    return tuple(found[version] for version in sorted(found))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "python" in metafunc.fixturenames:
        metafunc.parametrize("python", interpreters(), ids=os.path.basename)
