# SPDX-License-Identifier: Apache-2.0
"""``profilemate sweep``: run a command under many settings, each run a profiled session of its own.

Nothing of this runs inside vLLM. What came of the runs is told by ``analysis.sweep``, from the
folder that is written here.
"""
